"""Where checkpoints keep a ViT, and what they call its tensors. Everything here ends in timm's names, which are ours.

Hugging Face writes query, key and value apart; timm has one matrix ``qkv``. Both names that its ViT has had are read
(``encoder.layer.0.attention.attention.query`` and ``layers.0.attention.q_proj``); the older ones are written, because
every version of transformers reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from afire.errors import UserError

ANCHOR = "patch_embed.proj.weight"
# Where checkpoints keep their weights, outermost first, and what stands before the encoder's own names.
_CONTAINERS = ("teacher", "model", "state_dict", "ema", "module")
_PREFIXES = ("teacher.encoder.", "module.encoder.", "module.backbone.", "encoder.", "backbone.", "module.", "")
# Parts of other methods and heads that an encoder does not have; their absence here is no loss.
_FOREIGN = ("head", "fc_norm", "decoder", "mask_token", "projection", "mlp", "last_layer")

_HF_ANCHOR = "embeddings.patch_embeddings.projection.weight"
_HF_FOREIGN = ("pooler", "classifier", "embeddings.mask_token")
_HF_TOP = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": ANCHOR,
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
# timm's name inside a block: Hugging Face's, older and newer.
_HF_BLOCK = {
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "norm1": ("layernorm_before", "layernorm_before"),
    "norm2": ("layernorm_after", "layernorm_after"),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
_HF_QKV = (
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
)
_HF_LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")


def find_encoder(tensors: Mapping[str, Tensor], file: Path) -> tuple[str, dict[str, Tensor]]:
    """The ViT in a checkpoint, under timm's names, and the layout it was found in.

    A teacher is preferred to a student. Names under the prefix that cannot be an encoder's are left in, so that they
    show up as unexpected; known heads and decoders of other methods are dropped.
    """
    starts = [f"{container}." for container in _CONTAINERS] + [""]
    for container in starts:  # the names say where, not what: a teacher inside `teacher.`, then any model
        for prefix in _PREFIXES:
            full = container + prefix
            if full + ANCHOR not in tensors:
                continue
            inside = {name.removeprefix(full): tensor for name, tensor in tensors.items() if name.startswith(full)}
            own = {name: tensor for name, tensor in inside.items() if not name.startswith(_FOREIGN)}
            return _layout_name(full, inside), own
    for name in tensors:
        if name.endswith(_HF_ANCHOR):
            prefix = name.removesuffix(_HF_ANCHOR)
            inside = {other.removeprefix(prefix): tensor for other, tensor in tensors.items()}
            return "Hugging Face", from_huggingface(inside)
    shown = ", ".join(list(tensors)[:3])
    raise UserError(
        f"{file} holds no ViT in timm's or Hugging Face's naming (no {ANCHOR}); its first names are {shown}."
    )


def _layout_name(prefix: str, inside: Mapping[str, Tensor]) -> str:
    if any(name.startswith("decoder") for name in inside):
        return "MAE"
    if "encoder." in prefix:
        return "AFiRe"
    return "DINO" if "backbone" in prefix else "timm"


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ViT of transformers under timm's names; names that are not known stay as they are."""
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, Tensor]] = {}  # name of a qkv tensor -> its query, key and value
    inner = {old: ours for ours, names in _HF_BLOCK.items() for old in names}
    places = {name: place for names in _HF_QKV for place, name in enumerate(names)}
    for name, tensor in tensors.items():
        layer = _HF_LAYER.fullmatch(name)
        if name in _HF_TOP:
            found[_HF_TOP[name]] = tensor
        elif layer and layer[2] in places:
            apart.setdefault(f"blocks.{layer[1]}.attn.qkv.{layer[3]}", {})[places[layer[2]]] = tensor
        elif layer and layer[2] in inner:
            found[f"blocks.{layer[1]}.{inner[layer[2]]}.{layer[3]}"] = tensor
        elif not name.startswith(_HF_FOREIGN):
            found[name] = tensor
    for name, parts in apart.items():
        if len(parts) == 3:  # else it is reported as missing
            found[name] = torch.cat([parts[place] for place in range(3)])
    return found


def to_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's tensors under the names of transformers' ViTModel; the inverse of :func:`from_huggingface`."""
    top = {ours: theirs for theirs, ours in _HF_TOP.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in top:
            found[top[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        start = f"encoder.layer.{number}."
        if part == "attn.qkv":
            for theirs, piece in zip(_HF_QKV[0], tensor.chunk(3), strict=True):
                found[f"{start}{theirs}.{kind}"] = piece.contiguous()
        else:
            found[f"{start}{_HF_BLOCK[part][0]}.{kind}"] = tensor
    return found
