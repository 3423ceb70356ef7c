import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fbnll
from fbnll.experiment import Experiment
from fbnll.folder import RunFolder, to_json, write_atomically
from fbnll.runner import run

QUICK = {"users": 6, "model": "softmax", "rounds": 3, "epochs": 1, "tau_sim": 0.3}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a run"
    return run(Experiment(**QUICK), out=folder, compare=["fedavg"])


def test_a_run_folder_holds_all_that_is_promised(done):
    names = {path.relative_to(done.folder).as_posix() for path in done.folder.rglob("*") if path.is_file()}
    promised = {"config.json", "result.json", "figures.json", "history.jsonl", "checkpoint.bin", "report.html"}
    assert promised | {"models/cluster_0.safetensors", "models/cluster_1.safetensors"} <= names
    assert not any(Path(name).name.startswith(".") for name in names)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["experiment"]["users"] == 6
    assert {"seed", "device", "versions", "command"} <= set(config)


def test_the_result_has_the_fields_that_others_read(done):
    result = json.loads((done.folder / "result.json").read_text())
    assert result["clustering"]["ari"] == 1.0
    assert 0 < result["labels"]["noise_after"] < result["labels"]["noise_before"] < 0.26
    assert len(result["labels"]["per_user"]) == 6
    assert 0.5 < result["accuracy"]["mean"] <= 1
    assert result["accuracy"]["users_scored"] == 6
    assert [task["users"] for task in result["accuracy"]["per_task"]] == [3, 3]
    assert {"up", "down", "per_job", "clustering", "one_model_exchange"} <= set(result["bytes"])
    assert {"clustering", "correction", "training", "evaluation", "total"} <= set(result["seconds"])
    assert [row["method"] for row in result["comparison"]] == ["fb_nll", "fedavg"]


def test_counts_of_labels_add_up_and_fit_the_shares(done):
    labels = done.summary["labels"]
    for user in labels["per_user"]:
        assert user["before"] * user["n"] == pytest.approx(user["missed"] + user["repaired"] + user["mistaken"])
        assert user["after"] * user["n"] == pytest.approx(user["missed"] + user["broken"] + user["mistaken"])
    assert labels["noise_after"] == pytest.approx(np.mean([user["after"] for user in labels["per_user"]]))
    flow = {name: np.array(table) for name, table in done.figures["flow"].items()}
    total = sum(user["n"] for user in labels["per_user"])
    assert {table.sum() for table in flow.values()} == {total}
    assert total - flow["true_given"].trace() == labels["wrong_before"]
    repaired = done.figures["phases"]["repaired"]
    assert repaired["phase1"] + repaired["phase2"] == labels["repaired"]


def test_accuracy_is_that_of_the_last_round_in_the_history(done):
    lines = [json.loads(line) for line in (done.folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["accuracy"] is None
    per_task = [task["mean"] for task in done.summary["accuracy"]["per_task"]]
    assert lines[-1]["accuracy"] == {"mean": done.summary["accuracy"]["mean"], "per_task": per_task}


def test_models_are_saved_as_they_are(done):
    from safetensors.numpy import load_file

    for m, w in enumerate(done.models):
        saved = load_file(done.folder / "models" / f"cluster_{m}.safetensors")
        assert all((saved[name] == part).all() for name, part in w.items())


def test_zero_rounds_do_everything_before_training(tmp_path):
    result = run(Experiment(users=6, rounds=0), out=tmp_path / "zero").summary
    assert result["clustering"]["ari"] == 1.0
    assert result["labels"]["noise_after"] < result["labels"]["noise_before"]
    assert result["accuracy"]["mean"] is None
    assert not (tmp_path / "zero" / "models").exists()


@pytest.mark.parametrize("method", ["local", "fedavg", "reference_only"])
def test_fields_that_do_not_apply_are_null(method):
    summary = run(Experiment(**{**QUICK, "method": method, "noise": "none", "rounds": 1})).summary
    assert summary["clustering"]["ari"] is None
    assert summary["labels"]["noise_before"] == summary["labels"]["noise_after"] == 0
    assert summary["accuracy"]["users_scored"] == 6
    assert summary["bytes"]["clustering"] is None


def test_evaluating_seldom_changes_no_number_of_the_last_round():
    often, seldom = (run(Experiment(**QUICK, eval_every=every)).summary["accuracy"] for every in (1, 100))
    assert often == seldom


def test_a_different_noise_for_each_user_in_turn():
    per_user = run(Experiment(users=6, rounds=0, noise="none,class_independent", method="fb_nll_minus")).summary["labels"]["per_user"]
    assert [user["before"] > 0 for user in per_user] == [False, True] * 3


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.8, 1.5])
def test_a_killed_run_is_resumed_in_a_new_process_to_the_same_bits(done, tmp_path, moment):
    settings = {**QUICK, "rounds": 3}
    script = textwrap.dedent(f"""
        import sys
        from fbnll.experiment import Experiment
        from fbnll.runner import run
        run(Experiment(**{settings}), out=sys.argv[1], resume=True)
    """)
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    while process.poll() is None and not (folder / "config.json").exists():
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
    resumed = json.loads((folder / "result.json").read_text())
    for part in ("clustering", "labels", "accuracy", "bytes"):
        assert resumed[part] == json.loads(to_json(done.summary[part])), part
    for name in ("models/cluster_0.safetensors", "models/cluster_1.safetensors"):
        assert (folder / name).read_bytes() == (done.folder / name).read_bytes()


