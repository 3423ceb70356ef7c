"""Datasets from files that the tests make in each official format, and from a small server on the loopback address."""

import gzip
import hashlib
import io
import json
import os
import random
import socket
import struct
import tarfile
import threading
import tracemalloc
import zipfile
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat

from fbnll import data
from fbnll.cli import main
from fbnll.data import KNOWN, MOST_CLASSES, Dataset, download, fetch, load

REAL = Path(os.environ.get("FBNLL_DATA") or "nowhere")
NAMES = ["cifar10", "cifar100", "cifar100_coarse", "svhn", "fashion_mnist"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@contextmanager
def refused(*words, error=ValueError):
    """One sentence that says what is required, what came, and these words."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in text
    assert " must " in text
    assert len(text) < 700
    for word in words:
        assert word in text


@contextmanager
def little_memory(most=2**25):
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most


def same(dataset: Dataset, X_train, y_train, X_test, y_test) -> bool:
    pairs = zip((dataset.X_train, dataset.y_train, dataset.X_test, dataset.y_test), (X_train, y_train, X_test, y_test))
    return all(came.dtype == wanted.dtype and np.array_equal(came, wanted) for came, wanted in pairs)


# ------------------------------------------------------------------------------------------------------ files in the official formats


def made_up(rng, name, train=7, test=4):
    """Images, and labels with the first and the last class in them."""
    C, shape = len(KNOWN[name].classes), KNOWN[name].shape
    X = rng.integers(0, 256, (train + test, *shape)).astype(np.uint8)
    y = rng.permutation(np.r_[0, C - 1, rng.integers(0, C, train + test - 2)])
    return X[:train], y[:train], X[train:], y[train:]


def tar_gz(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def records(X, *labels):
    """CIFAR's: bytes of labels, then red, green and blue."""
    columns = [np.asarray(y, np.uint8)[:, None] for y in labels]
    return np.hstack([*columns, X.transpose(0, 3, 1, 2).reshape(len(X), 3072)]).tobytes()


def write_cifar10(folder, X_train, y_train, X_test, y_test):
    parts = np.array_split(np.arange(len(X_train)), 5)
    files = {f"data_batch_{i}.bin": records(X_train[rows], y_train[rows]) for i, rows in enumerate(parts, 1)}
    extra = {"readme.html": b"<p>not data</p>", "batches.meta.txt": b"airplane\n"}
    tar_gz(folder / "cifar-10-binary.tar.gz", {**extra, **files, "test_batch.bin": records(X_test, y_test)})


def write_cifar100(folder, X_train, y_train, X_test, y_test):
    """The coarse label before the fine one; here it is the fine one modulo 20."""
    files = {"train.bin": records(X_train, y_train % 20, y_train), "test.bin": records(X_test, y_test % 20, y_test)}
    tar_gz(folder / "cifar-100-binary.tar.gz", {"fine_label_names.txt": b"apple\n", **files})


def write_cifar100_coarse(folder, X_train, y_train, X_test, y_test):
    write_cifar100(folder, X_train, y_train + 40, X_test, y_test + 40)


def write_svhn(folder, *arrays):
    for split, X, y in (("train", *arrays[:2]), ("test", *arrays[2:])):
        digits = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": X.transpose(1, 2, 3, 0), "y": digits}, do_compression=True)


def write_fashion_mnist(folder, *arrays):
    for split, X, y in (("train", *arrays[:2]), ("t10k", *arrays[2:])):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(struct.pack(">4I", 0x803, len(X), 28, 28) + X.tobytes()))
        labels = struct.pack(">2I", 0x801, len(y)) + y.astype(np.uint8).tobytes()
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def write_official(name, folder, *arrays):
    folder.mkdir(parents=True, exist_ok=True)
    globals()[f"write_{name}"](folder, *arrays)


def png(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, kind)
    return file.getvalue()


def table(X, y, image="img", label="label", names=None):
    """As the hub's library writes it: images as {bytes, path}, the names of classes as JSON beside the schema."""
    cells = [{"bytes": blob if isinstance(blob, bytes | None) else png(blob), "path": None} for blob in X]
    columns = pa.table({image: pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])), label: pa.array(y)})
    about = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
    return columns.replace_schema_metadata({"huggingface": json.dumps(about)} if names else None)


def write_hub(name, folder, X_train, y_train, X_test, y_test):
    known = KNOWN[name]
    image = "img" if name.startswith("cifar") else "image"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(X_train, y_train, image, known.label, known.classes), folder / "train-00000-of-00001.parquet")
    pq.write_table(table(X_test, y_test, image, known.label, known.classes), folder / "test-00000-of-00001.parquet")


WRITERS = {"official": write_official, "hub": write_hub}


