"""Weights files: tensors and nothing else, under timm's names, which are ours.

Files are read with safetensors or ``torch.load(weights_only=True)``, so that code in them is never run. A ViT is found
in the layouts of timm, MAE, DINO, the original AFiRe and Hugging Face. Hugging Face keeps query, key and value apart
where timm has one matrix ``qkv``, and its ViT has had two sets of names (``encoder.layer.0.attention.attention.query``
and ``layers.0.attention.q_proj``): both are read, and the older ones are written, because every version of
transformers reads them.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from afire.errors import UserError
from afire.files import require_file, write_atomic
from afire.nn.vit import VisionTransformer, resize_positions


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a file by name, nested names joined with dots; nothing else in it is looked at."""
    require_file(file, "weights file")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} is truncated or holds pickled code beside tensors and was not opened; "
            "save a state_dict as safetensors."
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{file} is not a readable weights file ({reason}); it may be truncated: copy it again, or give another."
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


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, shape, type and content; the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _flatten(content: Mapping[object, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            tensors.update(_flatten(value, f"{prefix}{key}."))
    return tensors


ANCHOR = "patch_embed.proj.weight"
# Where checkpoints keep their weights, outermost first, and what stands before the encoder's own names.
_CONTAINERS = ("teacher", "model", "state_dict", "ema", "module")
_PREFIXES = ("teacher.encoder.", "module.encoder.", "module.backbone.", "encoder.", "backbone.", "module.", "")
# Heads and decoders of other methods, which an encoder does not have; leaving them out is no loss.
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
# timm's name inside a block: Hugging Face's, older and newer, and that of its DINOv2.
_HF_BLOCK = {
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "norm1": ("layernorm_before", "layernorm_before", "norm1"),
    "norm2": ("layernorm_after", "layernorm_after", "norm2"),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
_HF_QKV = (
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
)
_HF_LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias|lambda1)")
_HF_SCALES = {"layer_scale1": "ls1.gamma", "layer_scale2": "ls2.gamma"}


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
    renamed: dict[str, Tensor] = {}
    split: dict[str, dict[int, Tensor]] = {}  # name of a qkv tensor -> its query, key and value
    inner = {old: ours for ours, names in _HF_BLOCK.items() for old in names}
    places = {name: place for names in _HF_QKV for place, name in enumerate(names)}
    for name, tensor in tensors.items():
        layer = _HF_LAYER.fullmatch(name)
        if name in _HF_TOP:
            renamed[_HF_TOP[name]] = tensor
        elif layer and layer[2] in places:
            split.setdefault(f"blocks.{layer[1]}.attn.qkv.{layer[3]}", {})[places[layer[2]]] = tensor
        elif layer and layer[2] in _HF_SCALES:
            renamed[f"blocks.{layer[1]}.{_HF_SCALES[layer[2]]}"] = tensor
        elif layer and layer[2] in inner:
            renamed[f"blocks.{layer[1]}.{inner[layer[2]]}.{layer[3]}"] = tensor
        elif not name.startswith(_HF_FOREIGN):
            renamed[name] = tensor
    for name, pieces in split.items():
        if len(pieces) == 3:  # else it is reported as missing
            renamed[name] = torch.cat([pieces[place] for place in range(3)])
    return renamed


def to_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's tensors under the names of transformers' ViTModel; the inverse of :func:`from_huggingface`."""
    top = {ours: theirs for theirs, ours in _HF_TOP.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in top:
            renamed[top[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        layer, kind = rest.rsplit(".", 1)
        start = f"encoder.layer.{number}."
        if layer == "attn.qkv":
            for theirs, piece in zip(_HF_QKV[0], tensor.chunk(3), strict=True):
                renamed[f"{start}{theirs}.{kind}"] = piece.contiguous()
        else:
            renamed[f"{start}{_HF_BLOCK[layer][0]}.{kind}"] = tensor
    return renamed


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights in a file."""

    layout: str
    loaded: list[str]
    missing: list[str]  # the encoder wanted these; they keep their initial values
    unexpected: list[str]  # the file had these; they were not used
    changed: list[str]  # loaded after a change of shape, with the reason

    def message(self) -> str:
        """What was loaded, missing and not used, for people."""
        clauses = [f"{len(self.loaded)} tensors loaded ({self.layout} layout)"]
        clauses += [f"{len(self.missing)} missing ({', '.join(self.missing[:3])})"] if self.missing else []
        clauses += [f"{len(self.unexpected)} not used ({', '.join(self.unexpected[:3])})"] if self.unexpected else []
        return "; ".join(clauses + self.changed)


def fill_encoder(
    encoder: VisionTransformer, layout: str, tensors: Mapping[str, Tensor], file: Path, changes: Sequence[str] = ()
) -> LoadReport:
    """Load tensors in timm's names; positions and input channels are made to fit, nothing else is.

    ``changes`` were made before, and are reported with the others.
    """
    state = encoder.state_dict()
    loaded, changed = {}, list(changes)
    for name in sorted(tensors.keys() & state.keys()):
        tensor, change = _fit(name, tensors[name], state[name], encoder, file)
        loaded[name] = tensor.to(state[name].dtype)
        changed += [change] if change else []
    encoder.load_state_dict(loaded, strict=False)
    missing = sorted(state.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - state.keys())
    return LoadReport(layout, sorted(loaded), missing, unexpected, changed)


def _fit(name: str, tensor: Tensor, target: Tensor, encoder: VisionTransformer, file: Path) -> tuple[Tensor, str]:
    """``tensor`` in the shape that is wanted, and what had to be changed."""
    if name == "pos_embed":
        return _fit_positions(tensor, target, encoder, file)
    if tensor.shape == target.shape:
        return tensor, ""
    if name == ANCHOR and tensor.shape[0] == target.shape[0] and tensor.shape[2:] == target.shape[2:]:
        if tensor.shape[1] == 3 and target.shape[1] == 1:
            # A grey film seen as three equal channels gives the sum of the channels' products.
            return tensor.sum(1, keepdim=True), "3 input channels summed into 1"
        if tensor.shape[1] == 1 and target.shape[1] == 3:
            return (tensor / 3).expand_as(target), "1 input channel spread over 3"
    raise UserError(
        f"{file} has another architecture: {name} is {tuple(tensor.shape)} there and {tuple(target.shape)} here; "
        "set encoder.width, depth, heads, stem and patch_size as in the weights."
    )


def _fit_positions(tensor: Tensor, target: Tensor, encoder: VisionTransformer, file: Path) -> tuple[Tensor, str]:
    if tensor.ndim != 3 or tensor.shape[-1] != target.shape[-1]:
        raise UserError(
            f"{file}: pos_embed is {tuple(tensor.shape)}, which does not fit a width of {target.shape[-1]}."
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
        return target, change and "positions computed for the new size"
    return resized, change


def misfit(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """What is wrong with tensors that were given for those of a network; empty where nothing is."""
    for name in state:
        if name not in tensors:
            return f"lacks {name}"
    for name, tensor in tensors.items():
        if name not in state:
            return f"holds {name}, which its settings do not have"
        if tensor.shape != state[name].shape:
            return f"has {name} as {tuple(tensor.shape)}, but its settings say {tuple(state[name].shape)}"
    return ""
