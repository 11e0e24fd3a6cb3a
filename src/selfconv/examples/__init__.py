"""Small networks built from the layers, to copy and change: a U-Net and an autoencoder."""

from selfconv.examples.autoencoder import Autoencoder
from selfconv.examples.unet import UNet

__all__ = ["Autoencoder", "UNet"]
