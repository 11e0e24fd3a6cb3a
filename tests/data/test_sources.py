"""Data sets from the package and from .npz files; splits; every bad input in one line."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from selfconv.data import DataError, Dataset, fit, load_data
from selfconv.data.dataset import SourcePart, build
from selfconv.data.sources.npz import enlarge
from selfconv.data.splits import stratified


def fails(match: str, source: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load_data(source, **options)
    assert "\n" not in str(caught.value)


def contents(data: Dataset) -> dict[str, list[tuple[bytes, int]]]:
    """Images and labels of each part, in order."""
    return {
        part: [(image.numpy().tobytes(), int(label)) for image, label in zip(s.images, s.labels, strict=True)]
        for part, s in (("train", data.train), ("val", data.val), ("test", data.test))
    }


class TestSplit:
    @given(
        arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 6)),
        st.floats(0, 0.999),
        st.integers(0, 2**32 - 1),
    )
    def test_stratified(self, labels: np.ndarray, fraction: float, seed: int) -> None:
        rest, aside = stratified(labels, fraction, seed)
        assert sorted([*rest, *aside]) == list(range(len(labels)))
        assert np.array_equal(rest, np.sort(rest))
        assert np.array_equal(aside, np.sort(aside))
        counts, taken = np.bincount(labels, minlength=7), np.bincount(labels[aside], minlength=7)
        assert ((counts - taken >= 1) | (counts == 0)).all()
        capped = taken == counts - 1
        assert (np.abs(taken - fraction * counts)[~capped] < 1 + 1e-9).all()
        if not capped.any():
            assert len(aside) == round(fraction * len(labels))
        assert np.array_equal(stratified(labels, fraction, seed)[1], aside)

    def test_the_split_is_frozen(self) -> None:
        """The same for ever: runs of different versions validate on the same images."""
        labels = np.arange(20) % 2
        assert stratified(labels, 0.4, seed=0)[1].tolist() == [3, 4, 5, 7, 8, 11, 16, 18]

    def test_by_seed(self) -> None:
        one, same, other = (contents(load_data("digits", seed=seed)) for seed in (1, 1, 2))
        assert one == same
        assert set(one["val"]) != set(other["val"])
        assert one["test"] == other["test"]

    @pytest.mark.parametrize("validation", [0, 0.1, 0.5])
    def test_share(self, validation: float) -> None:
        data = load_data("digits", validation=validation)
        assert len(data.val) == round(1438 * validation)
        assert len(data.train) + len(data.val) == 1438

    @pytest.mark.parametrize("count", [100, 1294])
    def test_fewer_to_train_on(self, count: int) -> None:
        data = load_data("digits")
        fewer, whole, part = data.subset(count, 0), contents(data), contents(data.subset(count, 0))
        assert len(fewer.train) == count
        assert set(part["train"]) <= set(whole["train"])
        assert (part["val"], part["test"], fewer.digest) == (whole["val"], whole["test"], data.digest)
        share = torch.bincount(data.train.labels) * count / 1294
        assert ((torch.bincount(fewer.train.labels) - share).abs() < 1).all()

    @pytest.mark.parametrize("count", [9, 0, -1, 1295])
    def test_subset_out_of_range(self, count: int) -> None:
        with pytest.raises(DataError, match=f"subset: expected from 10 images, .* all 1294 .*; got {count}"):
            load_data("digits").subset(count, 0)

    def test_digest_pins_the_contents_and_not_the_split(self) -> None:
        data = load_data("digits")
        assert load_data("digits", seed=3, validation=0.3).digest == data.digest
        assert load_data("digits", image_size=8).digest != data.digest
        assert len(data.digest) == 64

    @pytest.mark.parametrize("change", ["pixel", "label", "name", "move"])
    def test_digest_sees_every_change(self, change: str) -> None:
        def digest(x: np.ndarray, y: np.ndarray, names: list[str], cut: int = 4) -> str:
            parts = {"train": SourcePart(x[:cut], y[:cut]), "test": SourcePart(x[cut:], y[cut:])}
            return build("x", parts, names, image_size=None, seed=0, validation=0).digest

        x, y, names = np.zeros((6, 2, 2), np.uint8), np.array([0, 1] * 3), ["a", "b"]
        before = digest(x, y, names)
        if change == "pixel":
            x[3, 1, 1] = 1
        elif change == "label":
            y[5] = 0
        elif change == "name":
            names[1] = "c"
        assert digest(x, y, names, 3 if change == "move" else 4) != before


class TestDigits:
    def test_digits(self) -> None:
        data = load_data("digits")
        assert (data.name, data.num_classes, data.in_channels, data.size) == ("digits", 10, 1, 16)
        assert data.class_names == tuple("0123456789")
        assert (len(data.train), len(data.val), len(data.test)) == (1294, 144, 359)
        labels = torch.cat([data.train.labels, data.val.labels, data.test.labels])
        assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as at UCI
        assert data.test.labels.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
        assert data.train.images.dtype == torch.uint8
        assert data.train.images.amax() == 255
        everything = {image for part in contents(data).values() for image, _ in part}
        assert len(everything) == 1797  # no image twice, in no two parts
        assert str(data) == (
            "digits: 1294 images to train, 144 to validate, 359 to test; 16×16, grey, 10 classes"
        )

    @given(arrays(np.uint8, (2, 8, 8), elements=st.integers(0, 16)))
    def test_enlarged_bilinearly(self, counts: np.ndarray) -> None:
        expected = F.interpolate(torch.tensor(counts)[:, None].double(), scale_factor=2, mode="bilinear")
        found = torch.tensor(enlarge(counts)).permute(0, 3, 1, 2)
        assert (found - expected * 255 / 16).abs().max() <= 0.5 + 1e-9
        assert np.array_equal(enlarge(np.rot90(counts, 1, (1, 2))), np.rot90(enlarge(counts), 1, (1, 2)))
        assert np.array_equal(enlarge(counts[:, :, ::-1]), enlarge(counts)[:, :, ::-1])

    def test_statistics_are_those_of_the_training_images(self) -> None:
        data = load_data("digits")
        pixels = data.train.images.double() / 255
        assert data.mean == pytest.approx([pixels.mean().item()], abs=1e-12)
        assert data.std == pytest.approx([pixels.std(correction=0).item()], abs=1e-12)

    def test_other_sizes(self) -> None:
        data = load_data("digits", image_size=24)
        assert data.train.images.shape == (1294, 1, 24, 24)

    def test_attribution_is_shipped(self) -> None:
        notice = (files("selfconv.data") / "NOTICE.txt").read_text("utf-8")
        for part in (
            "Alpaydin",
            "Kaynak",
            "UCI",
            "10.24432/C50P49",
            "creativecommons.org/licenses/by/4.0",
            "Changes",
        ):
            assert part in notice


def save(path: Path, **changes: Any) -> Path:
    """A good .npz file, but for the changes; None leaves an array out."""
    random = np.random.default_rng(0)
    good: dict[str, Any] = {
        "x_train": random.integers(0, 256, (40, 6, 6, 3), np.uint8),
        "y_train": np.arange(40) % 4,
        "x_test": random.integers(0, 256, (12, 6, 6, 3), np.uint8),
        "y_test": np.arange(12) % 4,
    }
    file = path / "shapes.npz"
    np.savez(file, **{key: value for key, value in (good | changes).items() if value is not None})
    return file


class TestNpz:
    @pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64, ">i4"])
    def test_colour(self, tmp_path: Path, dtype: Any) -> None:
        path = save(tmp_path, y_train=(np.arange(40) % 4).astype(dtype))
        data = load_data(path)
        with np.load(path) as file:
            x = file["x_test"]
        assert (data.name, data.in_channels, data.size, data.num_classes) == ("shapes", 3, 6, 4)
        assert data.class_names == ("0", "1", "2", "3")
        assert np.array_equal(data.test.images.permute(0, 2, 3, 1), x)
        assert data.train.images.is_contiguous(memory_format=torch.channels_last)
        assert data.train.labels.dtype == torch.int64
        assert (len(data.train), len(data.val), len(data.test)) == (36, 4, 12)
        assert sorted(data.val.labels.tolist()) == [0, 1, 2, 3]

    @pytest.mark.parametrize("shape", [(6, 6), (6, 6, 1)])
    def test_grey(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        x = np.random.default_rng(0).integers(0, 256, (40, *shape), np.uint8)
        data = load_data(str(save(tmp_path, x_train=x, x_test=x[:12])))
        assert data.in_channels == 1
        assert np.array_equal(data.test.images.flatten(), x[:12].ravel())

    def test_a_validation_part_of_its_own(self, tmp_path: Path) -> None:
        x, y = np.full((5, 6, 6, 3), 7, np.uint8), np.arange(5) % 4
        data = load_data(save(tmp_path, x_val=x, y_val=y))
        assert len(data.train) == 40
        assert np.array_equal(data.val.images.permute(0, 2, 3, 1), x)
        assert np.array_equal(data.val.labels, y)

    @pytest.mark.parametrize("kind", ["U", "S"])
    def test_class_names(self, tmp_path: Path, kind: str) -> None:
        names = np.array(["circle", "square", "star", "cross"], kind)
        assert load_data(save(tmp_path, class_names=names)).class_names == (
            "circle",
            "square",
            "star",
            "cross",
        )

    def test_resized_and_cropped(self, tmp_path: Path) -> None:
        wide = np.zeros((40, 6, 12, 3), np.uint8)
        wide[:, :, 3:9] = 200
        path = save(tmp_path, x_train=wide, x_test=wide[:12])
        fails("shapes: images are 6×12, not square; give an image_size", path)
        assert (load_data(path, image_size=6).train.images == 200).all()
        assert load_data(path, image_size=9).train.images.shape == (36, 3, 9, 9)

    def test_a_constant_channel_does_not_divide_by_zero(self, tmp_path: Path) -> None:
        x = np.zeros((40, 6, 6, 3), np.uint8)
        x[..., 1], x[:20, ..., 2] = 51, 255
        data = load_data(save(tmp_path, x_train=x, y_train=np.arange(40) // 10), validation=0)
        assert data.mean == pytest.approx((0, 0.2, 0.5))
        assert data.std == pytest.approx((1, 1, 0.5))

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"x_test": None, "y_train": None}, r"expected arrays x_train, .*; missing y_train, x_test$"),
            ({"x_val": np.zeros((1, 6, 6, 3), np.uint8)}, "missing y_val$"),
            ({"y_train": np.zeros(39, int)}, "got 40 in x_train, 39 in y_train$"),
            ({"y_test": np.zeros(13, int)}, "got 12 in x_test, 13 in y_test$"),
            ({"y_test": np.full(12, 4)}, r"y_test: expected labels 0\.\.3 as in y_train; got 4$"),
            ({"y_test": np.full(12, -1)}, r"y_test: expected labels 0\.\.3 as in y_train; got -1$"),
            (
                {"y_train": np.full(40, 2**63, np.uint64)},
                "y_train: expected labels from 0; got 9223372036854775808",
            ),
            ({"y_train": np.arange(40) % 4 - 1}, "shapes: y_train: expected labels from 0; got -1$"),
            ({"y_train": np.arange(40) % 4 + 1}, "got none for 1 of them, class 0 first$"),
            (
                {"y_train": np.arange(40) * 10**15, "y_test": np.zeros(12, int)},
                "of them, class 1 first",
            ),
            ({"y_train": np.zeros(40, int), "y_test": np.zeros(12, int)}, "at least two classes; got 1$"),
            ({"y_train": np.arange(40) % 4.0}, r"y_train: expected integers \[N\]; got float64 \[40\]$"),
            ({"y_train": np.arange(40) % 2 == 0}, "y_train: expected integers .*got bool"),
            ({"y_train": np.zeros((40, 1), int)}, r"y_train: expected integers \[N\]; got int64 \[40, 1\]$"),
            ({"y_train": np.array(["a"] * 40)}, "y_train: expected integers"),
            ({"x_train": np.zeros((40, 6, 6, 3))}, "expected values of one type; got float64, uint8: give"),
            ({"x_train": np.zeros((40, 6), np.uint8)}, r"x_train: .*; got shape \[40, 6\]$"),
            (
                {"x_train": np.full((40, 6, 6, 3), "a")},
                "x_train: expected integers or finite numbers; got <U1$",
            ),
            ({"x_train": np.zeros((40, 6, 6, 17), np.uint8)}, r"x_train: .*; got shape \[40, 6, 6, 17\]$"),
            ({"x_train": np.zeros((40, 3, 6, 6), np.uint8)}, r"\[40, 3, 6, 6\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 3, 8, 6), np.uint8)}, r"\[40, 3, 8, 6\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 1, 8, 6), np.uint8)}, r"\[40, 1, 8, 6\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 2, 16, 16), np.uint8)}, r"\[40, 2, 16, 16\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 4, 8, 8), np.uint8)}, r"\[40, 4, 8, 8\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 9, 4, 4), np.uint8)}, r"\[40, 9, 4, 4\] \(channels come last\)$"),
            ({"x_train": np.zeros((40, 0, 6, 3), np.uint8)}, "expected images with pixels"),
            (
                {"x_test": np.zeros((12, 6, 6), np.uint8)},
                "of one size and kind; got x_train 6×6×3, x_test 6×6×1$",
            ),
            ({"x_test": np.zeros((12, 7, 7, 3), np.uint8)}, "got x_train 6×6×3, x_test 7×7×3$"),
            (
                {"x_test": np.zeros((0, 6, 6, 3), np.uint8), "y_test": np.zeros(0, int)},
                "x_test: .* got none$",
            ),
            (
                {"x_train": np.zeros((0, 6, 6, 3), np.uint8), "y_train": np.zeros(0, int)},
                "x_train: .* got none$",
            ),
            ({"class_names": np.array(["a", "b", "c"])}, r"expected labels 0\.\.2 for 3 class names; got 3$"),
            ({"class_names": np.array(list("abcde"))}, "got none for 1 of them, class 'e' first$"),
            ({"class_names": np.arange(4)}, "class_names: expected strings"),
            ({"class_names": np.array([["a", "b"]])}, "class_names: expected strings"),
        ],
    )
    def test_bad_arrays(self, tmp_path: Path, changes: dict, why: str) -> None:
        fails(why, save(tmp_path, **changes))

    def test_pickled_objects_are_not_loaded(self, tmp_path: Path) -> None:
        marker = tmp_path / "ran"

        class Runs:
            def __reduce__(self) -> tuple[Callable, tuple]:
                return exec, (f"open({str(marker)!r}, 'w').close()",)

        path = save(tmp_path, y_train=np.array([Runs()] * 40, object))
        fails("cannot be read .*allow_pickle", path)
        assert not marker.exists()
        np.load(path, allow_pickle=True)["y_train"]
        assert marker.exists()  # it would have run

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
    def test_cut_off(self, tmp_path: Path, share: float) -> None:
        path = save(tmp_path)
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
        fails("expected an .npz file; got another format or a truncated file", path)

    def test_damaged(self, tmp_path: Path) -> None:
        path = save(tmp_path)
        data = bytearray(path.read_bytes())
        data[1000:1100] = bytes(100)
        path.write_bytes(data)
        fails("cannot be read", path)

    def test_not_arrays(self, tmp_path: Path) -> None:
        import zipfile

        path = tmp_path / "text.npz"
        with zipfile.ZipFile(path, "w") as file:
            for key in ("x_train", "y_train", "x_test", "y_test"):
                file.writestr(f"{key}.npy", "text")
        fails("(cannot be read|expected arrays)", path)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 255))
def test_fit_keeps_even_images_even(height: int, width: int, size: int, value: int) -> None:
    out = fit(np.full((2, height, width, 3), value, np.uint8), size)
    assert out.shape == (2, size, size, 3)
    assert (out == value).all()


class TestLoadData:
    @pytest.mark.parametrize(
        ("source", "options", "why"),
        [
            ("digit", {}, "got 'digit': no such file or folder; did you mean 'digits'"),
            ("", {}, "data: expected a name, a folder or a file; got an empty name"),
            ("nowhere.npz", {}, "got 'nowhere.npz': no such file or folder$"),
            ("digits", {"image_size": 0}, "image_size: expected an integer from 1 to 9459; got 0$"),
            ("digits", {"image_size": 2.5}, "image_size: .* got 2.5$"),
            ("digits", {"image_size": True}, "image_size: .* got True$"),
            ("digits", {"image_size": 100_000}, "image_size: .* got 100000$"),
            ("digits", {"image_size": -3}, "image_size: .* got -3"),
            ("digits", {"validation": 1.0}, r"validation: .* got 1.0"),
            ("digits", {"validation": -0.1}, r"validation: .* got -0.1"),
            ("digits", {"validation": float("nan")}, r"validation: .* got nan"),
            ("digits", {"seed": -1}, "seed: .* got -1"),
            ("digits", {"seed": 2**32}, "seed: .* got 4294967296"),
        ],
    )
    def test_bad_options(
        self, source: str, options: dict, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        fails(why, source, **options)

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "data.txt").write_text("1,2")
        fails(r"data.txt': another kind of file", tmp_path / "data.txt")
