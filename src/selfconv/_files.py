"""Files that are written whole or not at all, and files from anywhere, validated before use."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
import types
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 32  # of lists and objects in each other; Python's own functions end in a RecursionError
_PARTIAL = ".{}.partial"  # the name of a file while it is written
JSON_LIMIT = 16_000_000  # bytes; a run's largest JSON file has thousands
_OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
Kind = TypeVar("Kind")


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file atomically: it has its old or its new content, even after a crash of the machine."""
    partial = path.with_name(_PARTIAL.format(path.name))
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def remove_partial_files(folder: Path, pattern: str) -> None:
    """Removes what ``write_atomically`` left of files of this pattern when its process was killed.

    The next file of the same name replaces it; this is for names that may not be written again. No other
    process may be writing them.
    """
    for partial in folder.glob(_PARTIAL.format(pattern)):
        partial.unlink(missing_ok=True)


def write_figure(path: Path, figure: Figure, **options: Any) -> None:
    """Writes a figure of matplotlib atomically, in the format that the path ends with.

    Args:
        options: of ``Figure.savefig``.
    """
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], **options)
    write_atomically(path, buffer.getvalue())


def check_writable(folder: Path, *names: str) -> None:
    """Raises OSError, in one line, unless files of these names can be written to a folder.

    The folder need not exist yet, nor does it afterwards: so a command can ask before it computes.
    """
    missing: list[Path] = []
    try:
        for place in (folder, *folder.parents):
            if os.path.lexists(place):
                if not place.is_dir():
                    got = _kind(place) if place == folder else f"{_kind(place)} at {place}"
                    raise NotADirectoryError(f"{folder}: expected a folder to write to; got {got}")
                break
            missing.append(place)
        for name in names:
            if (path := folder / name).exists() and not path.is_file():
                raise FileExistsError(f"{path}: expected a file to write; got {_kind(path)}")
        _try_to_write(folder, missing)
    except OSError as error:
        if error.strerror is None:  # one of those above
            raise
        raise OSError(
            f"{folder}: expected a folder to write to; got one that cannot be written ({error.strerror})"
        ) from None


def _try_to_write(folder: Path, missing: list[Path]) -> None:
    """Makes the missing folders, the innermost of which is first, and a file, and removes them again."""
    made: list[Path] = []
    try:
        for place in reversed(missing):
            place.mkdir()
            made.insert(0, place)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _kind(path: Path) -> str:
    """What is at a path, for a message."""
    try:
        return _OTHER_KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "a file")
    except OSError:
        return "a broken link"


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk; flushing a file does not include its name."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    """Raises ValueError if the content has a number or a text that ``read_json`` would refuse."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        encoded = f"{text}\n".encode()
    except UnicodeEncodeError as error:  # bytes in the name of a file
        line = text.splitlines()[text.count("\n", 0, error.start)].strip(" ,")
        raise ValueError(f"{path}: expected names in UTF-8; got {line}") from None
    write_atomically(path, encoded)


# ---- reading ----


class FileRefused(ValueError):
    """A path that is not a plain file, or a file that is too large."""


def describe_folder(path: Path, lacking: str) -> str:
    """What is at a path where a folder with certain files was expected, for a message.

    Args:
        lacking: the files, none of which is in the folder.
    """
    if not path.is_dir():
        return "a file" if path.exists() else "no such folder"
    return f"a folder without {lacking}" if any(path.iterdir()) else "an empty folder"


