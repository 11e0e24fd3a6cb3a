"""Replaces layers by ones with fixed filters, for inference with the fused kernels and for exports."""
