"""Checkpoints that are whole or not there.

    RUN/checkpoints/step-00001200/
        model.safetensors      student, teacher, decoder, prototypes
        optimizer.safetensors  AdamW's moments, by parameter name
        state.json             step, settings, data, and the hash of the two files above

A checkpoint is written under another name, synced and renamed. ``state.json`` is written last and names the hashes of
the others, so a truncated one is recognised even where a rename was not atomic.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from afire.errors import UserError
from afire.files import ORDINARY_MODE, require_folder, sha256_file, write_json

Optimizers = Sequence[torch.optim.Optimizer]
FORMAT = 1
FOLDER, MODEL, OPTIMIZER, STATE = "checkpoints", "model.safetensors", "optimizer.safetensors", "state.json"

logger = logging.getLogger("afire")


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


def save_checkpoint(run: Path, model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of ``state["step"]`` and remove all but the newest ``keep`` that are whole.

    A disk that is full or read-only is a :class:`UserError`; the checkpoints before stay as they are.
    """
    folder = run / FOLDER
    final = folder / f"step-{int(state['step']):08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(final, model.state_dict(), optimizer_state(model, optimizers), state)
        _prune(folder, keep)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own way
        kept = [path.name for path in sorted(folder.glob("step-*"))]
        newest = f"; {kept[-1]} is whole, resume from it" if kept else ""
        raise UserError(
            f"cannot write the checkpoint {final}: {getattr(error, 'strerror', None) or error}{newest}."
        ) from error
    return final


def _prune(folder: Path, keep: int) -> None:
    """Keep the newest ``keep`` whole checkpoints: a truncated one, however new, is nothing to go on from."""
    kept = 0
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        if kept < keep and _looks_whole(checkpoint):
            kept += 1
        else:
            shutil.rmtree(checkpoint)


def _looks_whole(folder: Path) -> bool:
    """Whether its files are there and as long as their headers say; reading them all would cost seconds at every save.

    A safetensors file begins with the length of its header, which says where the last tensor ends.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name in state["files"]:
            with (folder / name).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            if (folder / name).stat().st_size != 8 + length + max(ends, default=0):
                return False
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
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
        write_json(temporary / STATE, {"format": FORMAT, **state, "files": hashes})
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        temporary.replace(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; truncated ones are named and passed over."""
    for folder in sorted((run / FOLDER).glob("step-*"), reverse=True):
        try:
            return read_checkpoint(folder)
        except UserError as error:
            logger.warning("passed over a truncated checkpoint: %s", error)
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder after checking that it is whole."""
    require_folder(folder, "checkpoint")
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise UserError(f"{folder} has checkpoint format {state['format']}; this version reads {FORMAT}.")
        for name, expected in state["files"].items():
            if sha256_file(folder / name) != expected:
                raise UserError(f"{folder / name} is not what {STATE} says was written.")
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} is not a whole checkpoint ({type(error).__name__}: {error}).") from None
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put a checkpoint into ``model`` and ``optimizers``."""
    try:
        model.load_state_dict(checkpoint.model_tensors())
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{checkpoint.folder} does not fit this model: {first}") from None
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
        home = value if moment == "step" and not _fused(optimizer) else value.to(parameter.device)
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
