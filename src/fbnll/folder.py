"""A run folder: config.json, history.jsonl, the last round's checkpoint, result.json, models and the data of figures."""

import hashlib
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

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

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
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


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
        self.facts: Payload = {}
        self._descriptor: int | None = None
        existing = self._read("config.json")
        if path.exists() and not path.is_dir():
            raise ValueError(f"a run folder must be a folder, but {path} is a file")
        if existing is None and path.is_dir() and any(path.iterdir()):
            raise ValueError(f"a run folder must be new or empty, but {path} holds other files")
        if existing is not None and not resume:
            raise ValueError(f"a run folder must be new or empty, but {path} holds a run already; --resume continues it")
        if existing is not None:
            before = existing.get("experiment")
            if not isinstance(before, dict):
                raise ValueError(f"{path / 'config.json'} must be a configuration that this library wrote, but it is not")
            differing = [name for name, value in json.loads(to_json(config)).items() if before.get(name) != value]
            if differing:
                came = ", ".join(f"{name} is {config[name]!r} instead of {before.get(name)!r}" for name in differing)
                raise ValueError(f"a run must be resumed with its own settings, but {came}")
            self._lock()
        self.existing, self.begun = existing, existing is not None

    def prepare(self, data: str, **facts: Any) -> None:
        """Says what the configuration will hold beside the settings; `data` is a hash of the data, which must be those of its beginning."""
        self.facts = {**facts, "data": data}
        if self.existing and self.existing.get("data") != data:
            raise ValueError(f"a run must be resumed with its own data, but these are not those that {self.path} began with")

    def begin(self) -> None:
        """Writes the configuration, with seed and versions; the folder is made only now, when a run has something to put there.

        Nothing happens where that was done before.
        """
        if self.begun:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        if self._read("config.json") is not None:
            self.release()
            raise ValueError(f"a run folder must be new or empty, but another run has begun in {self.path} meanwhile")
        versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES if _installed(name)}}
        config = {"experiment": self.config, "seed": self.config["seed"], "versions": versions, **self.facts}
        write_atomically(self.path / "config.json", to_json(config))
        self.begun = True

    def checkpoint(self) -> Payload | None:
        path = self.path / "checkpoint.bin"
        if not self.existing or not path.exists():
            return None
        data = path.read_bytes()
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            raise ValueError(f"{path} must be a checkpoint as this library wrote it, but it is damaged")
        return unpack(data[:-32])

    def record(self, line: Payload, checkpoint: Payload) -> None:
        """A round's line in the history, and behind it the checkpoint that makes the round last."""
        self.begin()
        rounds = [entry for entry in self.history() if entry["round"] < line["round"]]
        lines = "".join(to_json(entry, indent=None) for entry in [*rounds, line])
        write_atomically(self.path / "history.jsonl", lines)
        data = pack(checkpoint)
        write_atomically(self.path / "checkpoint.bin", data + hashlib.sha256(data).digest())

    def _lock(self) -> None:
        """Keeps the folder to this run until `release`, or until its process ends."""
        if fcntl is None:
            return
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise ValueError(f"a run folder must be written by one run at a time, but another one is at work in {self.path}") from None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

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
            value = json.loads(path.read_text()) if path.is_file() else None
        except ValueError:
            value = []
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{path} must be JSON that this library wrote, but it is not")
        return value


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
