"""What a trained model must be told of its images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from selfconv.data.dataset import Dataset

MAX_SIZE = 16384  # side of an image


@dataclass(frozen=True)
class DataInfo:
    """What a trained model must be told of the images it was trained on."""

    name: str
    digest: str
    class_names: list[str]
    in_channels: int
    size: int
    mean: list[float]
    std: list[float]
    images: dict[str, int]

    def __post_init__(self) -> None:
        """A description may come from anywhere, and what it says is used for the sizes of arrays."""
        numbers = [*self.mean, *self.std]
        if not (
            isinstance(self.name, str)
            and isinstance(self.digest, str)
            and all(isinstance(name, str) for name in self.class_names)
            and self.in_channels in (1, 3)
            and type(self.size) is int
            and 1 <= self.size <= MAX_SIZE
            and len(self.mean) == len(self.std) == self.in_channels
            and all(type(number) is float and math.isfinite(number) for number in numbers)
            and min(self.std) > 0
        ):
            raise ValueError("not the description of a data set")

    @classmethod
    def of(cls, data: Dataset) -> DataInfo:
        return cls(
            name=data.name,
            digest=data.digest,
            class_names=list(data.class_names),
            in_channels=data.in_channels,
            size=data.size,
            mean=list(data.mean),
            std=list(data.std),
            images={"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        )
