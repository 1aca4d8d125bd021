"""What lies in the folder of a run: settings, environment, code, data, metrics, a page, and checkpoints.

    RUN/checkpoints/step-00001200/
        model.safetensors      all networks of the method
        optimizer.safetensors  AdamW's moments, by parameter name
        state.json             step, settings, data, the hash of the two files above, and a digest of all this

A checkpoint is whole or not there: it is written under another name, synced and renamed. ``state.json`` is written last
and names the hashes of the others and its own, so a truncated or altered one is recognised even where a rename was not
atomic.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from afire._version import __version__
from afire.config import Section
from afire.errors import UserError
from afire.files import (
    ORDINARY_MODE,
    folder_lock,
    read_json,
    remove_unfinished,
    require_folder,
    require_own,
    sha256_file,
    sha256_text,
    write_json,
    write_text,
)
from afire.nn import distributed
from afire.settings import load_settings, to_yaml

logger = logging.getLogger("afire")

_PACKAGES = ("torch", "accelerate", "numpy", "safetensors", "pandas", "pydicom", "pillow")
CONFIG, DATA, ENVIRONMENT, METRICS, SUMMARY = (
    "config.yaml",
    "data.json",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
)


Optimizers = Sequence[torch.optim.Optimizer]
FORMAT = 1
CHECKPOINTS, MODEL, OPTIMIZER, STATE = "checkpoints", "model.safetensors", "optimizer.safetensors", "state.json"
_DIGEST = "digest"  # in state.json: of everything else in it
_NAMED = 3  # changed films in a message


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.state["step"])

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """The weights, by name."""
        return load_file(self.folder / MODEL)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, by name."""
        return load_file(self.folder / OPTIMIZER)


