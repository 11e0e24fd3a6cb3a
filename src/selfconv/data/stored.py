"""Images where they are stored: in memory, or in a memory-mapped file of which batches are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Images = NDArray[Any]  # [N, H, W, C]
CHUNK = 2**24  # bytes that are read at a time


class Stack:
    """Images [N, H, W, C] in memory, or some rows of a memory-mapped file, whose pages are soon released."""

    def __init__(self, array: Images, rows: NDArray[np.int64] | None = None) -> None:
        self.array, self.mapped = array, isinstance(array, np.memmap)
        self.rows = np.arange(len(array)) if self.mapped and rows is None else rows
        self._touched = 0

    def __len__(self) -> int:
        return len(self.array if self.rows is None else self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.array.shape[1:])

    def take(self, index: NDArray[np.int64]) -> Stack:
        return Stack(self.array[index]) if self.rows is None else Stack(self.array, self.rows[index])

    def read(self, index: NDArray[np.int64] | slice) -> Images:
        if self.rows is None:
            return self.array[index]
        found = np.asarray(self.array[self.rows[index]])
        self._touched += found.nbytes
        if self._touched > CHUNK:
            # the pages stay in the system's cache, but no longer count as this process's memory
            self.array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
            self._touched = 0
        return found

    def chunks(self) -> Iterator[Images]:
        step = max(1, CHUNK // max(1, math.prod(self.shape[1:]) * self.array.itemsize))
        return (self.read(slice(start, start + step)) for start in range(0, len(self), step))


class Split:
    """Images ``[N, C, H, W]``, stored channels_last, and their labels int64 ``[N]``.

    Attributes:
        levels: pixels are integers from 0 to ``levels``, uint8 or uint16.
        names: of the images, as their source calls them; empty if it does not.
    """

    def __init__(
        self,
        images: Tensor | Stack,
        labels: Tensor,
        *,
        levels: int = 255,
        names: Sequence[str] = (),
    ) -> None:
        self._stored = images
        self.labels, self.levels, self.names = labels, levels, names

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> Tensor:
        """All images, in memory."""
        return self._stored if isinstance(self._stored, Tensor) else self.read(torch.arange(len(self)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """N, C, H, W."""
        if isinstance(self._stored, Tensor):
            count, channels, height, width = self._stored.shape
        else:
            count, height, width, channels = self._stored.shape
        return count, channels, height, width

    @property
    def device(self) -> torch.device:
        """Where the images are: batches are computed there."""
        return self._stored.device if isinstance(self._stored, Tensor) else self.labels.device

    def read(self, index: Tensor) -> Tensor:
        """Some of the images."""
        if isinstance(self._stored, Tensor):
            return self._stored[index]
        found = torch.from_numpy(self._stored.read(index.cpu().numpy()))
        return found.permute(0, 3, 1, 2).to(self.labels.device)

    def chunks(self) -> Iterator[Tensor]:
        """All images, some thousands at a time."""
        step = max(1, CHUNK // math.prod(self.shape[1:]))
        return (self.read(part) for part in torch.arange(len(self)).split(step))

    def take(self, index: Tensor) -> Split:
        """A split of some of the images."""
        stored = self._stored
        chosen = stored[index] if isinstance(stored, Tensor) else stored.take(index.cpu().numpy())
        names = [self.names[i] for i in index.tolist()] if self.names else ()
        return Split(chosen, self.labels[index], levels=self.levels, names=names)

    @staticmethod
    def join(splits: Sequence[Split]) -> Split:
        """The images of several splits of one data set, one after another."""
        stacks = [split._stored for split in splits if isinstance(split._stored, Stack)]
        stored: Tensor | Stack
        if len(stacks) == len(splits) and all(
            stack.mapped for stack in stacks
        ):  # of one file, which stays there
            stored = Stack(stacks[0].array, np.concatenate([stack.rows for stack in stacks]))
        else:
            stored = torch.cat([split.images for split in splits])
        return Split(
            stored,
            torch.cat([split.labels for split in splits]),
            levels=splits[0].levels,
            names=[name for split in splits for name in split.names],
        )

    def to(self, device: torch.device | str) -> Split:
        """Copies the split to a device, where batches are then computed; mapped images stay on disk."""
        stored = self._stored.to(device) if isinstance(self._stored, Tensor) else self._stored
        return Split(stored, self.labels.to(device), levels=self.levels, names=self.names)
