"""Networks, and their weights as named arrays."""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

Weights = dict[str, np.ndarray]


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        self.downsample = None if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = relu(self.bn1(self.conv1(x)), inplace=True)
        return relu(self.bn2(self.conv2(x)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """A residual network whose weights have torchvision's names, so that its official files load.

    `stem` is "imagenet" (7×7 with stride 2, then pooling) or "cifar" (3×3, no pooling: more pixels are kept, fifteen times the operations).
    """

    def __init__(self, blocks: tuple[int, int, int, int], C: int, stem: str, channels: int = 3) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"stem must be cifar or imagenet, but it is {stem!r}")
        self.pooled = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, 64, *((7, 2, 3) if self.pooled else (3, 1, 1)), bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = stage(64, 64, blocks[0], stride=1)
        self.layer2 = stage(64, 128, blocks[1], stride=2)
        self.layer3 = stage(128, 256, blocks[2], stride=2)
        self.layer4 = stage(256, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512, C)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 512"]:
        x = relu(self.bn1(self.conv1(x)), inplace=True)
        x = max_pool2d(x, 3, 2, padding=1) if self.pooled else x
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n C"]:
        logits: Tensor = self.fc(self.features(x))
        return logits


def stage(channels: int, out: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(blocks - 1)))


def cnn(C: int, height: int, width: int, channels: int) -> nn.Module:
    """Three convolutions and a linear layer, good on a processor (97,290 weights for CIFAR-10)."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), C)),
    )


def mlp(C: int, d: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(d, 128), nn.ReLU(inplace=True), nn.Linear(128, C))


def softmax(C: int, d: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(d, C))


MODELS: dict[str, Callable[[int, tuple[int, ...], str], nn.Module]] = {
    "resnet18": lambda C, shape, stem: ResNet((2, 2, 2, 2), C, stem, shape[2]),
    "resnet10": lambda C, shape, stem: ResNet((1, 1, 1, 1), C, stem, shape[2]),
    "cnn": lambda C, shape, stem: cnn(C, *shape),
    "mlp": lambda C, shape, stem: mlp(C, math.prod(shape)),
    "softmax": lambda C, shape, stem: softmax(C, math.prod(shape)),
}


def build(model: str, C: int, shape: tuple[int, ...], stem: str = "cifar") -> nn.Module:
    """A network with `C` outputs for inputs of one `shape`, (height, width, channels) or (d,), weights unset until `set_weights`."""
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, but it is {model!r}")
    if model not in ("mlp", "softmax") and (len(shape) != 3 or min(shape[:2]) < 4):
        raise ValueError(
            f"{model} must be given images of at least 4×4 pixels (height, width, channels), but its inputs have shape {shape}"
        )
    with torch.device("meta"):  # no time and none of PyTorch's random numbers for weights that will be replaced
        net = MODELS[model](C, shape, stem)
    return net.to_empty(device="cpu")


def initial_weights(model: str, C: int, shape: tuple[int, ...], rng: np.random.Generator, stem: str = "cifar") -> Weights:
    """Random weights: He's normal (fan-out) in convolutions, uniform within 1/√fan-in in linear layers, biases 0, batch-norm idle.

    They are NumPy's numbers, so that a seed gives the same bits in every thread and under every version of PyTorch.
    """

    def start(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 4:
            out, _, height, width = shape
            return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / (out * height * width)))
        if len(shape) == 2:
            return (2 * rng.random(shape, np.float32) - 1) / np.float32(math.sqrt(shape[1]))
        return np.full(shape, name.endswith(("weight", "running_var")), np.float32)

    return {name: start(name, tuple(value.shape)) for name, value in arrays(build(model, C, shape, stem)).items()}


def arrays(net: nn.Module) -> dict[str, Tensor]:
    """What is averaged of a network, sharing its memory: weights, batch-norm's running mean and variance, not its integer counters."""
    return {name: value for name, value in net.state_dict().items() if value.is_floating_point()}


def get_weights(net: nn.Module) -> Weights:
    """Copies of the weights, in C order whatever the memory format of the network."""
    return {name: np.array(value.numpy(force=True), np.float32, order="C") for name, value in arrays(net).items()}


def set_weights(net: nn.Module, w: Weights) -> None:
    """Copy `w` into the network; names and shapes must be its own."""
    own = arrays(net)
    if wrong := own.keys() ^ w.keys():
        raise ValueError(f"weights must be named as the network's, but only one of the two has {min(wrong)}")
    for name, value in own.items():
        if w[name].shape != value.shape:
            raise ValueError(f"{name} must have the shape {tuple(value.shape)}, but its shape is {w[name].shape}")
        value.copy_(torch.tensor(w[name]))


def resolve_device(name: str) -> str:
    """Where to compute: "auto" is the first of cuda, mps and cpu that this machine has."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    here = [device for device, there in available.items() if there]
    if name not in ("auto", *here):
        raise ValueError(f"device must be auto or one that this machine has ({', '.join(here)}), but it is {name}")
    return here[0] if name == "auto" else name
