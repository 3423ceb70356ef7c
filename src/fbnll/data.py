"""Datasets as arrays: embedded digits, Parquet in the hub's layout, the official archives, a user's own file; nothing else knows the disk.

What comes from outside is checked before it is used and before memory is taken for what it promises, and nothing is ever unpickled: a
file that cannot be read, labels that are out of range, images of another size are a ValueError of one sentence that names the file.
"""

import gzip
import hashlib
import io
import json
import math
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from zipfile import ZipFile

import numpy as np
from jaxtyping import Int, Int64, Shaped, UInt8

Split = tuple[np.ndarray, np.ndarray]  # samples and their labels


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as (n, height, width, channels): uint8, or float32 (digits: sixteenths); labels are indices into `classes`."""

    name: str
    X_train: Shaped[np.ndarray, "train *sample"]
    y_train: Int64[np.ndarray, "train"]
    X_test: Shaped[np.ndarray, "test *sample"]
    y_test: Int64[np.ndarray, "test"]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """What a dataset holds, its folder here and on the hub, its publisher's files {URL: checksum} and how to read them, what labels it."""

    classes: tuple[str, ...]
    folder: str
    hub: str
    archive: dict[str, str]
    read: Callable[[list[Path], int], tuple[Split, Split]]
    label: str = "label"
    shape: tuple[int, int, int] = (32, 32, 3)


def load(name: str, data_dir: str | Path | None = None, quiet: bool = False) -> Dataset:
    """A dataset by its name, or a user's own: an .npz (X, y and, if they exist, X_test, y_test, classes) or a folder with Parquet.

    A name is looked for in `data_dir` and in a folder of that name inside it, as Parquet, then as the official archive.
    """
    if name == "digits":
        return _digits()
    if name in KNOWN:
        return _known(name, KNOWN[name], data_folder(data_dir), quiet)
    if name.endswith(".npz"):
        return _npz(Path(name))
    if Path(name).is_dir():
        return _parquet(Path(name).name, Path(name), "label", (), (), quiet)
    raise ValueError(f"the dataset must be digits, {', '.join(KNOWN)}, an .npz file or a folder with Parquet, but it is {name!r}")


def fetch(name: str, data_dir: str | Path | None = None, base_url: str | None = None, quiet: bool = False) -> Path:
    """Download a dataset's official archive, from another place if `base_url` is given, and give the folder that holds it."""
    if name not in KNOWN:
        raise ValueError(f"the dataset to fetch must be one of {', '.join(KNOWN)}, but it is {name!r}")
    folder = data_folder(data_dir) / KNOWN[name].folder
    for url, checksum in KNOWN[name].archive.items():
        file = url.rsplit("/", 1)[1]
        download(f"{base_url.rstrip('/')}/{file}" if base_url else url, folder / file, checksum, quiet)
    return folder


