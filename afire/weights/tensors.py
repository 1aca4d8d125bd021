"""Tensors out of files, and nothing else: safetensors and ``torch.load(weights_only=True)``; code is never run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from afire.errors import UserError
from afire.files import require_file, write_atomic


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a file by name, nested names joined with dots; nothing else in it is looked at."""
    require_file(file, "weights file")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} is torn or holds pickled code beside tensors and was not opened; save a state_dict as safetensors."
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise UserError(
            f"{file} is not a readable weights file ({(str(error) or type(error).__name__).splitlines()[0]})."
        ) from None
    if not isinstance(content, Mapping):
        raise UserError(f"{file} holds a {type(content).__name__}, not weights by name.")
    tensors = _flatten(content)
    if not tensors:
        raise UserError(f"{file} holds no tensors.")
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors that torch's libraries recognise; tensors that share memory are written apart."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomic(file, lambda temporary: save_file(plain, temporary, metadata={"format": "pt"}))


def _flatten(content: Mapping[object, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            tensors.update(_flatten(value, f"{prefix}{key}."))
    return tensors
