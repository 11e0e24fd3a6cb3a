"""Batches of normalised, augmented images, computed by whole-batch tensor operations in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv.data.stored import Split

Rotation = Literal["none", "quarter", "any"]


@dataclass(frozen=True)
class Augment:
    """Random affine maps of the pixel grid: an image f becomes f(A p + t), with p relative to the centre.

    Args:
        flip: horizontal flip with probability 1/2.
        pad: random crop of the original size after zero padding by ``pad`` pixels on each side: t is uniform
            in {-pad, …, pad}². The paper's 32×32 out of 36×36 is ``pad=2``.
        rotate: ``"quarter"`` rotates by a random multiple of 90°, ``"any"`` by a uniformly random angle
            (bilinear).
        brightness: adds to all pixels a number that is uniform in ±brightness, with pixels in 0..1.
        contrast: multiplies the distance to the mean colour of the data by a number in 1 ± contrast.
        colour: multiplies the distance of each channel to the mean of the channels by a factor in 1 ± colour.
        erase: with probability 1/2, a rectangle of up to this share of the image becomes the mean colour.

    Padding is zero in the *normalised* image, i.e. the mean colour; so are pixels that a rotation takes from
    outside the image.
    """

    flip: bool = False
    pad: int = 0
    rotate: Rotation = "none"
    brightness: float = 0.0
    contrast: float = 0.0
    colour: float = 0.0
    erase: float = 0.0

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ValueError(f"pad: expected a number of pixels ≥ 0; got {self.pad}")
        if self.rotate not in get_args(Rotation):
            raise ValueError(f"rotate: expected one of {', '.join(get_args(Rotation))}; got {self.rotate!r}")
        for name in ("brightness", "contrast", "colour", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number from 0 to 1; got {getattr(self, name)}")

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples maps for ``count`` images: A ``[count, 2, 2]`` and t ``[count, 2]``, as (row, column)."""
        if self.rotate == "any":
            angle = torch.rand(count, generator=generator) * math.tau
            cos, sin = angle.cos(), angle.sin()
        else:
            turns = torch.randint(4, (count,), generator=generator) if self.rotate == "quarter" else 0
            cos = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns].expand(count)  # exact, unlike cos of π/2
            sin = torch.tensor([0.0, 1.0, 0.0, -1.0])[turns].expand(count)
        mirror = (
            1.0 - 2.0 * torch.randint(2, (count,), generator=generator) if self.flip else torch.ones(count)
        )
        linear = torch.stack([cos, -sin * mirror, sin, cos * mirror], 1).view(count, 2, 2)
        shift = torch.randint(-self.pad, self.pad + 1, (count, 2), generator=generator).float()
        return linear, shift

    def draw_photometric(self, count: int, generator: torch.Generator) -> Tensor:
        """Samples changes of the pixels' values [count, 7]: brightness, contrast, colour, and a rectangle."""
        drawn = torch.rand(count, 8, generator=generator)
        spread = 2 * drawn[:, :3] - 1
        share = self.erase * drawn[:, 3] * (drawn[:, 7] < 0.5)
        aspect = (math.log(3) * (2 * drawn[:, 4] - 1)).exp()  # 1:3 to 3:1
        sides = torch.stack([(share * aspect).sqrt(), (share / aspect).sqrt()], 1).clamp(max=1)
        corner = drawn[:, 5:7] * (1 - sides)
        limits = torch.tensor([self.brightness, self.contrast, self.colour])
        return torch.cat([spread * limits, corner, sides], 1)

    @property
    def has_photometric(self) -> bool:
        return any((self.brightness, self.contrast, self.colour, self.erase))


def apply_photometric(images: Tensor, drawn: Tensor, std: Sequence[float]) -> Tensor:
    """Changes brightness, contrast and colour, and erases a rectangle, of normalised images.

    Args:
        drawn: from ``Augment.draw_photometric``.
    """
    drawn = drawn.to(images.device)
    brightness, contrast, colour = (drawn[:, i].view(-1, 1, 1, 1) for i in range(3))
    grey = images.mean(1, keepdim=True)
    images = (grey + (images - grey) * (1 + colour)) * (1 + contrast)
    images = images + brightness / torch.tensor(std, device=images.device).view(1, -1, 1, 1)
    height, width = images.shape[2:]
    outside = torch.zeros(len(images), 1, height, width, dtype=torch.bool, device=images.device)
    for axis, size in enumerate((height, width)):
        place = (torch.arange(size, device=images.device) + 0.5) / size
        first, length = drawn[:, 3 + axis, None], drawn[:, 5 + axis, None]
        missed = (place < first) | (place >= first + length)
        outside |= missed.view(-1, 1, size, 1) if axis == 0 else missed.view(-1, 1, 1, size)
    return (images * outside).contiguous(memory_format=torch.channels_last)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float], levels: int = 255) -> Tensor:
    """Normalises integers 0..levels ``[N, C, H, W]`` by mean and deviation, to float32, channels_last."""
    shape = (1, len(mean), 1, 1)
    scale = torch.tensor([1 / (levels * s) for s in std], device=images.device).view(shape)
    offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device).view(shape)
    return torch.addcmul(offset, images.contiguous(memory_format=torch.channels_last).float(), scale)


