"""The command line: `fbnll run`, `fbnll demo`, `fbnll report`, `fbnll data`; its flags are the fields of Experiment."""

import argparse
import errno
import json
import logging
import os
import shlex
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

EXAMPLES = """examples:
  fbnll run                                            digits, 20 users, two tasks, class-dependent noise
  fbnll run --noise uniform --tasks 5 --out runs/five  and keep everything in a folder, with a page to look at
  fbnll run --dataset cifar10 --data-dir D --rounds 0  cluster and correct, do not train
  fbnll run --out runs/five --resume ...               go on after an interruption, with the same settings
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 the run failed, 2 bad input (one sentence on stderr), 130 interrupted."""
    try:
        args = _parser().parse_args(arguments)
        args.typed = shlex.join(["fbnll", *(sys.argv[1:] if arguments is None else arguments)])
        logging.basicConfig(level=logging.ERROR if args.quiet else logging.WARNING, format="%(name)s: %(message)s")
        args.command(args)
    except KeyboardInterrupt:
        print("fbnll: interrupted; `fbnll run` with --out goes on after its last round with --resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConnectionError as error:
        print(f"fbnll: failed: {_sentence(error)}", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"fbnll: error: {_sentence(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"fbnll: failed: {error}", file=sys.stderr)
        return 1
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"there must be room on the disk to write {error.filename or 'the results'}, but it is full"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} must be readable and writeable, but: {error.strerror}"
    if isinstance(error, ImportError) and error.name:
        return f"{error.name} must be installed for this, but it is not: pip install 'fbnll[run]'"
    return " ".join(str(error).split())


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, like all others."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"fbnll: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="fbnll",
        description="Personalised federated learning with noisy labels: cluster users once by the spectra of their features,\n"
        "correct their labels from a small clean set, and train one model per cluster.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run one experiment", epilog=EXAMPLES, formatter_class=formatter, allow_abbrev=False)
    _add_fields(run)
    run.add_argument("--out", metavar="DIR", help="run folder to write: new, empty, or with --resume the one to go on from")
    run.add_argument("--resume", action="store_true", help="go on from the last round in --out")
    run.add_argument(
        "--compare", metavar="METHODS", default="", help="more methods on the same users, with commas: fb_nll_minus,fedavg,clean"
    )
    run.set_defaults(command=_run)

    demo = commands.add_parser("demo", help="see FB-NLL work on real digits, in less than a minute", allow_abbrev=False)
    demo.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/demo, or the next one that is free)")
    demo.set_defaults(command=_demo)

    report = commands.add_parser("report", help="draw the page of a run folder again", allow_abbrev=False)
    report.add_argument("folder", metavar="DIR", help="a run folder, as written by fbnll run --out DIR")
    report.set_defaults(command=_report)

    data = commands.add_parser("data", help="download official datasets", allow_abbrev=False)
    verbs = data.add_subparsers(required=True, metavar="VERB")
    fetch = verbs.add_parser("fetch", help="download an official archive, verify it, and resume where it stopped", allow_abbrev=False)
    fetch.add_argument("name", metavar="NAME", help="cifar10, cifar100, svhn or fashion_mnist; as in: fbnll data fetch svhn")
    fetch.add_argument("--data-dir", metavar="DIR", help="where to put it (default: $FBNLL_DATA or ~/.cache/fbnll/data)")
    fetch.set_defaults(command=_fetch)

    for command in (run, demo, report, fetch):
        command.add_argument("--quiet", action="store_true", help="no progress bars and no summary")
    return parser


def _add_fields(parser: argparse.ArgumentParser) -> None:
    from fbnll.experiment import DEFAULTS, Experiment

    kinds = typing.get_type_hints(Experiment)
    for entry in fields(Experiment):
        flag, text = f"--{entry.name.replace('_', '-')}", entry.metadata["help"]
        if kinds[entry.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=entry.default, help=text)
            continue
        by_dataset = entry.name in DEFAULTS["digits"]
        if entry.default is not None or by_dataset:
            text += f" (default: {'by dataset' if entry.default is None else entry.default})"
        convert = _tasks if entry.name == "tasks" else _plain_type(kinds[entry.name])
        metavar = convert.__name__.strip("_").upper()
        parser.add_argument(
            flag,
            type=convert,
            default=entry.default,
            metavar=metavar,
            help=text.replace("%", "%%"),
        )


def _plain_type(kind: object) -> type:
    """The type that a flag's text is converted to: the first of a union such as int | None."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return typing.cast(type, options[0])


def _tasks(text: str) -> int | tuple[tuple[int, ...], ...]:
    try:
        if text.strip().isdigit():
            return int(text)
        split = json.loads(text) if text.startswith("[") else [part.split(",") for part in text.split("/")]
        if any(type(c) is float for task in split for c in task):
            raise ValueError
        return tuple(tuple(int(c) for c in task) for task in split)
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"must be a number, or classes as in 0,1,8,9/2,3,4,5,6,7, but it is {text!r}") from None


def _run(args: argparse.Namespace) -> None:
    from fbnll.experiment import Experiment
    from fbnll.runner import run

    e = Experiment(**{entry.name: getattr(args, entry.name) for entry in fields(Experiment)})
    if args.resume and not args.out:
        raise ValueError("--resume must come with --out, the run folder to go on from, but there is none")
    compare = [name.strip() for name in args.compare.split(",") if name.strip()]
    result = run(e, out=args.out, resume=args.resume, compare=compare, command=args.typed, quiet=args.quiet)
    if not args.quiet:
        from fbnll.summary import told

        print(told(result))


def _demo(args: argparse.Namespace) -> None:
    from fbnll.experiment import Experiment
    from fbnll.runner import run

    out = Path(args.out) if args.out else _free(Path("runs/demo"))
    result = run(Experiment(), out=out, compare=["fb_nll_minus", "fedavg", "clean"], command=args.typed, quiet=args.quiet)
    if not args.quiet:
        from fbnll.summary import told

        print(told(result))


def _free(path: Path) -> Path:
    """The path itself or, where earlier results are there, the first of path-2, path-3, … that is free."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _report(args: argparse.Namespace) -> None:
    from fbnll.report import write_report

    page = write_report(Path(args.folder))
    if not args.quiet:
        print(page)


def _fetch(args: argparse.Namespace) -> None:
    from fbnll.data import fetch

    folder = fetch(args.name, args.data_dir, quiet=args.quiet)
    if not args.quiet:
        print(folder)


if __name__ == "__main__":
    sys.exit(main())
