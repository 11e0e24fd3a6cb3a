"""Folders of images, and single images read as training reads them."""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bombs import png_that_claims
from PIL import Image

from selfconv.data import DataError, decoding, load_data, read_image
from selfconv.data.sources import listing


def fails(match: str, source: Path, **options: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load_data(source, **options)
    assert "\n" not in str(caught.value)


def paint(path: Path, value: int | tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(path)


def gallery(root: Path, part: str = "", count: int = 10, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Grey images, each of its own shade."""
    for c, name in enumerate(classes):
        for i in range(count):
            paint(root / part / name / f"{i:03}.png", 100 * c + i)
    return root


def shades(split: Any) -> list[int]:
    return split.images[:, 0, 0, 0].tolist()


class TestFolder:
    def test_classes(self, tmp_path: Path) -> None:
        root = gallery(tmp_path / "pets", count=50)
        data = load_data(root)
        assert (data.name, data.class_names, data.in_channels, data.size) == ("pets", ("cat", "dog"), 1, 8)
        assert (len(data.train), len(data.val), len(data.test)) == (72, 8, 20)
        assert sorted(shades(data.train) + shades(data.val) + shades(data.test)) == [
            *range(50),
            *range(100, 150),
        ]
        for split in (data.train, data.val, data.test):
            assert (split.labels == torch.tensor(shades(split)) // 100).all()
        other = load_data(root, seed=5)
        assert shades(other.test) == shades(data.test)  # no seed lets training see a test image
        assert shades(other.val) != shades(data.val)
        assert load_data(f"{root}/.").digest == data.digest

    def test_train_and_test_folders_are_parts(self, tmp_path: Path) -> None:
        root = tmp_path / "pets"
        for part, count in (("train", 20), ("valid", 3), ("test", 4)):
            gallery(root, part, count)
        data = load_data(root)
        assert shades(data.train) == [*range(20), *range(100, 120)]
        assert shades(data.val) == [0, 1, 2, 100, 101, 102]
        assert shades(data.test) == [0, 1, 2, 3, 100, 101, 102, 103]

    def test_missing_parts_are_split_off(self, tmp_path: Path) -> None:
        data = load_data(gallery(gallery(tmp_path, "train", 20), "test", 4))
        assert (len(data.train), len(data.val), len(data.test)) == (36, 4, 8)
        data = load_data(gallery(gallery(tmp_path / "b", "train", 20), "val", 4))
        assert (len(data.train), len(data.val), len(data.test)) == (32, 8, 8)

    def test_a_class_may_be_absent_from_the_test(self, tmp_path: Path) -> None:
        root = gallery(gallery(tmp_path, "train"), "test", classes=("dog",))
        assert load_data(root).test.labels.unique().tolist() == [1]

    def test_hidden_files_and_others(self, tmp_path: Path) -> None:
        root = gallery(tmp_path / "pets")
        (root / ".git").mkdir()
        (root / "cat" / ".DS_Store").write_text("x")
        (root / "cat" / "._000.png").write_text("x")
        (root / "readme.txt").write_text("x")
        assert len(load_data(root).train) == 14  # without a warning
        (root / "dog" / "raw").mkdir()
        (root / "dog" / "raw" / "b.heic").write_text("x")
        (root / "dog" / "raw" / ".c.png").write_text("x")
        (root / "dog" / "a.heic").write_text("x")
        with pytest.warns(UserWarning, match=r"ignored 2 files that are no images; the first is dog/a.heic"):
            load_data(root)

    @pytest.mark.parametrize("part", ["", "train"])
    def test_images_in_no_class_are_counted(self, tmp_path: Path, part: str) -> None:
        root = gallery(tmp_path / "pets", part)
        paint(root / part / "stray.png", 7)
        first = Path(part) / "stray.png"
        with pytest.warns(
            UserWarning, match=f"ignored 1 image outside the folders of classes; the first is {first}"
        ):
            assert len(load_data(root).everything) == 20

    def test_links_to_nothing(self, tmp_path: Path) -> None:
        root = gallery(tmp_path / "pets")
        (root / "cat" / "x.tif").symlink_to(tmp_path / "nowhere.tif")
        fails(
            r"pets/cat/x.tif: expected a link to .*; got one to .*/nowhere.tif, which does not exist$", root
        )

    @pytest.mark.parametrize("where", [".", "cat", "cat/deep"])
    @pytest.mark.parametrize("name", ["batch2", "x.png", "notes.txt"])
    def test_links_to_nothing_anywhere(self, tmp_path: Path, where: str, name: str) -> None:
        root = gallery(tmp_path / "pets")
        (root / where).mkdir(exist_ok=True)
        (root / where / f".{name}").symlink_to("/mnt/not_mounted")  # hidden
        load_data(root)
        (root / where / name).symlink_to("/mnt/not_mounted/batch2")
        why = "expected a link to a file or folder; got one to /mnt/not_mounted/batch2, which does not exist$"
        fails(rf"{Path('pets') / where / name}: {why}", root)

    def test_capitals_of_parts(self, tmp_path: Path) -> None:
        gallery(gallery(tmp_path, "Train"), "TEST", 3)
        data = load_data(tmp_path)
        assert (data.class_names, len(data.test), data.has_test_part) == (("cat", "dog"), 6, True)
        assert load_data(gallery(tmp_path / "traffic", classes=("Bus", "Train"))).class_names == (
            "Bus",
            "Train",
        )

    def test_folders_within_a_class(self, tmp_path: Path) -> None:
        root = gallery(tmp_path / "pets")
        paint(root / "dog" / "2024" / "may" / "x.png", 77)
        paint(root / "cat" / "y.png", 78)
        (root / "cat" / "y.png").rename(root / "cat" / "scan")  # no suffix: known by its content
        (root / "cat" / "notes").write_text("text")
        with pytest.warns(UserWarning, match="pets: ") as found:
            data = load_data(root)
        first, second = sorted(str(warning.message) for warning in found)
        assert "pets: ignored 1 file that is no image; the first is cat/notes" in first
        assert "pets: read 1 image in subfolders of a class folder as an image of that class; " in second
        assert "the first is dog/2024/may/x.png (class 'dog')" in second
        everything = data.everything
        labels = dict(zip(everything.names, everything.labels.tolist(), strict=True))
        assert (len(labels), labels["dog/2024/may/x.png"], labels["cat/scan"]) == (22, 1, 0)

    @pytest.mark.parametrize("kind", ["png", "jpg", "JPEG", "bmp", "gif", "tif", "webp", "ppm"])
    def test_kinds_of_files(self, tmp_path: Path, kind: str) -> None:
        gallery(tmp_path)
        paint(tmp_path / "cat" / f"x.{kind}", (200, 30, 60))
        data = load_data(tmp_path)
        images = torch.cat([data.train.images, data.val.images, data.test.images])
        assert data.in_channels == 3
        colours = images[:, :, 4, 4].long()
        assert (colours - torch.tensor([200, 30, 60])).abs().amax(1).amin() <= 4

    def test_grey_only_if_all_are(self, tmp_path: Path) -> None:
        gallery(tmp_path)
        paint(tmp_path / "cat" / "x.png", (9, 9, 9))
        assert load_data(tmp_path).in_channels == 1
        paint(tmp_path / "cat" / "y.png", (9, 9, 8))
        assert load_data(tmp_path).in_channels == 3

    def test_size_of_the_images_or_the_given_one(self, tmp_path: Path) -> None:
        root = gallery(tmp_path)
        assert load_data(root).size == 8
        assert load_data(root, image_size=5).size == 5
        paint(root / "cat" / "wide.png", 3, (20, 10))
        assert load_data(root).size == 64
        assert load_data(root, image_size=8).size == 8

    def test_one_size_that_is_not_square(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            for i in range(5):
                paint(tmp_path / name / f"{i}.png", i, (10, 20))
        assert load_data(tmp_path).size == 64

    def test_corrupt_files_are_named(self, tmp_path: Path) -> None:
        root = gallery(tmp_path / "pets")
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        for name in ("cut.png", "cut.jpg"):
            Image.fromarray(noise).save(root / "dog" / name)
            data = (root / "dog" / name).read_bytes()
            (root / "dog" / name).write_bytes(data[: len(data) // 2])
        fails(r"pets: 2 of 22 images cannot be read: dog/cut.jpg \(damaged.*\), dog/cut.png \(damaged", root)
        for i in range(5):
            (root / "cat" / f"empty{i}.png").write_bytes(b"")
        fails(
            r"7 of 27 .*: cat/empty0.png \(not an image: [^)]*\), cat/empty1.png .*, cat/empty2.* and 4 more",
            root,
        )

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    def test_pixel_limit(self, tmp_path: Path) -> None:
        root = gallery(tmp_path)
        (root / "cat" / "000.png").write_bytes(png_that_claims(10_000, 9_000))
        fails(
            r"1 of 20 .*: cat/000.png \(expected up to 89 million pixels; got 10000×9000, 90 million\)", root
        )

    def test_room_on_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            f_bavail, f_frsize = 10, 4096

        monkeypatch.setattr(decoding.os, "statvfs", lambda _: Full)
        fails(
            r"20 images of 5000×5000 need 0.5 GB, more than the 0.1 GB of memory .* room for 41.0 kB: give a",
            gallery(tmp_path / "pets"),
            image_size=5000,
            memory=1e8,
            cache=tmp_path / "cache",
        )

    def test_bad_folders(self, tmp_path: Path) -> None:
        def root(name: str) -> Path:
            (tmp_path / name).mkdir()
            return tmp_path / name

        fails("expected a folder of images for each class; got no folders", root("empty"))
        flat = root("flat")
        paint(flat / "a.png", 1)
        fails("got no folders", flat)
        fails("expected at least two classes; got cat$", gallery(root("one"), classes=("cat",)))
        bare = gallery(root("bare"))
        (bare / "eel").mkdir()
        fails(r"expected images \(.bmp .*\) of class 'eel' to train on; got none", bare)
        hollow = root("hollow classes")
        (hollow / "cat").mkdir()
        (hollow / "dog").mkdir()
        fails("of class 'cat' to train on; got none", hollow)
        fails("expected train/ beside test/", gallery(root("trainless"), "test"))
        fails(
            "expected train/, val/ and test/; got extra/ as well",
            gallery(gallery(root("more"), "train"), "extra"),
        )
        fails(
            "expected one folder of images for val; got val/, validation/",
            gallery(gallery(gallery(root("twice"), "train"), "val"), "validation"),
        )
        strange = gallery(gallery(root("strange"), "train"), "test", classes=("cat", "yak"))
        fails("expected in test/ the classes of train/; got 'yak' as well", strange)
        hollow = gallery(root("hollow"), "train")
        (hollow / "test" / "cat").mkdir(parents=True)
        fails("expected images in test/; got none", hollow)
        (hollow / "train2").mkdir()
        (hollow / "test" / "cat").rmdir()
        fails("got train2/ as well", hollow)
        empty = root("empty parts")
        (empty / "train").mkdir()
        fails("expected at least two classes; got none", empty)
        fails("too few images to set some aside for a test; got 2", gallery(root("tiny"), count=1))

    @pytest.mark.parametrize("where", ["", "train"])
    def test_a_class_folder_that_is_a_dead_link(self, tmp_path: Path, where: str) -> None:
        root = gallery(tmp_path / "fields", where)
        (root / where / "eel").symlink_to(tmp_path / "gone")
        with pytest.raises(
            DataError, match=r"eel: expected a link to .*; got one to .*/gone, which does not exist$"
        ):
            load_data(root)

    def test_links_to_folders_of_a_class(self, tmp_path: Path) -> None:
        """They are read as folders are, unless they lead back to one above them."""
        more = gallery(tmp_path / "more")
        root = gallery(tmp_path / "fields")
        before = len(load_data(root).everything)
        (root / "cat" / "second").symlink_to(more / "cat")
        with pytest.warns(UserWarning, match="in subfolders of a class folder"):
            assert len(load_data(root).everything) == before + len([*(more / "cat").iterdir()])
        (root / "cat" / "loop").symlink_to(root)
        with pytest.raises(
            DataError, match="loop/cat: expected a link to another folder; got one to a folder that"
        ):
            load_data(root)

    def test_data_sets_of_another_kind(self, tmp_path: Path) -> None:
        """In a folder that has no images, or one folder with others."""
        root = tmp_path / "hub"
        (root / "data").mkdir(parents=True)
        (root / "data" / "train-00000.parquet").write_text("x")
        fails("expected at least two classes; got data: for the Parquet files in it, give .*hub/data$", root)
        root = gallery(tmp_path / "arrays")
        (root / "eel").mkdir()
        (root / "eel" / "x.npz").write_text("x")
        fails(
            r"of class 'eel' to train on; got none: eel/x.npz is an archive, .* save each image as \.npy",
            root,
        )

    def test_one_name_in_two_spellings(self, tmp_path: Path) -> None:
        """é is one character or two; macOS writes two."""
        one, two = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
        for root, spelling in ((tmp_path / "a", one), (tmp_path / "b", two)):
            gallery(root, "train", classes=(spelling, "cag"))
            gallery(root, "test", classes=(one, "cag"))
        a, b = load_data(tmp_path / "a"), load_data(tmp_path / "b")
        assert a.class_names == b.class_names
        assert {*a.class_names} == {one, "cag"}
        assert b.test.labels.tolist().count(b.class_names.index(one)) == 10
        paint(tmp_path / "b" / "train" / one / "x.png", 3)
        both = re.escape(f"{two!a} and {one!a}")  # in ASCII, where they differ
        fails(f"expected one folder for each class; got {both} in .*b/train, two spellings", tmp_path / "b")

    def test_known_names_take_precedence_over_folders(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gallery(tmp_path / "digits")
        monkeypatch.chdir(tmp_path)
        assert load_data("digits").num_classes == 10
        assert load_data("./digits").num_classes == 2
        assert load_data(Path("digits")).num_classes == 2

    def test_an_unreadable_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise PermissionError(13, "Permission denied", str(tmp_path))

        gallery(tmp_path)
        monkeypatch.setattr(listing, "_scan", refuse)
        fails("Permission denied$", tmp_path)

    def test_without_pillow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = gallery(tmp_path)
        monkeypatch.setitem(sys.modules, "PIL", None)
        monkeypatch.delitem(sys.modules, "PIL.Image")
        with pytest.raises(ModuleNotFoundError, match=r"^reading image files needs PIL: pip install"):
            load_data(root)


class TestReadImage:
    def test_as_in_the_folder(self, tmp_path: Path) -> None:
        """Prediction sees what training saw."""
        random = np.random.default_rng(0)
        for part in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / part / name).mkdir(parents=True)
                noise = random.integers(0, 256, (30, 41, 3), np.uint8)
                Image.fromarray(noise).save(tmp_path / part / name / "x.jpg")
        data = load_data(tmp_path, image_size=12, validation=0)
        for split, part in ((data.train, "train"), (data.test, "test")):
            for image, name in zip(split.images, "ab", strict=True):
                assert torch.equal(image, read_image(tmp_path / part / name / "x.jpg", 12, 3))

    def test_grey_pixels_of_a_colour_file_are_exact(self, tmp_path: Path) -> None:
        grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
        Image.fromarray(np.stack([grey] * 3, -1)).save(tmp_path / "x.png")
        assert np.array_equal(read_image(tmp_path / "x.png", 16, 1)[0], grey)

    @pytest.mark.parametrize(
        ("array", "why"),
        [
            (np.full((4, 4), 4080, np.uint16), "got uint16, 4080 to 4080: give .* --range 0,4095"),
            (
                np.full((4, 4), 70_000, np.int32),
                "got int32, 70000 to 70000: give .* --range LOW,HIGH, the least",
            ),
            (np.full((4, 4), 0.5, np.float32), "got float32, 0.5 to 0.5: give their range, such as --range"),
        ],
    )
    def test_other_depths_need_a_range(self, tmp_path: Path, array: np.ndarray, why: str) -> None:
        Image.fromarray(array).save(tmp_path / "x.tif")
        with pytest.raises(
            DataError, match=f"x.tif: expected uint8 values, as the training images have; {why}"
        ):
            read_image(tmp_path / "x.tif", 4, 1)

    def test_transparency_shows_white(self, tmp_path: Path) -> None:
        image = np.zeros((4, 4, 4), np.uint8)
        image[:, 2:, 3] = 255
        Image.fromarray(image).save(tmp_path / "x.png")
        assert read_image(tmp_path / "x.png", 4, 1)[0, 0].tolist() == [255, 255, 0, 0]

    def test_exif_orientation(self, tmp_path: Path) -> None:
        picture = np.zeros((8, 8, 3), np.uint8)
        picture[:2] = 255
        exif = Image.Exif()
        exif[0x0112] = 6  # turn by 90° clockwise to see it upright
        Image.fromarray(picture).save(tmp_path / "x.png", exif=exif)
        assert np.array_equal(read_image(tmp_path / "x.png", 8, 3).permute(1, 2, 0), np.rot90(picture, -1))

    @pytest.mark.parametrize("size", [(40, 20), (20, 40)])
    def test_the_centre_is_cut_out(self, tmp_path: Path, size: tuple[int, int]) -> None:
        picture = Image.new("L", size, 0)
        picture.paste(
            255, ((size[0] - 20) // 2, (size[1] - 20) // 2, (size[0] + 20) // 2, (size[1] + 20) // 2)
        )
        picture.save(tmp_path / "x.png")
        assert read_image(tmp_path / "x.png", 20, 1).amin() == 255
        assert read_image(tmp_path / "x.png", 10, 1)[0, 1:-1, 1:-1].amin() == 255

    def test_cmyk(self, tmp_path: Path) -> None:
        Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "x.jpg")
        red, green, blue = read_image(tmp_path / "x.jpg", 8, 3)[:, 4, 4].tolist()
        assert red > 240
        assert max(green, blue) < 15

    def test_bad_input(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").write_text("text")
        for path, size, channels, why in [
            (
                tmp_path / "x.png",
                8,
                3,
                "x.png: not an image: expected BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP or .npy$",
            ),
            (tmp_path / "none.png", 8, 3, "none.png: No such file or directory$"),
            (tmp_path, 8, 3, "expected a file; got a folder$"),
            (tmp_path / "x.png", 8, 17, "expected 1 to 16 channels and a size of 1 to 9459; got 17 and 8"),
            (tmp_path / "x.png", 0, 1, "got 1 and 0"),
        ]:
            with pytest.raises(DataError, match=why):
                read_image(path, size, channels)
