"""Splits that do not leak: groups that stay together, identical images on both sides, lists of images."""

from __future__ import annotations

import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from selfconv.data import DataError, load_data, warn_about_classes
from selfconv.data.splits import stratified_groups

RANDOM = np.random.default_rng(0)


def slides(root: Path, slides: int = 10, each: int = 4) -> Path:
    for label in "ab":
        (root / label).mkdir(parents=True)
        for slide in range(slides):
            for cell in range(each):
                pixels = RANDOM.integers(0, 256, (8, 8), np.uint8)
                Image.fromarray(pixels).save(root / label / f"slide{slide}_{cell}.png")
    return root


def slide(name: str) -> str:
    return name.partition("_")[0].rpartition("slide")[2]


class TestGroups:
    def test_folder(self, tmp_path: Path) -> None:
        data = load_data(slides(tmp_path / "cells"), group_by=r"slide(\d+)_")
        parts = [{slide(name) for name in split.names} for split in (data.train, data.val, data.test)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 10
        assert [len(split) for split in (data.train, data.val, data.test)] == [56, 8, 16]
        other = load_data(tmp_path / "cells", group_by=r"slide(\d+)_", seed=3)
        assert {slide(name) for name in other.test.names} == parts[2]
        assert {slide(name) for name in other.val.names} != parts[1]

    def test_group_by_uses_the_whole_match_without_parentheses(self, tmp_path: Path) -> None:
        data = load_data(slides(tmp_path), group_by=r"slide\d")
        assert not {slide(n) for n in data.train.names} & {slide(n) for n in data.test.names}

    def test_a_class_in_one_group(self, tmp_path: Path) -> None:
        """It cannot be in the test, of which training warns."""
        root = slides(tmp_path / "cells")
        (root / "c").mkdir()
        for i in range(12):
            Image.new("L", (4, 4), 20 * i).save(root / "c" / f"slide99_{i}.png")
        data = load_data(root, group_by=r"slide(\d+)_")
        with pytest.warns(
            UserWarning, match=r"cells: no \w+ images of 1 of 3 classes \(first: 'c'\)"
        ) as said:
            warn_about_classes(data)
        assert [str(warning.message).split()[2] for warning in said] == ["validation", "test"]
        assert (data.train.labels == 2).sum() == 12

    def test_errors(self, tmp_path: Path) -> None:
        root = slides(tmp_path / "cells")
        for pattern, why in [
            ("(", r"group_by: expected a regular expression; got '\('"),
            (
                "a|(slide)",
                r"expected the parentheses of 'a\|\(slide\)' to match in every file; not in a/slide0",
            ),
            ("patient", "expected 'patient' in the name of every file; not in a/slide0_0.png"),
            (".", "got 1 group, 'a' first|expected enough groups"),
        ]:
            with pytest.raises(DataError, match=why):
                load_data(root, group_by=pattern)
        with pytest.raises(DataError, match=r"group_by: applies to folders, .* only; got digits"):
            load_data("digits", group_by="x")
        parts = tmp_path / "parts"
        for part in ("train", "test"):
            shutil.copytree(root, parts / part)
        with pytest.raises(DataError, match="expected each group in one part; '0' is in train and in test"):
            load_data(parts, group_by=r"slide(\d)")

    @given(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=40, max_size=120),
        st.floats(0.1, 0.4),
        st.integers(0, 5),
    )
    def test_groups_stay_together(self, members: list[tuple[int, int]], fraction: float, seed: int) -> None:
        labels, groups = np.array([c for c, _ in members]), [str(g) for _, g in members]
        try:
            rest, aside = stratified_groups(labels, fraction, seed, groups)
        except DataError:
            return
        assert sorted([*rest, *aside]) == [*range(len(members))]
        assert not {groups[i] for i in rest} & {groups[i] for i in aside}
        assert {*labels[rest]} == {*labels}


class TestCopies:
    def test_identical_images_cause_a_warning(self, tmp_path: Path) -> None:
        root = slides(tmp_path / "cells")
        for part in ("train", "test"):
            shutil.copytree(root, tmp_path / "parts" / part)
        with pytest.warns(UserWarning, match="identical") as caught:
            load_data(tmp_path / "parts", validation=0)
        (message,) = (str(warning.message) for warning in caught)
        assert message.startswith(
            "parts: 80 of 80 test images are identical to training images "
            "(first: test/a/slide0_0.png = train/a/slide0_0.png), "
        )

    def test_what_to_do_about_them(self, tmp_path: Path) -> None:
        """Only sources that have groups are told of them."""
        x, y = RANDOM.integers(0, 256, (40, 8, 8), np.uint8), np.arange(40) % 2
        np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        with pytest.warns(UserWarning, match="so the accuracy on them says little; remove copies$"):
            load_data(tmp_path / "x.npz", validation=0)
        root = slides(tmp_path / "cells")
        shutil.copytree(root / "a", root / "a" / "again")
        with pytest.warns(UserWarning, match="remove copies, or keep them together with --group-by$"):
            load_data(root)

    @pytest.mark.filterwarnings("error")
    def test_no_warning_without_duplicates(self, tmp_path: Path) -> None:
        load_data(slides(tmp_path))


