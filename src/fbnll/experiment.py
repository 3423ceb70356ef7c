"""One frozen Experiment: its fields are the flags of the command, the JSON in the run folder and the arguments in Python."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from fbnll.methods import METHODS, load_method
from fbnll.noise import NOISES

MODELS = ("resnet18", "resnet10", "cnn", "mlp", "softmax")
TRANSPORTS = ("inprocess", "loopback", "processes")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is run. None stands for the default of the dataset, as `complete` fills it in."""

    dataset: str = option(
        "digits",
        "digits (inside the package), cifar10, cifar100, cifar100_coarse, svhn, fashion_mnist, a .npz file or a folder with Parquet",
    )
    data_dir: str | None = option(
        None, "folder with the dataset, as Parquet or as its official archive (default: $FBNLL_DATA, or where `fbnll data fetch` puts it)"
    )
    method: str = option("fb_nll", f"one of {', '.join(METHODS)}")
    tasks: int | tuple[tuple[int, ...], ...] = option(2, "how many tasks (the paper's splits), or the split itself: 0,1,8,9/2,3,4,5,6,7")
    users: int = option(20, "number of users K")
    impurity: float = option(0.08, "share of every task's samples that is dealt to all users")
    clean_per_class: int | None = option(None, "clean samples of a class that the server has")
    noise: str = option("class_dependent", f"one of {', '.join(NOISES)}, or several with commas: users get them in turn")
    alpha: float = option(0.25, "share of a user's samples that class-dependent and class-independent noise selects")
    rho: float = option(0.4, "probability that uniform noise makes a user noisy")
    beta: float = option(0.2, "smallest share of noise of such a user")
    coin: bool = option(False, "select noisy samples by a coin each, not an exact number")
    phi_clustering: str | None = option(
        None,
        "features for clustering: hog, hog_grey, raw, efficientnet_lite0[@pixels], resnet18[@pixels][:weights.pth], "
        "or a .npy with a row a sample",
    )
    phi_correction: str | None = option(None, "features for correction, likewise")
    q: int | None = option(None, "eigenvectors that a user shares for clustering, at most")
    eps: float = option(0.0, "adaptive rank: keep eigenvalues above eps times the largest")
    linkage: str = option("average", "average, single or complete")
    q1: int | None = option(None, "rank in phase 1 of the correction")
    l: int | None = option(None, "rank in phase 2 of the correction")
    tau_sim: str | float = option("auto", "threshold of phase 1: a number, or auto: from the clean set")
    model: str | None = option(None, f"one of {', '.join(MODELS)}")
    stem: str = option("cifar", "first layer of a ResNet: cifar (3x3) or imagenet (7x7, stride 2, pooling; six to nine times faster)")
    inputs: str = option("data", "what models are trained on: data, or the features called clustering or correction")
    rounds: int | None = option(None, "rounds of training; 0 does everything before training")
    epochs: int = option(2, "local epochs a round")
    lr: float | None = option(None, "learning rate")
    momentum: float = option(0.5, "momentum")
    weight_decay: float = option(1e-3, "weight decay")
    batch: int | None = option(None, "batch size")
    weighted: bool = option(False, "weigh users by their number of samples, which they then tell")
    participation: float = option(1.0, "share of a cluster's users that train in a round")
    eval_every: int = option(1, "evaluate after every so many rounds, and after the last")
    missing_at_most: int | None = option(None, "users that may be missing before the run stops; half of them by default")
    transport: str | None = option(None, f"one of {', '.join(TRANSPORTS)}; processes where workers is above 1")
    workers: int = option(1, "worker processes")
    device: str = option("auto", "auto, cpu, cuda or mps")
    channels_last: bool = option(False, "train with channels last in memory")
    bf16: bool = option(False, "train in bfloat16 where PyTorch's autocast does")
    seed: int = option(0, "seed of everything random")

    def complete(self) -> "Experiment":
        """The same with the dataset's defaults for None, after checking what can be checked before any data is read."""
        own = DEFAULTS.get(self.dataset, DEFAULTS["other"])
        filled = replace(self, **{name: value for name, value in own.items() if getattr(self, name) is None})
        if isinstance(filled.noise, str):
            filled = replace(filled, noise=",".join(noise.strip() for noise in filled.noise.split(",")))
        if isinstance(filled.tau_sim, str) and filled.tau_sim != "auto":
            filled = replace(filled, tau_sim=_number("tau_sim", filled.tau_sim))
        _check(filled)
        return filled