def check_file(path: str | os.PathLike[str], limit: float) -> None:
    """Raises FileRefused, before anything is read, unless it is a plain file of at most so many bytes.

    A FIFO would keep its reader waiting, and a device has no end. OSError if there is no such file.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        other = _OTHER_KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise FileRefused(f"expected a file; got {other}")
    if found.st_size > limit:
        raise FileRefused(f"expected at most {limit:.0f} bytes; got {found.st_size}")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """The text of a small file; raises ValueError if it is too large, not a plain file, or not text."""
    check_file(path, JSON_LIMIT)
    with open(path, "rb") as file:
        content = file.read(JSON_LIMIT + 1)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("expected JSON; got bytes that are not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """The content of a small JSON file; raises ValueError as ``read_text`` and ``parse_json`` do."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """The only place that decodes JSON.

    Raises:
        ValueError: it is not JSON, a key occurs twice, a number is not finite, or it is nested too deeply.
    """
    try:
        content = json.loads(text, object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON; got something else ({error})") from None
    if not _is_within(content, MAX_DEPTH):
        raise ValueError(f"expected JSON of at most {MAX_DEPTH} levels; got more")
    return content


def _is_within(content: object, levels: int) -> bool:
    if not isinstance(content, dict | list):
        return True
    parts = content.values() if isinstance(content, dict) else content
    return levels > 0 and all(_is_within(part, levels - 1) for part in parts)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


def read_as(kind: type[Kind], path: Path) -> Kind:
    """The content of a JSON file as a dataclass, whose fields define what is valid."""
    content = read_json(path)
    try:
        return parse(kind, content, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_lines_as(kind: type[Kind], path: Path) -> list[Kind]:
    """The content of a JSON lines file, as a list of dataclasses."""
    try:
        lines = read_text(path).splitlines()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(kind, parse_json(line), ""))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


# ---- JSON as dataclasses: each says what a file holds ----


def parse(kind: type[Kind], value: object, name: str) -> Kind:
    """A JSON value as a type: a dataclass, list, dict, tuple, union with None, Literal, or a plain one.

    Numbers are finite, integers fit 64 bits, text can be written as UTF-8. A dataclass gets no field that it
    does not know, and every one that has no default; what its ``__post_init__`` refuses is refused here too.

    Args:
        name: what messages call it; "" if the name of its file will do.

    Raises:
        ValueError: in one line, what was expected under which name.
    """
    return cast(Kind, _parse(kind, value, name))


def _parse(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        return _dataclass(kind, value, name)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _parse(next(a for a in arguments if a is not type(None)), value, name)
    if origin is Literal:
        if any(type(value) is type(a) and value == a for a in arguments):
            return value
        raise ValueError(f"{name}: expected one of {', '.join(map(str, arguments))}; got {value!r}")
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object; got {value!r}")
        return {_parse(str, key, name): _parse(arguments[1], part, name) for key, part in value.items()}
    if origin in (list, tuple):
        return _sequence(origin, arguments, value, name)
    return _plain(kind, value, name)


def _dataclass(kind: Any, value: Any, name: str) -> Any:
    where = f"{name}: " if name else ""
    if not isinstance(value, dict):
        raise ValueError(f"{where}expected an object; got {value!r}")
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind) if f.init}
    for key, f in known.items():
        if (earlier := f.metadata.get("earlier")) in value and key not in value:
            value = {key if k == earlier else k: part for k, part in value.items()}
    if unknown := [key for key in value if key not in known]:
        raise ValueError(f"{where}unknown option {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    if missing := [key for key, f in known.items() if key not in value and not _has_default(f)]:
        raise ValueError(f"{where}expected {', '.join(known)}; {missing[0]} is missing")
    return kind(**{key: _parse(hints[key], part, key) for key, part in value.items()})


def earlier_name(name: str) -> dict[str, str]:
    """Metadata for a field that older files call by another name; ``parse`` reads it under either."""
    return {"earlier": name}


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _sequence(origin: Any, arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list; got {value!r}")
    if origin is list or arguments[-1] is Ellipsis:
        return origin(_parse(arguments[0], part, name) for part in value)
    if len(value) != len(arguments):
        raise ValueError(f"{name}: expected {len(arguments)} values; got {value!r}")
    return tuple(_parse(a, part, name) for a, part in zip(arguments, value, strict=True))


def _plain(kind: Any, value: Any, name: str) -> Any:
    if kind is Any:
        return value
    if kind is float and type(value) in (int, float):
        if abs(value) <= MAX_INTEGER if type(value) is int else math.isfinite(value):
            return float(value)
        raise ValueError(f"{name}: expected a finite number; got {_short(value)}")
    if kind is int and type(value) is int and abs(value) > MAX_INTEGER:
        raise ValueError(f"{name}: expected an integer of 64 bits; got {_short(value)}")
    if kind is str and type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected text; got {value!r}") from None
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}; got {_short(value)}")
    return value


def _short(value: object) -> str:
    """A value for a message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"one of {value.bit_length()} bits"
    return repr(value)
