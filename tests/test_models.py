import threading

import numpy as np
import pytest
import torch

from fbnll import experiment
from fbnll.models import MODELS, ResNet, arrays, build, get_weights, initial_weights, set_weights

SHAPES = {"resnet18": (8, 8, 3), "resnet10": (8, 8, 3), "cnn": (8, 8, 1), "mlp": (5,), "softmax": (5,)}


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_names_of_models_are_known_without_torch():
    assert tuple(MODELS) == experiment.MODELS


@pytest.mark.parametrize(
    ("model", "shape", "stem", "weights"),
    [
        ("resnet18", (32, 32, 3), "cifar", 11_173_962),
        ("resnet10", (32, 32, 3), "cifar", 4_903_242),
        ("resnet18", (32, 32, 3), "imagenet", 11_181_642),  # the 7×7 stem has 64·3·(49 − 9) = 7,680 weights more
        ("cnn", (32, 32, 3), "cifar", 97_290),
        ("mlp", (64,), "cifar", 64 * 128 + 128 + 128 * 10 + 10),
        ("softmax", (8, 8, 1), "cifar", 64 * 10 + 10),
    ],
)
def test_networks_have_the_number_of_weights_they_are_known_for(model, shape, stem, weights):
    assert count(build(model, 10, shape, stem)) == weights


def test_resnet18_has_torchvisions_names_and_shapes_and_its_number_of_weights():
    with torch.device("meta"):
        net = ResNet((2, 2, 2, 2), 1000, "imagenet")
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert count(net) == 11_689_512  # torchvision's documentation of resnet18
    assert len(shapes) == 122  # 20 convolutions, 20 batch-norms of 5, the last layer's 2
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["bn1.running_var"] == (64,)
    assert shapes["layer1.0.conv1.weight"] == (64, 64, 3, 3)
    assert "layer1.0.downsample.0.weight" not in shapes
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes["layer2.0.downsample.1.weight"] == (128,)
    assert shapes["layer4.1.bn2.num_batches_tracked"] == ()
    assert shapes["fc.weight"] == (1000, 512)


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_outputs_of_a_resnet_are_its_last_layer_on_its_features(stem):
    net = ResNet((1, 1, 1, 1), 4, stem, channels=1).eval()
    x = torch.ones(2, 1, 9, 9)
    assert net.features(x).shape == (2, 512)
    assert torch.equal(net(x), net.fc(net.features(x)))


@pytest.mark.parametrize("model", MODELS)
def test_weights_that_were_set_are_the_weights_one_gets(model):
    w = initial_weights(model, 3, SHAPES[model], np.random.default_rng(0))
    net = build(model, 3, SHAPES[model])
    set_weights(net, w)
    again = get_weights(net)
    assert again.keys() == w.keys()
    assert all(np.array_equal(again[name], w[name]) and again[name].dtype == np.float32 for name in w)


def test_weights_have_running_statistics_and_no_counters():
    w = initial_weights("resnet10", 3, (8, 8, 3), np.random.default_rng(0))
    assert {"bn1.running_mean", "bn1.running_var"} < w.keys()
    assert not any("num_batches_tracked" in name for name in w)


def test_weights_one_gets_are_copies_in_c_order():
    net = build("cnn", 3, (8, 8, 1)).to(memory_format=torch.channels_last)
    w = get_weights(net)
    assert all(value.flags.c_contiguous for value in w.values())
    before = {name: value.copy() for name, value in w.items()}
    for value in arrays(net).values():
        value.fill_(7)
    assert all(np.array_equal(w[name], before[name], equal_nan=True) for name in w)


def test_read_only_weights_can_be_set_and_stay_as_they_are():
    w = initial_weights("softmax", 3, (5,), np.random.default_rng(0))
    for value in w.values():
        value.flags.writeable = False
    net = build("softmax", 3, (5,))
    set_weights(net, w)
    arrays(net)["1.weight"].fill_(7)
    assert not (w["1.weight"] == 7).any()


@pytest.mark.parametrize("model", MODELS)
def test_initial_weights_are_a_function_of_the_generator_alone(model):
    first, same, other = (initial_weights(model, 3, SHAPES[model], np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_initial_weights_leave_torchs_random_numbers_alone():
    before = torch.random.get_rng_state()
    initial_weights("resnet10", 3, (8, 8, 3), np.random.default_rng(0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initial_weights_are_the_same_in_threads_that_run_together():
    found = {}
    threads = [
        threading.Thread(target=lambda k=k: found.update({k: initial_weights("cnn", 3, (8, 8, 1), np.random.default_rng(k % 2))}))
        for k in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[k][name], found[k % 2][name]) for k in range(6) for name in found[k])


def test_initial_weights_have_the_spread_they_are_said_to_have():
    w = initial_weights("resnet18", 10, (32, 32, 3), np.random.default_rng(0))
    assert w["layer4.1.conv2.weight"].std() == pytest.approx(np.sqrt(2 / (512 * 9)), rel=0.01)
    assert np.abs(w["fc.weight"]).max() == pytest.approx(1 / np.sqrt(512), rel=0.01)
    assert (w["bn1.weight"] == 1).all()
    assert (w["bn1.running_var"] == 1).all()
    assert not w["bn1.bias"].any()
    assert not w["bn1.running_mean"].any()
    assert not w["fc.bias"].any()


@pytest.mark.parametrize(
    ("model", "shape", "stem", "message"),
    [
        ("vgg", (5,), "cifar", "model must be one of resnet18, resnet10, cnn, mlp, softmax, but it is 'vgg'"),
        ("cnn", (324,), "cifar", r"cnn must be given images of at least 4×4 pixels .* but its inputs have shape \(324,\)"),
        ("resnet18", (2, 2, 3), "cifar", r"resnet18 must be given images of at least 4×4 pixels .* \(2, 2, 3\)"),
        ("resnet18", (8, 8, 3), "tiny", "stem must be cifar or imagenet, but it is 'tiny'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(model, shape, stem, message):
    with pytest.raises(ValueError, match=message):
        build(model, 10, shape, stem)


def test_weights_of_another_network_are_refused_in_a_sentence():
    net = build("softmax", 3, (5,))
    with pytest.raises(ValueError, match=r"named as the network's, but only one of the two has 3.bias"):
        set_weights(net, initial_weights("mlp", 3, (5,), np.random.default_rng(0)))
    with pytest.raises(ValueError, match=r"1.weight must have the shape \(3, 5\), but its shape is \(3, 6\)"):
        set_weights(net, initial_weights("softmax", 3, (6,), np.random.default_rng(0)))