# The paper's values where it gives them; digits has about 65 samples a user, so that ranks and batches are small and steps are large.
PAPER = {"q": 10, "q1": 20, "l": 30, "rounds": 80, "lr": 5e-4, "batch": 64}
PRETRAINED = "efficientnet_lite0"
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "phi_clustering": "raw",
        "phi_correction": "raw",
        "clean_per_class": 10,
        "q": 10,
        "q1": 10,
        "l": 5,
        "model": "mlp",
        "rounds": 30,
        "lr": 0.1,
        "batch": 16,
    },
    "cifar10": {**PAPER, "phi_clustering": "hog", "phi_correction": PRETRAINED, "clean_per_class": 200, "model": "resnet18"},
    "svhn": {**PAPER, "phi_clustering": PRETRAINED, "phi_correction": PRETRAINED, "clean_per_class": 300, "model": "resnet10"},
    "fashion_mnist": {**PAPER, "phi_clustering": "raw", "phi_correction": PRETRAINED, "clean_per_class": 200, "model": "cnn"},
    "cifar100": {**PAPER, "phi_clustering": "hog", "phi_correction": PRETRAINED, "clean_per_class": 20, "model": "resnet18"},
    "cifar100_coarse": {**PAPER, "phi_clustering": "hog", "phi_correction": PRETRAINED, "clean_per_class": 100, "model": "resnet18"},
}
DEFAULTS["other"] = {**DEFAULTS["digits"], "q1": 3}  # features may have few columns


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or auto, but it is {text!r}") from None


def _check(e: Experiment) -> None:
    for name, kind in get_type_hints(Experiment).items():
        value = getattr(e, name)
        if name != "tasks" and not (isinstance(value, kind) or (type(value) is int and float in (kind, *get_args(kind)))):
            raise ValueError(f"{name} must be {getattr(kind, '__name__', kind)}, but it is {value!r}")
    load_method(e.method)
    if e.model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, but it is {e.model!r}")
    unknown = [noise for noise in e.noise.split(",") if noise not in NOISES]
    if unknown:
        raise ValueError(f"noise must be one of {', '.join(NOISES)}, but it is {unknown[0]!r}")
    tau = 0.0 if e.tau_sim == "auto" else e.tau_sim
    in_range = {"impurity": e.impurity, "alpha": e.alpha, "rho": e.rho, "beta": e.beta, "tau_sim": tau, "eps": e.eps}
    for name, value in in_range.items():
        if not 0 <= float(value) <= 1:
            raise ValueError(f"{name} must be from 0 to 1, but it is {value}")
    if e.eps == 1:
        raise ValueError("eps must be below 1, but it is 1")
    if not 0 < e.participation <= 1:
        raise ValueError(f"participation must be above 0 and at most 1, but it is {e.participation}")
    for name in ("users", "clean_per_class", "q", "q1", "l", "epochs", "batch", "eval_every", "workers"):
        if getattr(e, name) < 1:
            raise ValueError(f"{name} must be at least 1, but it is {getattr(e, name)}")
    for name in ("rounds", "seed", "lr", "momentum", "weight_decay", "missing_at_most"):
        value = getattr(e, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be at least 0, but it is {value}")
    for name, choices in {
        "transport": (None, *TRANSPORTS),
        "linkage": ("average", "single", "complete"),
        "inputs": ("data", "clustering", "correction"),
        "stem": ("cifar", "imagenet"),
        "device": ("auto", "cpu", "cuda", "mps"),
    }.items():
        if getattr(e, name) not in choices:
            because = ": it needs distances in a Euclidean space" if getattr(e, name) == "ward" else ""
            raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}, but it is {getattr(e, name)!r}{because}")
    if e.workers > 1 and e.transport not in (None, "processes"):
        raise ValueError(f"workers above 1 must go with the transport processes, but it is {e.transport}")
    M = e.tasks if isinstance(e.tasks, int) else len(e.tasks)
    if not 1 <= M <= e.users:
        raise ValueError(f"tasks must be from 1 to the number of users, but there are {M} tasks and {e.users} users")
