"""Local SGD and predictions: weights and arrays in, weights and arrays out."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import convert_conv2d_weight_memory_format

from fbnll.models import Weights, build, get_weights, set_weights


def local_sgd(
    w: Weights,
    X: Shaped[np.ndarray, "n *shape"],
    y: Int64[np.ndarray, " n"],
    rng: np.random.Generator,
    *,
    model: str,
    C: int,
    stem: str = "cifar",
    epochs: int = 2,
    lr: float = 5e-4,
    momentum: float = 0.5,
    weight_decay: float = 1e-3,
    batch: int = 64,
    device: str = "cpu",
    channels_last: bool = False,
    bf16: bool = False,
) -> tuple[Weights, float]:
    """The weights after some epochs of SGD on cross-entropy, and the mean loss on the way (0 where there was nothing to learn from).

    The defaults are the paper's; the optimiser is new in each call, and images are not augmented.
    """
    if not epochs * len(y):
        return w, 0.0
    with repeatable():
        net = build(model, C, X.shape[1:], stem)
        set_weights(net, w)
        if channels_last:
            convert_conv2d_weight_memory_format(net, torch.channels_last)
        net.to(device).train(min(len(y), batch) > 1)  # one sample has no variance: batch-norm then keeps to its running statistics
        fused = all(p.is_contiguous() for p in net.parameters()) or None  # else PyTorch's fused step is slower than its plain one
        optimiser = torch.optim.SGD(net.parameters(), lr, momentum, weight_decay=weight_decay, fused=fused)
        inputs, labels = to_tensor(X).to(device), torch.tensor(y, device=device)
        precision = torch.autocast(device, torch.bfloat16) if bf16 else nullcontext()
        total = 0.0
        for _ in range(epochs):
            for rows in minibatches(len(y), batch, rng):
                i = torch.from_numpy(rows).to(device)
                with precision:
                    loss = cross_entropy(net(inputs[i]), labels[i])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                total += loss.item() * len(rows)
        mean_loss = total / (epochs * len(y))
        if not np.isfinite(mean_loss):
            raise ValueError(f"the training loss must stay finite, but it became {mean_loss} with learning rate {lr}")
        return get_weights(net), mean_loss


def minibatches(n: int, batch: int, rng: np.random.Generator) -> list[Int64[np.ndarray, " _"]]:
    """One epoch's rows in random order; a last batch of one sample joins the one before, since batch-norm needs two.

    >>> [len(rows) for rows in minibatches(129, 64, np.random.default_rng(0))]
    [64, 65]
    """
    return np.split(rng.permutation(n), range(batch, n - (n % batch == 1), batch))


def predict(
    w: Weights, X: Shaped[np.ndarray, "n *shape"], *, model: str, C: int, stem: str = "cifar", device: str = "cpu", batch: int | None = None
) -> Float[np.ndarray, "n C"]:
    """Log-probabilities of the C classes: argmax is the prediction, exp the probability, minus the entry at a label its cross-entropy."""
    batch = batch or (32 if device == "cpu" else 512)  # larger ones take new memory in each layer, and a processor half the time for it
    with repeatable(), torch.inference_mode():
        net = build(model, C, X.shape[1:], stem)
        set_weights(net, w)
        net.to(device).eval()
        parts = [net(to_tensor(X[i : i + batch]).to(device)).log_softmax(1).cpu() for i in range(0, len(X), batch)]
        return torch.cat([torch.empty(0, C), *parts]).numpy()


def to_tensor(X: Shaped[np.ndarray, "n *shape"]) -> Float[Tensor, "n ..."]:
    """What a network reads: features as they are, images (n, height, width, channels) as (x − ½) / ¼, channels first.

    Pixels are bytes or numbers in [0, 1].

    >>> to_tensor(np.full((1, 2, 2, 3), 255, np.uint8)).unique()
    tensor([2.])
    """
    values = torch.tensor(np.ascontiguousarray(X))  # in PyTorch's own memory, aligned: products then have the same bits everywhere
    if X.ndim != 4:
        return values.float()
    values = values.permute(0, 3, 1, 2).contiguous().float()
    return values.div_(255 if X.dtype == np.uint8 else 1).sub_(0.5).div_(0.25)  # in place: new memory costs more than the arithmetic


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread of PyTorch and kernels without races: the same bits in every process and thread, and no fight over the cores."""
    torch.backends.cudnn.deterministic = True  # stays so: putting it back would race with the program's other threads
    threads = torch.get_num_threads()  # of this thread alone
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
