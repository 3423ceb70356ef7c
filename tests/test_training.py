from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fbnll.models import initial_weights, resolve_device
from fbnll.training import local_sgd, minibatches, predict, to_tensor

SOFTMAX = {"model": "softmax", "C": 3}
RESNET = {"model": "resnet10", "C": 3, "stem": "imagenet"}  # one value a channel and sample at the end, where batch-norm needs two samples


def problem(n, shape, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    if len(shape) == 3:
        return (40 * y[:, None, None, None] + rng.integers(0, 100, (n, *shape))).astype(np.uint8), y
    return (rng.standard_normal((n, *shape)) + 2 * np.eye(3, *shape)[y]).astype(np.float32), y


def start(X, model, C=3, stem="cifar", seed=0):
    return initial_weights(model, C, X.shape[1:], np.random.default_rng(seed), stem)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def steps_by_formula(W, b, X, y, lr, momentum, weight_decay, steps):
    """SGD on the softmax regression with W (classes × features), all samples in one batch: v ← μv + g + λw, w ← w − ηv."""
    vW, vb = np.zeros_like(W), np.zeros_like(b)
    for _ in range(steps):
        p = np.exp(X @ W.T + b)
        residual = p / p.sum(1, keepdims=True) - np.eye(len(b))[y]
        vW = momentum * vW + residual.T @ X / len(y) + weight_decay * W
        vb = momentum * vb + residual.mean(0) + weight_decay * b
        W, b = W - lr * vW, b - lr * vb
    return W, b


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_steps_on_a_softmax_regression_are_those_of_the_formula(epochs):
    X, y = problem(7, (4,))
    w = start(X, "softmax")
    hyper = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1}
    new, _ = local_sgd(w, X, y, np.random.default_rng(0), **SOFTMAX, epochs=epochs, **hyper)
    W, b = steps_by_formula(w["1.weight"].astype(float), w["1.bias"].astype(float), X, y, **hyper, steps=epochs)
    np.testing.assert_allclose(new["1.weight"], W, atol=1e-6)
    np.testing.assert_allclose(new["1.bias"], b, atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_over_all_samples_whatever_the_batches():
    X, y = problem(10, (4,))
    w = start(X, "softmax")
    expected = -predict(w, X, **SOFTMAX)[np.arange(10), y].mean()
    for batch in (1, 3, 4, 64):
        _, loss = local_sgd(w, X, y, np.random.default_rng(0), **SOFTMAX, lr=0.0, batch=batch)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_the_optimiser_starts_anew_in_each_call():
    X, y = problem(7, (4,))
    hyper = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.0, "epochs": 1}
    w = start(X, "softmax")
    once, _ = local_sgd(w, X, y, np.random.default_rng(0), **SOFTMAX, **hyper)
    twice, _ = local_sgd(once, X, y, np.random.default_rng(0), **SOFTMAX, **hyper)
    W, b = steps_by_formula(once["1.weight"].astype(float), once["1.bias"].astype(float), X, y, 0.3, 0.9, 0.0, steps=1)
    np.testing.assert_allclose(twice["1.weight"], W, atol=1e-6)
    np.testing.assert_allclose(twice["1.bias"], b, atol=1e-6)


def test_a_learning_rate_of_zero_changes_running_statistics_alone():
    X, y = problem(6, (8, 8, 3))
    w = start(X, **RESNET)
    new, _ = local_sgd(w, X, y, np.random.default_rng(0), **RESNET, lr=0.0)
    for name in w:
        assert np.array_equal(new[name], w[name]) != ("running" in name), name


@pytest.mark.parametrize("model", ["cnn", "mlp", "softmax"])
def test_the_loss_goes_down(model):
    X, y = problem(60, (8, 8, 1))
    w, rng = start(X, model), np.random.default_rng(0)
    losses = []
    for _ in range(4):
        w, loss = local_sgd(w, X, y, rng, model=model, C=3, lr=0.05, batch=16)
        losses.append(loss)
    assert losses == sorted(losses, reverse=True)


