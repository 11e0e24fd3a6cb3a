"""Local attention: what its layers share, and the layers."""
