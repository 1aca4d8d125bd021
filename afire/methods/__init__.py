"""Pre-training methods, each in one file: its settings, networks, views, losses and health.

Knows networks and lesions; knows no loop, no file and no command.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from afire.config import Config
from afire.errors import UserError
from afire.methods.adam1 import Adam1
from afire.methods.adam2 import Adam2
from afire.methods.afire import AFiRe
from afire.methods.base import Learner, Method, complete
from afire.methods.c2l import C2L
from afire.methods.dino import DINO
from afire.methods.dira import DiRA
from afire.methods.genesis import Genesis
from afire.methods.imagenet import ImageNet
from afire.methods.mae import MAE
from afire.methods.moco import MoCo
from afire.methods.pcl import PCL
from afire.methods.pcrl import PCRL
from afire.methods.phantom import PhantomTaught
from afire.methods.supervised import Supervised
from afire.methods.transvw import TransVW

__all__ = ["METHODS", "Learner", "Method", "check_overrides", "complete", "make_method", "method_type", "unread"]

METHODS: dict[str, type[Method]] = {
    "afire": AFiRe,
    "mae": MAE,
    "moco": MoCo,
    "dino": DINO,
    "c2l": C2L,
    "pcl": PCL,
    "genesis": Genesis,
    "transvw": TransVW,
    "dira": DiRA,
    "pcrl": PCRL,
    "adam1": Adam1,
    "adam2": Adam2,
    "supervised": Supervised,
    "imagenet": ImageNet,
    "phantom": PhantomTaught,
}
"""Methods by the name that ``afire pretrain --method`` takes."""

_SHARED = ("method", "seed", "image", "encoder", "training", "run")


def method_type(name: str) -> type[Method]:
    """The class of a method, or a message that lists the methods."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(f"there is no method {name!r}{hint} Methods are {', '.join(METHODS)}.")
    return METHODS[name]


def make_method(config: Config) -> Method:
    """The networks that the settings describe, with initial weights from ``config.seed``."""
    return method_type(config.method)(config)


def unread(method: str) -> list[str]:
    """Groups of settings that a method does not read."""
    reads = (*_SHARED, *method_type(method).sections, "options")
    return [name for name in Config.model_fields if name not in reads]


def check_overrides(method: str, overrides: Sequence[str]) -> None:
    """Refuse a ``--set`` that names a group of settings which the method does not read."""
    unknown = unread(method)
    for override in overrides:
        group = override.partition("=")[0].strip().split(".")[0]
        if group in unknown:
            raise UserError(f"--set {override}: the method {method} does not read {group}; see `afire config`.")