def test_every_method_stopped_by_a_signal_is_continued_in_a_new_process_to_the_same_bits(tmp_path):
    """Stopped behind round 1 of 3, with enough asks before that their numbers have two digits."""
    from fbnll.methods import METHODS

    script = textwrap.dedent("""
        import os, signal, sys
        from fbnll.experiment import Experiment
        from fbnll.folder import RunFolder
        from fbnll.methods import METHODS
        from fbnll.runner import run
        folder, how = sys.argv[1:]
        record = RunFolder.record
        def stop(self, line, checkpoint):
            record(self, line, checkpoint)
            if how == "stop" and line["round"] == 6:
                raise KeyboardInterrupt
        RunFolder.record = stop
        for name in METHODS:
            try:
                run(Experiment(users=4, model="softmax", rounds=8, epochs=1, tau_sim=0.3, method=name), out=f"{folder}/{name}", resume=True)
            except KeyboardInterrupt:
                pass
    """)
    for folder, hows in {"whole": ["go"], "parts": ["stop", "go"]}.items():
        for how in hows:
            subprocess.run([sys.executable, "-c", script, str(tmp_path / folder), how], check=True)
    for name in METHODS:
        whole, parts = (tmp_path / folder / name for folder in ("whole", "parts"))
        results = [json.loads((folder / "result.json").read_text()) for folder in (whole, parts)]
        for part in ("clustering", "labels", "accuracy", "bytes", "missing"):
            assert results[0][part] == results[1][part], (name, part)
        assert set(results[0]["seconds"]) == set(results[1]["seconds"])
        assert results[1]["seconds"]["total"] >= results[1]["seconds"]["training"]
        for model in sorted((whole / "models").glob("*")) if (whole / "models").exists() else []:
            assert model.read_bytes() == (parts / "models" / model.name).read_bytes()


def test_a_finished_run_resumed_gives_the_same_result(done):
    before = done.summary["accuracy"]
    again = run(Experiment(**QUICK), out=done.folder, resume=True, compare=["fedavg"])
    assert again.summary["accuracy"] == before
    assert [line["round"] for line in RunFolder(done.folder, {}, True).history()] == [0, 1, 2, 3]


