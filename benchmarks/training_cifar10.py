"""How fast does the library train beside bare PyTorch, and do channels_last and bf16 change what is learned? Real CIFAR-10, one thread.

    FBNLL_DATA=<folder with cifar10/> .venv/bin/python benchmarks/training_cifar10.py           # writes the CSV and prints the tables
    .venv/bin/python benchmarks/training_cifar10.py --table                                     # prints the tables from the CSV

Speed: whole calls of `local_sgd` at the paper's settings (batches of 64, two epochs, learning rate 5e-4, momentum .5, weight decay 1e-3),
arrays in, weights out, with what a call costs once: the network is built and given its weights, the images become tensors. Beside it,
taking turns and on the same batches, a loop as in any tutorial: the network built before, `torch.optim.SGD`, images already tensors in
the option's memory format, nothing else timed. Both must come to the same loss. Where a network is slow, a call has fewer images than
one of the paper's users (2,400), and what it costs once weighs more.

Accuracy: FedAvg inside the true tasks, without noise, on 4,000 images: two tasks, four users, four rounds of one epoch, and a learning
rate of .05, fixed beforehand on another seed so that something is learned in the time there is (the paper's needs 80 rounds of everything).
Accuracy is over all test images. A difference is that of two runs with one seed: same users, same initial weights, same batches.
Options are of training alone; evaluation is in fp32. channels_last computes the same in another order: its differences are those that
rounding alone makes.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median, pstdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fbnll.data import Dataset, load, progress
from fbnll.experiment import Experiment
from fbnll.models import cnn, initial_weights, mlp
from fbnll.partition import tasks_of
from fbnll.runner import run
from fbnll.training import local_sgd, to_tensor
from tables import parser_of, read_rows, write_rows

RESULTS = Path(__file__).parent / "results" / "training_cifar10.csv"
OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "channels_last": {"channels_last": True},
    "bf16": {"bf16": True},
    "both": {"channels_last": True, "bf16": True},
}
C, SHAPE, BATCH, EPOCHS = 10, (32, 32, 3), 64, 2
REPEATS, SEEDS = range(5), range(5)
IMAGES = {  # of a call, whose speed is measured
    ("resnet18", "cifar"): 128,
    ("resnet18", "imagenet"): 640,
    ("resnet10", "cifar"): 256,
    ("resnet10", "imagenet"): 1280,
    ("cnn", ""): 1280,
    ("mlp", ""): 2400,
}
LEARNING = {("cnn", ""): {"lr": 0.05, "batch": 16}, ("resnet10", "imagenet"): {"lr": 0.05, "batch": 64}}  # whose accuracy is measured
TRAINED_ON = 4000  # images of all users
SPLIT = tasks_of("cifar10", 2, C)
FEDERATION = Experiment(
    method="oracle", noise="none", tasks=SPLIT, users=4, clean_per_class=1, rounds=4, epochs=1, eval_every=4, device="cpu"
)

Row = dict[str, object]


# ------------------------------------------------------------------------------------------------------------------------------- speed


class Block(nn.Module):
    """The basic block as it is usually written."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            shortcut = self.downsample(x)
        out += shortcut
        return self.relu(out)


def resnet(blocks: int, stem: str) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, 64, 3, padding=1, bias=False) if stem == "cifar" else nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    layers["bn1"], layers["relu"] = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    if stem == "imagenet":
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    for i, (channels, out) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)]):
        rest = [Block(out, out, 1) for _ in range(blocks - 1)]
        layers[f"layer{i + 1}"] = nn.Sequential(Block(channels, out, 2 if i else 1), *rest)
    layers["avgpool"], layers["flatten"], layers["fc"] = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, C)
    return nn.Sequential(layers)


BARE: dict[str, Callable[[str], nn.Module]] = {
    "resnet18": lambda stem: resnet(2, stem),
    "resnet10": lambda stem: resnet(1, stem),
    "cnn": lambda stem: cnn(C, *SHAPE),  # these two are plain nn.Sequential
    "mlp": lambda stem: mlp(C, int(np.prod(SHAPE))),
}


