"""Loads data sets: digits from the package, CIFAR, images in folders, lists or Parquet files, ``.npz``
arrays, the Hugging Face Hub.

>>> data = load_data("digits")
>>> data.num_classes, data.in_channels, data.size
(10, 1, 16)
>>> batches = Batches(data.train, 128, mean=data.mean, std=data.std, shuffle=True)
>>> for images, labels in batches.epoch(0):
...     ...
"""

from selfconv.data.batches import Augment, Batches, Rotation, normalise
from selfconv.data.dataset import (
    MAX_PIXELS,
    AbsentDataError,
    DataInfo,
    Dataset,
    MissingDataError,
    describe_channels,
    warn_about_classes,
)
from selfconv.data.images import (
    IMAGE_FORMATS,
    is_image_name,
    read_image,
    read_images,
    require_image_readers,
)
from selfconv.data.load import NAMES, load_data
from selfconv.data.pixels import (
    Clipping,
    DataError,
    GroupError,
    PixelRange,
    as_bytes,
    fit,
    parse_range,
    visible_channels,
)
from selfconv.data.sources.cifar import imitation
from selfconv.data.splits import image_hashes
from selfconv.data.stored import Split, Stack

__all__ = [
    "IMAGE_FORMATS",
    "MAX_PIXELS",
    "NAMES",
    "AbsentDataError",
    "Augment",
    "Batches",
    "Clipping",
    "DataError",
    "DataInfo",
    "Dataset",
    "GroupError",
    "MissingDataError",
    "PixelRange",
    "Rotation",
    "Split",
    "Stack",
    "as_bytes",
    "describe_channels",
    "fit",
    "image_hashes",
    "imitation",
    "is_image_name",
    "load_data",
    "normalise",
    "parse_range",
    "read_image",
    "read_images",
    "require_image_readers",
    "visible_channels",
    "warn_about_classes",
]
