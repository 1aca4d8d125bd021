"""What the tensors of a ViT say about it: its width, depth, patches, positions and channels, but not its heads.

Plain ViTs of other libraries differ in little things that our encoder can hold exactly: scales of the branches,
positions without one for the class token, another normalisation of the input. Those are turned into ours here, and
what it cannot hold is refused.

``timm:NAME``, such as ``timm:deit_tiny_patch16_224``, is a pre-trained ViT of timm, which downloads it and keeps it in
the hub's cache, where it is found again without a network.

Shapes: D width, C channels, p patch size, L patches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from afire.config import Config, ImageConfig
from afire.errors import UserError
from afire.files import read_json
from afire.nn.vit import Normalise, sincos_positions
from afire.weights.files import ANCHOR

_HEAD_WIDTH = 64
_HEADS = {1280: 16, 1408: 16, 1664: 16}  # ViT-H, g and G, whose heads are wider
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_INSIDE = frozenset(
    f"{part}.{kind}"
    for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    for kind in ("weight", "bias")
)
# A scale of a branch, and the matrix that it can be multiplied into; timm's names, then those of DeiT III.
_SCALES = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2", "gamma_1": "attn.proj", "gamma_2": "mlp.fc2"}
_REGISTERS = ("reg_token", "register_tokens", "embeddings.register_tokens")
_POSITION_TOLERANCE = 1e-3  # files in half precision
TIMM = "timm:"


@dataclass(frozen=True)
class Architecture:
    """Of an encoder in a file. ``heads`` are as many as such a width usually has, unless a file says otherwise."""

    width: int
    depth: int
    patch_size: int
    channels: int
    stem: Literal["patch", "conv"]
    positions: Literal["sincos", "learned"]
    side: int  # patches in a row of the grid that the positions are for
    heads: int
    heads_said: bool  # by a file beside the weights

    def fits(self, config: Config) -> bool:
        """Whether settings say the same about all that tensors tell."""
        encoder = config.encoder
        ours = (self.width, self.depth, self.patch_size, self.stem, self.positions, self.channels)
        theirs = (encoder.width, encoder.depth, encoder.patch_size, encoder.stem, encoder.positions)
        return encoder.kind == "vit" and ours == (*theirs, config.image.channels)

    @property
    def size(self) -> int:
        """Side of the films it was made for, in pixels."""
        return self.side * self.patch_size

    def settings(self) -> dict[str, dict[str, Any]]:
        """As settings, nested as in a YAML file. Weights for colours were made for ImageNet's normalisation."""
        encoder = {
            "kind": "vit",
            "size": None,
            "width": self.width,
            "depth": self.depth,
            "heads": self.heads,
            "patch_size": self.patch_size,
            "stem": self.stem,
            "positions": self.positions,
        }
        image: dict[str, Any] = {"size": self.size, "channels": self.channels}
        return {"encoder": encoder, "image": image | ({"normalise": "imagenet"} if self.channels == 3 else {})}

    def message(self, config: Config) -> str:
        """What was read, for people, and what the settings ``config`` say of what cannot be read."""
        heads = config.encoder.heads
        how = "usual for this width; tensors do not tell, --set encoder.heads= says otherwise"
        if heads != self.heads:
            how = "as was asked for"
        elif self.heads_said:
            how = "as its settings say"
        elif self.width == heads * _HEAD_WIDTH:
            how = f"width / {_HEAD_WIDTH}; tensors do not tell, --set encoder.heads= says otherwise"
        stem = ", convolutional stem" if self.stem == "conv" else ""
        return (
            f"width {self.width}, depth {self.depth}, patch {self.patch_size}{stem}, {self.positions} positions on "
            f"{self.side}x{self.side}, {self.channels} channel{'s' if self.channels > 1 else ''}, {heads} "
            f"head{'s' if heads > 1 else ''} ({how}), image.normalise {config.image.normalise}"
        )


@dataclass(frozen=True)
class Beside:
    """What the files beside weights say that tensors do not: heads, and the normalisation of the input."""

    heads: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def read_beside(file: Path) -> Beside:
    """Of the folder of a weights file, as transformers and timm write it; nothing where they did not."""
    config = _json(file.parent / "config.json")
    arguments, default = (config.get(name) or {} for name in ("model_args", "pretrained_cfg"))
    processor = _json(file.parent / "preprocessor_config.json")
    heads = config.get("num_attention_heads", arguments.get("num_heads"))
    mean, std = default.get("mean"), default.get("std")
    if processor.get("do_normalize", False):
        mean, std = processor.get("image_mean"), processor.get("image_std")
    return Beside(heads if isinstance(heads, int) else None, *(_three(numbers) for numbers in (mean, std)))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = read_json(file)
    except UserError:
        return {}  # a file of another program, which we cannot read
    return content if isinstance(content, dict) else {}


