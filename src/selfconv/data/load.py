"""``load_data``: from a name or a path to a data set."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from selfconv.data.cifar import ARCHIVES, load_cifar
from selfconv.data.dataset import DataError, Dataset
from selfconv.data.digits import load_digits
from selfconv.data.folder import load_folder
from selfconv.data.npz import load_npz

NAMES = ("digits", *ARCHIVES)


def default_cache() -> Path:
    """The folder for downloads: ``$SELFCONV_DATA``, or else ``~/.cache/selfconv``."""
    return Path(os.environ.get("SELFCONV_DATA") or "~/.cache/selfconv").expanduser()


def load_data(
    source: str | os.PathLike[str],
    *,
    image_size: int | None = None,
    seed: int = 0,
    validation: float = 0.1,
    download: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads a data set into memory.

    Args:
        source: ``"digits"``, ``"cifar10"``, ``"cifar100"``, a folder of images, or an ``.npz`` file. To load
            a folder with one of these names, write ``./digits``.
        image_size: side of the images: the shorter side is resized to it, then the image is centre-cropped.
            By default images keep their size (64 for a folder of mixed sizes).
        seed: of the split into training and validation; the test set does not depend on it.
        validation: fraction of the training images to hold out, stratified by class, if the source has no
            validation set. 45,000 + 5,000 images of CIFAR with the default.
        download: whether an archive that is not in the cache may be downloaded.
        cache: folder of downloaded archives; by default ``$SELFCONV_DATA`` or ``~/.cache/selfconv``.

    Raises:
        DataError: the data are invalid; the message is one line that names them and the reason.
    """
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size: expected a positive number of pixels; got {image_size}")
    if not 0 <= validation < 1:
        raise DataError(
            f"validation: expected a share of the training images, 0 ≤ share < 1; got {validation}"
        )
    if not 0 <= seed < 2**32:
        raise DataError(f"seed: expected 0 ≤ seed < 2³²; got {seed}")
    cache = default_cache() if cache is None else Path(cache)
    load = _loader(source, download, cache)
    try:
        return load(image_size=image_size, seed=seed, validation=validation)
    except OSError as error:
        place = error.filename if error.filename is not None else source
        raise DataError(f"{place}: {error.strerror or error}") from error


def _loader(source: str | os.PathLike[str], download: bool, cache: Path) -> Callable[..., Dataset]:
    if source == "digits":
        return load_digits
    if isinstance(source, str) and source in ARCHIVES:
        return lambda **options: load_cifar(source, cache=cache, download=download, **options)
    if not os.fspath(source):  # Path("") is the working directory
        raise DataError("data: expected a name, a folder or a file; got an empty name")
    path = Path(source).expanduser()
    if path.is_dir():
        return lambda **options: load_folder(path, **options)
    if path.is_file() and path.suffix == ".npz":
        return lambda **options: load_npz(path, **options)
    found = "another kind of file" if path.exists() else "no such file or folder"
    close = get_close_matches(str(source), NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    known = f"{', '.join(NAMES)}, a folder, or an .npz file"
    raise DataError(f"data: expected {known}; got {os.fspath(source)!r}: {found}{hint}")
