import subprocess
import sys

import pytest

from fbnll.cli import main
from fbnll.experiment import Experiment


def test_every_field_of_an_experiment_is_a_flag_with_a_help_text(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for name in Experiment.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "fbnll run --dataset cifar10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--dataset", "nothing"],
        ["run", "--tasks", "0,1/1,2", "--rounds", "0"],
        ["run", "--tasks", "21"],
        ["run", "--q", "65", "--rounds", "0"],
        ["run", "--resume"],
        ["run", "--compare", "nothing", "--rounds", "0"],
        ["run", "--dataset", "cifar10", "--data-dir", "/nowhere", "--rounds", "0"],
        ["run", "--phi-correction", "/nowhere/features.npy", "--rounds", "0"],
        ["report", "/nowhere"],
        ["data", "fetch", "nothing"],
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fbnll: error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--tasks", "two"],
        ["run", "--tasks", "[[0.5,1],[2]]"],
        ["run", "--tasks", "0,1/"],
        ["run", "--users", "many"],
        ["run", "--nothing"],
        [],
        ["walk"],
    ],
)
def test_flags_that_cannot_be_read_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fbnll: error: ")
    assert error.count("\n") == 1


def test_a_run_tells_what_it_found_in_a_few_lines(capsys, tmp_path):
    assert main(["run", "--users", "6", "--rounds", "1", "--model", "softmax", "--out", str(tmp_path / "r")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 10
    text = "\n".join(lines)
    for words in ("clusters", "labels", "accuracy", "report.html"):
        assert words in text


def test_a_split_can_be_given_in_two_ways(capsys):
    for split in ("0,1,2/3,4", "[[0, 1, 2], [3, 4]]"):
        assert main(["run", "--users", "4", "--tasks", split, "--rounds", "0", "--noise", "none", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


NO_TORCH = {
    "import fbnll": "import fbnll, fbnll.methods, fbnll.federation, fbnll.transports",
    "help": "import contextlib\nfrom fbnll.cli import main\nwith contextlib.suppress(SystemExit): main(['--help'])",
    "a clustering ask": "from fbnll.federation import find_job\nfind_job('fbnll.methods.fb_nll:relevances')",
    "clustering and correction": (
        "from fbnll.experiment import Experiment\nfrom fbnll.runner import run\nrun(Experiment(users=4, rounds=0, transport='loopback'))"
    ),
}


@pytest.mark.parametrize("what", NO_TORCH)
def test_torch_is_imported_only_where_something_trains(what):
    script = f"{NO_TORCH[what]}\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_the_numerics_need_none_of_the_extras():
    script = """
import sys
for name in ("torch", "sklearn", "pyarrow", "PIL", "tqdm", "safetensors"):
    sys.modules[name] = None
import fbnll, fbnll.spectral, fbnll.clustering, fbnll.correction, fbnll.noise, fbnll.partition
import fbnll.payload, fbnll.federation, fbnll.transports
"""
    subprocess.run([sys.executable, "-c", script], check=True)