def cache_folder(kind: str) -> Path:
    """Where things are kept that can be had again: `$FBNLL_CACHE` or ~/.cache/fbnll."""
    return Path(os.environ.get("FBNLL_CACHE") or os.path.expanduser("~/.cache/fbnll")) / kind


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where datasets are: what the user says, `$FBNLL_DATA`, or the cache."""
    return Path(data_dir or os.environ.get("FBNLL_DATA") or cache_folder("data"))


def progress(items: Iterable[Any] | None, what: str, quiet: bool = False, **options: Any) -> Any:
    """A bar on the terminal for what takes longer than two seconds."""
    from tqdm import tqdm

    return tqdm(items, desc=what, delay=2, leave=False, disable=quiet or None, **options)  # None: not where nobody watches


# ------------------------------------------------------------------------------------------------------------------------- downloading

MOST_BYTES = 2**29  # no file that is fetched here is half as large


def download(url: str, path: Path, checksum: str, quiet: bool = False) -> Path:
    """A file from the network, with a checksum such as "md5:c32a…"; there is no `path` before it is whole and its checksum is right.

    What an earlier attempt left in `path`.part is continued; a second process waits for the first.
    """
    with _writeable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            if path.exists():
                if (is_now := _checksum(path, checksum)) != checksum:
                    raise ValueError(f"{path} must have the checksum {checksum}, but it has {is_now}: delete it, or restore it")
                return path
            return _verified(url, path, checksum, quiet)


def _verified(url: str, path: Path, checksum: str, quiet: bool) -> Path:
    part = path.with_name(path.name + ".part")
    for _ in ("resumed", "afresh") if part.exists() else ("afresh",):  # the file may have changed on the server in between
        _receive(url, part, quiet)
        if (came := _checksum(part, checksum)) == checksum:
            os.replace(part, path)
            return path
        part.unlink()
    raise ValueError(f"{url} must have the checksum {checksum}, but what came has {came} and was deleted")


@contextmanager
def _writeable(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into one sentence; errors of the network are ConnectionErrors, and pass."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        raise ValueError(f"{path} must be writeable, with room for it on the disk, but: {error.strerror or error}") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is in here with the same folder; a killed one is in no longer."""
    try:
        import fcntl
    except ImportError:  # Windows: two downloads at once may spoil each other, which the checksum finds
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _checksum(path: Path, like: str) -> str:
    algorithm = like.split(":")[0]
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def _receive(url: str, part: Path, quiet: bool) -> None:
    """Append to `part` what it lacks, or write it anew where the server does not continue."""
    have = part.stat().st_size if part.exists() else 0
    with _network(url):
        response = _answer(url, have)
    if response is None:
        return

    def piece() -> bytes:
        with _network(url):
            return bytes(response.read(2**16))

    with response:
        have = have if response.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
        total = None if response.length is None else have + response.length
        bar = progress(None, f"fetching {part.stem}", quiet, initial=have, total=total, unit="B", unit_scale=True)
        with part.open("ab" if have else "wb") as file, bar:
            for chunk in iter(piece, b""):
                have += file.write(chunk)
                bar.update(len(chunk))
                if max(have, total or 0) > MOST_BYTES:
                    raise ValueError(f"{url} must give at most {MOST_BYTES:,} bytes, but it gives {max(have, total or 0):,} or more")
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine might leave the name without the content
    if total is not None and have < total:
        raise ConnectionError(f"{url} must give {total:,} bytes, but the connection ended after {have:,}: try again to go on from there")


def _answer(url: str, have: int) -> Any:
    """The server's response from byte `have` on, or from 0 on if it likes that better; None if it has nothing more."""
    request = Request(url, headers={"User-Agent": "fbnll", **({"Range": f"bytes={have}-"} if have else {})})
    try:
        return urlopen(request, timeout=30)
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:  # the checksum says whether what we have is right
            return None
        raise ConnectionError(f"{url} must be there, but the server answers {error.code} {error.reason}") from error


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Turns whatever the network does into a ConnectionError of one sentence."""
    try:
        yield
    except (OSError, HTTPException) as error:
        if type(error) is ConnectionError:  # it is said already
            raise
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise ConnectionError(f"{url} must be reachable, but {reason}") from error


# ---------------------------------------------------------------------------------------------------------------- digits and own files


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    X, y = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int64)
    return Dataset("digits", *_hold_out(X, y), tuple("0123456789"))


def _hold_out(X: Shaped[np.ndarray, "n *sample"], y: Int[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A fifth of every class as test samples, the same ones every time."""
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(y), bool)
    for c in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == c))
        is_test[members[: round(len(members) / 5)]] = True
    return X[~is_test], y[~is_test], X[is_test], y[is_test]


def _npz(path: Path) -> Dataset:
    with must_be(path, "an .npz with samples X, integer labels y and, if there are any, X_test, y_test and classes"):
        arrays = _members(path, "X", "y", "X_test", "y_test", "classes")
        if missing := {"X", "y", *(["y_test"] if "X_test" in arrays else [])} - arrays.keys():
            raise ValueError(f"it has no {min(missing)}")
        C, classes = _own_classes(arrays)
        train = _checked(_samples(arrays["X"]), arrays["y"], C)
        split = (*train, *_checked(_samples(arrays["X_test"]), arrays["y_test"], C)) if "X_test" in arrays else _hold_out(*train)
        if split[0].shape[1:] != split[2].shape[1:]:
            raise ValueError(f"X holds samples of shape {split[0].shape[1:]} and X_test of {split[2].shape[1:]}")
        if not len(split[2]):
            raise ValueError("no class has three samples, so that none can be held out, and there is no X_test")
        return Dataset(path.stem, *split, classes or _numbered(split[1], split[3]))