def transform(images: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Applies affine maps of the grid to images ``[N, C, H, W]``; zero outside.

    Exact if every map takes pixels to pixels (the entries of A are 0 and ±1), otherwise bilinear.
    """
    exact = bool((linear == linear.round()).all())  # before they go to a device, which would have to wait
    linear, shift = linear.to(images.device), shift.to(images.device)
    count, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) - (height - 1) / 2
    columns = torch.arange(width, device=images.device) - (width - 1) / 2
    across, along = linear[..., 0, None, None] * rows[:, None], linear[..., 1, None, None] * columns
    source = across + along + shift[..., None, None]  # [N, 2, H, W], from the centre
    if not exact:
        grid = torch.stack([source[:, 1] * (2 / width), source[:, 0] * (2 / height)], -1)
        return F.grid_sample(images, grid, align_corners=False).contiguous(memory_format=torch.channels_last)
    row = (source[:, 0] + (height - 1) / 2).long()
    column = (source[:, 1] + (width - 1) / 2).long()
    outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
    first = torch.arange(count, device=images.device)[:, None, None] * (height * width)
    index = first + row.clamp_(0, height - 1) * width + column.clamp_(0, width - 1)
    pixels = images.permute(0, 2, 3, 1).reshape(-1, channels)  # [N·H·W, C]
    moved = pixels.index_select(0, index.view(-1)).view(count, height, width, channels)
    return moved.masked_fill_(outside[..., None], 0).permute(0, 3, 1, 2)


class Batches:
    """Batches of a split: images float32 ``[N, C, H, W]``, channels_last, and labels int64 ``[N]``.

    The batches of an epoch depend only on ``seed`` and the epoch's number, not on torch's global random
    state, so a run that resumes in the middle of an epoch continues with the same batches.

    With several processes, ``batch_size`` is the size of the global batch, and each process gets its slice.

    Args:
        shuffle: use a new order in each epoch, and only full batches (or one batch of all images, if there
            are fewer than ``batch_size``), which are divided evenly between processes. Otherwise all images,
            in order; a process may then get no image of the last batch.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"expected 0 ≤ rank < world_size; got rank={rank}, world_size={world_size}")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(
                f"batch_size: expected a positive multiple of world_size={world_size}; got {batch_size}"
            )
        if shuffle:
            batch_size = min(batch_size, len(split) // world_size * world_size)
            if batch_size == 0:
                raise ValueError(
                    f"expected an image for each of {world_size} processes; got {len(split)} images"
                )
        if augment is not None and augment.rotate != "none" and split.shape[2] != split.shape[3]:
            raise ValueError(f"rotate: expected square images; got {list(split.shape)}")
        self.split, self.batch_size = split, batch_size
        self.mean, self.std, self.augment = mean, std, augment
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Batches in an epoch."""
        count = len(self.split)
        return count // self.batch_size if self.shuffle else math.ceil(count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(
        self, epoch: int, start_step: int = 0, *, size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from ``start_step`` on, with images resized if a size is given."""
        if epoch < 0 or not 0 <= start_step <= len(self):
            raise ValueError(
                f"expected epoch ≥ 0 and 0 ≤ start_step ≤ {len(self)}; got {epoch} and {start_step}"
            )
        return self._epoch(epoch, start_step, size)

    def _epoch(self, epoch: int, start_step: int, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        count, device = len(self.split), self.split.device
        state = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        # everything random is drawn for the whole epoch, so that any step of any process can be cut out
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        maps = self.augment.draw(count, generator) if self.augment is not None else None
        photometric = None
        if self.augment is not None and self.augment.has_photometric:
            photometric = self.augment.draw_photometric(count, generator)
        for step in range(start_step, len(self)):
            first = step * self.batch_size
            images_in_step = min(self.batch_size, count - first)
            cuts = [first + images_in_step * rank // self.world_size for rank in (self.rank, self.rank + 1)]
            own = slice(*cuts)
            index = order[own].to(device)
            images = normalise(self.split.read(index), self.mean, self.std, self.split.levels)
            if maps is not None:
                images = transform(images, *(value[own] for value in maps))
            if photometric is not None:
                images = apply_photometric(images, photometric[own], self.std)
            if size is not None and images.shape[-2:] != (size, size):
                images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
            yield images, self.split.labels[index]
