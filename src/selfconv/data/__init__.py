"""Loads data sets into memory: digits from the package, CIFAR, a folder of images, or an ``.npz`` file.

>>> data = load_data("digits")
>>> data.num_classes, data.in_channels, data.size
(10, 1, 16)
>>> batches = Batches(data.train, 128, mean=data.mean, std=data.std, shuffle=True)
>>> for images, labels in batches.epoch(0):
...     ...
"""

from selfconv.data.batches import Augment, Batches, Rotation, normalise
from selfconv.data.cifar import imitation
from selfconv.data.dataset import DataError, Dataset, MissingDataError, Split, fit
from selfconv.data.images import IMAGE_FORMATS, IMAGE_SUFFIXES, MAX_PIXELS, read_image, require_pillow
from selfconv.data.info import DataInfo
from selfconv.data.load import load_data

__all__ = [
    "IMAGE_FORMATS",
    "IMAGE_SUFFIXES",
    "MAX_PIXELS",
    "Augment",
    "Batches",
    "DataError",
    "DataInfo",
    "Dataset",
    "MissingDataError",
    "Rotation",
    "Split",
    "fit",
    "imitation",
    "load_data",
    "normalise",
    "read_image",
    "require_pillow",
]