def _three(numbers: object) -> tuple[float, ...]:
    if (
        isinstance(numbers, Sequence)
        and len(numbers) == 3
        and all(isinstance(number, int | float) for number in numbers)
    ):
        return tuple(float(number) for number in numbers)
    return ()


def read_architecture(tensors: Mapping[str, Tensor], file: Path, heads: int | None = None) -> Architecture:
    """Of tensors in timm's names that :func:`plain_vit` let pass; ``heads`` where a file beside them says it."""
    convs = sum(re.fullmatch(r"patch_embed\.convs\.\d+\.weight", name) is not None for name in tensors)
    first = tensors["patch_embed.convs.0.weight" if convs else ANCHOR]
    width = len(tensors[ANCHOR])
    positions = tensors.get("pos_embed")
    if positions is None:
        raise UserError(
            f"{file} holds no positions (pos_embed), so that it does not say which ones its tokens need; a ViT with "
            "rotary or relative positions cannot be used."
        )
    blocks = {int(match[1]) for name in tensors if (match := _BLOCK.fullmatch(name))}
    hidden = len(tensors["blocks.0.mlp.fc1.weight"]) if 0 in blocks else 0
    if hidden != 4 * width:
        raise UserError(f"{file} has MLPs {hidden / width:g} times as wide as its tokens; ours are 4 times as wide.")
    side = round((positions.shape[1] - 1) ** 0.5)
    return Architecture(
        width=width,
        depth=len(blocks),
        patch_size=2**convs if convs else first.shape[-1],
        channels=first.shape[1],
        stem="conv" if convs else "patch",
        positions="sincos" if is_sincos(positions, side) else "learned",
        side=side,
        heads=heads or usual_heads(width),
        heads_said=heads is not None,
    )


def usual_heads(width: int) -> int:
    """The heads of the ViTs of this width; of a width that none has, heads as near to 64 wide as it allows."""
    if width in _HEADS:
        return _HEADS[width]
    divisors = (heads for heads in range(1, width + 1) if width % heads == 0)
    return min(divisors, key=lambda heads: abs(width / heads - _HEAD_WIDTH))


def is_sincos(positions: Tensor, side: int) -> bool:
    """Whether positions (1, 1 + side * side, D) are the fixed ones, and not learned."""
    if positions.shape[-1] % 4 or positions.shape[1] != 1 + side * side:
        return False
    fixed = F.pad(sincos_positions(positions.shape[-1], (side, side)), (0, 0, 1, 0))[None]
    return torch.allclose(positions.float(), fixed, atol=_POSITION_TOLERANCE)


