"""Feature maps Φ: HoG, pretrained networks (imported when used), raw pixels, a saved array, any callable; cached on disk by content."""

import numpy as np
from jaxtyping import Float, Shaped
from numpy.lib.stride_tricks import sliding_window_view

Images = Shaped[np.ndarray, "n height width channels"]  # uint8, or floats in [0, 1]


def hog(X: Images, grey: bool = False) -> Float[np.ndarray, "n d"]:
    """Histograms of oriented gradients (Dalal & Triggs, 2005): what scikit-image's `hog(x, cells_per_block=(2, 2))` gives, many images at a time.

    Nine orientations, cells of 8×8 pixels, blocks of 2×2 cells, L2-Hys. Each pixel of a colour image votes with the channel that has the
    largest gradient there (`channel_axis=-1`), or, if `grey`, the image is turned to luminance first (`rgb2gray`).

    >>> hog(np.zeros((5, 32, 32, 3), np.uint8)).shape
    (5, 324)
    """
    if X.ndim != 4 or min(X.shape[1:3]) < 16:
        raise ValueError(f"HoG needs images of at least 16×16 pixels as (n, height, width, channels), but their shape is {X.shape}")
    return np.concatenate([_hog(X[i : i + 64], grey) for i in range(0, max(len(X), 1), 64)])  # 64 images fit in the processor's cache


def _hog(X: Images, grey: bool) -> Float[np.ndarray, "n d"]:
    X = _luminance(X) if grey and X.shape[3] == 3 else X
    # float32 as scikit-image for float32, and exact for uint8
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
    return X @ np.array([[0.2125], [0.7154], [0.0721]], X.dtype)


def _unit(blocks: Float[np.ndarray, "*n 36"]) -> Float[np.ndarray, "*n 36"]:
    return blocks / np.sqrt((blocks * blocks).sum(-1, keepdims=True) + 1e-10)