# -------------------------------------------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_and_every_label_is_read_from_every_layout(name, layout, rng, tmp_path):
    arrays = made_up(rng, name)
    WRITERS[layout](name, tmp_path / KNOWN[name].folder, *arrays)
    dataset = load(name, tmp_path)
    assert same(dataset, *arrays)
    assert dataset.name == name
    assert dataset.classes == KNOWN[name].classes


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_may_be_in_the_folder_itself_or_where_the_hub_puts_it(name, layout, rng, tmp_path):
    arrays = made_up(rng, name)
    for where in ("", "data", KNOWN[name].hub, f"{KNOWN[name].folder}/data"):
        root = tmp_path / f"root-{len(where)}"
        WRITERS[layout](name, root / where, *arrays)
        assert same(load(name, root), *arrays)


def test_other_datasets_in_the_same_folder_are_not_taken_for_the_one_that_is_asked_for(rng, tmp_path):
    for name in ("cifar10", "cifar100", "fashion_mnist"):
        write_hub(name, tmp_path / KNOWN[name].folder, *made_up(rng, name))
    with refused("svhn must be in", "train_32x32.mat and test_32x32.mat", "fbnll data fetch svhn"):
        load("svhn", tmp_path)


def test_the_folder_is_what_the_user_says_else_what_the_environment_says(rng, tmp_path, monkeypatch):
    arrays = made_up(rng, "cifar10")
    write_official("cifar10", tmp_path / "cifar10", *arrays)
    monkeypatch.setenv("FBNLL_DATA", str(tmp_path))
    assert same(load("cifar10"), *arrays)
    with refused("cifar10 must be in"):
        load("cifar10", tmp_path / "elsewhere")
    monkeypatch.delenv("FBNLL_DATA")
    monkeypatch.setenv("FBNLL_CACHE", str(tmp_path))
    assert data.data_folder() == tmp_path / "data"


def test_both_kinds_of_labels_of_cifar100_come_from_one_archive(rng, tmp_path):
    X_train, y_train, X_test, y_test = made_up(rng, "cifar100")
    write_official("cifar100", tmp_path, X_train, y_train, X_test, y_test)
    assert same(load("cifar100", tmp_path), X_train, y_train, X_test, y_test)
    assert same(load("cifar100_coarse", tmp_path), X_train, y_train % 20, X_test, y_test % 20)