def _members(path: Path, *names: str) -> dict[str, np.ndarray]:
    with ZipFile(path) as archive:
        there = set(archive.namelist())
        members = {name: archive.getinfo(f"{name}.npy") for name in names if f"{name}.npy" in there}
        _check_unpacked(path, sum(member.file_size for member in members.values()))
        arrays = {}
        for name, member in members.items():
            with archive.open(member) as file:
                arrays[name] = read_array(cast(io.BufferedIOBase, file), member.file_size)
    return arrays


def _own_classes(arrays: dict[str, np.ndarray]) -> tuple[int, tuple[str, ...]]:
    """How many there may be, and their names if they are given."""
    if "classes" not in arrays:
        return MOST_CLASSES, ()
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind not in "iuU" or not 0 < len(names) <= MOST_CLASSES:
        raise ValueError(f"its classes are of shape {names.shape} and type {names.dtype}")
    return len(names), tuple(map(str, names))


def _samples(X: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    if X.dtype != np.uint8:
        if X.dtype.kind not in "iuf":
            raise ValueError(f"its samples are of type {X.dtype}")
        with np.errstate(over="ignore"):  # said below, in words
            X = X.astype(np.float32)
        if not np.isfinite(X).all():
            raise ValueError(f"sample {np.argwhere(~np.isfinite(X))[0, 0]} holds NaN, infinity or a number too large for single precision")
    return X[..., None] if X.ndim == 3 else X  # grey images


def _numbered(*labels: Int64[np.ndarray, "_"]) -> tuple[str, ...]:
    return tuple(map(str, range(max(int(y.max(initial=-1)) for y in labels) + 1)))


# -------------------------------------------------------------------------------------------------------------- what comes from outside


@contextmanager
def must_be(path: Path, what: str) -> Iterator[None]:
    """Turns whatever goes wrong inside into one sentence about the file."""
    try:
        yield
    except ImportError:  # nothing is wrong with the file
        raise
    except Exception as error:  # readers of foreign bytes raise nearly everything: zlib.error, SyntaxError, struct.error, …
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200].rstrip(".") or type(error).__name__
        raise ValueError(f"{path} must be {what}, but {'it has no ' if isinstance(error, KeyError) else ''}{reason}") from error


def _check_unpacked(path: Path, size: int) -> None:
    """Refuses what promises to become much larger than any data does: 64 MiB, or 256 times what is on the disk."""
    if size > max(2**26, 2**8 * path.stat().st_size):
        raise ValueError(f"its {path.stat().st_size:,} bytes say that they are {size:,} when unpacked")


