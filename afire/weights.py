"""Weights from elsewhere: our own runs, timm, DINO, MAE and the original AFiRe, all in timm's ViT naming.

Only safetensors and ``torch.load(weights_only=True)`` are used: a file with code in it is refused, never run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from afire.errors import UserError
from afire.files import require_file
from afire.model.positions import resize_positions
from afire.model.vit import VisionTransformer

# Where checkpoints keep their weights, outermost first, and what stands before the encoder's own names.
_CONTAINERS = ("teacher", "model", "state_dict", "ema", "module")
_PREFIXES = ("teacher.encoder.", "module.encoder.", "module.backbone.", "encoder.", "backbone.", "module.", "")
_ANCHOR = "patch_embed.proj.weight"
# Parts of other methods and heads that an encoder does not have; their absence here is no loss.
_FOREIGN = ("head", "fc_norm", "decoder", "mask_token", "projection", "mlp", "last_layer")


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights in a file."""

    layout: str
    loaded: list[str]
    missing: list[str]  # the encoder wanted these; they keep their initial values
    unexpected: list[str]  # the file had these; they were not used
    changed: list[str]  # loaded after a change of shape, with the reason

    def sentence(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded ({self.layout} layout)"]
        parts += [f"{len(self.missing)} missing ({', '.join(self.missing[:3])})"] if self.missing else []
        parts += [f"{len(self.unexpected)} not used ({', '.join(self.unexpected[:3])})"] if self.unexpected else []
        return "; ".join(parts + self.changed)


def load_encoder(encoder: VisionTransformer, file: Path) -> LoadReport:
    """Load the encoder's weights from a file; positions and input channels are made to fit, nothing else is."""
    layout, found = find_encoder(read_tensors(file), file)
    wanted = encoder.state_dict()
    loaded, changed = {}, []
    for name in sorted(found.keys() & wanted.keys()):
        tensor, change = _fit(name, found[name], wanted[name], encoder, file)
        loaded[name] = tensor.to(wanted[name].dtype)
        changed += [change] if change else []
    encoder.load_state_dict(loaded, strict=False)
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    return LoadReport(layout, sorted(loaded), missing, unexpected, changed)


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


def find_encoder(tensors: Mapping[str, Tensor], file: Path) -> tuple[str, dict[str, Tensor]]:
    """The ViT in a checkpoint, under timm's names, and the layout it was found in.

    A teacher is preferred to a student. Names under the prefix that cannot be an encoder's are left in, so that they
    show up as unexpected; known heads and decoders of other methods are dropped.
    """
    starts = [f"{container}." for container in _CONTAINERS] + [""]
    for container in starts:  # the names say where, not what: a teacher inside `teacher.`, then any model
        for prefix in _PREFIXES:
            full = container + prefix
            if full + _ANCHOR not in tensors:
                continue
            inside = {name.removeprefix(full): tensor for name, tensor in tensors.items() if name.startswith(full)}
            own = {name: tensor for name, tensor in inside.items() if not name.startswith(_FOREIGN)}
            return _layout_name(full, inside), own
    shown = ", ".join(list(tensors)[:3])
    raise UserError(f"{file} holds no ViT in timm's naming (no {_ANCHOR}); its first names are {shown}.")


def _layout_name(prefix: str, inside: Mapping[str, Tensor]) -> str:
    if any(name.startswith("decoder") for name in inside):
        return "MAE"
    if "encoder." in prefix:
        return "AFiRe"
    return "DINO" if "backbone" in prefix else "timm"


def _fit(name: str, tensor: Tensor, wanted: Tensor, encoder: VisionTransformer, file: Path) -> tuple[Tensor, str]:
    """``tensor`` in the shape that is wanted, and what had to be changed."""
    if name == "pos_embed":
        return _fit_positions(tensor, wanted, encoder, file)
    if tensor.shape == wanted.shape:
        return tensor, ""
    if name == _ANCHOR and tensor.shape[0] == wanted.shape[0] and tensor.shape[2:] == wanted.shape[2:]:
        if tensor.shape[1] == 3 and wanted.shape[1] == 1:
            # A grey film seen as three equal channels gives the sum of the channels' products.
            return tensor.sum(1, keepdim=True), "3 input channels summed into 1"
        if tensor.shape[1] == 1 and wanted.shape[1] == 3:
            return (tensor / 3).expand_as(wanted), "1 input channel spread over 3"
    raise UserError(
        f"{file} has another architecture: {name} is {tuple(tensor.shape)} there and {tuple(wanted.shape)} here; "
        "set encoder.width, depth, heads and patch_size as in the weights."
    )


def _fit_positions(tensor: Tensor, wanted: Tensor, encoder: VisionTransformer, file: Path) -> tuple[Tensor, str]:
    if tensor.ndim != 3 or tensor.shape[-1] != wanted.shape[-1]:
        raise UserError(
            f"{file}: pos_embed is {tuple(tensor.shape)}, which does not fit a width of {wanted.shape[-1]}."
        )
    side = round((tensor.shape[1] - 1) ** 0.5)
    if side * side != tensor.shape[1] - 1:
        raise UserError(
            f"{file}: pos_embed has {tensor.shape[1]} tokens, which is not a class token and a square grid."
        )
    resized = resize_positions(tensor, (side, side), encoder.grid)
    change = (
        ""
        if resized.shape == tensor.shape
        else f"positions resized from {side}x{side} to {encoder.grid[0]}x{encoder.grid[1]}"
    )
    if encoder.positions == "sincos":
        native = VisionTransformer(side * encoder.patch_size, encoder.patch_size, 1, encoder.width, 1, 1).pos_embed
        if not torch.allclose(tensor.float(), native, atol=1e-3):
            raise UserError(f"{file} has learned positions; add --set encoder.positions=learned.")
        return wanted, change and "positions computed for the new size"
    return resized, change


def _flatten(content: Mapping[object, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            tensors.update(_flatten(value, f"{prefix}{key}."))
    return tensors
