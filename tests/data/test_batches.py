"""Batches: the augmentation is its definition, epochs can be resumed and shared out."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selfconv.data import Augment, Batches, Split, load_data, normalise
from selfconv.data.batches import transform

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.15)
AUGMENTS = [
    None,
    Augment(flip=True, pad=2),
    Augment(flip=True, pad=1, rotate="quarter"),
    Augment(flip=True, pad=2, rotate="any"),
]
every_augment = pytest.mark.parametrize("augment", AUGMENTS, ids=str)


def split(count: int, channels: int = 3, size: int = 6) -> Split:
    """Random images; the label is the image's number."""
    images = torch.randint(256, (count, size, size, channels), dtype=torch.uint8).permute(0, 3, 1, 2)
    return Split(images, torch.arange(count))


def batches(data: Split, batch_size: int = 8, **options: Any) -> Batches:
    channels = data.images.shape[1]
    return Batches(data, batch_size, mean=MEAN[:channels], std=STD[:channels], **options)


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def sampled(image: Tensor, row: float, column: float) -> Tensor:
    """f(row, column) by the definition of bilinear interpolation, zero outside: [C]."""
    value = torch.zeros(len(image), dtype=torch.double)
    for r, c in product(range(image.shape[1]), range(image.shape[2])):
        weight = max(0.0, 1 - abs(r - row)) * max(0.0, 1 - abs(c - column))
        value += weight * image[:, r, c].double()
    return value