def plain_vit(
    tensors: Mapping[str, Tensor], file: Path, beside: Beside | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The same network as a plain ViT, and what had to be changed; a message where it is another kind of network."""
    ours, changes = dict(tensors), list[str]()
    if len(ours[ANCHOR].shape) != 4 or ours[ANCHOR].shape[2] != ours[ANCHOR].shape[3]:
        raise UserError(f"{file}: {ANCHOR} is {tuple(ours[ANCHOR].shape)}, which is no projection of square patches.")
    if any(name in ours for name in _REGISTERS):
        raise UserError(f"{file} has register tokens, which the encoder does not have; use weights without them.")
    if "cls_token" not in ours:
        raise UserError(f"{file} has no class token (cls_token), which the encoder needs; use weights with one.")
    changes += _fold_scales(ours)
    changes += _fit_first_positions(ours)
    changes += _fold_normalisation(ours, beside or Beside())
    _refuse_other_blocks(ours, file)
    return ours, changes


def _fold_scales(tensors: dict[str, Tensor]) -> list[str]:
    """A branch that is scaled channel by channel is a branch whose last matrix has scaled rows."""
    scales = [name for name in tensors if (match := _BLOCK.fullmatch(name)) and match[2] in _SCALES]
    for name in scales:
        gamma, block = tensors.pop(name), _BLOCK.fullmatch(name)
        assert block is not None
        matrix = f"blocks.{block[1]}.{_SCALES[block[2]]}"
        tensors[f"{matrix}.weight"] = gamma[:, None] * tensors[f"{matrix}.weight"]
        tensors[f"{matrix}.bias"] = gamma * tensors[f"{matrix}.bias"]
    return [f"{len(scales)} scales of branches multiplied into their matrices"] if scales else []


def _fit_first_positions(tensors: dict[str, Tensor]) -> list[str]:
    """One position for the class token before those of the patches; a distillation token is left out."""
    positions, changes = tensors.get("pos_embed"), list[str]()
    if positions is None or positions.ndim != 3:
        return changes
    if tensors.pop("dist_token", None) is not None:
        changes.append("the distillation token left out")
        if _is_square(positions.shape[1] - 2):
            positions = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    if _is_square(positions.shape[1]) and positions.shape[1] > 1:  # DeiT III: the class token lies nowhere
        positions = F.pad(positions, (0, 0, 1, 0))
        changes.append("no position for the class token")
    tensors["pos_embed"] = positions
    return changes


def _is_square(number: int) -> bool:
    return number > 0 and round(number**0.5) ** 2 == number


def _fold_normalisation(tensors: dict[str, Tensor], beside: Beside) -> list[str]:
    """The projection of patches that takes ImageNet's normalisation in place of the weights' own.

    A pixel is x = s z + m in ours and x = s' z' + m' in theirs, so that their z' is our z times s/s' plus (m - m')/s'.
    """
    normalise = Normalise(ImageConfig(channels=3, normalise="imagenet"))
    mean, std = normalise.mean, normalise.std
    kernel, bias = tensors[ANCHOR], tensors.get("patch_embed.proj.bias")
    if kernel.shape[1] != 3 or bias is None or not (beside.mean and beside.std and min(beside.std) > 0):
        return []
    own_mean, own_std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (beside.mean, beside.std))
    if torch.allclose(own_mean, mean, atol=1e-3) and torch.allclose(own_std, std, atol=1e-3):
        return []
    shift = (kernel.float() * (mean - own_mean) / own_std).sum(dim=(1, 2, 3))
    tensors[ANCHOR] = (kernel.float() * std / own_std).to(kernel.dtype)
    tensors["patch_embed.proj.bias"] = (bias.float() + shift).to(bias.dtype)
    return ["its own normalisation turned into ImageNet's"]


def _refuse_other_blocks(tensors: Mapping[str, Tensor], file: Path) -> None:
    inside = sorted((match[1], match[2]) for name in tensors if (match := _BLOCK.fullmatch(name)))
    for number, names in groupby(inside, key=lambda pair: pair[0]):
        for name in sorted({pair[1] for pair in names} ^ _INSIDE):
            says = "lacks" if name in _INSIDE else "has"
            raise UserError(f"{file} is a ViT of another kind than ours: it {says} blocks.{number}.{name}.")


@dataclass(frozen=True)
class TimmModel:
    """The tensors of a model, and what timm says about it."""

    tensors: dict[str, Tensor]
    beside: Beside


def is_timm_name(weights: str | Path) -> bool:
    """Whether weights are named as timm's."""
    return str(weights).startswith(TIMM)


@lru_cache(maxsize=1)  # opened several times in one command, for the settings and for the weights
def timm_model(name: str) -> TimmModel:
    """A model of timm with its pre-trained weights, downloaded where they are not there yet."""
    if find_spec("timm") is None:
        raise UserError(f"{TIMM}{name} needs timm; install it with pip install 'afire[timm]'.")
    import timm

    if not name or not timm.is_model(name):
        raise UserError(f"timm has no model {name!r}; timm.list_models(pretrained=True) gives the names.")
    try:
        network = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # no weights, no network, no place in the cache: of the hub's and timm's own kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"timm cannot give the weights of {name} ({type(error).__name__}: {reason}); go online once, or copy its "
            "model.safetensors here and give that file."
        ) from None
    heads = getattr(getattr(next(iter(getattr(network, "blocks", ())), None), "attn", None), "num_heads", None)
    default = getattr(network, "pretrained_cfg", None) or {}
    mean, std = (tuple(float(number) for number in default.get(key) or ()) for key in ("mean", "std"))
    return TimmModel(dict(network.state_dict()), Beside(heads, mean, std))
