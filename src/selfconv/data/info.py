"""The properties of the training images that a trained model needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from selfconv.data.dataset import Dataset
from selfconv.data.images import MAX_SIZE


@dataclass(frozen=True)
class DataInfo:
    """The properties of the training images that are needed to use a trained model."""

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
        if len({*self.class_names}) < max(2, len(self.class_names)):
            raise ValueError(f"class_names: expected two or more, all different; got {self.class_names!r}")
        if self.in_channels not in (1, 3) or not 1 <= self.size <= MAX_SIZE:
            raise ValueError(
                f"expected in_channels 1 or 3 and size 1 to {MAX_SIZE}; got {self.in_channels}, {self.size}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.in_channels or (name == "std" and min(values) <= 0):
                raise ValueError(f"{name}: expected {self.in_channels} numbers; got {values!r}")
        if {*self.images} != {"train", "val", "test"} or min(self.images.values()) < 0:
            raise ValueError(f"images: expected how many train, val and test; got {self.images!r}")

    def agrees_with(self, other: DataInfo) -> bool:
        """Whether both describe the same images; means may round differently on another machine."""
        close = all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
            for a, b in zip([*self.mean, *self.std], [*other.mean, *other.std], strict=False)
        )
        return (
            close
            and self.in_channels == other.in_channels
            and replace(self, mean=other.mean, std=other.std) == other
        )

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
