"""An encoder filled from a file: what is loaded, what is missing, what is left over, and what had to be made to fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from afire.errors import UserError
from afire.model.positions import resize_positions
from afire.model.vit import VisionTransformer
from afire.weights.layouts import ANCHOR, find_encoder
from afire.weights.tensors import read_tensors


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights in a file."""

    layout: str
    loaded: list[str]
    missing: list[str]  # the encoder wanted these; they keep their initial values
    unexpected: list[str]  # the file had these; they were not used
    changed: list[str]  # loaded after a change of shape, with the reason

    def sentence(self) -> str:
        """What was loaded, missing and not used, for people."""
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


def _fit(name: str, tensor: Tensor, wanted: Tensor, encoder: VisionTransformer, file: Path) -> tuple[Tensor, str]:
    """``tensor`` in the shape that is wanted, and what had to be changed."""
    if name == "pos_embed":
        return _fit_positions(tensor, wanted, encoder, file)
    if tensor.shape == wanted.shape:
        return tensor, ""
    if name == ANCHOR and tensor.shape[0] == wanted.shape[0] and tensor.shape[2:] == wanted.shape[2:]:
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
