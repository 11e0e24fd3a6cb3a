"""Images to train on, in memory: from the package, the network, a folder, or an ``.npz`` file.

>>> data = load_data("digits")
>>> data.num_classes, data.in_channels, data.size
(10, 1, 16)
>>> batches = Batches(data.train, 128, mean=data.mean, std=data.std, shuffle=True)
>>> for images, labels in batches.epoch(0):
...     ...
"""

from selfconv.lab.data._batches import Augment, Batches, Rotation, normalise
from selfconv.lab.data._dataset import DataError, Dataset, Split
from selfconv.lab.data._images import read_image
from selfconv.lab.data._load import load_data

__all__ = [
    "Augment",
    "Batches",
    "DataError",
    "Dataset",
    "Rotation",
    "Split",
    "load_data",
    "normalise",
    "read_image",
]
