"""Images as instruments make them: deep, with many channels, in one range for the whole data set."""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image, ImageOps

from selfconv.data import Clipping, DataError, PixelRange, fit, load_data, read_image, read_images
from selfconv.data import images as images_module
from selfconv.data.images import Item, is_image_name, read_values
from selfconv.data.pixels import UnreadableError, _resize, choose_range

RANDOM = np.random.default_rng(0)


def noise(*shape: int, dtype: Any = np.uint16, high: int = 4096) -> np.ndarray:
    return RANDOM.integers(0, high, shape).astype(dtype)


def gallery(root: Path, count: int = 10, **options: Any) -> dict[str, np.ndarray]:
    """A TIFF folder of two classes; returns the values by name."""
    values = {}
    for label in "ab":
        (root / label).mkdir(parents=True)
        for i in range(count):
            values[f"{label}/{i}.tif"] = noise(8, 8, **options)
            tifffile.imwrite(root / label / f"{i}.tif", values[f"{label}/{i}.tif"])
    return values


def check_values(data: Any, values: dict[str, np.ndarray]) -> None:
    """Every image is stored as it is in its file."""
    seen = 0
    for split in (data.train, data.val, data.test):
        for image, name in zip(split.images, split.names, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).squeeze(-1).numpy(), values[name])
            seen += 1
    assert seen == len(values)


