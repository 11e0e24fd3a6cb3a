"""Layers with fixed, precomputed filters, for networks that are no longer trained."""