def test_the_same_generator_gives_the_same_bits_and_another_does_not():
    X, y = problem(40, (8, 8, 1))
    w = start(X, "cnn")
    first, again, other = (local_sgd(w, X, y, np.random.default_rng(seed), model="cnn", C=3, batch=8, lr=0.1)[0] for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


def test_threads_that_run_together_and_the_number_of_torchs_threads_change_no_bit():
    X, y = problem(40, (16, 16, 3))
    w = start(X, **RESNET)

    def train(_):
        return local_sgd(w, X, y, np.random.default_rng(0), **RESNET, batch=16, lr=0.1)[0]

    alone = train(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(same(found, alone) for found in pool.map(train, range(3)))
        assert same(train(0), alone)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_training_leaves_its_inputs_and_torchs_random_numbers_alone():
    X, y = problem(12, (8, 8, 1))
    w = start(X, "cnn")
    for array in (X, y, *w.values()):
        array.flags.writeable = False
    state = torch.random.get_rng_state()
    local_sgd(w, X, y, np.random.default_rng(0), model="cnn", C=3, lr=0.1)
    predict(w, X, model="cnn", C=3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_user_without_samples_and_a_training_without_epochs_return_the_weights():
    X, y = problem(4, (5,))
    w = start(X, "softmax")
    assert local_sgd(w, X[:0], y[:0], np.random.default_rng(0), **SOFTMAX) == (w, 0.0)
    assert local_sgd(w, X, y, np.random.default_rng(0), **SOFTMAX, epochs=0) == (w, 0.0)


@pytest.mark.parametrize(("n", "batch"), [(5, 4), (1, 64), (3, 1)])
def test_batch_norm_bears_batches_of_one_sample(n, batch):
    X, y = problem(n, (8, 8, 3))
    w = start(X, **RESNET)
    new, loss = local_sgd(w, X, y, np.random.default_rng(0), **RESNET, batch=batch)
    assert np.isfinite(loss)
    assert not np.array_equal(new["fc.weight"], w["fc.weight"])
    assert np.array_equal(new["bn1.running_mean"], w["bn1.running_mean"]) == (min(n, batch) == 1)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 66, 128, 129, 200])
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_minibatches_hold_every_row_once_and_no_row_is_alone_unless_all_are(n, batch):
    batches = minibatches(n, batch, np.random.default_rng(0))
    assert sorted(np.concatenate(batches)) == list(range(n))
    assert all(len(rows) == batch for rows in batches[:-1])
    assert len(batches[-1]) <= batch + 1
    assert min(map(len, batches)) > 1 or min(n, batch) == 1


def test_options_of_speed_learn_the_same_up_to_their_precision():
    X, y = problem(24, (8, 8, 3))
    w = start(X, **RESNET)
    plain, channels_last, bf16 = (
        local_sgd(w, X, y, np.random.default_rng(0), **RESNET, batch=8, **options)[1]
        for options in ({}, {"channels_last": True}, {"bf16": True})
    )
    assert channels_last == pytest.approx(plain, rel=1e-4)
    assert bf16 == pytest.approx(plain, rel=0.05)


def test_a_loss_that_explodes_is_one_clear_error():
    X, y = problem(20, (5,))
    with pytest.raises(ValueError, match=r"the training loss must stay finite, but it became (nan|inf) with learning rate 1e\+30"):
        local_sgd(start(X, "softmax"), X, y, np.random.default_rng(0), **SOFTMAX, lr=1e30, batch=4)


def test_predictions_are_log_probabilities_that_do_not_depend_on_the_batch():
    X, _ = problem(11, (8, 8, 1))
    w = start(X, "cnn")
    found = predict(w, X, model="cnn", C=3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.exp(found).sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(predict(w, X, model="cnn", C=3, batch=4), found, atol=1e-6)
    assert predict(w, X[:0], model="cnn", C=3).shape == (0, 3)


def test_predictions_of_a_softmax_regression_are_those_of_the_formula():
    X, _ = problem(6, (4,))
    w = start(X, "softmax")
    logits = X @ w["1.weight"].T + w["1.bias"]
    np.testing.assert_allclose(predict(w, X, **SOFTMAX), logits - np.log(np.exp(logits).sum(1, keepdims=True)), atol=1e-6)


def test_networks_read_bytes_and_numbers_between_0_and_1_alike():
    X = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    x = to_tensor(X)
    assert x.shape == (2, 3, 4, 5)
    assert x[1, 2, 3, 4] == pytest.approx((X[1, 3, 4, 2] / 255 - 0.5) / 0.25)
    np.testing.assert_allclose(to_tensor(X / 255), x, atol=1e-6)
    np.testing.assert_array_equal(to_tensor(X[::-1]), x.flip(0))  # a view that runs backwards


def test_features_are_read_as_they_are():
    Z = np.array([[-3.0, 0.0, 700.0]])
    np.testing.assert_array_equal(to_tensor(Z), Z)


def test_a_device_that_is_not_there_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"device must be auto or one that this machine has \(cpu\), but it is cuda"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