def test_label_10_of_svhn_is_the_digit_0(rng, tmp_path):
    X = rng.integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)
    for split in ("train", "test"):
        savemat(tmp_path / f"{split}_32x32.mat", {"X": X.transpose(1, 2, 3, 0), "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
    dataset = load("svhn", tmp_path)
    assert dataset.y_train.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert np.array_equal(dataset.X_test, X)


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_has_as_many_distinct_classes_as_its_publisher_says(name):
    expected = {"cifar100": 100, "cifar100_coarse": 20}.get(name, 10)
    assert len(set(KNOWN[name].classes)) == len(KNOWN[name].classes) == expected


def test_parquet_in_pieces_is_the_same_as_in_one(rng, tmp_path):
    X_train, y_train, X_test, y_test = made_up(rng, "cifar10", train=9)
    for i in range(3):
        rows = slice(3 * i, 3 * i + 3)
        pq.write_table(table(X_train[rows], y_train[rows]), tmp_path / f"train-0000{i}-of-00003.parquet", row_group_size=2)
    pq.write_table(table(X_test, y_test), tmp_path / "test.parquet")
    assert same(load("cifar10", tmp_path), X_train, y_train, X_test, y_test)
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    with refused("must hold 3 files train*.parquet", "it holds 2"):
        load("cifar10", tmp_path)


def test_classes_may_be_spelt_and_ordered_as_the_file_says(rng, tmp_path):
    arrays = made_up(rng, "fashion_mnist")
    names = ["Trouser", "T - shirt / top", *KNOWN["fashion_mnist"].classes[2:]]
    for split, X, y in (("train", *arrays[:2]), ("test", *arrays[2:])):
        pq.write_table(table(X, y, "image", names=names), tmp_path / f"{split}.parquet")
    assert load("fashion_mnist", tmp_path).classes == tuple(names)


def test_a_folder_of_parquet_is_a_dataset_of_its_own(rng, tmp_path):
    X, y = rng.integers(0, 256, (6, 9, 5, 3)).astype(np.uint8), np.array([0, 1, 2, 0, 1, 2])
    for split, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        pq.write_table(table(X[rows], y[rows], "image"), tmp_path / f"{split}.parquet")
    dataset = load(str(tmp_path))
    assert same(dataset, X[:4], y[:4], X[4:], y[4:])
    assert dataset.classes == ("0", "1", "2")


def test_images_may_be_plain_bytes_grey_and_jpeg(tmp_path):
    X = np.full((4, 16, 16, 1), 40, np.uint8)
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": [png(x, "JPEG") for x in X], "label": [0, 1, 1, 0]}), tmp_path / f"{split}.parquet")
    assert same(load(str(tmp_path)), X, np.array([0, 1, 1, 0]), X, np.array([0, 1, 1, 0]))


def test_digits_need_no_file_and_hold_out_a_fifth_of_every_class():
    digits, again = load("digits"), load("digits")
    assert digits.X_train.dtype == np.float32
    assert digits.X_train.shape[1:] == (8, 8, 1)
    assert (digits.X_train.min(), digits.X_train.max()) == (0, 1)
    assert len(digits.y_train) + len(digits.y_test) == 1797
    for c in range(10):
        test, train = ((y == c).sum() for y in (digits.y_test, digits.y_train))
        assert test == round((test + train) / 5)
    assert same(again, digits.X_train, digits.y_train, digits.X_test, digits.y_test)


# ------------------------------------------------------------------------------------------------------------------- a user's own .npz


def write_npz(path, compressed=True, **changes):
    rng = np.random.default_rng(1)
    arrays = {"X": rng.integers(0, 256, (20, 6, 6, 3)).astype(np.uint8), "y": np.arange(20) % 4} | changes
    arrays = {name: value for name, value in arrays.items() if value is not None}
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return str(path)


@pytest.mark.parametrize("compressed", [True, False])
def test_an_own_file_gives_its_arrays_and_its_classes(compressed, rng, tmp_path):
    X, y = rng.random((20, 5), np.float32), (np.arange(20) % 4).astype(np.int32)
    X_test, y_test = rng.random((3, 5), np.float32), np.array([0, 1, 3])
    path = write_npz(tmp_path / "own.npz", compressed, X=X, y=y, X_test=X_test, y_test=y_test, classes=np.array(list("abcd")))
    dataset = load(path)
    assert same(dataset, X, y.astype(np.int64), X_test, y_test)
    assert dataset.classes == ("a", "b", "c", "d")
    assert dataset.name == "own"


def test_an_own_file_without_test_samples_holds_out_a_fifth_of_every_class(tmp_path):
    dataset = load(write_npz(tmp_path / "own.npz"))
    assert Counter(dataset.y_test.tolist()) == dict.fromkeys(range(4), 1)
    assert len(dataset.y_train) == 16
    assert dataset.classes == ("0", "1", "2", "3")


def test_a_class_may_be_in_the_test_samples_alone(tmp_path):
    path = write_npz(tmp_path / "own.npz", X_test=np.zeros((1, 6, 6, 3), np.uint8), y_test=np.array([6]))
    assert load(path).classes == tuple("0123456")


def test_grey_images_get_a_channel_and_other_numbers_become_single_precision(tmp_path):
    grey = load(write_npz(tmp_path / "grey.npz", X=np.full((20, 6, 7), 3, np.uint8)))
    assert grey.X_train.shape == (16, 6, 7, 1)
    assert grey.X_train.dtype == np.uint8
    for dtype in (np.float16, np.float64, np.int64, ">f4"):
        other = load(write_npz(tmp_path / "other.npz", X=np.asfortranarray(np.arange(40).reshape(20, 2)).astype(dtype)))
        assert other.X_train.dtype == np.float32
        assert sorted(np.r_[other.X_train, other.X_test][:, 0]) == list(range(0, 40, 2))


Y = np.arange(20) % 4
WRONG = {
    "no samples": ({"X": None}, "it has no X"),
    "no labels": ({"y": None}, "it has no y"),
    "no test labels": ({"X_test": np.zeros((2, 6, 6, 3), np.uint8)}, "it has no y_test"),
    "too few labels": ({"y": Y[:19]}, "samples of shape (20, 6, 6, 3) and labels of shape (19,)"),
    "labels that are not integers": ({"y": Y + 0.5}, "type float64"),
    "labels in a table": ({"y": Y[:, None]}, "labels of shape (20, 1)"),
    "names for labels": ({"y": np.array(list("abcd"))[Y]}, "type <U1"),
    "a negative label": ({"y": Y - 1}, "a label is -1"),
    "a label beyond the classes": ({"classes": np.array(["a", "b", "c"])}, "a label is 3"),
    "a label beyond all bounds": ({"y": np.r_[Y[:19], 2**62]}, f"a label is {2**62}"),
    "an unsigned label beyond all bounds": ({"y": np.r_[Y[:19], 0].astype(np.uint64) - np.uint64(1)}, f"a label is {2**64 - 1}"),
    "classes that are no names": ({"classes": np.ones(4)}, "classes are of shape (4,) and type float64"),
    "NaN": ({"X": np.r_[np.zeros((19, 5)), [[0, 0, np.nan, 0, 0]]]}, "sample 19 holds NaN"),
    "infinity": ({"X": np.full((20, 5), -np.inf, np.float16)}, "sample 0 holds NaN, infinity"),
    "numbers too large": ({"X": np.full((20, 5), 1e300)}, "sample 0 holds NaN, infinity or a number too large"),
    "text": ({"X": np.full((20, 5), "x")}, "samples are of type <U1"),
    "complex numbers": ({"X": np.ones((20, 5), complex)}, "complex128"),
    "no sample at all": ({"X": np.zeros((0, 5)), "y": Y[:0]}, "samples of shape (0, 5)"),
    "empty samples": ({"X": np.zeros((20, 0))}, "samples of shape (20, 0)"),
    "numbers for samples": ({"X": np.zeros(20)}, "samples of shape (20,)"),
    "test samples of another shape": (
        {"X_test": np.zeros((2, 6, 6, 1), np.uint8), "y_test": Y[:2]},
        "X holds samples of shape (6, 6, 3) and X_test of (6, 6, 1)",
    ),
    "nothing to hold out": ({"X": np.zeros((4, 5)), "y": np.arange(4)}, "no class has three samples"),
    "objects": ({"X": np.array([{}] * 20, dtype=object)}, "type object"),
    "records": ({"y": np.zeros(20, [("a", "i4")])}, "type [('a', '<i4')]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_own_file_is_refused_for(case, tmp_path):
    changes, words = WRONG[case]
    path = write_npz(tmp_path / "own.npz", **changes)
    with refused(f"{path} must be an .npz with samples X, integer labels y", words):
        load(path)


def lying_npy(shape, descr="'<f8'", after=b"\0" * 100):
    """A .npy of a few bytes whose header promises another shape."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + after


LIES = {
    "gigabytes": lying_npy((20, 2**28)),
    "more than there is in the world": lying_npy((2**62, 2**62)),
    "an item of a gigabyte": lying_npy((1,), "'|V1073741824'"),
    "a string of a gigabyte": lying_npy((1,), "'<U268435456'"),
    "negative sizes": lying_npy((-5, -20), "'|u1'"),
    "less than there is": lying_npy((5,), "'|u1'"),
    "another version": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"\0" * 100,
    "nothing": b"",
    "no header": b"\x93NUMPY\x01\x00\xff",
    "code": lying_npy((5,), "__import__('os').getcwd()"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("member", ["X", "y", "classes"])
def test_an_own_file_whose_header_lies_is_refused_before_memory_is_taken(lie, member, tmp_path):
    path = write_npz(tmp_path / "own.npz", **{member: None})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{member}.npy", LIES[lie])
    with little_memory(), refused(f"{path} must be an .npz"):
        load(path)


def test_an_own_file_that_unpacks_to_far_more_than_it_is_is_refused_before_memory_is_taken(tmp_path):
    path = write_npz(tmp_path / "own.npz", X=np.zeros((2**21 + 1, 32), np.uint8), y=np.zeros(2**21 + 1, np.uint8))
    with little_memory(), refused("when unpacked"):
        load(path)


def test_what_is_no_npz_is_refused(tmp_path):
    for content in (b"", b"PK\x03\x04", b"hello" * 100):
        (tmp_path / "own.npz").write_bytes(content)
        with refused("own.npz must be an .npz"):
            load(str(tmp_path / "own.npz"))
    with refused("missing.npz must be an .npz", "No such file or directory"):
        load(str(tmp_path / "missing.npz"))


def test_an_unknown_dataset_is_named(tmp_path):
    with refused("dataset must be digits, cifar10, cifar100, cifar100_coarse, svhn, fashion_mnist, an .npz", "it is 'mnist'"):
        load("mnist", tmp_path)
    with refused("dataset to fetch must be one of cifar10", "it is 'digits'"):
        fetch("digits", tmp_path)


# ------------------------------------------------------------------------------------------------------------ Parquet that is not right


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": [0, 1, 10]}, "a label is 10"),
        ({"y": [0, 1, -1]}, "a label is -1"),
        ({"y": [0, 1, None]}, "type float64"),
        ({"y": ["cat", "dog", "cat"]}, "labels of shape (3,) and type object"),
        ({"label": "target"}, "it has no column label"),
        ({"image": "picture"}, "it has no column image"),
        ({"X": [b"GIF89a", b"", b""]}, "an image is neither PNG nor JPEG"),
        ({"X": [None, None, None]}, "an image is neither PNG nor JPEG"),
        ({"X": [png(np.zeros((32, 32, 3), np.uint8))[:-30]] * 3}, "must be Parquet with images"),
        ({"X": np.zeros((3, 28, 28, 1), np.uint8)}, "an image of 32×32 pixels is 28×28"),
        ({"X": np.zeros((0, 32, 32, 3), np.uint8), "y": np.zeros(0, int)}, "it has no rows"),
        ({"names": ["cat", "dog"]}, "it names 2 classes"),
        ({"names": list("0123456789")}, "its classes are 0, 1, 2"),
    ],
)
def test_parquet_is_refused_where_something_is_not_as_it_must_be(changes, words, tmp_path):
    columns = table(**{"X": np.zeros((3, 32, 32, 3), np.uint8), "y": [0, 1, 2]} | changes)
    for split in ("train", "test"):
        pq.write_table(columns, tmp_path / f"{split}.parquet")
    with refused("train.parquet must be Parquet with images in a column img or image and labels 0..9 in a column label", words):
        load("cifar10", tmp_path)


def test_parquet_without_test_samples_is_refused(tmp_path):
    pq.write_table(table(np.zeros((1, 32, 32, 3), np.uint8), [0]), tmp_path / "train.parquet")
    with refused("must hold train*.parquet and test*.parquet, but it has no test*.parquet"):
        load("cifar10", tmp_path)


def test_own_images_are_of_one_size_of_eight_bits_and_of_bounded_size(tmp_path):
    deep = io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.uint16)).save(deep, "PNG")
    small, other = np.zeros((9, 9, 3), np.uint8), np.zeros((9, 8, 3), np.uint8)
    cases = {
        "an image of 9×9 pixels is 9×8": [png(small), png(other)],
        "more than 8 bits": [deep.getvalue()] * 2,
        "which is more than 1,048,576": [png(np.zeros((1025, 1024, 1), np.uint8))] * 2,
        f"a label is {MOST_CLASSES}": [png(small)] * 2,
    }
    for words, X in cases.items():
        pq.write_table(table(X, [0, MOST_CLASSES]), tmp_path / "train.parquet")
        with refused("train.parquet must be Parquet", words):
            load(str(tmp_path))


def test_an_image_that_claims_to_be_enormous_is_refused_before_memory_is_taken(tmp_path):
    blob = bytearray(png(np.zeros((32, 32, 3), np.uint8)))
    blob[16:24] = struct.pack(">2I", 60_000, 60_000)
    pq.write_table(table([bytes(blob)], [0]), tmp_path / "train.parquet")
    for name, where in (("cifar10", tmp_path), (str(tmp_path), None)):
        with little_memory(), refused("train.parquet must be Parquet"):
            load(name, where)


POOLS = [pa.default_memory_pool()]  # they must live as long as anything that was made in them


@pytest.fixture
def arrow_memory():
    """What Arrow takes at most at a time while the test runs."""
    POOLS.append(pa.proxy_memory_pool(POOLS[0]))
    pa.set_memory_pool(POOLS[-1])
    yield POOLS[-1]
    pa.set_memory_pool(POOLS[0])


@pytest.mark.parametrize("blob", [png(np.zeros((1000, 1000, 1), np.uint8)), bytes(2**20)], ids=["image", "zeros"])
def test_parquet_that_repeats_one_image_for_ever_is_refused_before_memory_is_taken(blob, tmp_path, arrow_memory):
    dictionary = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array([blob]))
    columns = pa.table({"image": dictionary, "label": np.zeros(100_000, np.int8)})
    pq.write_table(columns, tmp_path / "train.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "train.parquet").stat().st_size < 20_000
    with little_memory(), refused("train.parquet must be Parquet"):
        load(str(tmp_path))
    assert arrow_memory.max_memory() < 2**25


def test_parquet_that_unpacks_to_far_more_than_it_is_is_refused_before_memory_is_taken(tmp_path, arrow_memory):
    columns = pa.table({"image": pa.array([bytes(2**26)]), "label": [0]})
    pq.write_table(columns, tmp_path / "train.parquet", compression="zstd", use_dictionary=False)
    before = arrow_memory.max_memory()
    with little_memory(), refused("when unpacked"):
        load(str(tmp_path))
    assert arrow_memory.max_memory() < before + 2**20


# ------------------------------------------------------------------------------------------------------------- files that are not whole


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_anywhere_is_refused_and_named(name, layout, rng, tmp_path):
    WRITERS[layout](name, tmp_path, *made_up(rng, name))
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for length in (0, 1, 10, 20, len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 1):
            path.write_bytes(whole[:length])
            with refused(f"{path} must be"):
                load(name, tmp_path)
        path.write_bytes(whole)
    load(name, tmp_path)


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", ["cifar10", "svhn", "fashion_mnist"])
def test_a_file_with_a_wrong_byte_is_refused_or_gives_images_and_labels_in_range(name, layout, rng, tmp_path):
    WRITERS[layout](name, tmp_path, *made_up(rng, name, train=5, test=1))
    luck = random.Random(0)
    path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    for _ in range(40):
        at = luck.choice([luck.randrange(len(whole)), luck.randrange(200), len(whole) - 1 - luck.randrange(200)])
        path.write_bytes(whole[:at] + bytes([whole[at] ^ luck.randrange(1, 256)]) + whole[at + 1 :])
        with suppress(ValueError):
            dataset = load(name, tmp_path)
            assert dataset.X_train.shape == (5, *KNOWN[name].shape)
            assert 0 <= dataset.y_train.min() <= dataset.y_train.max() < 10


def test_a_wrong_byte_in_the_contents_of_a_gzip_is_always_found(rng, tmp_path):
    write_official("fashion_mnist", tmp_path, *made_up(rng, "fashion_mnist", train=2))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for at in range(20, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused(f"{path} must be a gzipped idx file of 28×28 images"):
            load("fashion_mnist", tmp_path)


# --------------------------------------------------------------------------------------------------------- archives that are not right


GOOD = records(np.zeros((2, 32, 32, 3), np.uint8), [1, 9])


def cifar10_files(**changes):
    files = {f"data_batch_{i}.bin": GOOD for i in range(1, 6)} | {"test_batch.bin": GOOD}
    return {name: content for name, content in (files | changes).items() if content is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_batch_3.bin": None}, "it has no data_batch_3.bin"),
        ({"test_batch.bin": None}, "it has no test_batch.bin"),
        ({"data_batch_2.bin": GOOD[:-1]}, "data_batch_2.bin has 6,145 bytes instead of 3,073 for each image"),
        ({"data_batch_2.bin": b""}, "data_batch_2.bin has 0 bytes"),
        ({"test_batch.bin": records(np.zeros((1, 32, 32, 3), np.uint8), [10])}, "a label is 10"),
    ],
)
def test_an_archive_of_cifar_is_refused_where_something_is_not_as_it_must_be(changes, words, tmp_path):
    tar_gz(tmp_path / "cifar-10-binary.tar.gz", cifar10_files(**changes))
    with refused("cifar-10-binary.tar.gz must be the binary archive of CIFAR with labels 0..9", words):
        load("cifar10", tmp_path)


def tar_header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [2**30, 2**62, -1])
@pytest.mark.parametrize("name", ["data_batch_1.bin", "readme.html"])
def test_a_tar_whose_header_lies_is_refused_before_memory_is_taken(name, size, tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(tar_header(name, size) + bytes(2**20)))
    with little_memory(), refused("must be the binary archive of CIFAR", f"{name} has {size:,} bytes"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_a_tar_with_an_endless_name_takes_no_memory(kind, tmp_path):
    size = 2**27
    with gzip.open(tmp_path / "cifar-10-binary.tar.gz", "wb", compresslevel=1) as file:
        file.write(tar_header("data_batch_1.bin", size, kind))
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
        file.write(bytes(1024))
    with little_memory(), refused("it has no data_batch_1.bin"):
        load("cifar10", tmp_path)


def test_a_tar_that_goes_on_after_its_end_is_refused_before_memory_is_taken(tmp_path):
    tar_gz(tmp_path / "cifar-10-binary.tar.gz", cifar10_files())
    load("cifar10", tmp_path)
    with (tmp_path / "cifar-10-binary.tar.gz").open("ab") as file:
        file.write(gzip.compress(bytes(2**25), 1))
    with little_memory(), refused("it goes on after its end"):
        load("cifar10", tmp_path)


def test_a_link_in_a_tar_is_no_file_and_nothing_is_written(tmp_path):
    content = b"".join(tar_header(name, 0, tarfile.SYMTYPE) for name in cifar10_files()) + bytes(1024)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(content))
    with refused("it has no data_batch_1.bin"):
        load("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_only_as_many_images_as_cifar_has_are_read(tmp_path, rng):
    tar_gz(tmp_path / "cifar-10-binary.tar.gz", {"readme": b"", "data_batch_1.bin": bytes(3073 * 60_001)})
    with refused(f"data_batch_1.bin has {3073 * 60_001:,} bytes"):
        load("cifar10", tmp_path)


def idx(*header, after=b""):
    return gzip.compress(struct.pack(f">{len(header)}I", *header) + after)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train-images-idx3-ubyte.gz", idx(0x803, 2**32 - 1, 28, 28), "its header says [2051, 4294967295, 28, 28]"),
        ("train-images-idx3-ubyte.gz", idx(0x803, 1, 2**31, 28), "its header says"),
        ("train-images-idx3-ubyte.gz", idx(0x801, 5, 28, 28), "its header says"),
        ("train-images-idx3-ubyte.gz", idx(0x803, 7, 28, 28, after=bytes(783)), "it ends early"),
        ("train-images-idx3-ubyte.gz", idx(0x803, 0, 28, 28, after=bytes(1)), "it goes on after its end"),
        ("train-images-idx3-ubyte.gz", idx(0x803, 0, 28, 28), "must be labels in 0..9 of the 0 images"),
        ("train-images-idx3-ubyte.gz", idx(0x803, 60_000, 28, 28, after=bytes(784)), "it ends early"),
        ("t10k-labels-idx1-ubyte.gz", idx(0x801, 3, after=bytes(3)), "samples of shape (4, 28, 28, 1) and labels of shape (3,)"),
        ("t10k-labels-idx1-ubyte.gz", idx(0x801, 4, after=b"\0\1\2\x0a"), "a label is 10"),
    ],
)
def test_files_of_fashion_mnist_are_refused_where_something_is_not_as_it_must_be(file, content, words, rng, tmp_path):
    write_official("fashion_mnist", tmp_path, *made_up(rng, "fashion_mnist"))
    (tmp_path / file).write_bytes(content)
    with little_memory(2**26), refused(words):
        load("fashion_mnist", tmp_path)


IMAGES = np.zeros((32, 32, 3, 2), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": IMAGES, "y": np.array([[1], [0]], np.uint8)}, "a label is 0"),
        ({"X": IMAGES, "y": np.array([[1], [11]], np.uint8)}, "a label is 11"),
        ({"X": IMAGES, "y": np.array([[1.0], [2.0]])}, "type float64"),
        ({"X": IMAGES}, "it holds {'X':"),
        ({"y": np.ones((2, 1), np.uint8)}, "it holds {'y':"),
        ({"X": IMAGES[:28], "y": np.ones((2, 1), np.uint8)}, "(28, 32, 3, 2)"),
        ({"X": IMAGES.astype(np.float64), "y": np.ones((2, 1), np.uint8)}, "double"),
        ({"X": IMAGES, "y": np.array([["a"], ["b"]], object)}, "type object"),
    ],
)
def test_files_of_svhn_are_refused_where_something_is_not_as_it_must_be(arrays, words, tmp_path):
    for split in ("train", "test"):
        savemat(tmp_path / f"{split}_32x32.mat", arrays)
    with refused("train_32x32.mat must be a MATLAB 5.0 file with images X (32 × 32 × 3 × n) and labels y in 1..10", words):
        load("svhn", tmp_path)


def test_a_matlab_file_whose_header_lies_is_refused_before_memory_is_taken(tmp_path):
    file = io.BytesIO()
    savemat(file, {"X": IMAGES, "y": np.ones((2, 1), np.uint8)})
    n = 2**18
    lying = file.getvalue().replace(struct.pack("<4i", 32, 32, 3, 2), struct.pack("<4i", 32, 32, 3, n))
    lying = lying.replace(struct.pack("<2i", 2, 1), struct.pack("<2i", n, 1))
    for split in ("train", "test"):
        (tmp_path / f"{split}_32x32.mat").write_bytes(lying)
    with little_memory(), refused("train_32x32.mat must be a MATLAB 5.0 file", "when unpacked"):
        load("svhn", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------- from the network


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        site, asked = self.server.site, self.headers.get("Range")
        site.asked.append((self.path, asked))
        content = site.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(asked[len("bytes=") : -1]) if asked and site.ranges else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if site.announced is not False:
            self.send_header("Content-Length", str(site.announced or len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : site.cut])

    def log_message(self, *_):
        pass


class Site:
    """What a server offers, how it behaves, and what it was asked for."""

    def __init__(self, url):
        self.url, self.files, self.asked = url, {}, []
        self.ranges, self.cut, self.announced = True, None, None  # it may stop early, and announce another length, or none


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.site = Site(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.site
    server.shutdown()
    thread.join()
    server.server_close()


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


CONTENT = random.Random(0).randbytes(300_000)


def test_a_download_is_the_file_and_nothing_else(site, tmp_path):
    site.files["/a.bin"] = CONTENT
    path = download(f"{site.url}/a.bin", tmp_path / "new" / "a.bin", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", quiet=True)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_what_is_there_and_right_is_not_downloaded_again(site, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert site.asked == []


def test_what_is_there_and_wrong_is_kept_and_named(site, tmp_path):
    site.files["/a.bin"] = CONTENT
    (tmp_path / "a.bin").write_bytes(b"my own")
    with refused(f"a.bin must have the checksum {md5(CONTENT)}, but it has {md5(b'my own')}: delete it, or restore it"):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert (tmp_path / "a.bin").read_bytes() == b"my own"


@pytest.mark.parametrize("have", [1, 1000, len(CONTENT) - 1])
@pytest.mark.parametrize("ranges", [True, False])
def test_what_an_earlier_attempt_left_is_continued_if_the_server_can(have, ranges, site, tmp_path):
    site.files["/a.bin"], site.ranges = CONTENT, ranges
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:have])
    assert download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT)).read_bytes() == CONTENT
    assert site.asked == [("/a.bin", f"bytes={have}-")]
    assert not (tmp_path / "a.bin.part").exists()


def test_a_connection_that_breaks_leaves_what_came_and_the_next_attempt_goes_on_from_there(site, tmp_path):
    site.files["/a.bin"], site.cut = CONTENT, 200_000
    with refused("must give 300,000 bytes, but the connection ended after 200,000: try again", error=ConnectionError):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin.part"]
    site.cut = None
    assert download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT)).read_bytes() == CONTENT
    assert site.asked[1] == ("/a.bin", "bytes=200000-")


def test_a_file_that_changed_on_the_server_in_between_is_downloaded_afresh(site, tmp_path):
    site.files["/a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(b"an older version")
    assert download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT)).read_bytes() == CONTENT
    assert [asked for _, asked in site.asked] == ["bytes=16-", None]


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"])
def test_a_whole_file_that_an_earlier_attempt_left_is_checked(left, site, tmp_path):
    site.files["/a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(left)
    assert download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize("left", [None, CONTENT[:500], b"an older version"])
@pytest.mark.parametrize("announced", [None, False])
def test_a_file_that_was_tampered_with_is_refused_and_deleted(left, announced, site, tmp_path):
    site.files["/a.bin"], site.announced = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), announced
    if left:
        (tmp_path / "a.bin.part").write_bytes(left)
    with refused(f"/a.bin must have the checksum {md5(CONTENT)}, but what came has", "was deleted"):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_unannounced_is_found_by_the_checksum(site, tmp_path):
    site.files["/a.bin"], site.announced, site.cut = CONTENT, False, 1000
    with refused("must have the checksum"):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("announced", [10**15, False])
def test_a_file_that_is_far_too_long_is_not_received(announced, site, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_BYTES", 100_000)
    site.files["/a.bin"], site.announced = CONTENT, announced
    with refused("must give at most 100,000 bytes"):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin.part").stat().st_size < 200_000


def test_a_file_that_is_not_there_is_named(site, tmp_path):
    with refused(f"{site.url}/a.bin must be there, but the server answers 404 Not Found", error=ConnectionError):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/a.bin"
        with refused(f"{url} must be reachable, but", "refused", error=ConnectionError):
            download(url, tmp_path / "a.bin", md5(CONTENT))


def test_a_server_that_speaks_something_else_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.bin"
        with refused(f"{url} must be reachable, but", error=ConnectionError):
            download(url, tmp_path / "a.bin", md5(CONTENT))
        thread.join()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a file on a disk that is full")
def test_a_full_disk_is_named(site, tmp_path):
    site.files["/a.bin"] = CONTENT
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with refused("a.bin must be writeable, with room for it on the disk, but: No space left on device"):
        download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT))
    assert not (tmp_path / "a.bin").exists()


def test_a_folder_that_cannot_be_made_is_named(site, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with refused("a.bin must be writeable", "Not a directory"):
        download(f"{site.url}/a.bin", tmp_path / "file" / "folder" / "a.bin", md5(CONTENT))
    assert site.asked == []


def test_two_downloads_of_one_file_at_once_wait_for_each_other(site, tmp_path):
    pytest.importorskip("fcntl", reason="needs locks on files")
    site.files["/a.bin"] = CONTENT
    start, came = threading.Barrier(4), []

    def one():
        start.wait()
        came.append(download(f"{site.url}/a.bin", tmp_path / "a.bin", md5(CONTENT), quiet=True).read_bytes())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [CONTENT] * 4
    assert len(site.asked) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_that_was_fetched_can_be_loaded(name, site, rng, tmp_path, monkeypatch):
    arrays = made_up(rng, name)
    write_official(name, tmp_path / "there", *arrays)
    files = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    official = [url.rsplit("/", 1)[1] for url in KNOWN[name].archive]
    assert sorted(official) == sorted(files)
    monkeypatch.setitem(KNOWN, name, replace(KNOWN[name], archive={f"http://{name}/{file}": md5(files[file]) for file in official}))
    site.files = {f"/mirror/{file}": content for file, content in files.items()}
    folder = fetch(name, tmp_path / "here", base_url=f"{site.url}/mirror/", quiet=True)
    assert {path.name for path in folder.iterdir()} == set(files)
    assert same(load(name, tmp_path / "here"), *arrays)
    fetch(name, tmp_path / "here", base_url=site.url)
    assert len(site.asked) == len(files)


def test_the_command_fetches_and_says_in_one_line_what_went_wrong(site, rng, tmp_path, monkeypatch, capsys):
    arrays = made_up(rng, "cifar10")
    write_official("cifar10", tmp_path, *arrays)
    content = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    url = f"{site.url}/cifar-10-binary.tar.gz"
    monkeypatch.setitem(KNOWN, "cifar10", replace(KNOWN["cifar10"], archive={url: md5(content)}))
    command = ["data", "fetch", "cifar10", "--data-dir", str(tmp_path / "here")]
    assert main(command) == 1
    assert f"{url} must be there, but the server answers 404 Not Found" in capsys.readouterr().err
    site.files["/cifar-10-binary.tar.gz"] = content
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "here" / "cifar10")
    assert same(load("cifar10", tmp_path / "here"), *arrays)


@pytest.mark.parametrize("name", NAMES)
def test_every_official_file_has_a_checksum_and_none_is_a_pickle(name):
    for url, checksum in KNOWN[name].archive.items():
        assert url.endswith((".tar.gz", ".gz", ".mat"))
        assert "python" not in url
        algorithm, digest = checksum.split(":")
        assert len(digest) == 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size


# ------------------------------------------------------------------------------------------------------------------------- real data


def real(name):
    if not (REAL / KNOWN[name].folder).is_dir():
        pytest.skip(f"needs the environment variable FBNLL_DATA, a folder with {name}")
    return load(name, REAL)


def test_cifar10_has_5000_and_1000_images_a_class_and_its_known_means():
    dataset = real("cifar10")
    assert np.bincount(dataset.y_train).tolist() == [5000] * 10
    assert np.bincount(dataset.y_test).tolist() == [1000] * 10
    assert dataset.X_train.shape[1:] == dataset.X_test.shape[1:] == (32, 32, 3)
    assert dataset.X_train.mean((0, 1, 2)) / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)  # as widely published


def test_fashion_mnist_has_6000_and_1000_images_a_class():
    dataset = real("fashion_mnist")
    assert np.bincount(dataset.y_train).tolist() == [6000] * 10
    assert np.bincount(dataset.y_test).tolist() == [1000] * 10
    assert dataset.X_train.shape[1:] == dataset.X_test.shape[1:] == (28, 28, 1)