def test_a_folder_that_holds_another_run_or_other_files_is_refused(done, tmp_path):
    with pytest.raises(ValueError, match="holds a run already; --resume continues it"):
        run(Experiment(**QUICK), out=done.folder)
    with pytest.raises(ValueError, match="must be resumed with its own settings, but seed is 1 instead of 0"):
        run(Experiment(**QUICK, seed=1), out=done.folder, resume=True)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"must be new or empty, but .* holds other files"):
        run(Experiment(**QUICK), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_folder_is_written_by_one_run_at_a_time(tmp_path):
    first = RunFolder(tmp_path / "a", {"seed": 0}, False)
    second = RunFolder(tmp_path / "a", {"seed": 0}, False)
    first.begin()
    with pytest.raises(ValueError, match="must be written by one run at a time"):
        second.begin()
    with pytest.raises(ValueError, match="must be written by one run at a time"):
        RunFolder(tmp_path / "a", {"seed": 0}, True)
    first.release()
    with pytest.raises(ValueError, match="another run has begun"):
        second.begin()
    second.release()


def test_a_run_is_not_resumed_with_other_data_nor_from_a_damaged_checkpoint(tmp_path):
    users, reference = own_users(np.random.default_rng(0))
    experiment = Experiment(tasks=2, q=4, q1=2, l=2, rounds=0, tau_sim=0.5)
    fbnll.run(experiment, users=users, reference=reference, out=tmp_path / "run")
    others = [(X[::2], y[::2]) for X, y in users]
    with pytest.raises(ValueError, match="a run must be resumed with its own data"):
        fbnll.run(experiment, users=others, reference=reference, out=tmp_path / "run", resume=True)
    data = bytearray((tmp_path / "run" / "checkpoint.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "run" / "checkpoint.bin").write_bytes(data)
    with pytest.raises(ValueError, match="must be a checkpoint as this library wrote it, but it is damaged"):
        fbnll.run(experiment, users=users, reference=reference, out=tmp_path / "run", resume=True)
    for content in ("{}", "[]", "3", "{"):
        (tmp_path / "run" / "config.json").write_text(content)
        with pytest.raises(ValueError, match="that this library wrote"):
            fbnll.run(experiment, users=users, reference=reference, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("settings", [{"clean_per_class": 1}, {"eps": 1.0}, {"model": "vit"}, {"q": 65}])
def test_a_refused_run_leaves_its_folder_free_for_the_corrected_one(settings, tmp_path):
    base = {"users": 4, "rounds": 0}
    with pytest.raises(ValueError, match="must"):
        run(Experiment(**{**base, **settings}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_of_the_wrong_type_are_one_sentence():
    """In a process whose signatures are not checked for types."""
    script = """
        from fbnll.experiment import Experiment
        for settings in ({"q": 4.5}, {"seed": None}, {"lr": "a"}, {"rounds": 1.5}, {"noise": None}, {"users": "3"}, {"coin": 1}):
            try:
                Experiment(**settings).complete()
            except ValueError as error:
                ((name, value),) = settings.items()
                assert str(error).startswith(f"{name} must be ") and str(error).endswith(f"but it is {value!r}"), error
            else:
                raise AssertionError(settings)
        Experiment(lr=1, tau_sim=1, alpha=1).complete()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_files_are_as_private_as_the_user_wants_them(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "file", "labels")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


BAD = {
    "dataset": ({"dataset": "mnist1d"}, "dataset must be"),
    "method": ({"method": "fedsgd"}, "method must be one of"),
    "overlapping tasks": ({"tasks": ((0, 1), (1, 2))}, "must"),
    "tasks outside": ({"tasks": ((0, 1), (2, 12))}, "must"),
    "more tasks than users": ({"users": 1}, "tasks must be from 1 to the number of users"),
    "no users": ({"users": 0}, "users must be at least 1"),
    "q above the width": ({"q": 65}, "q must be at most the feature dimension, but q is 65 and features have 64 columns"),
    "l above the width": ({"l": 65}, "l must be at most the feature dimension"),
    "noise": ({"noise": "salt"}, "noise must be one of .* but it is 'salt'"),
    "alpha": ({"alpha": 1.5}, "alpha must be from 0 to 1, but it is 1.5"),
    "ward": ({"linkage": "ward"}, "linkage must be one of .*Euclidean"),
    "model": ({"model": "vit"}, "model must be one of"),
    "model that does not fit": ({"model": "cnn", "inputs": "clustering"}, "must"),
    "rounds": ({"rounds": -1}, "rounds must be at least 0"),
    "tau": ({"tau_sim": "high"}, "tau_sim must be a number or auto, but it is 'high'"),
    "clean set": ({"clean_per_class": 1000}, "must have 1000 samples for the clean set"),
    "users without data": ({"users": 1400}, "must"),
    "one task with noise of other tasks": ({"tasks": 1}, "must"),
    "features": ({"phi_clustering": "vgg"}, "must"),
    "workers": ({"transport": "loopback", "workers": 3}, "workers above 1 must go with the transport processes, but it is loopback"),
    "device": ({"device": "tpu"}, "device must be one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_sentence_and_leave_nothing_behind(case, tmp_path):
    settings, words = BAD[case]
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=words) as error:
        run(Experiment(**{**QUICK, **settings}), out=out)
    assert "\n" not in str(error.value)
    assert not out.exists()


def blobs(rng, n, classes):
    y = rng.choice(classes, n)
    return (np.eye(8)[y] * 4 + rng.normal(size=(n, 8))).astype(np.float32), y


def own_users(rng):
    users = [blobs(rng, 60, classes) for classes in ((0, 1), (2, 3)) for _ in range(3)]
    reference = blobs(rng, 200, (0, 1, 2, 3))
    return users, reference


def test_users_can_be_given_directly_and_get_their_corrected_labels_back():
    rng = np.random.default_rng(0)
    users, reference = own_users(rng)
    noisy = [(X, np.where(rng.random(len(y)) < 0.25, (y + 1) % 4, y)) for X, y in users]
    experiment = Experiment(tasks=2, q=4, q1=2, l=2, model="softmax", rounds=2)
    result = fbnll.run(experiment, users=noisy, reference=reference)
    assert result.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    before, after = (np.mean([np.mean(a != y) for a, (_, y) in zip(labels, users)]) for labels in ([y for _, y in noisy], result.labels))
    assert after < before / 2
    assert result.summary["labels"] is None
    assert result.summary["accuracy"]["mean"] is None


def test_a_user_without_samples_is_left_out_and_named_and_others_that_are_odd_are_handled(caplog):
    rng = np.random.default_rng(0)
    users, reference = own_users(rng)
    empty = (np.empty((0, 8), np.float32), np.empty(0, np.int64))
    single = (users[0][0][:1], users[0][1][:1])
    constant = (np.ones((9, 8), np.float32), np.zeros(9, np.int64))
    experiment = Experiment(tasks=3, q=4, q1=2, l=2, model="softmax", rounds=1, batch=8)
    result = fbnll.run(experiment, users=[*users, empty, single, constant, users[0], users[0]], reference=reference)
    assert result.summary["clustering"]["without_cluster"] == [6]
    assert "users without samples are left out: 6" in caplog.text
    for method in ("fedavg", "local"):
        others = fbnll.run(replace(experiment, method=method), users=[*users, empty], reference=reference)
        assert others.clusters[6] == -1
    assert result.clusters[9] == result.clusters[10] == result.clusters[0]
    assert len(result.labels[6]) == 0


BAD_USERS = {
    "NaN": (lambda X, y: (X * np.nan, y), "samples of user 1 must be finite, but 480 values are NaN or infinite"),
    "one dimension": (
        lambda X, y: (X[:, 0], y),
        "samples of user 1 must be real numbers with a row a sample, but they are float32 \\(60,\\)",
    ),
    "complex": (lambda X, y: (X * 1j, y), "samples of user 1 must be real numbers"),
    "a huge label": (lambda X, y: (X, y + 30_000), "labels must be from 0 to 999, but one is 300"),
    "negative labels": (lambda X, y: (X, y - 9), "labels of user 1 must be integers from 0 on"),
    "float labels": (lambda X, y: (X, y + 0.5), "labels of user 1 must be integers from 0 on"),
    "fewer labels": (lambda X, y: (X, y[:-1]), r"user 1 must have one label for each sample, but there are labels \(59,\)"),
    "another shape": (lambda X, y: (X[:, :5], y), "samples of all users must have one shape"),
    "class without clean samples": (lambda X, y: (X, y + 9), r"the clean set must have samples of every class, but it has none of \[4, 5"),
}


@pytest.mark.parametrize("case", BAD_USERS)
def test_bad_samples_are_one_sentence(case):
    change, words = BAD_USERS[case]
    users, reference = own_users(np.random.default_rng(0))
    users[1] = change(*users[1])
    with pytest.raises(ValueError, match=words):
        fbnll.run(Experiment(tasks=2, q=4, q1=2, l=2, rounds=0), users=users, reference=reference)


def test_a_method_that_corrects_asks_for_a_clean_set_and_the_oracle_for_the_truth():
    users, _ = own_users(np.random.default_rng(0))
    with pytest.raises(ValueError, match="fb_nll must have a clean set, but reference is not given"):
        fbnll.run(Experiment(rounds=0), users=users)
    with pytest.raises(ValueError, match="oracle must know the true tasks"):
        fbnll.run(Experiment(rounds=0, method="oracle"), users=users)


def test_writing_is_all_or_nothing(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "new\ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(tmp_path):
    mount = tmp_path / "small disk"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("a small disk can only be mounted by root")
    try:
        from fbnll.cli import main

        code = main(["run", "--users", "6", "--rounds", "1", "--model", "mlp", "--quiet", "--out", str(mount / "run")])
        left = [path for path in mount.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", mount], check=True)
    assert code == 2
    assert all(path.name in ("config.json", "history.jsonl") for path in left)
