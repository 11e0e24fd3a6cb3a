"""Splits images by class and by group, and finds identical images in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from selfconv.data.pixels import GroupError
from selfconv.data.stored import Split

Labels = NDArray[np.int64]  # [N]


def split_off(
    labels: Labels, fraction: float, seed: int, groups: Sequence[str] | None = None
) -> tuple[Labels, Labels]:
    """Indices of the images that stay and of those set aside, both ascending."""
    if groups is None:
        return stratified(labels, fraction, seed)
    return stratified_groups(labels, fraction, seed, groups)


def stratified(labels: Labels, fraction: float, seed: int) -> tuple[Labels, Labels]:
    """Indices of the images that stay and of those set aside, both ascending.

    ``round(fraction · N)`` images are set aside, from each class its share up to rounding (largest
    remainder), but never the last image of a class.
    """
    classes, counts = np.unique(labels, return_counts=True)
    share = counts * fraction
    take = np.floor(share).astype(np.int64)
    order = np.argsort(take - share, kind="stable")  # largest remainder first
    missing = round(fraction * len(labels)) - int(take.sum())
    take[order[:missing]] += 1
    take = np.minimum(take, counts - 1)
    random = np.random.RandomState(seed)  # its stream is frozen, as the split must be
    aside = [random.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, take, strict=True)]
    mask = np.zeros(len(labels), bool)
    mask[np.concatenate(aside)] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def stratified_groups(
    labels: Labels, fraction: float, seed: int, groups: Sequence[str]
) -> tuple[Labels, Labels]:
    """As ``stratified``, but all images of a group stay on one side, so the shares are approximate.

    The groups are visited in random order, and one is set aside if that brings the number of images of each
    class closer to its share (sum of squares), and leaves every class an image; at least one group, if one
    can be.
    """
    names, group = np.unique(np.array(groups), return_inverse=True)
    classes, label = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(classes)))
    np.add.at(counts, (group, label), 1)
    target, total = fraction * counts.sum(0), counts.sum(0)
    aside, chosen = np.zeros(len(classes)), np.zeros(len(names), bool)
    for number in np.random.RandomState(seed).permutation(len(names)):
        after = aside + counts[number]
        closer = ((after - target) ** 2).sum() < ((aside - target) ** 2).sum()
        if closer and (after < total).all():
            aside, chosen[number] = after, True
    possible = np.flatnonzero((counts < total).all(1))
    if fraction > 0 and not chosen.any() and len(possible):
        chosen[possible[((counts[possible] - target) ** 2).sum(1).argmin()]] = True
    if fraction > 0 and not chosen.any():
        raise GroupError(
            f"group_by: expected enough groups to set {fraction:.0%} of the images aside and keep every "
            f"class on both sides; got {len(names)} group{'s' * (len(names) != 1)}, {str(names[0])!r} first"
        )
    mask = chosen[group]
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def check_groups(what: str, groups: Mapping[str, Sequence[str] | None]) -> None:
    """Raises GroupError if the parts of a source share a group."""
    seen: dict[str, str] = {}
    for part, names in groups.items():
        for name in dict.fromkeys(names or ()):
            if name in seen:
                raise GroupError(
                    f"{what}: group_by: expected each group in one part; {name!r} is in {seen[name]} and "
                    f"in {part}"
                )
            seen[name] = part


def leaks(parts: Mapping[str, Split]) -> Iterator[str]:
    """A sentence for each pair of parts that have identical images in common."""
    found = {part: _digests(split) for part, split in parts.items()}
    for used, held in (("train", "val"), ("train", "test"), ("val", "test")):
        first = {digest: i for i, digest in reversed([*enumerate(found[used])])}
        shared = [i for i, digest in enumerate(found[held]) if digest in first]
        if shared:
            theirs = first[found[held][shared[0]]]
            what = {"train": "training", "val": "validation", "test": "test"}
            yield (
                f"{len(shared)} of {len(found[held])} {what[held]} images are identical to {what[used]} "
                f"images (first: {_name(parts[held], shared[0])} = {_name(parts[used], theirs)}), so the "
                "accuracy on them says little"
            )


def image_hashes(split: Split) -> NDArray[np.uint64]:
    """A number for each image of a split, equal for equal pixels."""
    return np.frombuffer(b"".join(_digests(split, 8)), "<u8")


def _digests(split: Split, size: int = 16) -> list[bytes]:
    return [
        hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=size).digest()
        for chunk in split.chunks()
        for image in chunk.permute(0, 2, 3, 1).numpy(force=True)
    ]


def _name(split: Split, index: int) -> str:
    return split.names[index] if split.names else f"image {index}"
