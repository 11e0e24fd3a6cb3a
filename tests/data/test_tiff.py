"""TIFF files of every kind: the same values whatever is beside the image, and none in the wrong colours."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from selfconv.data import DataError, PixelRange, load_data, read_image
from selfconv.data.images import Item, read_values

RANDOM = np.random.default_rng(0)


def noise(*shape: int, bits: int = 8) -> np.ndarray:
    return RANDOM.integers(0, 2**bits, shape).astype(np.uint8 if bits <= 8 else np.uint16)


def write(
    path: Path,
    array: np.ndarray,
    *,
    thumbnail: str | None = None,
    order: str = "<",
    big: bool = False,
    **options: Any,
) -> None:
    small = np.zeros((4, 4), np.uint8)
    with tifffile.TiffWriter(path, byteorder=order, bigtiff=big) as file:
        if thumbnail == "before":
            file.write(small, photometric="minisblack", subfiletype=1, metadata=None)
        file.write(array, metadata=None, **options)
        if thumbnail == "behind":
            file.write(small, photometric="minisblack", subfiletype=1, metadata=None)


def values(path: Path) -> np.ndarray:
    return read_values(Item("x", path))


def each_way(path: Path, array: np.ndarray, **options: Any) -> np.ndarray:
    """The values of a file, which are the same with a thumbnail before or behind the image."""
    found = []
    for thumbnail in (None, "before", "behind"):
        write(path, array, thumbnail=thumbnail, **options)
        found.append(values(path))
    assert found[0].dtype == found[1].dtype == found[2].dtype
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    return found[0]


def refused(path: Path, array: np.ndarray, why: str, **options: Any) -> None:
    for thumbnail in (None, "before", "behind"):
        write(path, array, thumbnail=thumbnail, **options)
        with pytest.raises(DataError, match=rf"x.tif: {why}$"):
            read_image(path, 8, 3)


class TestAlpha:
    @pytest.mark.parametrize("bits", [8, 12, 16])
    @pytest.mark.parametrize("kind", ["unassalpha", "assocalpha"])
    @pytest.mark.parametrize("photometric", ["miniswhite", "minisblack"])
    @pytest.mark.parametrize("planar", ["contig", "separate"])
    def test_grey(self, tmp_path: Path, bits: int, kind: str, photometric: str, planar: str) -> None:
        """White is 0 or the full scale of the grey sample; alpha is never inverted."""
        most = 2**bits - 1
        grey, alpha = noise(7, 9, bits=bits), noise(7, 9, bits=bits)
        alpha[0], alpha[1] = 0, most
        stored = grey if kind == "unassalpha" else (grey / most * alpha).astype(grey.dtype)
        options: dict[str, Any] = {"photometric": photometric, "planarconfig": planar, "extrasamples": [kind]}
        if bits == 12:
            options["bitspersample"] = 12
        array = np.stack([stored, alpha], -1 if planar == "contig" else 0)
        found = each_way(tmp_path / "x.tif", array, **options)[..., 0].astype(float)
        light = grey / most if photometric == "minisblack" else 1 - grey / most
        shown = light * (alpha / most) + 1 - alpha / most
        assert np.abs(found / most - shown).max() <= 1.01 / most
        assert (found[0] == most).all()

    @pytest.mark.parametrize("bits", [8, 16])
    def test_alpha_before_another_sample(self, tmp_path: Path, bits: int) -> None:
        array, most = noise(7, 9, 5, bits=bits), 2**bits - 1
        array[0, :, 3], array[1, :, 3] = 0, most
        extra = ["unassalpha", "unspecified"]
        found = each_way(tmp_path / "x.tif", array, photometric="rgb", extrasamples=extra)
        assert found.shape == (7, 9, 4)
        assert (found[0] == most).all()
        assert np.array_equal(found[1], array[1][:, [0, 1, 2, 4]])

    @pytest.mark.parametrize("bits", [8, 16])
    def test_a_sample_of_no_stated_meaning_is_not_inverted(self, tmp_path: Path, bits: int) -> None:
        array, most = noise(7, 9, 2, bits=bits), 2**bits - 1
        found = each_way(tmp_path / "x.tif", array, photometric="miniswhite", extrasamples=["unspecified"])
        assert np.array_equal(found, np.stack([most - array[..., 0], array[..., 1]], -1))


class TestWhite:
    @pytest.mark.parametrize("bits", [2, 4, 8, 10, 12, 16])
    @pytest.mark.parametrize("orientation", [1, 6])
    def test_zero_is_white(self, tmp_path: Path, bits: int, orientation: int) -> None:
        array, most = noise(6, 8, bits=bits), 2**bits - 1
        options: dict[str, Any] = {} if bits in (8, 16) else {"bitspersample": bits}
        options["extratags"] = [(274, 3, 1, orientation, True)]
        found = each_way(tmp_path / "x.tif", array, photometric="miniswhite", **options)[..., 0]
        upright = array if orientation == 1 else np.rot90(array, -1)
        assert np.array_equal(found, (most - upright.astype(int)) * (255 // most if bits < 8 else 1))

    def test_floating_point(self, tmp_path: Path) -> None:
        why = r"expected a photometric interpretation .*; got MINISWHITE of 1 × float32, compression NONE"
        refused(tmp_path / "x.tif", noise(8, 8).astype(np.float32), why, photometric="miniswhite")


class TestFewBits:
    @pytest.mark.parametrize("bits", [2, 4, 6])
    @pytest.mark.parametrize("orientation", [1, 6])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_scaled_to_bytes(self, tmp_path: Path, bits: int, orientation: int, channels: int) -> None:
        array = noise(6, 8, 3, bits=bits) if channels == 3 else noise(6, 8, bits=bits)
        tags = [(274, 3, 1, orientation, True)]
        found = each_way(
            tmp_path / "x.tif",
            array,
            photometric="rgb" if channels == 3 else "minisblack",
            bitspersample=bits,
            extratags=tags,
        )
        upright = array if orientation == 1 else np.rot90(array, -1)
        expected = np.rint(upright * (255 / (2**bits - 1))).reshape(*upright.shape[:2], -1)
        assert np.array_equal(found[..., :channels], expected)

    def test_in_a_folder(self, tmp_path: Path) -> None:
        """Files with and without a thumbnail are one data set."""
        for i in range(20):
            folder = tmp_path / "cells" / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            array = np.full((8, 8), i % 16, np.uint8)
            write(
                folder / f"{i:02}.tif",
                array,
                thumbnail="before" if i > 9 else None,
                photometric="minisblack",
                bitspersample=4,
            )
        data = load_data(tmp_path / "cells")
        for split in (data.train, data.val, data.test):
            for image, name in zip(split.images, split.names, strict=True):
                assert (image == int(name[2:4]) % 16 * 17).all()


class TestColours:
    @pytest.mark.parametrize("planar", ["contig", "separate"])
    @pytest.mark.parametrize("compression", [None, "deflate", "zstd", "jpeg2000", "jpeg"])
    @pytest.mark.parametrize("orientation", [1, 6])
    @pytest.mark.parametrize(("photometric", "mode"), [("cielab", "LAB"), ("separated", "CMYK")])
    def test_converted(
        self, tmp_path: Path, photometric: str, mode: str, compression: Any, planar: str, orientation: int
    ) -> None:
        array = noise(8, 12, len(mode))
        options: dict[str, Any] = {}
        if compression == "jpeg":  # in flat colours, which it keeps
            array[:] = array[0, 0]
            options["compressionargs"] = {"level": 100, "colorspace": 0, "outcolorspace": 0}
        as_rgb = np.array(Image.frombytes(mode, (12, 8), array.tobytes(), "raw", mode).convert("RGB"))
        found = each_way(
            tmp_path / "x.tif",
            array if planar == "contig" else array.transpose(2, 0, 1),
            photometric=photometric,
            planarconfig=planar,
            compression=compression,
            extratags=[(274, 3, 1, orientation, True)],
            **options,
        )
        assert np.array_equal(found, as_rgb if orientation == 1 else np.rot90(as_rgb, -1))

    @pytest.mark.parametrize("writer", ["pillow", "tifffile"])
    def test_cielab_in_jpeg(self, tmp_path: Path, writer: str) -> None:
        """The samples as they are, as libtiff stores them, or converted as those of colours are."""
        rows, columns = np.mgrid[:16, :24]
        array = np.stack([columns * 10, 100 + rows, 150 - rows], -1).astype(np.uint8)
        image = Image.frombytes("LAB", (24, 16), array.tobytes(), "raw", "LAB")
        if writer == "pillow":
            image.save(tmp_path / "x.tif", compression="jpeg", quality=95)
        else:
            write(tmp_path / "x.tif", array, photometric="cielab", compression="jpeg")
        difference = values(tmp_path / "x.tif").astype(int) - np.array(image.convert("RGB"))
        assert np.abs(difference).mean() < 6

    def test_cielab_in_jpeg_beside_what_pillow_does_not_read(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            options: dict[str, Any] = {
                "metadata": None,
                "compressionargs": {"colorspace": 0, "outcolorspace": 0},
            }
            file.write(
                noise(4, 4), subfiletype=1, photometric="minisblack", metadata=None, compression="zstd"
            )
            file.write(noise(8, 8, 3), photometric="cielab", compression="jpeg", **options)
        with pytest.raises(DataError, match=r"x.tif: .*; got CIELAB of 3 × uint8, compression JPEG$"):
            read_image(tmp_path / "x.tif", 8, 3)

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    @pytest.mark.parametrize("orientation", [1, 6])
    def test_palette(self, tmp_path: Path, bits: int, orientation: int) -> None:
        array, colours = noise(8, 12, bits=bits), noise(3, 2**bits, bits=16)
        tags = [(274, 3, 1, orientation, True), (320, 3, colours.size, colours.ravel().tolist(), True)]
        options: dict[str, Any] = {"photometric": "minisblack", "bitspersample": bits, "extratags": tags}
        for thumbnail, page in ((None, 0), ("before", 1), ("behind", 0)):
            write(tmp_path / "x.tif", array, thumbnail=thumbnail, **options)
            with tifffile.TiffFile(tmp_path / "x.tif", mode="r+b") as file:
                file.pages[page].tags["PhotometricInterpretation"].overwrite(3)
            upright = array if orientation == 1 else np.rot90(array, -1)
            assert np.array_equal(values(tmp_path / "x.tif"), colours.T[upright] >> 8)

    @pytest.mark.parametrize("compression", [None, "lzw"])
    @pytest.mark.parametrize("orientation", [1, 6])
    @pytest.mark.parametrize("thumbnail", [None, "before"])
    def test_palette_of_bytes(
        self, tmp_path: Path, compression: Any, orientation: int, thumbnail: str | None
    ) -> None:
        """Old programs wrote colours from 0 to 255 instead of 65535."""
        array, colours = noise(8, 12), noise(3, 256).astype(np.uint16)
        options: dict[str, Any] = {"photometric": "palette", "colormap": colours, "compression": compression}
        tag = [(274, 3, 1, orientation, True)]
        write(tmp_path / "x.tif", array, thumbnail=thumbnail, extratags=tag, **options)
        upright = array if orientation == 1 else np.rot90(array, -1)
        assert np.array_equal(values(tmp_path / "x.tif"), colours.T[upright])
        grey = np.tile(np.arange(256, dtype=np.uint16), (3, 1))
        write(tmp_path / "x.tif", array, thumbnail=thumbnail, extratags=tag, **options | {"colormap": grey})
        assert torch.equal(read_image(tmp_path / "x.tif", 8, 3)[0], read_image(tmp_path / "x.tif", 8, 1)[0])

    @pytest.mark.parametrize("compression", ["jpeg", "lzw"])
    def test_ycbcr(self, tmp_path: Path, compression: str) -> None:
        ramp = np.linspace(60, 180, 256).astype(np.uint8).reshape(16, 16)
        rgb = np.stack([ramp, np.full_like(ramp, 90), 255 - ramp], -1)
        stored = np.array(Image.fromarray(rgb).convert("YCbCr"))
        options = {"subsampling": (1, 1)} if compression == "lzw" else {}
        path = tmp_path / "x.tif"
        found = each_way(path, stored, photometric="ycbcr", compression=compression, **options)
        assert np.abs(found.astype(int) - rgb).max() < 9

    @pytest.mark.parametrize(
        ("photometric", "bits", "compression", "named"),
        [
            ("ycbcr", 8, None, "YCBCR of 3 × uint8, compression NONE"),
            ("ycbcr", 8, "jpeg2000", "YCBCR of 3 × uint8, compression JPEG2000"),
            ("ycbcr", 16, "deflate", "YCBCR of 3 × uint16, compression .*DEFLATE"),
            ("cielab", 16, None, "CIELAB of 3 × uint16, compression NONE"),
            ("icclab", 8, None, "ICCLAB of 3 × uint8, compression NONE"),
            ("logluv", 16, None, "LOGLUV of 3 × uint16, compression NONE"),
            ("linear_raw", 16, None, "LINEAR_RAW of 3 × uint16, compression NONE"),
        ],
    )
    def test_what_is_not_converted_is_refused(
        self, tmp_path: Path, photometric: str, bits: int, compression: Any, named: str
    ) -> None:
        options = {"subsampling": (1, 1)} if photometric == "ycbcr" else {}
        refused(
            tmp_path / "x.tif",
            noise(8, 8, 3, bits=bits),
            f"expected a photometric interpretation that can be converted; got {named}",
            photometric=photometric,
            compression=compression,
            planarconfig="contig",
            **options,
        )

    @pytest.mark.parametrize(
        ("number", "name"),
        [
            (4, "MASK"),
            (5, "SEPARATED"),
            (32803, "CFA"),
            (51177, "DEPTH_MAP"),
            (12345, "12345"),
        ],
    )
    @pytest.mark.parametrize("bits", [8, 16])
    def test_samples_of_another_meaning_than_grey(
        self, tmp_path: Path, number: int, name: str, bits: int
    ) -> None:
        path = tmp_path / "x.tif"
        write(path, noise(8, 8, bits=bits), photometric="minisblack")
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages.first.tags["PhotometricInterpretation"].overwrite(number)
        why = f"got {name} of 1 × uint{bits}, compression NONE$"
        with pytest.raises(DataError, match=f"x.tif: expected a photometric interpretation .*; {why}"):
            read_image(path, 8, 3)

    @pytest.mark.parametrize("bits", [4, 8, 16])
    def test_a_palette_without_colours(self, tmp_path: Path, bits: int) -> None:
        path = tmp_path / "x.tif"
        write(path, noise(8, 8, bits=bits), photometric="minisblack", bitspersample=bits)
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages.first.tags["PhotometricInterpretation"].overwrite(3)
        named = f"PALETTE of 1 × uint{max(bits, 8)}, compression NONE$"
        with pytest.raises(DataError, match=f"x.tif: expected a photometric interpretation .*; got {named}"):
            read_image(path, 8, 3)

    def test_deep_inks(self, tmp_path: Path) -> None:
        why = r"expected a photometric interpretation .*; got SEPARATED of 4 × uint16, compression NONE"
        refused(tmp_path / "x.tif", noise(8, 8, 4, bits=16), why, photometric="separated")

    @pytest.mark.parametrize("bits", [8, 16])
    @pytest.mark.parametrize("big", [False, True])
    @pytest.mark.parametrize("order", ["<", ">"])
    def test_any_order_of_bytes(self, tmp_path: Path, bits: int, big: bool, order: str) -> None:
        array = noise(6, 8, 3, bits=bits)
        found = each_way(tmp_path / "x.tif", array, photometric="rgb", order=order, big=big)
        assert np.array_equal(found, array)

    @pytest.mark.parametrize("compression", [None, "zlib"])
    @pytest.mark.parametrize("in_memory", [False, True])
    def test_pages_written_one_by_one_are_channels(
        self, tmp_path: Path, compression: Any, in_memory: bool
    ) -> None:
        array, path = noise(3, 6, 8, bits=12), tmp_path / "x.tif"
        with tifffile.TiffWriter(path) as file:
            for page in array:
                file.write(page, compression=compression)
        found = read_values(Item("x", path.read_bytes if in_memory else path))
        assert np.array_equal(found, array.transpose(1, 2, 0))

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
    def test_two_axes_beside_rows_and_columns(self, tmp_path: Path, dtype: Any) -> None:
        """tifffile gives every axis that it does not know the same letter."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(
            path, np.zeros((40, 2, 300, 300), dtype), photometric="minisblack", compression="zlib"
        )
        tracemalloc.start()
        with pytest.raises(DataError, match=r"; got a stack \(Q 40, Q 2, Y 300, X 300\)$"):
            read_image(path, 8, 3)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 5e6

    def test_axes_of_one_are_none(self, tmp_path: Path) -> None:
        array, path = noise(1, 3, 6, 8, bits=16), tmp_path / "x.tif"
        tifffile.imwrite(path, array, photometric="minisblack", metadata={"axes": "QQYX"})
        assert np.array_equal(values(path), array[0].transpose(1, 2, 0))

    def test_pages_of_several_sizes_are_refused(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            for side in (8, 9):
                file.write(noise(side, 8), photometric="minisblack")
        with pytest.raises(DataError, match=r"expected one image, .*; got 2 \(8×8 uint8, 9×8 uint8\)"):
            read_image(tmp_path / "x.tif", 8, 3)

    @pytest.mark.parametrize("sides", [(16, 8), (16, 8, 4), (16, 4), (18, 6, 2)])
    @pytest.mark.parametrize("bits", [8, 16])
    def test_smaller_pages_are_copies_only_if_marked(
        self, tmp_path: Path, sides: tuple[int, ...], bits: int
    ) -> None:
        """Sizes that divide each other prove nothing."""
        pages = [noise(side, side, bits=bits) for side in sides]

        def store(kinds: list[int], inside: int = 0) -> None:
            with tifffile.TiffWriter(tmp_path / "x.tif") as file:
                for number, (page, kind) in enumerate(zip(pages, kinds, strict=True)):
                    file.write(
                        page,
                        photometric="minisblack",
                        metadata=None,
                        subfiletype=kind,
                        subifds=inside if number == 0 else 0,
                    )

        for inside in (0, len(sides) - 1):  # beside the image, or in SubIFDs of it
            store([0] + [1] * (len(sides) - 1), inside)
            assert np.array_equal(values(tmp_path / "x.tif")[..., 0], pages[0])
        store([0] * len(sides), len(sides) - 1)
        assert np.array_equal(values(tmp_path / "x.tif")[..., 0], pages[0])
        store([0] * len(sides))
        described = ", ".join(f"{side}×{side} uint{bits}" for side in sides)
        with pytest.raises(DataError, match=rf"expected one image, .*; got {len(sides)} \({described}\)$"):
            read_image(tmp_path / "x.tif", 8, 1)

    def test_values_of_more_bits_than_declared(self, tmp_path: Path) -> None:
        """As tifffile reads big-endian integers of 24 bits, from the wrong bytes."""
        path = tmp_path / "x.tif"
        write(path, noise(6, 24), order=">", photometric="minisblack")
        with tifffile.TiffFile(path, mode="r+b") as file:
            for tag, number in (("ImageWidth", 8), ("BitsPerSample", 24)):
                file.pages.first.tags[tag].overwrite(number)
        with pytest.raises(DataError, match=r"x.tif: expected values of 24 bits; got \d+$"):
            read_image(path, 8, 1, pixels=PixelRange("uint32", 0, 2**24))

    def test_a_mask_of_the_images_own_size(self, tmp_path: Path) -> None:
        array = noise(6, 8, bits=1).astype(bool)
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            file.write(array, photometric="minisblack", metadata=None)
            file.write(~array, photometric="minisblack", metadata=None, subfiletype=4)
        assert np.array_equal(values(tmp_path / "x.tif")[..., 0], array * 255)


def same_after(path: Path, channels: int, bits: int, **options: Any) -> None:
    """Writes an image without loss, grey or in colour, and compares what is read."""
    array = noise(16, 24, channels, bits=bits)
    colours = (array, "rgb") if channels == 3 else (array[..., 0], "minisblack")
    found = each_way(path, colours[0], photometric=colours[1], **options)
    assert np.array_equal(found[..., :channels], array)


class TestCompressions:
    @pytest.mark.parametrize("bits", [8, 16])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize(
        "compression", ["jpeg2000", "jpegxl", "lerc", "png", "zstd", "lzma", "lzw", "packbits", "deflate"]
    )
    def test_lossless(self, tmp_path: Path, bits: int, channels: int, compression: str) -> None:
        same_after(tmp_path / "x.tif", channels, bits, compression=compression)

    @pytest.mark.parametrize("bits", [8, 16])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("compression", ["lzw", "packbits", "deflate", "zstd"])
    def test_differences_of_neighbours(
        self, tmp_path: Path, bits: int, channels: int, compression: str
    ) -> None:
        same_after(tmp_path / "x.tif", channels, bits, compression=compression, predictor=2)

    def test_a_thumbnail_that_pillow_does_not_read(self, tmp_path: Path) -> None:
        """Pillow reads the first page of a file when it opens the file."""
        array = noise(16, 24)
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            options: dict[str, Any] = {"photometric": "minisblack", "metadata": None}
            file.write(array[:8, :8], subfiletype=1, compression="jpeg2000", **options)
            file.write(array, compression="lzw", **options)
        assert np.array_equal(values(tmp_path / "x.tif")[..., 0], array)

    def test_webp(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        array = noise(16, 24, 3)
        options = {"compression": "webp", "compressionargs": {"level": 100}}  # lossless
        found = each_way(tmp_path / "x.tif", array, photometric="rgb", **options)
        assert np.array_equal(found, array)
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize(("number", "name"), [(34661, "JBIG"), (12345, "12345")])
    @pytest.mark.parametrize("bits", [8, 16])
    def test_unknown_ones_are_named(self, tmp_path: Path, number: int, name: str, bits: int) -> None:
        path = tmp_path / "x.tif"
        write(path, noise(8, 8, bits=bits), photometric="minisblack")
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages.first.tags["Compression"].overwrite(number)
        pixels = PixelRange(f"uint{bits}", 0, 255)
        with pytest.raises(
            DataError,
            match=f"x.tif: expected a compression that tifffile and imagecodecs read; got {name}$",
        ):
            read_image(path, 8, 1, pixels=pixels)