def bare_sgd(net: nn.Module, x: Tensor, y: Tensor, seed: int, bf16: bool = False) -> float:
    """A plain loop on tensors in memory: the mean loss on the way."""
    rng = np.random.default_rng(seed)
    optimiser = torch.optim.SGD(net.parameters(), lr=5e-4, momentum=0.5, weight_decay=1e-3)
    net.train()
    total = 0.0
    for _ in range(EPOCHS):
        for rows in torch.from_numpy(rng.permutation(len(y))).split(BATCH):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(net(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(rows)
    return total / (EPOCHS * len(y))


class Pair:
    """The library and the bare loop on the same images, with the same options."""

    def __init__(self, X: np.ndarray, y: np.ndarray, model: str, stem: str, channels_last: bool = False, bf16: bool = False) -> None:
        self.X, self.y, self.bf16 = X, y, bf16
        self.network = {"model": model, "C": C, "stem": stem or "cifar"}
        self.options = {"channels_last": channels_last, "bf16": bf16}
        self.w = initial_weights(shape=SHAPE, rng=np.random.default_rng(0), **self.network)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.net = BARE[model](stem).to(memory_format=memory_format)
        self.x = to_tensor(X).contiguous(memory_format=memory_format)
        self.labels = torch.tensor(y)

    def library(self, seed: int) -> float:
        return local_sgd(self.w, self.X, self.y, np.random.default_rng(seed), **self.network, **self.options)[1]

    def bare(self, seed: int) -> float:
        return bare_sgd(self.net, self.x, self.labels, seed, self.bf16)

    def warm_up(self) -> None:
        """One call of each, which must agree."""
        self.net.load_state_dict({name: torch.tensor(value) for name, value in self.w.items()}, strict=False)
        losses = self.library(0), self.bare(0)
        assert np.isclose(*losses, rtol=0.02 if self.bf16 else 1e-3), f"{self.network} {self.options}: {losses}"

    def seconds(self, repeat: int) -> dict[str, float]:
        """Of both, one right after the other, in turn the first."""
        taken = {}
        for which in (self.library, self.bare) if repeat % 2 else (self.bare, self.library):
            begun = time.perf_counter()
            which(repeat)
            taken[which.__name__] = time.perf_counter() - begun
        return taken


def measure_speed(cifar10: Dataset, only: str | None = None) -> Iterator[Row]:
    """One row per network, repeat and option, in this order, so that all options of a network see the same neighbours."""
    for model, stem in progress([network for network in IMAGES if only in (None, network[0])], "networks"):
        n = IMAGES[model, stem]
        X, y = cifar10.X_train[:n], cifar10.y_train[:n]
        pairs = {name: Pair(X, y, model, stem, **options) for name, options in OPTIONS.items()}
        for pair in pairs.values():
            pair.warm_up()
        for repeat, (name, pair) in product(REPEATS, pairs.items()):
            speed = {which: f"{EPOCHS * n / taken:.5g}" for which, taken in pair.seconds(repeat).items()}
            yield row("speed", model, stem, name, repeat, speed["library"], speed["bare"])


def row(question: str, model: str, stem: str, options: str, seed_or_repeat: int, value: str, reference: str) -> Row:
    which = {"question": question, "model": model, "stem": stem, "options": options, "seed_or_repeat": seed_or_repeat}
    return {**which, "value": value, "reference": reference}


# ---------------------------------------------------------------------------------------------------------------------------- accuracy


def measure_accuracy(cifar10: Dataset) -> Iterator[Row]:
    """One row per network, seed and option: the accuracy after the last round, mean of the users."""
    with TemporaryDirectory() as folder:
        part = Path(folder) / "part.npz"
        rows = np.random.default_rng(0).permutation(len(cifar10.y_train))[:TRAINED_ON]
        X, y = cifar10.X_train[rows], cifar10.y_train[rows]
        np.savez(part, X=X, y=y, X_test=cifar10.X_test, y_test=cifar10.y_test)
        for ((model, stem), sgd), seed in progress(list(product(LEARNING.items(), SEEDS)), "seeds"):
            accuracy = {}
            for name, options in OPTIONS.items():
                e = replace(FEDERATION, dataset=str(part), model=model, stem=stem or "cifar", seed=seed, **sgd, **options)
                accuracy[name] = f"{run(e).summary['accuracy']['mean']:.5f}"
                yield row("accuracy", model, stem, name, seed, accuracy[name], accuracy["default"])


# ------------------------------------------------------------------------------------------------------------------------------ tables


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Three tables, a line a network and a column an option, as Markdown: speed, beside bare PyTorch, accuracy."""
    speed: Cells = defaultdict(list)
    accuracy: Cells = defaultdict(list)
    for r in rows:
        network = f"{r['model']}, {r['stem']} stem" if r["stem"] else r["model"]
        values = speed if r["question"] == "speed" else accuracy
        values[network, r["options"]].append((float(r["value"]), float(r["reference"])))

    def faster(network: str, options: str) -> str:
        found, default = ([value for value, _ in speed[network, name]] for name in (options, "default"))
        times = f" (×{median(a / b for a, b in zip(found, default)):.2f})" if options != "default" else ""
        return f"{median(found):,.0f}{times}"

    def beside_bare(network: str, options: str) -> str:
        ratios = [value / reference for value, reference in speed[network, options]]
        return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

    def learned(network: str, options: str) -> str:
        if options == "default":
            values = [100 * value for value, _ in accuracy[network, options]]
            return f"{mean(values):.2f} % ± {pstdev(values):.2f}"
        differences = [100 * (value - default) for value, default in accuracy[network, options]]
        return f"{mean(differences):+.2f} ± {pstdev(differences):.2f}"

    repeats, seeds = (max(map(len, values.values()), default=0) for values in (speed, accuracy))
    return "\n\n".join(
        [
            f"Images per second of `local_sgd` on one thread, median of {repeats} repeats (and times the default)",
            _markdown(speed, faster),
            f"Library / bare PyTorch, images per second, median of {repeats} repeats (least–most)",
            _markdown(speed, beside_bare),
            f"Accuracy of the default over {seeds} seeds, and differences from it with the same seed in points (mean ± standard deviation)",
            _markdown(accuracy, learned),
        ]
    )


Cells = defaultdict[tuple[str, str], list[tuple[float, float]]]


def _markdown(values: Cells, cell: Callable[[str, str], str]) -> str:
    networks = dict.fromkeys(network for network, _ in values)
    lines = ["| network | " + " | ".join(OPTIONS) + " |", "|---|" + "---|" * len(OPTIONS)]
    lines += [f"| {network} | {' | '.join(cell(network, options) for options in OPTIONS)} |" for network in networks]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="MODEL", help="measure the speed of this model alone, and keep all other rows of the CSV")
    args = parser.parse_args()
    if not args.table:
        torch.set_num_threads(1)
        cifar10 = load("cifar10", args.data_dir)
        rows = [*measure_speed(cifar10, args.only)]
        if args.only:
            kept = [row for row in read_rows(RESULTS) if (row["question"], row["model"]) != ("speed", args.only)]
            rows = sorted([*kept, *rows], key=lambda row: row["question"], reverse=True)
        else:
            rows += measure_accuracy(cifar10)
        write_rows(RESULTS, rows)
    print(table(read_rows(RESULTS)))


if __name__ == "__main__":
    main()