def manifest(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


class TestManifest:
    def test_same_images_as_the_folder(self, tmp_path: Path) -> None:
        root = slides(tmp_path / "cells")
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
        rows = [f"cells/{name},{name[0]}" for name in names]
        data = load_data(manifest(tmp_path / "cells.csv", "path,label", *rows))
        folder = load_data(root)
        assert data.digest == folder.digest
        assert data.class_names == ("a", "b")
        assert [f"cells/{name}" for name in folder.test.names] == data.test.names

    def test_a_path_in_two_lines(self, tmp_path: Path) -> None:
        root = slides(tmp_path / "cells")
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
        rows = [f"cells/{name},{name[0]}" for name in names]
        rows += [f"cells/./{names[0]},{names[0][0]}", rows[1]]
        path, last = manifest(tmp_path / "cells.csv", "path,label", *rows), len(rows)
        with pytest.warns(
            UserWarning,
            match=r"cells.csv: expected every path once; got 2 repeated lines, whose images count again; the "
            rf"first is cells/\./{names[0]} in line {last}, as in line 2$",
        ):
            load_data(path)

    def test_splits_and_groups(self, tmp_path: Path) -> None:
        root = slides(tmp_path / "cells")
        names = sorted(path.relative_to(tmp_path).as_posix() for path in root.rglob("*.png"))
        rows = [
            f"{name},{name[6]},{'test' if slide(name) in '12' else ''},{slide(name)},p{int(slide(name)) // 2}"
            for name in names
        ]
        path = manifest(tmp_path / "x.csv", "path,label,split,group,patient", *rows)
        data = load_data(path)
        assert {slide(name) for name in data.test.names} == {"1", "2"}
        assert not {slide(n) for n in data.val.names} & {slide(n) for n in data.train.names}
        with pytest.raises(DataError, match="expected each group in one part; 'p0' is in train and in test"):
            load_data(path, group_by="patient")
        with pytest.raises(DataError, match="expected each group in one part; 'a' is in train and in test"):
            load_data(path, group_by="cells/(.)")

    @pytest.mark.parametrize(
        ("lines", "why"),
        [
            (["path,label"], "expected a line of column names and a line for each image; got none"),
            (["file,label", "x.png,a"], "expected columns path, label .*; got file, label, no path"),
            (
                ["path,label,split", "x.png,a,later"],
                "line 2: split: expected train, val or test; got 'later'",
            ),
            (["path,label", "x.png,"], "line 2: expected a path and a label; got an empty one"),
            (["path,label", "x.png,a,b"], "line 2: expected as many columns as the first line has"),
            (["path,label", "x.png,a", "x.png,b"], "line 3: expected one label for each path"),
            (["path,label", "x.png,a", "./y/../x.png,b"], "line 3: expected one label for each path"),
            (["path,label", "x.png,a", "HERE/x.png,b"], "line 3: expected one label for each path"),
            (["path,label,split", "x.png,a,test"], "expected images to train on; got split test alone"),
        ],
    )
    def test_errors(self, tmp_path: Path, lines: list[str], why: str) -> None:
        with pytest.raises(DataError, match=why):
            load_data(manifest(tmp_path / "x.csv", *(line.replace("HERE", str(tmp_path)) for line in lines)))

    @pytest.mark.parametrize(
        ("lines", "group_by", "why"),
        [
            (("path;label", "1.png;a"), None, "no path: separate columns by commas, not semicolons"),
            (("path\tlabel", "1.png\ta"), None, "no path: separate columns by commas, not tabs"),
            (("path,label, label,x,x", "1.png,a,b,,"), None, "every column once; got 'label' 2 times"),
            (
                ("path,label", "", "", "1.png,a", "9.png,b"),
                None,
                r"line 5: no such file: 9.png; 1 of 2",
            ),
            (("path,label", "1.png,a", "1.png,b"), None, r"line 3: .*1.png is 'b', and 'a' in line 2$"),
            (
                ("path,label,slide", "1.png,a,x", "2.png,b,y"),
                "slied",
                "columns path, label, slide;",
            ),
        ],
    )
    def test_what_is_wrong_in_a_list(
        self, tmp_path: Path, lines: tuple[str, ...], group_by: str | None, why: str
    ) -> None:
        for name in ("1.png", "2.png"):
            Image.new("L", (8, 8)).save(tmp_path / name)
        with pytest.raises(DataError, match=why):
            load_data(manifest(tmp_path / "x.csv", *lines), group_by=group_by)

    def test_groups_by_the_path_in_a_list(self, tmp_path: Path) -> None:
        """Where no column has the name that is given."""
        rows = []
        for i in range(40):
            Image.fromarray(np.full((8, 8), 6 * i, np.uint8)).save(tmp_path / f"slide{i // 4}_{i}.png")
            rows.append(f"slide{i // 4}_{i}.png,{'ab'[i % 2]}")
        data = load_data(manifest(tmp_path / "x.csv", "path,label", *rows), group_by=r"slide(\d+)_")
        slides = [{name.partition("_")[0] for name in part.names} for part in data.parts]
        assert sum(map(len, slides)) == len(set.union(*slides)) == 10

    def test_spaces_and_empty_groups(self, tmp_path: Path) -> None:
        rows = []
        for i in range(40):
            Image.fromarray(np.full((8, 8), 6 * i, np.uint8)).save(tmp_path / f"{i}.png")
            rows.append(f"{i}.png, {'ab'[i % 2]} ,{'' if i < 30 else 'one'}")
        data = load_data(manifest(tmp_path / "x.csv", "path, label ,group", *rows))
        assert data.class_names == ("a", "b")
        assert min(len(part) for part in data.parts) > 0
        parts = [{int(name.split(".")[0]) for name in part.names} for part in data.parts]
        assert sum(bool(part & {*range(30, 40)}) for part in parts) == 1  # the group stays together
        assert sum(bool(part & {*range(30)}) for part in parts) > 1  # those without one do not

    def test_labels_in_two_spellings(self, tmp_path: Path) -> None:
        """They are one class, and one group."""
        spellings = [unicodedata.normalize(form, "é") for form in ("NFC", "NFD")]
        rows = []
        for i in range(40):
            Image.fromarray(np.full((8, 8), 6 * i, np.uint8)).save(tmp_path / f"{i}.png")
            spelling = spellings[i // 20]
            rows.append(f"{i}.png,{spelling if i % 2 else 'b'},{spelling if i % 10 == 0 else i}")
        data = load_data(manifest(tmp_path / "x.csv", "path,label,group", *rows))
        assert data.class_names == ("b", spellings[0])
        parts = [{int(name.split(".")[0]) for name in part.names} for part in data.parts]
        assert sum(bool(part & {0, 10, 20, 30}) for part in parts) == 1

    @pytest.mark.parametrize("link", ["ln.png", "linked/1.png"])
    def test_a_link_with_another_label(self, tmp_path: Path, link: str) -> None:
        (tmp_path / "a").mkdir()
        Image.new("L", (8, 8)).save(tmp_path / "a" / "1.png")
        (tmp_path / "ln.png").symlink_to("a/1.png")
        (tmp_path / "linked").symlink_to("a")
        path = manifest(tmp_path / "x.csv", "path,label", "a/1.png,a", f"{link},b")
        with pytest.raises(DataError, match=f"line 3: .*; {link} is 'b', and 'a' in line 2$"):
            load_data(path)

    @pytest.mark.parametrize(
        ("lines", "number", "why"),
        [
            (
                [b"path,label", b"1.png,a", b"", b'"1"x.png,b', b"2.png,b"],
                4,
                "expected cells in CSV .',' expected",
            ),
            (
                [b"path,label", b"1.png,a", b'2.png,"b', b"3.png,c"],
                3,
                "expected cells in CSV .unexpected end of",
            ),
            ([b'"path,label', b"1.png,a"], 1, "expected cells in CSV .unexpected end of"),
            ([b"path,label", b"1.png,a", b"caf\xe9.png,a"], 3, "expected text in UTF-8; got the byte 0xe9"),
        ],
    )
    def test_what_is_not_csv(self, tmp_path: Path, lines: list[bytes], number: int, why: str) -> None:
        (tmp_path / "x.csv").write_bytes(b"\n".join(lines) + b"\n")
        with pytest.raises(DataError, match=rf"x\.csv, line {number}: {why}"):
            load_data(tmp_path / "x.csv")

    def test_parquet_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no such file or folder"):
            load_data(tmp_path / "x.parquet")
