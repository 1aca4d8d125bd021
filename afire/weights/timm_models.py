"""Pre-trained ViTs of timm: ``timm:NAME``, such as ``timm:deit_tiny_patch16_224``.

timm downloads them and keeps them in the hub's cache, where they are found again without a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from afire.errors import UserError
from afire.weights.architecture import Beside

TIMM = "timm:"


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