class TestFiles:
    """Values equal to what tifffile and NumPy give."""

    @pytest.mark.parametrize(
        ("array", "options"),
        [
            (noise(6, 5), {}),
            (noise(6, 5), {"compression": "lzw"}),
            (noise(6, 5), {"compression": "deflate", "predictor": True}),
            (noise(6, 5), {"byteorder": ">"}),
            (noise(6, 5, 3, high=65536), {"photometric": "rgb"}),
            (noise(6, 5, 4), {"photometric": "minisblack", "planarconfig": "contig"}),
            (
                noise(6, 5, 7, dtype=np.uint8, high=256),
                {"photometric": "minisblack", "planarconfig": "contig"},
            ),
            (noise(6, 5, dtype=np.int32, high=1_000_000), {}),
            (noise(6, 5, dtype=np.uint32, high=2**31), {}),
            (noise(6, 5).astype(np.float32) / 7, {}),
            (noise(6, 5).astype(np.float16), {}),
            (noise(6, 5, dtype=np.int16), {}),
        ],
    )
    def test_tiff(self, tmp_path: Path, array: np.ndarray, options: dict[str, Any]) -> None:
        tifffile.imwrite(tmp_path / "x.tif", array, **options)
        found = read_values(Item("x", tmp_path / "x.tif"))
        assert np.array_equal(
            found.squeeze(-1) if array.ndim == 2 else found, tifffile.imread(tmp_path / "x.tif")
        )

    @pytest.mark.parametrize("channels", [2, 4, 16])
    def test_channels_as_pages(self, tmp_path: Path, channels: int) -> None:
        array = noise(channels, 20, 18)
        tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack")
        tifffile.imwrite(tmp_path / "b.ome.tif", array, metadata={"axes": "CYX"}, photometric="minisblack")
        tifffile.imwrite(tmp_path / "c.tif", array, imagej=True, metadata={"axes": "CYX"})
        for name in ("a.tif", "b.ome.tif", "c.tif"):
            assert np.array_equal(read_values(Item("x", tmp_path / name)), array.transpose(1, 2, 0))

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float32])
    @pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 9)])
    def test_npy(self, tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        array = noise(*shape, dtype=dtype, high=200)
        np.save(tmp_path / "x.npy", array)
        assert np.array_equal(read_values(Item("x", tmp_path / "x.npy")), array.reshape(6, 5, -1))

    @pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
    def test_deep_png(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        array = noise(*shape, high=65536)
        (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(array))
        assert np.array_equal(read_values(Item("x", tmp_path / "x.png")), array.reshape(6, 5, -1))

    def test_alpha_only_where_the_format_says_so(self, tmp_path: Path) -> None:
        array = np.zeros((4, 4, 4), np.uint16)
        array[..., 3] = [0, 0, 65535, 65535]
        tifffile.imwrite(tmp_path / "alpha.tif", array, photometric="rgb", extrasamples=["unassalpha"])
        tifffile.imwrite(tmp_path / "four.tif", array, photometric="rgb", extrasamples=["unspecified"])
        (tmp_path / "alpha.png").write_bytes(imagecodecs.png_encode(array))
        for name in ("alpha.tif", "alpha.png"):
            shown = read_values(Item("x", tmp_path / name))
            assert shown.shape == (4, 4, 3)
            assert shown[0, :, 0].tolist() == [65535, 65535, 0, 0]
        assert np.array_equal(read_values(Item("x", tmp_path / "four.tif")), array)

    def test_eight_bits_with_four_channels(self, tmp_path: Path) -> None:
        array = noise(8, 8, 4, dtype=np.uint8, high=256)
        tifffile.imwrite(tmp_path / "x.tif", array, photometric="rgb", extrasamples=["unspecified"])
        assert np.array_equal(read_image(tmp_path / "x.tif", 8, 4).permute(1, 2, 0), array)
        with pytest.raises(DataError, match=r"x.tif: expected 3 channels; got 4$"):
            read_image(tmp_path / "x.tif", 8, 3)

    @pytest.mark.parametrize("planar", ["contig", "separate"])
    def test_eight_bits_in_three_channels_that_are_not_declared_colours(
        self, tmp_path: Path, planar: str
    ) -> None:
        array = noise(8, 8, 3, dtype=np.uint8, high=256)
        stored = array if planar == "contig" else array.transpose(2, 0, 1)
        tifffile.imwrite(tmp_path / "x.tif", stored, photometric="minisblack", planarconfig=planar)
        assert np.array_equal(read_image(tmp_path / "x.tif", 8, 3).permute(1, 2, 0), array)

    @pytest.mark.parametrize("kind", ["grey", "white", "colour", "palette", "bits"])
    @pytest.mark.parametrize("compression", [None, "deflate"])
    def test_shallow_tiffs_upright(self, tmp_path: Path, kind: str, compression: str | None) -> None:
        shape = (7, 12, 3) if kind == "colour" else (7, 12)
        array = noise(*shape, dtype=np.uint8, high=256)
        options: dict[str, Any] = {"compression": compression}
        options["photometric"] = {"colour": "rgb", "white": "miniswhite"}.get(kind, "minisblack")
        shown = array
        if kind == "white":
            shown = 255 - array
        elif kind == "palette":
            colours = noise(3, 256, high=256).astype(np.uint16) * 257
            options |= {"photometric": "palette", "colormap": colours}
            shown = (colours.T[array] >> 8).astype(np.uint8)
        elif kind == "bits":
            array = array > 127
            shown = array * np.uint8(255)
        colour = shown if shown.ndim == 3 else np.repeat(shown[..., None], 3, -1)
        for orientation in range(1, 9):
            tifffile.imwrite(tmp_path / "x.tif", array, extratags=[(274, 3, 1, orientation, True)], **options)
            exif = Image.Exif()
            exif[274] = orientation
            Image.fromarray(colour).save(tmp_path / "x.png", exif=exif)
            expected = read_values(Item("x", tmp_path / "x.png"))
            found = read_values(Item("x", tmp_path / "x.tif"))
            assert np.array_equal(found, expected), orientation
            sides = [images_module.read_header(Item("x", tmp_path / f"x.{s}"))[:2] for s in ("tif", "png")]
            assert sides[0] == sides[1]
            small = [read_image(tmp_path / f"x.{s}", 5, 3) for s in ("tif", "png")]
            assert torch.equal(*small)

    @pytest.mark.parametrize("white", [100, 255, 4095, 65535])
    @pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
    def test_pgm_and_ppm(self, tmp_path: Path, kind: str, white: int) -> None:
        """As they are written, whatever value is white."""
        channels, path = (1 if kind in ("P2", "P5") else 3), tmp_path / "x.ppm"
        array = noise(6, 5, channels, dtype=np.uint16 if white > 255 else np.uint8, high=white + 1)
        header = f"{kind} # made here\n5 6\n{white}\n".encode()
        digits = " ".join(map(str, array.ravel())).encode() + b"\n"
        path.write_bytes(
            header + (digits if kind in ("P2", "P3") else array.astype(f">u{array.itemsize}").tobytes())
        )
        found = read_values(Item("x", path))
        assert found.dtype == array.dtype
        assert np.array_equal(found[..., :channels], array)
        pixels = PixelRange(array.dtype.name, 0, white)
        read = read_image(path, 5, channels, pixels=pixels).permute(1, 2, 0)  # the middle rows, between two
        between = (array[:-1].astype(int) + array[1:]) / 2
        assert np.abs(read.numpy() - between).max() <= 0.5

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"P5\n5 6\n4095\n" + bytes(59), "damaged or truncated"),
            (b"P2\n2 1\n100\n1", "damaged or truncated"),
            (b"P2\n2 1\n100\n1 x", "damaged or truncated"),
            (b"P2\n2 1\n100\n1 1_0", "damaged or truncated"),
            (b"P2\n2 1\n100\n1 # 2", "damaged or truncated"),
            (b"P2\n2 1\n100\n1 nan", "expected integers from 0 to 100, .*; got nan"),
            (
                b"P2\n2 1\n100\n1 101",
                "expected integers from 0 to 100, which the header calls white; got 101",
            ),
            (b"P2\n2 1\n100\n1 -1", "expected integers from 0 to 100, which the header calls white; got -1"),
            (b"P2\n2 1\n9\n1 2.5", "expected integers from 0 to 9, which the header calls white; got 2.5"),
            (
                b"P2\n2 1\n100\n1 4294967297",
                "expected integers from 0 to 100, which the header calls white; got 4294967297",
            ),
            (
                b"P5\n2 1\n100\n\x01\xff",
                "expected integers from 0 to 100, which the header calls white; got 255",
            ),
        ],
    )
    def test_damaged_pgm(self, tmp_path: Path, content: bytes, why: str) -> None:
        (tmp_path / "x.pgm").write_bytes(content)
        with pytest.raises(DataError, match=f"x.pgm: {why}$"):
            read_image(tmp_path / "x.pgm", 1, 1)

    @pytest.mark.parametrize("white", [255, 4095])
    @pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
    @pytest.mark.parametrize("behind", [b"\nthe end", b"\nP2 1 1 9 3", b" # end", b"\xff"])
    def test_what_is_behind_the_image_is_ignored(
        self, tmp_path: Path, kind: str, white: int, behind: bytes
    ) -> None:
        channels, digits = (1 if kind in ("P2", "P5") else 3), kind in ("P2", "P3")
        array = noise(4, 5, channels, dtype=np.uint16 if white > 255 else np.uint8, high=white + 1)
        content = " ".join(map(str, array.ravel())).encode() + b"\n" * (behind == b"\xff")
        if not digits:
            content = array.astype(f">u{array.itemsize}").tobytes()
        (tmp_path / "x.pgm").write_bytes(f"{kind} 5 4 {white}\n".encode() + content + behind)
        assert np.array_equal(read_values(Item("x", tmp_path / "x.pgm"))[..., :channels], array)

    @pytest.mark.parametrize("length", [1, 65_500, 65_536, 200_000])
    def test_a_pgm_with_long_comments(self, tmp_path: Path, length: int) -> None:
        """However they and the numbers are cut into blocks."""
        array = noise(100, 400)
        comment = b"#" + b" 7" * length + b"\r"
        lines = comment.join(b" ".join(b"%d" % value for value in row) + b" " for row in array[:50])
        lines += comment + b"\n".join(b"%d" % value for value in array[50:].ravel())
        (tmp_path / "x.pgm").write_bytes(b"P2 400 100 4095\n" + lines)
        assert np.array_equal(read_values(Item("x", tmp_path / "x.pgm"))[..., 0], array)

    @pytest.mark.parametrize("kind", [b"P2", b"P5"])
    @pytest.mark.parametrize("filling", [b"8 ", b" ", b"8", b"#"])
    def test_memory_of_a_small_pgm_in_a_large_file(self, tmp_path: Path, kind: bytes, filling: bytes) -> None:
        """Numbers of the image alone need memory, not what is behind them or in their place."""
        path = tmp_path / "x.pgm"
        path.write_bytes(kind + b" 5 4 100\n" + b" 3" * 19 + b" " + filling * (2**25 // len(filling)))
        tracemalloc.start()
        try:
            read_values(Item("x", path))
        except UnreadableError as error:
            assert str(error) == "damaged or truncated"  # noqa: PT017
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 5e6

    @pytest.mark.parametrize("white", [b"255", b"100"])
    def test_a_pgm_with_other_line_ends_and_more_behind_it(self, tmp_path: Path, white: bytes) -> None:
        (tmp_path / "x.pgm").write_bytes(b"P2\r# by hand\r2 1\r" + white + b"\r7 9\r" + b"8 " * 10**6)
        tracemalloc.start()
        values = read_values(Item("x", tmp_path / "x.pgm"))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert values[0, :, 0].tolist() == [7, 9]
        assert most < 2e7  # numbers that are not of the image are no objects

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    @pytest.mark.parametrize("transparent", [0, 1])
    def test_a_grey_png_with_a_transparent_value(self, tmp_path: Path, bits: int, transparent: int) -> None:
        """Transparent pixels are white, the others scaled to bytes."""

        def chunk(name: bytes, content: bytes) -> bytes:
            checksum = zlib.crc32(name + content)
            return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

        row = [0, 1, 2**bits - 1, 2**bits - 2]
        packed = int("".join(f"{value:0{bits}b}" for value in row).ljust(8, "0"), 2)
        line = b"\0" + packed.to_bytes(max(1, bits * len(row) // 8), "big")
        (tmp_path / "x.png").write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", len(row), 1, bits, 0, 0, 0, 0))
            + chunk(b"tRNS", struct.pack(">H", transparent))
            + chunk(b"IDAT", zlib.compress(line))
            + chunk(b"IEND", b"")
        )
        found = read_values(Item("x", tmp_path / "x.png"))[0, :, 0]
        scale = 255 // (2**bits - 1)
        assert found.tolist() == [255 if value == transparent else value * scale for value in row]

    def test_a_mask_of_the_size_of_the_image_is_ignored(self, tmp_path: Path) -> None:
        array = noise(8, 8, dtype=np.uint8, high=256)
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            file.write(array, photometric="minisblack", metadata=None)
            file.write(array > 99, photometric="mask", metadata=None, subfiletype=4)
            file.write(array // 2, photometric="minisblack", metadata=None, subfiletype=1)
        assert np.array_equal(read_values(Item("x", tmp_path / "x.tif"))[..., 0], array)

    def test_files_of_an_ome_set_have_one_image_each(self, tmp_path: Path) -> None:
        names = ["a.ome.tif", "b.ome.tif"]
        images = "".join(
            f'''<Image ID="Image:{i}"><Pixels ID="Pixels:{i}" DimensionOrder="XYCZT" Type="uint16"
            SizeX="8" SizeY="8" SizeC="1" SizeZ="1" SizeT="1">
            <Channel ID="Channel:{i}:0" SamplesPerPixel="1"/><TiffData IFD="0" PlaneCount="1">
            <UUID FileName="{name}">urn:uuid:{i}</UUID></TiffData></Pixels></Image>'''
            for i, name in enumerate(names)
        )
        for i, name in enumerate(names):
            schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
            description = f'<?xml version="1.0"?><OME xmlns="{schema}" UUID="urn:uuid:{i}">{images}</OME>'
            array = np.full((8, 8), 100 + i, np.uint16)
            tifffile.imwrite(tmp_path / name, array, description=description, metadata=None, ome=False)
        for i, name in enumerate(names):
            assert (read_values(Item("x", tmp_path / name)) == 100 + i).all()

    @pytest.mark.parametrize("kind", ["palette", "separated"])
    def test_pages_in_colours_are_not_dropped(self, tmp_path: Path, kind: str) -> None:
        shape = (8, 8) if kind == "palette" else (8, 8, 4)
        options = {"colormap": noise(3, 256)} if kind == "palette" else {}
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            for _ in range(2):
                page = noise(*shape, dtype=np.uint8, high=256)
                file.write(page, photometric=kind, metadata=None, **options)
        with pytest.raises(
            DataError, match=r"expected one (CMYK|palette) image, .*; got one of shape \[2, 8, 8"
        ):
            read_image(tmp_path / "x.tif", 8, 3)

    def test_a_cut_tiff(self, tmp_path: Path) -> None:
        Image.fromarray(noise(64, 64, dtype=np.uint8, high=256)).save(
            tmp_path / "x.tif", compression="tiff_lzw"
        )
        (tmp_path / "x.tif").write_bytes((tmp_path / "x.tif").read_bytes()[:2000])
        with pytest.raises(DataError, match=r"x.tif: damaged or truncated$"):
            read_image(tmp_path / "x.tif", 8, 1)

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
    def test_smaller_copies_in_a_tiff_are_ignored(self, tmp_path: Path, dtype: Any) -> None:
        array = noise(8, 8, dtype=dtype, high=200)
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            file.write(array[::2, ::2], photometric="minisblack", subfiletype=1)
            file.write(array, photometric="minisblack")
        assert np.array_equal(read_values(Item("x", tmp_path / "x.tif"))[..., 0], array)

    def test_a_palette_behind_a_smaller_copy(self, tmp_path: Path) -> None:
        array, colours = noise(8, 8, dtype=np.uint8, high=256), noise(3, 256, high=256) * 257
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            file.write(array[::2, ::2], photometric="minisblack", subfiletype=1)
            file.write(array, photometric="palette", colormap=colours)
        assert np.array_equal(read_values(Item("x", tmp_path / "x.tif")), colours.T[array] >> 8)

    @pytest.mark.parametrize(
        ("second", "described"),
        [(noise(4, 5), "8×8 uint16, 4×5 uint16"), (noise(8, 8, dtype=np.uint8), "8×8 uint16, 8×8 uint8")],
    )
    def test_several_images_in_a_tiff(self, tmp_path: Path, second: np.ndarray, described: str) -> None:
        with tifffile.TiffWriter(tmp_path / "x.tif") as file:
            for array in (noise(8, 8), second):
                file.write(array, photometric="minisblack")
        with pytest.raises(DataError, match=rf"x.tif: expected one image, .*; got 2 \({described}\)$"):
            read_image(tmp_path / "x.tif", 8, 1, pixels=PixelRange("uint16", 0, 4095))

    def test_a_grey_image_has_one_channel(self, tmp_path: Path) -> None:
        Image.new("L", (8, 8), 9).save(tmp_path / "x.png")
        with pytest.raises(DataError, match=r"x.png: expected 16 channels; got 1$"):
            read_image(tmp_path / "x.png", 8, 16)

    def test_a_pfm_in_colour(self, tmp_path: Path) -> None:
        (tmp_path / "x.pfm").write_bytes(b"PF\n5 6\n-1.0\n" + bytes(5 * 6 * 3 * 4))
        with pytest.raises(
            DataError, match=r"x.pfm: expected a PFM of one channel \(Pf\); got one in colour"
        ):
            read_image(tmp_path / "x.pfm", 8, 1)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("x.pbm", b"P1\n3 2\n0 1 0\n1 1 0\n"),
            ("x.pbm", b"P4\n3 2\n" + bytes([0b010_00000, 0b110_00000])),
            ("x.pnm", b"P5\n3 2\n255\n" + bytes([255, 0, 255, 0, 0, 255])),
            ("x.pnm", b"P2\n3 2\n300\n300 0 300 0 0 300\n"),
        ],
    )
    def test_bitmaps_and_any_map(self, tmp_path: Path, name: str, content: bytes) -> None:
        """In a bitmap 1 is black."""
        (tmp_path / name).write_bytes(content)
        assert is_image_name(tmp_path / name)
        found = read_values(Item("x", tmp_path / name))[..., 0]
        assert np.array_equal(found > 0, [[1, 0, 1], [0, 0, 1]])
        assert {*np.unique(found)} <= {0, 255, 300}

    def test_pfm(self, tmp_path: Path) -> None:
        array = RANDOM.normal(size=(6, 5)).astype("<f4")
        (tmp_path / "x.pfm").write_bytes(b"Pf\n5 6\n-1.0\n" + array[::-1].tobytes())
        found = read_values(Item("x", tmp_path / "x.pfm"))
        assert found.dtype == np.float32
        assert np.array_equal(found[..., 0], array)

    @pytest.mark.parametrize(
        ("shape", "why"),
        [
            *((shape, "channels first") for shape in [(3, 20, 20), (2, 20, 30), (4, 9, 9), (5, 3, 16, 16)]),
            *(
                (shape, "channels first")
                for shape in [(7, 24, 24), (16, 24, 24), (12, 20, 30), (4, 7, 24, 24)]
            ),
            *((shape, "channels first") for shape in [(5, 3, 20, 16), (5, 1, 20, 16), (3, 20, 16)]),
            *((shape, "channels first") for shape in [(5, 3, 2, 2), (5, 9, 4, 4), (9, 4, 4)]),
            ((24, 24, 20), "more than 16 channels"),
            ((24, 24, 24), "more than 16 channels"),
            ((20, 16, 16), "a stack of grey images"),
            ((16, 16, 16), "a stack of grey images"),
        ],
    )
    def test_arrays_that_can_be_read_in_two_ways(
        self, tmp_path: Path, shape: tuple[int, ...], why: str
    ) -> None:
        array = noise(*shape, dtype=np.uint8, high=256)
        np.save(tmp_path / "x.npy", array)
        for read in (read_image, read_images):
            with pytest.raises(
                DataError,
                match=rf"x.npy: expected \[H, W, C\], or a stack \[N, H, W, C\] .*, which may .*{why}",
            ):
                read(tmp_path / "x.npy", 8, 1)
        if array.ndim == 3:
            np.save(tmp_path / "x.npy", array[..., None])
            assert len(read_images(tmp_path / "x.npy", 8, 1)) == len(array)

    @pytest.mark.parametrize("shape", [(20, 33), (33, 20), (7, 40), (41, 40), (9, 6)])
    @pytest.mark.parametrize("size", [5, 16, 40])
    def test_one_geometry_for_all_depths(self, tmp_path: Path, shape: tuple[int, int], size: int) -> None:
        array = noise(*shape, dtype=np.uint8, high=256)
        Image.fromarray(array).save(tmp_path / "x.png")
        tifffile.imwrite(tmp_path / "x.tif", array.astype(np.uint16))
        shallow = read_image(tmp_path / "x.png", size, 1).int()
        deep = read_image(tmp_path / "x.tif", size, 1, pixels=PixelRange("uint16", 0, 255)).int()
        stack = fit(array[None, ..., None], size)[0, ..., 0]
        assert (shallow - deep).abs().max() <= 1
        assert (shallow[0] - torch.from_numpy(stack).int()).abs().max() <= 1
        exact = ImageOps.fit(
            Image.fromarray(array.astype(np.float32)), (size, size), Image.Resampling.BILINEAR
        )
        found = _resize(torch.from_numpy(array.astype(np.float64))[None, ..., None], size)[0, ..., 0]
        assert (
            np.abs(found.numpy() - np.array(exact)).max() < 1e-3
        )  # not yet rounded; Pillow rounds bytes twice

    def test_upright(self, tmp_path: Path) -> None:
        array = noise(6, 5)
        picture = Image.fromarray((array >> 4).astype(np.uint8))
        for orientation in range(1, 9):
            tifffile.imwrite(tmp_path / "x.tif", array, extratags=[(274, 3, 1, orientation, True)])
            exif = Image.Exif()
            exif[274] = orientation
            picture.save(tmp_path / "x.png", exif=exif)
            shallow = read_values(Item("x", tmp_path / "x.png"))[..., 0]
            assert np.array_equal(read_values(Item("x", tmp_path / "x.tif"))[..., 0] >> 4, shallow)

    @pytest.mark.parametrize(
        ("array", "options", "why"),
        [
            (
                noise(3, 20, 18),
                {"imagej": True, "metadata": {"axes": "ZYX"}},
                r"got a stack \(Z 3, Y 20, X 18\)",
            ),
            (noise(17, 20, 18), {"photometric": "minisblack"}, r"expected 1 to 16 channels; got 17 \(QYX\)"),
            (noise(6, 5).astype(np.complex64), {}, "expected integers or floating point; got complex64"),
        ],
    )
    def test_refused_tiffs(self, tmp_path: Path, array: Any, options: dict[str, Any], why: str) -> None:
        tifffile.imwrite(tmp_path / "x.tif", array, **options)
        with pytest.raises(DataError, match=f"x.tif: .*{why}"):
            read_image(tmp_path / "x.tif", 4, 1)

    @pytest.mark.parametrize(
        ("array", "why"),
        [
            (np.zeros((2, 3, 4, 5, 6)), r"expected \[H, W\] .*; got \[2, 3, 4, 5, 6\]"),
            (np.zeros(7), r"got \[7\]"),
            (np.full((4, 4), np.nan), "expected finite values; got infinite ones or nan"),
            (np.array([["a"]]), "expected integers or floating point; got <U1"),
        ],
    )
    def test_refused_arrays(self, tmp_path: Path, array: np.ndarray, why: str) -> None:
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(DataError, match=why):
            read_image(tmp_path / "x.npy", 4, 1, pixels=PixelRange(None, 0, 1))

    def test_damaged(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, noise(40, 40), compression="lzw")
        np.save(tmp_path / "x.npy", noise(40, 40))
        whole = {
            "x.tif": buffer.getvalue(),
            "x.png": imagecodecs.png_encode(noise(40, 40, high=65536)),
            "x.npy": (tmp_path / "x.npy").read_bytes(),
        }
        for name, content in whole.items():
            for keep in (30, len(content) // 2):
                (tmp_path / name).write_bytes(content[:keep])
                with pytest.raises(
                    DataError, match=r"^[^\n]*(damaged|not an image|expected an .npy array)[^\n]*$"
                ):
                    read_image(tmp_path / name, 4, 1, pixels=PixelRange("uint16", 0, 4095))
        np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
        with pytest.raises(DataError, match=r"expected an .npy array"):
            read_image(tmp_path / "x.npy", 4, 1)

    def test_only_the_first_image_of_a_stack_is_decoded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode, decoded = images_module.decode, []

        def count(item: Item, *args: Any) -> Any:
            decoded.append(item)
            return decode(item, *args)

        monkeypatch.setattr(images_module, "decode", count)
        stack = noise(50, 1, 17, dtype=np.uint8, high=256)
        np.save(tmp_path / "x.npy", stack)
        image = read_image(tmp_path / "x.npy", 1, 1)
        assert len(decoded) == 1
        assert abs(int(image[0, 0, 0]) - int(stack[0, 0, 8])) < 256
        np.save(tmp_path / "x.npy", stack[:0])
        with pytest.raises(DataError, match=r"got \[0, 1, 17\]"):
            read_image(tmp_path / "x.npy", 1, 1)

    @pytest.mark.parametrize("name", ["x.tif", "x.npy"])
    def test_values_that_need_too_much_memory(self, tmp_path: Path, name: str) -> None:
        """Few enough pixels, but many channels of many bytes: refused before they are decoded."""
        deep = np.zeros((20, 20, 16), np.float64)
        if name == "x.npy":
            np.save(tmp_path / name, deep)
        else:
            tifffile.imwrite(tmp_path / name, deep, photometric="minisblack", planarconfig="contig")
        pixels = PixelRange("float64", 0, 1)
        assert read_image(tmp_path / name, 20, 16, pixels=pixels, max_pixels=20 * 20 * 16).shape[0] == 16
        with pytest.raises(DataError, match=r"expected values of up to 0 million bytes; got 0 m"):
            read_image(tmp_path / name, 20, 16, pixels=pixels, max_pixels=500)


class TestRange:
    def test_the_range_is_of_the_values_in_the_files(self, tmp_path: Path) -> None:
        """A single bright pixel, which resizing averages away, needs its bits in `predict` too."""
        for label in "ab":
            (tmp_path / label).mkdir()
            for i in range(10):
                values = noise(64, 64, high=256)
                values[3, 3] = 40_000
                tifffile.imwrite(tmp_path / label / f"{i}.tif", values)
        data = load_data(tmp_path, image_size=4)
        assert int(data.train.images.int().max()) < 32_768
        assert data.pixels == PixelRange("uint16", 0, 65_535)

    def test_twelve_bits(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells")
        values["a/0.tif"][0, 0] = 4095
        tifffile.imwrite(tmp_path / "cells" / "a" / "0.tif", values["a/0.tif"])
        data = load_data(tmp_path / "cells")
        assert data.train.images.dtype == torch.uint16
        assert data.pixels == PixelRange("uint16", 0, 4095)
        check_values(data, values)
        pixels = data.train.images.double() / 4095
        assert data.mean[0] == pytest.approx(pixels.mean().item(), rel=1e-12)
        assert data.std[0] == pytest.approx(pixels.std(correction=0).item(), rel=1e-12)

    def test_bytes_in_sixteen_bits(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells", high=256)
        data = load_data(tmp_path / "cells")
        assert data.train.images.dtype == torch.uint8  # nothing is lost
        assert data.pixels == PixelRange("uint16", 0, 255)
        check_values(data, values)

    def test_thirty_two_bits(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells", dtype=np.int32, high=10_000_000)
        data = load_data(tmp_path / "cells")
        low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
        assert (data.pixels.low, data.pixels.high, data.pixels.levels) == (low, high, 65535)
        scaled = {name: np.rint((v - low) / (high - low) * 65535) for name, v in values.items()}
        check_values(data, scaled)

    def test_floating_point(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells", dtype=np.float32, high=2)
        data = load_data(tmp_path / "cells", pixel_range="-0.5,1.5")
        check_values(data, {name: np.rint((v + 0.5) / 2 * 65535) for name, v in values.items()})

    @pytest.mark.parametrize(("high", "text"), [(1, "auto"), (2, "auto"), (100, "auto"), (1, "0,1")])
    @pytest.mark.parametrize("source", ["folder", "npz"])
    def test_floating_point_is_not_counted_in_integers(
        self, tmp_path: Path, high: int, text: str, source: str
    ) -> None:
        stack = (RANDOM.random((20, 20, 20)) * high).astype(np.float32)
        stack[::2, 0, 0], stack[::2, 0, 1] = 0, high
        place = tmp_path / "x.npz"
        if source == "npz":
            labels = np.arange(10) % 2
            np.savez(place, x_train=stack[:10], y_train=labels, x_test=stack[10:], y_test=labels)
        else:
            for label, part in (("a", stack[:10]), ("b", stack[10:])):
                (tmp_path / label).mkdir()
                np.save(tmp_path / label / "x.npy", part[..., None])
            place = tmp_path
        data = load_data(place, pixel_range=text)
        assert (data.pixels.low, data.pixels.high, data.train.levels) == (0, high, 65535)
        stored = np.sort(data.everything.images.numpy().astype(float).ravel()) / 65535 * high
        assert np.abs(stored - np.sort(stack.ravel())).max() <= 0.5001 / 65535 * high

    def test_levels(self) -> None:
        """Of integers as many as there are in the range; of other and of mixed types the most."""
        ranges = [
            (PixelRange(), 255),
            (PixelRange("int16", -5, 5), 10),
            (PixelRange("uint16", 0, 4095), 4095),
            (PixelRange("uint16", 0, 0.5), 65535),
            (PixelRange("float32", 0, 1), 65535),
            (PixelRange(None, 0, 1), 65535),
            (PixelRange("uint8", 0, 255, by_type=True), 255),
            (PixelRange("float64", 0, 65535, by_type=True), 65535),
        ]
        assert [given.levels for given, _ in ranges] == [levels for _, levels in ranges]

    def test_values_outside_are_clipped(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells", dtype=np.uint8, high=256)
        data = load_data(tmp_path / "cells", pixel_range="10,200")
        assert data.train.levels == 190
        check_values(data, {name: np.clip(v, 10, 200) - 10 for name, v in values.items()})

    @pytest.mark.parametrize("memory", [None, 0.0])
    def test_values_outside_are_counted(self, tmp_path: Path, memory: float | None) -> None:
        for name, values in (("a", [0, 10, 20, 30]), ("b", [40, 50, 60, 70])):
            (tmp_path / "x" / name).mkdir(parents=True)
            for i in range(5):
                array = np.array(values, np.int16).reshape(2, 2) + (i == 0)
                tifffile.imwrite(tmp_path / "x" / name / f"{i}.tif", array)
        for _ in range(2):  # the second time from the cache, if there is one
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = load_data(tmp_path / "x", pixel_range="15,65", memory=memory, cache=tmp_path / "cache")
            assert data.clipping == Clipping(40, 10, 5)
        assert data.clipping.describe() == "25% of the values are below, 12% above"
        assert Clipping(1000, 0, 760).describe() == "76% of the values are above"
        assert Clipping(1000, 0, 5).describe() == "0.5% of the values are above"
        assert Clipping(10_000, 1, 5).describe() is None

    def test_floating_point_outside_its_range(self, tmp_path: Path) -> None:
        for i in range(20):
            (tmp_path / "x" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            array = RANDOM.uniform(-3, 7, (8, 8)).astype(np.float32)
            tifffile.imwrite(tmp_path / "x" / "ab"[i % 2] / f"{i}.tif", array)
        said = r"x: [23]\d% of the values are below, [56]\d% above the range of each file's type, and are cl"
        with pytest.warns(UserWarning, match=said):
            data = load_data(tmp_path / "x", pixel_range="dtype")
        assert data.pixels.describe() == "values in the range of each file's type (float32)"

    def test_values_too_large_for_a_range(self, tmp_path: Path) -> None:
        for i in range(4):
            (tmp_path / "x" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "x" / "ab"[i % 2] / f"{i}.npy", np.array([[0, 1], [1, 3e38]], np.float32))
        with pytest.raises(DataError, match=r"x: expected values of at most 1.8e\+19; got 0 to 3e\+38"):
            load_data(tmp_path / "x")
        with pytest.raises(
            DataError, match=r"range: expected LOW < HIGH, both of at most 1.8e\+19; got 0, 1e\+308"
        ):
            load_data(tmp_path / "x", pixel_range="0,1e308")

    def test_switches_in_an_npz(self, tmp_path: Path) -> None:
        """As in an .npy file."""
        x = RANDOM.integers(0, 2, (40, 4, 4)).astype(bool)
        labels = np.arange(40) % 2
        np.savez(tmp_path / "x.npz", x_train=x, y_train=labels, x_test=x, y_test=labels)
        data = load_data(tmp_path / "x.npz", validation=0)
        assert np.array_equal(data.train.images[:, 0], x * np.uint8(255))

    def test_types(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells")
        values["b/8.tif"] = noise(8, 8, dtype=np.uint8, high=256)
        tifffile.imwrite(tmp_path / "cells" / "b" / "8.tif", values["b/8.tif"])
        with pytest.raises(
            DataError, match="expected values of one type; got uint16, uint8: give --range dtype"
        ):
            load_data(tmp_path / "cells")
        tifffile.imwrite(tmp_path / "cells" / "b" / "8.tif", noise(8, 8))
        with pytest.warns(UserWarning, match=r"use \d+ of 65536 levels"):
            load_data(tmp_path / "cells", pixel_range="dtype")

    def test_mixed_types(self, tmp_path: Path) -> None:
        values = gallery(tmp_path / "cells", high=65536)
        tifffile.imwrite(tmp_path / "cells" / "b" / "8.tif", deep := noise(8, 8, dtype=np.uint8, high=256))
        check_values(
            load_data(tmp_path / "cells", pixel_range="dtype"),
            values | {"b/8.tif": deep.astype(np.uint16) * 257},
        )

    def test_few_levels_cause_a_warning(self, tmp_path: Path) -> None:
        gallery(tmp_path / "dim", dtype=np.uint8, high=13)
        with pytest.warns(
            UserWarning,
            match=r"dim: the images use 13 of 256 levels, from 0 to 12, of the range 0 to 255: --range LOW",
        ):
            load_data(tmp_path / "dim")

    @pytest.mark.filterwarnings("ignore:.* and are clipped")
    @pytest.mark.parametrize(
        ("array", "pixel_range", "said"),
        [
            (np.arange(6, dtype=np.uint8), "-5,5", "6 of 11 levels, from 0 to 5, of the range -5 to 5$"),
            (
                np.arange(6, dtype=np.uint8),
                "1e3,2e3",
                "1 of 1001 levels, from 1000 to 1000, of the range 1000",
            ),
            (
                np.full(6, 3.5, np.float32),
                "auto",
                "1 of 65536 levels, from 3.5 to 3.5, of the range 3.5 to 4.5:",
            ),
            (
                np.arange(-5, 1, dtype=np.int16),
                "dtype",
                "6 of 65536 levels, from -5 to 0, of the range of each",
            ),
            (
                np.array([0, 0, 0.5], np.float32),
                "-1,1",
                "2 of 65536 levels, from 0 to 0.5, of the range -1 to 1",
            ),
        ],
    )
    def test_a_warning_of_few_levels_has_values_of_the_files(
        self, tmp_path: Path, array: np.ndarray, pixel_range: str, said: str
    ) -> None:
        images = np.resize(array, (20, 8, 8))
        labels = np.arange(20) % 2
        np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        with pytest.warns(UserWarning, match="x: the images use") as caught:
            load_data(tmp_path / "x.npz", pixel_range=pixel_range)
        [message] = [str(one.message) for one in caught if "the images use" in str(one.message)]
        assert re.match(f"x: the images use {said}", message), message

    @pytest.mark.parametrize("kind", ["npz", "folder"])
    def test_the_images_of_every_part_count(self, tmp_path: Path, kind: str) -> None:
        """For the automatic range, and so for the warning that another range may fit them better."""
        dim, bright = (RANDOM.integers(0, high, (20, 8, 8)).astype(np.uint16) for high in (256, 30_000))
        labels = np.arange(20) % 2
        if kind == "npz":
            np.savez(tmp_path / "x.npz", x_train=dim, y_train=labels, x_test=bright, y_test=labels)
        for part, images in (("train", dim), ("test", bright)):
            for i, image in enumerate(images):
                (tmp_path / "x" / part / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(tmp_path / "x" / part / "ab"[i % 2] / f"{i}.tif", image)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = load_data(tmp_path / ("x.npz" if kind == "npz" else "x"))
        assert data.pixels == PixelRange("uint16", 0, 32767)

    def test_bad_ranges(self, tmp_path: Path) -> None:
        for text in ("", "full", "1", "1,2,3", "5,5", "9,2", "nan,1", "0,inf"):
            with pytest.raises(DataError, match=r"^range: expected auto, dtype, or LOW,HIGH .*; got '"):
                load_data(tmp_path, pixel_range=text)
        with pytest.raises(DataError, match=r"range: applies to folders, .* only; got digits"):
            load_data("digits", pixel_range="dtype")

    def test_resized_in_their_own_depth(self, tmp_path: Path) -> None:
        ramp = np.linspace(0, 4095, 32).round().astype(np.uint16)[None].repeat(32, 0)
        tifffile.imwrite(tmp_path / "x.tif", ramp)
        small = read_image(tmp_path / "x.tif", 8, 1, pixels=PixelRange("uint16", 0, 4095))[0]
        byte = Image.fromarray(np.rint(ramp / 4095 * 255).astype(np.uint8)).resize(
            (8, 8), Image.Resampling.BILINEAR
        )
        assert np.abs(small.numpy() / 4095 - np.array(byte) / 255).max() < 1 / 255
        assert len(np.unique(small.numpy() % 16)) > 2  # finer than 8 bits

    @given(
        arrays.arrays(
            st.sampled_from([np.uint8, np.uint16, np.int16, np.int32, np.uint32]), (3, 4, 2), elements=None
        )
    )
    def test_what_is_stored_is_the_nearest_level(self, values: np.ndarray) -> None:
        chosen = choose_range(
            "auto", [values.dtype.name], lambda: (float(values.min()), float(values.max())), "x"
        )
        stored = np.rint(chosen.scale(values))
        assert stored.min() >= 0
        assert stored.max() <= chosen.levels <= 65535
        back = stored / chosen.levels * (chosen.high - chosen.low) + chosen.low
        assert np.abs(back - values).max() <= (0 if chosen.levels < 65535 else 0.5 / 65535) * (
            chosen.high - chosen.low
        ) + 1e-9 * max(1.0, abs(chosen.high))


class TestChannels:
    @pytest.mark.parametrize("channels", [2, 4, 5, 16])
    def test_folder(self, tmp_path: Path, channels: int) -> None:
        stack = noise(20, 8, 8, channels, dtype=np.uint8, high=256)
        for label, part in (("a", stack[:10]), ("b", stack[10:])):
            (tmp_path / label).mkdir()
            np.save(tmp_path / label / "cells.npy", part)
        data = load_data(tmp_path)
        assert data.in_channels == channels
        assert f"8×8, {channels} channels, 2 classes" in str(data)
        both = {f"a/cells.npy[{i}]": stack[i] for i in range(10)} | {
            f"b/cells.npy[{i}]": stack[10 + i] for i in range(10)
        }
        check_values(data, both)

    def test_mixed_numbers_of_channels_are_refused(self, tmp_path: Path) -> None:
        gallery(tmp_path, dtype=np.uint8, high=256)
        np.save(tmp_path / "a" / "five.npy", noise(8, 8, 5, dtype=np.uint8, high=256))
        with pytest.raises(DataError, match=r"expected .* same number of channels; got 1, 5 \(a/five.npy\)"):
            load_data(tmp_path)

    @pytest.mark.parametrize("suffix", ["npy", "npz"])
    @pytest.mark.parametrize(
        "shape", [(8, 8, 4), (8, 8, 8), (4, 4, 4), (3, 9, 2), (8, 20, 3), (20, 4, 4), (20, 16, 16), (3, 2, 1)]
    )
    def test_channels_that_can_only_be_last(
        self, tmp_path: Path, shape: tuple[int, int, int], suffix: str
    ) -> None:
        stack, labels = noise(40, *shape, dtype=np.uint8, high=256), np.arange(40) % 2
        if suffix == "npy":
            for label in (0, 1):
                (tmp_path / "x" / str(label)).mkdir(parents=True)
                np.save(tmp_path / "x" / str(label) / "cells.npy", stack[labels == label])
            source = tmp_path / "x"
        else:
            source = tmp_path / "x.npz"
            np.savez(source, x_train=stack, y_train=labels, x_test=stack, y_test=labels)
        assert load_data(source, image_size=min(shape[:2])).in_channels == shape[2]

    def test_npz(self, tmp_path: Path) -> None:
        stack = noise(20, 8, 8, 4)
        labels = np.arange(20) % 2
        np.savez(
            tmp_path / "x.npz", x_train=stack[:12], y_train=labels[:12], x_test=stack[12:], y_test=labels[12:]
        )
        data = load_data(tmp_path / "x.npz", validation=0)
        assert np.array_equal(data.train.images.permute(0, 2, 3, 1), stack[:12])
        assert data.test.names[3] == "x_test[3]"
        assert data.pixels == PixelRange("uint16", 0, 4095)
