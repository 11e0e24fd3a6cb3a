"""The operation in fused CPU kernels, written in Numba: ``backend`` calls ``kernels`` on ``threads``."""