def read_array(file: io.BufferedIOBase, size: int) -> Shaped[np.ndarray, "..."]:
    """The array at the start of `file`, in `size` bytes of .npy: no memory is taken unless shape and type in its header fit the size."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its .npy has a version other than 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "biufU":
        raise ValueError(f"it holds an array of type {dtype}")
    held = size - file.tell()
    if math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"its header says {shape} of {dtype}, and {held:,} bytes follow")
    content = bytearray(held)
    if file.readinto(content) != held:
        raise ValueError("it ends early")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _checked(X: Shaped[np.ndarray, "..."], y: Shaped[np.ndarray, "..."], C: int) -> Split:
    if y.ndim != 1 or y.dtype.kind not in "iu" or X.ndim < 2 or len(X) != len(y) or X.size == 0:
        raise ValueError(f"it holds samples of shape {X.shape} and labels of shape {y.shape} and type {y.dtype}")
    if wrong := [label for label in (int(y.min()), int(y.max())) if not 0 <= label < C]:
        raise ValueError(f"a label is {wrong[0]}")
    return np.ascontiguousarray(X), y.astype(np.int64)


def _known(name: str, known: Known, root: Path, quiet: bool) -> Dataset:
    C, files = len(known.classes), [url.rsplit("/", 1)[1] for url in known.archive]
    for folder in (base / inner for base in (root / known.folder, root) for inner in ("", known.hub, "data")):
        if _shards(folder, "train"):
            return _parquet(name, folder, known.label, known.shape, known.classes, quiet)
        if all((folder / file).is_file() for file in files):
            train, test = known.read([folder / file for file in files], C)
            return Dataset(name, *train, *test, known.classes)
    raise ValueError(
        f"{name} must be in {root} as Parquet (train*.parquet and test*.parquet) or as {' and '.join(files)}, but it is not: "
        f"point --data-dir at its folder, or run `fbnll data fetch {name}`"
    )


# ------------------------------------------------------------------------------------------------------------------------------ Parquet

MOST_CLASSES = 1000  # tables of counts have that many rows and columns
MOST_PIXELS = 2**20


def _shards(folder: Path, split: str) -> list[Path]:
    """train.parquet, or train-00000-of-00002.parquet and so on, all of them."""
    whole = folder / f"{split}.parquet"
    shards = [whole] if whole.is_file() else sorted(folder.glob(f"{split}*.parquet"))
    promised = {int(number) for path in shards for number in re.findall(r"-of-(\d+)", path.name)}
    if promised and promised != {len(shards)}:
        raise ValueError(f"{folder} must hold {max(promised)} files {split}*.parquet, as their names say, but it holds {len(shards)}")
    return shards


def _parquet(name: str, folder: Path, label: str, shape: tuple[int, ...], classes: tuple[str, ...], quiet: bool) -> Dataset:
    """An empty shape or no classes: what the first file says."""
    splits: list[np.ndarray] = []
    for split in ("train", "test"):
        parts = []
        for path in _shards(folder, split):
            X, y, names = _read_parquet(path, label, shape, classes, quiet)
            shape, classes = X.shape[1:], names or classes
            parts.append((X, y))
        if not parts:
            raise ValueError(f"{folder} must hold train*.parquet and test*.parquet, but it has no {split}*.parquet")
        splits += [np.concatenate(arrays) for arrays in zip(*parts)]
    X_train, y_train, X_test, y_test = splits
    return Dataset(name, X_train, y_train, X_test, y_test, classes or _numbered(y_train, y_test))


def _read_parquet(
    path: Path, label: str, shape: tuple[int, ...], classes: tuple[str, ...], quiet: bool
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    from pyarrow.parquet import ParquetFile

    C = len(classes) or MOST_CLASSES
    what = f"Parquet with images in a column img or image and labels 0..{C - 1} in a column {label}"
    with must_be(path, what), ParquetFile(path) as file:
        columns = file.schema_arrow.names
        image = "img" if "img" in columns else "image"
        if missing := {image, label} - set(columns):
            raise ValueError(f"it has no column {min(missing)}")
        if not file.metadata.num_rows:
            raise ValueError("it has no rows")
        _check_unpacked(path, sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)))
        names = _class_names(file.schema_arrow.metadata or {}, label)
        _check_names(names, classes)
        return *_checked(*_decoded_rows(path, file, image, label, shape, quiet), len(names) or C), names


def _decoded_rows(path: Path, file: Any, image: str, label: str, shape: tuple[int, ...], quiet: bool) -> Split:
    n, y = file.metadata.num_rows, []

    def blobs() -> Iterator[Any]:
        few = 4  # a kilobyte of Parquet may repeat a megabyte in every row, and memory is taken for all rows of a batch
        batches = file.iter_batches(few, columns=[image, label])
        for batch in progress(batches, f"reading {path.name}", quiet, total=-(-n // few), unit_scale=few):
            y.append(batch.column(label).to_numpy(zero_copy_only=False))
            cells = batch.column(image)
            yield from cells.field("bytes") if hasattr(cells, "field") else cells

    X = np.empty(0, np.uint8)
    for row, blob in enumerate(blobs()):
        pixels = _decoded(blob.as_py(), shape)
        if row == 0:
            shape = pixels.shape
            _check_unpacked(path, n * pixels.size)
            X = np.empty((n, *shape), np.uint8)
        X[row] = pixels
    return X, np.concatenate(y)


def _class_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    """The hub's library keeps them as JSON in the file."""
    try:
        return tuple(map(str, json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _check_names(names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Classes may be spelt and ordered otherwise, but another number of them, or none that is known, is another dataset."""
    if names and classes and len(names) != len(classes):
        raise ValueError(f"it names {len(names)} classes")
    if names and classes and not {_letters(name) for name in names} & {_letters(name) for name in classes}:
        raise ValueError(f"its classes are {', '.join(names)}")


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _decoded(blob: bytes | None, shape: tuple[int, ...]) -> UInt8[np.ndarray, "height width channels"]:
    """A PNG or JPEG as an array; its size is looked at before its pixels are unpacked."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(blob or b""), formats=("PNG", "JPEG"))
    except UnidentifiedImageError:
        raise ValueError("an image is neither PNG nor JPEG") from None
    if image.mode[0] in "IF":
        raise ValueError("an image has more than 8 bits a pixel and channel")
    height, width, channels = shape or (image.height, image.width, 1 if image.mode in ("1", "L") else 3)
    if (image.height, image.width) != (height, width):
        raise ValueError(f"an image of {height}×{width} pixels is {image.height}×{image.width}")
    if height * width > MOST_PIXELS:
        raise ValueError(f"an image has {height}×{width} pixels, which is more than {MOST_PIXELS:,}")
    return np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(height, width, channels)


# ------------------------------------------------------------------------------------------------------------------- official archives


def _cifar(paths: list[Path], C: int, members: dict[str, str], labels: int, column: int) -> tuple[Split, Split]:
    """Records of `labels` bytes of labels, then 1,024 bytes each of red, green and blue; `members` maps a file to its split."""
    [path], length = paths, labels + 3072
    with must_be(path, f"the binary archive of CIFAR with labels 0..{C - 1}"), gzip.open(path) as stream:
        found = _untarred(stream, members, 60_000 * length)
        for name in members:
            if name not in found:
                raise ValueError(f"it has no {name}")
            if len(found[name]) % length or not found[name]:
                raise ValueError(f"{name} has {len(found[name]):,} bytes instead of {length:,} for each image")

        def split(name: str) -> Split:
            rows = np.frombuffer(b"".join(found[file] for file in members if members[file] == name), np.uint8).reshape(-1, length)
            return _checked(rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, column], C)

        return split("train"), split("test")


def _untarred(stream: io.BufferedIOBase, names: Collection[str], most: int) -> dict[str, bytes]:
    """Files of a tar by their names, `most` bytes in all, in memory: nothing is written anywhere, and what else it holds is skipped."""
    found: dict[str, bytes] = {}
    while (header := _exactly(stream, 512)).strip(b"\0"):
        member = tarfile.TarInfo.frombuf(header, "utf-8", "replace")
        name = PurePosixPath(member.name).name
        if not 0 <= member.size <= most:
            raise ValueError(f"{name} has {member.size:,} bytes")
        if name in names and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            found[name] = _exactly(stream, member.size)
            most -= member.size
        else:
            for at in range(0, member.size, 2**20):
                _exactly(stream, min(2**20, member.size - at))
        _exactly(stream, -member.size % 512)
    if len(stream.read(2**20)) == 2**20:  # else this was the end, where gzip keeps its checksum
        raise ValueError("it goes on after its end")
    return found


def _exactly(stream: io.BufferedIOBase, size: int) -> bytes:
    if len(content := stream.read(size)) < size:
        raise ValueError("it ends early")
    return content


def _svhn(paths: list[Path], C: int) -> tuple[Split, Split]:
    """MATLAB files whose label 10 is the digit 0."""
    from scipy.io import loadmat, whosmat

    def read(path: Path) -> Split:
        with must_be(path, "a MATLAB 5.0 file with images X (32 × 32 × 3 × n) and labels y in 1..10"):
            held = {name: (shape, kind) for name, shape, kind in whosmat(path)}
            n = held["y"][0][0] if "y" in held else 0
            if held.get("X") != ((32, 32, 3, n), "uint8") or held["y"][0] != (n, 1):
                raise ValueError(f"it holds {held}")
            _check_unpacked(path, n * 3072)
            arrays = loadmat(path, variable_names=["X", "y"])
            X, y = _checked(arrays["X"].transpose(3, 0, 1, 2), arrays["y"][:, 0], C + 1)
            if y.min() == 0:
                raise ValueError("a label is 0")
            return X, y % 10

    train, test = map(read, paths)
    return train, test


def _idx(paths: list[Path], C: int) -> tuple[Split, Split]:
    """Images and labels of Fashion-MNIST in the format of MNIST: a magic number, the sizes, bytes."""

    def read(path: Path, *sample: int) -> np.ndarray:
        with (
            must_be(path, f"a gzipped idx file of {'×'.join(map(str, sample)) + ' images' if sample else 'labels'}"),
            gzip.open(path) as file,
        ):
            magic, n, *size = np.frombuffer(_exactly(file, 8 + 4 * len(sample)), ">u4").tolist()
            if magic != 0x801 + len(sample) or tuple(size) != sample or n > 60_000:
                raise ValueError(f"its header says {[magic, n, *size]}")
            content = _exactly(file, n * math.prod(sample))
            if file.read(1):  # else this was the end, where gzip keeps its checksum
                raise ValueError("it goes on after its end")
            return np.frombuffer(content, np.uint8).reshape(n, *sample)

    def split(images: Path, labels: Path) -> Split:
        X, y = read(images, 28, 28)[..., None], read(labels)
        with must_be(labels, f"labels in 0..{C - 1} of the {len(X)} images in {images.name}"):
            return _checked(X, y, C)

    return split(*paths[:2]), split(*paths[2:])


# ------------------------------------------------------------------------------------------------------------------------ what there is

_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz"  # checksums: the tables "Download" of its cifar.html
_CIFAR10 = {f"{_CIFAR_PAGE}/cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"}
_CIFAR100 = {f"{_CIFAR_PAGE}/cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8"}

_SVHN_PAGE = "http://ufldl.stanford.edu/housenumbers"  # it has no checksums: these are torchvision's (torchvision/datasets/svhn.py)
_SVHN = {
    f"{_SVHN_PAGE}/train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
    f"{_SVHN_PAGE}/test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
}

_FASHION_PAGE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # checksums: https://github.com/zalandoresearch/fashion-mnist
_FASHION = {
    f"{_FASHION_PAGE}/train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    f"{_FASHION_PAGE}/train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    f"{_FASHION_PAGE}/t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    f"{_FASHION_PAGE}/t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}

_CIFAR10_MEMBERS = {**{f"data_batch_{i}.bin": "train" for i in range(1, 6)}, "test_batch.bin": "test"}
_CIFAR100_MEMBERS = {"train.bin": "train", "test.bin": "test"}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KNOWN = {
    "cifar10": Known(
        _words("airplane automobile bird cat deer dog frog horse ship truck"),
        "cifar10",
        "plain_text",
        _CIFAR10,
        partial(_cifar, members=_CIFAR10_MEMBERS, labels=1, column=0),
    ),
    "cifar100": Known(
        _words(
            "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar "
            "cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl "
            "hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom "
            "oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road "
            "rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank "
            "telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
        ),
        "cifar100",
        "cifar100",
        _CIFAR100,
        partial(_cifar, members=_CIFAR100_MEMBERS, labels=2, column=1),
        label="fine_label",
    ),
    "cifar100_coarse": Known(
        _words(
            "aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices household_furniture insects "
            "large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals "
            "non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2"
        ),
        "cifar100",
        "cifar100",
        _CIFAR100,
        partial(_cifar, members=_CIFAR100_MEMBERS, labels=2, column=0),
        label="coarse_label",
    ),
    "svhn": Known(_words("0 1 2 3 4 5 6 7 8 9"), "svhn", "cropped_digits", _SVHN, _svhn),
    "fashion_mnist": Known(
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        "fashion_mnist",
        "fashion_mnist",
        _FASHION,
        _idx,
        shape=(28, 28, 1),
    ),
}