@pytest.mark.parametrize("augment", AUGMENTS[1:], ids=str)
@given(size=st.integers(1, 6), channels=st.sampled_from([1, 3]), seed=st.integers(0, 1000))
def test_augmentation_is_its_definition(augment: Augment, size: int, channels: int, seed: int) -> None:
    """Each pixel p of the result is f(A p + t), with p measured from the centre."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(3, channels, size, size, generator=generator)
    linear, shift = augment.draw(3, generator)
    out = transform(images, linear, shift)
    centre = (size - 1) / 2
    for n, i, j in product(range(3), range(size), range(size)):
        p = torch.tensor([i - centre, j - centre], dtype=torch.double)
        row, column = (linear[n].double() @ p + shift[n].double() + centre).tolist()
        assert torch.allclose(out[n, :, i, j].double(), sampled(images[n], row, column), atol=1e-4)


def test_the_papers_crops_and_flips_all_occur_exactly() -> None:
    """Crops of the original size from the zero-padded normalised image, mirrored or not."""
    data = split(1)
    normal = normalise(data.images, MEAN, STD)
    padded = F.pad(normal, (2, 2, 2, 2))[0]
    crops = [padded[:, i : i + 6, j : j + 6] for i, j in product(range(5), repeat=2)]
    expected = crops + [crop.flip(-1) for crop in crops]
    loader = batches(data, shuffle=True, augment=Augment(flip=True, pad=2))
    seen = set()
    for epoch in range(700):
        ((images, _),) = loader.epoch(epoch)
        matches = [k for k, crop in enumerate(expected) if torch.equal(images[0], crop)]
        assert len(matches) == 1
        seen.update(matches)
    assert seen == set(range(50))


@pytest.mark.parametrize("flip", [False, True])
def test_quarter_turns_all_occur_exactly(flip: bool) -> None:
    data = split(1, size=5)
    normal = normalise(data.images, MEAN, STD)[0]
    faces = [normal, normal.flip(-1)] if flip else [normal]
    expected = [torch.rot90(face, k, (1, 2)) for face in faces for k in range(4)]
    loader = batches(data, augment=Augment(flip=flip, rotate="quarter"))
    seen = set()
    for epoch in range(150):
        ((images, _),) = loader.epoch(epoch)
        (match,) = [k for k, turned in enumerate(expected) if torch.equal(images[0], turned)]
        seen.add(match)
    assert seen == set(range(len(expected)))


def test_any_angle_agrees_with_quarter_turns() -> None:
    images = torch.randn(4, 3, 7, 7)
    angle = torch.arange(4) * (math.pi / 2) + 1e-7
    linear = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(4, 2, 2)
    exact = transform(images, linear.round(), torch.zeros(4, 2))
    assert not torch.equal(linear, linear.round())
    assert torch.allclose(transform(images, linear, torch.zeros(4, 2)), exact, atol=1e-4)
    assert torch.equal(exact[2], images[2].rot90(2, (1, 2)))


def test_angles_are_uniform() -> None:
    linear, _ = Augment(rotate="any").draw(4000, torch.Generator().manual_seed(0))
    angle = torch.atan2(linear[:, 1, 0], linear[:, 0, 0])
    assert (torch.histc(angle, 8, -math.pi, math.pi) / 500 - 1).abs().max() < 0.2
    assert torch.allclose(linear @ linear.mT, torch.eye(2).expand(4000, 2, 2), atol=1e-6)
    assert torch.allclose(torch.linalg.det(linear), torch.ones(4000), atol=1e-6)


def test_normalised_by_the_training_images() -> None:
    data = load_data("digits")
    images = torch.cat([x for x, _ in Batches(data.train, 100, mean=data.mean, std=data.std)])
    assert len(images) == len(data.train)
    assert images.mean().abs() < 1e-5
    assert (images.std(correction=0) - 1).abs() < 1e-5


@every_augment
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_dtype_of_a_batch(augment: Augment | None, channels: int) -> None:
    data = split(20, channels)
    for images, labels in batches(data, augment=augment, shuffle=True):
        assert images.dtype == torch.float32
        assert images.shape == (8, channels, 6, 6)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
    assert data.images.is_contiguous(memory_format=torch.channels_last)


def test_a_split_goes_to_a_device() -> None:
    moved = split(3).to("meta")
    assert (moved.images.device.type, moved.labels.device.type, len(moved)) == ("meta", "meta", 3)


def test_images_stored_in_another_order() -> None:
    data = split(20)
    other = Split(data.images.contiguous(), data.labels)
    augment = Augment(flip=True, pad=2, rotate="quarter")
    assert same(batches(data, augment=augment), batches(other, augment=augment))


def test_in_order_all_images_come_once() -> None:
    data = split(21)
    images, labels = zip(*batches(data), strict=True)
    assert [len(y) for y in labels] == [8, 8, 5]
    assert torch.equal(torch.cat(labels), data.labels)
    assert torch.equal(torch.cat(images), normalise(data.images, MEAN, STD))


def test_shuffled_in_full_batches_without_repetition() -> None:
    loader = batches(split(21), shuffle=True)
    orders = [torch.cat([y for _, y in loader.epoch(epoch)]).tolist() for epoch in range(50)]
    assert len(loader) == 2
    assert all(len(set(order)) == 16 for order in orders)
    assert len({tuple(order) for order in orders}) == 50
    assert {label for order in orders for label in order} == set(range(21))  # none is left out for ever


def test_images_and_labels_belong_together() -> None:
    data = split(40)
    normal = normalise(data.images, MEAN, STD)
    for images, labels in batches(data, shuffle=True):
        assert torch.equal(images, normal[labels])


def test_fewer_images_than_a_batch() -> None:
    loader = batches(split(5), shuffle=True)
    assert [len(y) for _, y in loader] == [5]
    assert [len(y) for _, y in batches(split(5), shuffle=True, world_size=2)] == [2]


@every_augment
@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 1000), start=st.integers(0, 5))
def test_resumed_epochs_go_on_with_the_same_bits(
    augment: Augment | None, seed: int, epoch: int, start: int
) -> None:
    data = split(43)
    whole = list(batches(data, augment=augment, shuffle=True, seed=seed).epoch(epoch))
    torch.rand(3)  # the global random state has no part in it
    resumed = batches(data, augment=augment, shuffle=True, seed=seed).epoch(epoch, start_step=start)
    assert same(whole[start:], resumed)


def test_seeds_and_epochs_differ() -> None:
    data = split(16)
    orders = {
        tuple(torch.cat([y for _, y in batches(data, shuffle=True, seed=seed).epoch(epoch)]).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_global_random_state_is_left_alone() -> None:
    data = split(20)
    before = torch.get_rng_state()
    for _ in batches(data, shuffle=True, augment=AUGMENTS[-1]):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@every_augment
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_share_the_batch_of_one(augment: Augment | None, world_size: int, shuffle: bool) -> None:
    data = split(42)
    options: dict[str, Any] = {"augment": augment, "shuffle": shuffle, "seed": 3}
    alone = batches(data, **options).epoch(2)
    shares = [batches(data, **options, rank=r, world_size=world_size).epoch(2) for r in range(world_size)]
    joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*shares, strict=True)]
    for (images, labels), (own_images, own_labels) in zip(alone, joined, strict=True):
        assert torch.equal(labels, own_labels)
        assert torch.equal(images, own_images)
        if shuffle:
            assert len(labels) == 8


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 0}, "batch_size: expected a positive multiple of world_size=1; got 0"),
        (
            {"batch_size": 9, "world_size": 2},
            "batch_size: expected a positive multiple of world_size=2; got 9",
        ),
        ({"rank": 1}, "expected 0 ≤ rank < world_size; got rank=1, world_size=1"),
        ({"rank": -1}, "got rank=-1"),
        (
            {"batch_size": 32, "world_size": 32, "shuffle": True},
            "an image for each of 32 processes; got 20 images",
        ),
    ],
)
def test_bad_options(options: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        batches(split(20), **options)


def test_bad_epochs() -> None:
    loader = batches(split(20))
    for epoch, start in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(ValueError, match=f"0 ≤ start_step ≤ 3; got {epoch} and {start}"):
            loader.epoch(epoch, start)
    assert list(loader.epoch(0, 3)) == []


def test_bad_augmentation() -> None:
    with pytest.raises(ValueError, match="pad: expected a number of pixels ≥ 0; got -1"):
        Augment(pad=-1)
    with pytest.raises(ValueError, match="rotate: expected one of none, quarter, any; got 'half'"):
        Augment(rotate="half")  # type: ignore[arg-type]
    oblong = Split(torch.zeros(4, 1, 6, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rotate: expected square images; got \[4, 1, 6, 8\]"):
        batches(oblong, augment=Augment(rotate="quarter"))
    ((images, _),) = batches(oblong, augment=Augment(flip=True, pad=1))
    assert images.shape == (4, 1, 6, 8)
