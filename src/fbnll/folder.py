"""A run folder: config.json, history.jsonl, the last round's checkpoint, result.json, models and the data of figures."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fbnll.payload import Payload, pack, unpack

PACKAGES = ("fbnll", "numpy", "scipy", "torch")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes all of the file or nothing: a reader, also after a crash, finds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def to_json(value: Any, indent: int | None = 2) -> str:
    """JSON in which everything that is not a finite number is null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


class RunFolder:
    """The folder of one run: new or empty, or, to resume, one that holds the same configuration."""

    def __init__(self, path: Path, config: Payload, resume: bool):
        self.path, self.config = path, config
        existing = self._read("config.json")
        if path.exists() and not path.is_dir():
            raise ValueError(f"a run folder must be a folder, but {path} is a file")
        if existing is None and path.is_dir() and any(path.iterdir()):
            raise ValueError(f"a run folder must be new or empty, but {path} holds other files")
        if existing is not None and not resume:
            raise ValueError(f"a run folder must be new or empty, but {path} holds a run already; --resume continues it")
        if existing is not None:
            before = existing["experiment"]
            differing = [name for name, value in json.loads(to_json(config)).items() if before.get(name) != value]
            if differing:
                came = ", ".join(f"{name} is {config[name]!r} instead of {before.get(name)!r}" for name in differing)
                raise ValueError(f"a run must be resumed with its own settings, but {came}")
        self.resumed = existing is not None

    def begin(self, command: str | None, device: str, extra: Payload) -> None:
        """Writes the configuration, with seed, device and versions; the folder is made only now, when a run has something to put there."""
        if self.resumed:
            return
        versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES if _installed(name)}}
        config = {"experiment": self.config, "seed": self.config["seed"], "device": device, "versions": versions, "command": command}
        write_atomically(self.path / "config.json", to_json({**config, **extra}))

    def checkpoint(self) -> Payload | None:
        path = self.path / "checkpoint.bin"
        if not self.resumed or not path.exists():
            return None
        try:
            return unpack(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} must be a checkpoint that this library wrote, but it is not: {error}") from None

    def record(self, line: Payload, checkpoint: Payload) -> None:
        """A round's line in the history, and behind it the checkpoint that makes the round last."""
        rounds = [entry for entry in self.history() if entry["round"] < line["round"]]
        lines = "".join(to_json(entry, indent=None) for entry in [*rounds, line])
        write_atomically(self.path / "history.jsonl", lines)
        write_atomically(self.path / "checkpoint.bin", pack(checkpoint))

    def history(self) -> list[Payload]:
        path = self.path / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self, summary: Payload, figures: Payload, models: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Models, data of the figures, and last the result, which tells a finished run."""
        if models:
            from safetensors.numpy import save

            for name, w in models.items():
                write_atomically(
                    self.path / "models" / f"{name}.safetensors", save({key: np.ascontiguousarray(part) for key, part in w.items()})
                )
        write_atomically(self.path / "figures.json", to_json(figures, indent=None))
        write_atomically(self.path / "result.json", to_json(summary))

    def _read(self, name: str) -> Payload | None:
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.is_file() else None
        except ValueError:
            raise ValueError(f"{path} must be JSON that this library wrote, but it is not") from None


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
