"""Affine Self Convolution: convolution whose filters depend on the image."""

from selfconv._version import __version__

__all__ = ["__version__"]