class Tensors(NamedTuple):
    """What a checkpoint holds, by name and whole: any number of processes may go on from it."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]


def collect(model: nn.Module, optimizers: Optimizers, keep: bool = True) -> Tensors:
    """Weights and moments, joined from their parts where these are sharded, for a process that is to ``keep`` them.

    A collective call.
    """
    return Tensors(_whole(model.state_dict(), keep), _whole(optimizer_state(model, optimizers), keep))


def _whole(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """One after the other: a device need not hold more than one of them whole."""
    joined = ((name, distributed.whole(tensor)) for name, tensor in tensors.items())
    return {name: tensor.cpu() if distributed.in_parts(tensors[name]) else tensor for name, tensor in joined if keep}


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizers: Optimizers,
    state: Mapping[str, Any],
    keep: int,
    tensors: Tensors | None = None,
) -> Path:
    """Write the checkpoint of ``state["step"]`` and remove all but the newest ``keep`` that are whole.

    ``tensors`` are what :func:`collect` gave, where all processes had to take part in it; else they are collected here.
    A disk that is full or read-only is a :class:`UserError`; the checkpoints before stay as they are.
    """
    folder = run / CHECKPOINTS
    final = folder / f"step-{int(state['step']):08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(final, *(tensors or collect(model, optimizers)), state)
        _prune(folder, keep)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own way
        names = [path.name for path in sorted(folder.glob("step-*"))]
        newest = f"; {names[-1]} is whole, resume from it" if names else ""
        raise UserError(
            f"cannot write the checkpoint {final}: {getattr(error, 'strerror', None) or error}{newest}."
        ) from error
    return final


def _prune(folder: Path, keep: int) -> None:
    """Keep the newest ``keep`` whole checkpoints: a truncated one, however new, is nothing to go on from."""
    count = 0
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        if count < keep and _looks_whole(checkpoint):
            count += 1
        else:
            shutil.rmtree(checkpoint)


def _looks_whole(folder: Path) -> bool:
    """Whether its files are there and as long as their headers say; reading them all would cost seconds at every save.

    A safetensors file begins with the length of its header, which says where the last tensor ends.
    """
    try:
        for name in read_state(folder)["files"]:
            with (folder / name).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            if (folder / name).stat().st_size != 8 + length + max(ends, default=0):
                return False
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return False
    return True


def write_folder(
    final: Path, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Write one checkpoint folder under a temporary name, sync it, rename it."""
    temporary = final.with_name(f".part-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _save(model, temporary / MODEL)
        _save(optimizer, temporary / OPTIMIZER)
        hashes = {name: sha256_file(temporary / name) for name in (MODEL, OPTIMIZER)}
        content = {"format": FORMAT, **state, "files": hashes}
        write_json(temporary / STATE, {**content, _DIGEST: _digest(content)})
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        temporary.replace(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; truncated ones are named and passed over."""
    for folder in sorted((run / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            return read_checkpoint(folder)
        except UserError as error:
            logger.warning("passed over a truncated checkpoint: %s", error)
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint, if it is what was written; those of earlier versions cannot tell."""
    state = read_json(folder / STATE)
    if not isinstance(state, dict):
        raise UserError(f"{folder / STATE} is not the state of a checkpoint.")
    recorded = state.pop(_DIGEST, None)
    if recorded is not None and recorded != _digest(state):
        raise UserError(f"{folder / STATE} is not what was written: its digest differs.")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    """The same for a state and for what is read of its file."""
    as_read = json.loads(json.dumps(state))
    return sha256_text(json.dumps(as_read, sort_keys=True))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder after checking that it is whole."""
    require_folder(folder, "checkpoint")
    try:
        state = read_state(folder)
        if state["format"] != FORMAT:
            raise UserError(f"{folder} has checkpoint format {state['format']}; this version reads {FORMAT}.")
        for name, expected in state["files"].items():
            if sha256_file(folder / name) != expected:
                raise UserError(f"{folder / name} is not what {STATE} says was written.")
        int(state["step"])
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder} is not a whole checkpoint ({type(error).__name__}: {error}).") from None
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put a checkpoint into ``model`` and ``optimizers``."""
    restore_model(checkpoint, model)
    restore_optimizers(checkpoint, model, optimizers)


def restore_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the weights of a checkpoint into a ``model`` that is not sharded yet."""
    try:
        model.load_state_dict(checkpoint.model_tensors())
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{checkpoint.folder} does not fit this model: {first}") from None


def restore_optimizers(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put the moments of a checkpoint into ``optimizers``; a collective call where ``model`` is sharded."""
    load_optimizer_state(checkpoint.optimizer_tensors(), model, optimizers)


def optimizer_state(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """The optimisers' tensors as ``parameter.name::moment``: names outlive the order of parameters.

    Several optimisers own different parameters, so that a name tells whose it is.
    """
    return {
        f"{name}::{key}": value
        for optimizer in optimizers
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(tensors: Mapping[str, torch.Tensor], model: nn.Module, optimizers: Optimizers) -> None:
    """Undo :func:`optimizer_state`."""
    parameters = dict(model.named_parameters())
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, value in tensors.items():
        name, _, moment = key.rpartition("::")
        parameter = parameters[name]
        if id(parameter) not in owners:
            continue  # a parameter that this phase of the run does not train
        optimizer = owners[id(parameter)]
        # AdamW keeps its step counter where it was made (the CPU unless fused on a GPU); moments live with the weight.
        if moment == "step":
            home = value.to(parameter.device) if _fused(optimizer) else value
        else:
            home = distributed.part_like(value, parameter)
        optimizer.state[parameter][moment] = home.clone()


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable"))


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(ORDINARY_MODE)  # safetensors makes 0600; colleagues may read a run as they may read its settings
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes. ``with RunFolder(path) as folder``: what :meth:`hold` took is let go at the end."""

    path: Path
    _held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def hold(self) -> None:
        """Keep other processes from writing here; a run that is going on already is a :class:`UserError`."""
        self._held.enter_context(folder_lock(self.path, "the run in"))

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / CONFIG).exists()

    def begin(
        self,
        config: Section,
        data: Mapping[str, Any],
        resume: bool,
        force: bool,
        changed_films: Sequence[str] = (),
        check_fits: Callable[[Checkpoint], None] | None = None,
    ) -> Checkpoint | None:
        """Start afresh, or return the checkpoint to go on from; refuse what would mix two runs.

        ``check_fits`` refuses a checkpoint that other settings cannot go on from: before they are written, or the run
        would have settings that its own weights do not fit.
        """
        if not resume:
            require_own(self.path, DATA, ("README.md", METRICS, SUMMARY))
            if self.exists:
                raise UserError(
                    f"{self.path} already holds a run; add --resume to go on with it, or choose another --out."
                )
            self._clear_litter()
            self._describe(config, data)
            return None
        if not self.exists:
            raise UserError(f"{self.path} holds no run to resume; leave --resume out to start one.")
        # With another list of films, every film that is new to it would seem to be changed.
        changes = self.changes(config, data) or _film_changes(changed_films)
        if changes and not force:
            raise UserError(
                f"the run in {self.path} was made with other settings or films ({'; '.join(changes)}); add --force to "
                "go on, or choose another --out."
            )
        self._clear_litter()
        checkpoint = newest_checkpoint(self.path)
        if changes and checkpoint is not None and check_fits is not None:
            check_fits(checkpoint)
        if changes or checkpoint is None:
            self._describe(config, data)
        self._forget_after(checkpoint.step if checkpoint else 0)
        return checkpoint

    def changes(self, config: Section, data: Mapping[str, Any]) -> list[str]:
        """Settings and data that differ from those the run was begun with; `run` and `training.shard` may change."""
        free: Any = {"run": True, "training": {"shard"}}  # where weights lie does not change them
        before = flat(load_settings(type(config), [self.path / CONFIG]).model_dump(exclude=free))
        now = flat(config.model_dump(exclude=free))
        changes = [f"{key} was {before.get(key)}, is {now[key]}" for key in now if before.get(key) != now[key]]
        stored = read_json(self.path / DATA)
        for key, what in (("hash", "data's"), ("weights_hash", "weights'")):
            if stored.get(key) != data.get(key):
                changes.append(f"the {what} hash was {str(stored.get(key))[:12]}, is {str(data.get(key))[:12]}")
        return changes

    def _describe(self, config: Section, data: Mapping[str, Any]) -> None:
        write_json(self.path / DATA, dict(data))
        write_json(self.path / ENVIRONMENT, environment())
        write_text(self.path / CONFIG, to_yaml(config))  # last: its presence is what makes a folder a run

    def _clear_litter(self) -> None:
        """Remove what a killed run left half-written."""
        for folder in (self.path, self.path / CHECKPOINTS, self.path / "pictures"):
            remove_unfinished(folder)

    def _forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be run again."""
        path = self.path / METRICS
        if not path.exists():
            return
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    lines.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # truncated by a kill
        write_text(path, "".join(f"{line}\n" for line in lines))

    def finish(self, page: str, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, and ``README.md`` with the text of ``page``."""
        write_json(self.path / SUMMARY, dict(summary))
        write_text(self.path / "README.md", page)


def _film_changes(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return [f"films whose files are gone or not those of before: {', '.join(names[:_NAMED])}{more}"]


def environment() -> dict[str, Any]:
    """Versions, machine and code state; no user or host name."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "afire": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpus": devices,
        "packages": versions,
        "git": _git_state(),
        "command": [Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])],
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _without_folders(word: str) -> str:
    """A word of the command; of an absolute path only the last name, as the folders above it tell whose machine it is.

    Also of one behind an equals sign: ``--out=/home/jane/run`` becomes ``--out=.../run``.
    """
    name, equals, value = word.partition("=")
    if not _is_absolute(word) and _is_absolute(value):
        return f"{name}{equals}.../{PureWindowsPath(value).name}"
    return f".../{PureWindowsPath(word).name}" if _is_absolute(word) else word


def _is_absolute(path: str) -> bool:
    """Here or on Windows, or from somebody's home."""
    return path.startswith(("/", "~")) or PureWindowsPath(path).is_absolute()


def _git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, and whether it was changed since; None outside a checkout."""
    try:
        here = Path(__file__).parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    entries: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            entries.update(flat(value, f"{prefix}{key}."))
        else:
            entries[f"{prefix}{key}"] = value
    return entries
