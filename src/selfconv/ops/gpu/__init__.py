"""The operation in Triton kernels for GPUs: ``backend`` calls ``kernels``."""
