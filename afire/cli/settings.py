"""Settings from options: ``--set``, ``--preset`` and ``--config`` of every command.

``--set`` takes ``key.sub=value``, or ``command.key.sub=value`` for one command's setting.

A key goes to the first of a command's owners that has it: the command's own settings before those of the networks. For
a key that none of them has, the message names the nearest one, and the command that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from afire.config import Config, LengthConfig, Section
from afire.errors import UserError
from afire.settings import Unknown, find_unknown, load_config, parse_override
from afire.tasks.settings import DetectConfig, FinetuneConfig, SegmentConfig


@dataclass(frozen=True)
class Owner:
    """Settings of a command, or ``groups`` of them. ``by_name``: a key must begin with the command's name."""

    command: str
    kind: type[Section]
    groups: tuple[str, ...] = ()
    by_name: bool = False

    def unknown(self, path: Sequence[str]) -> Unknown | None:
        """The part of a key that is not among these settings; None where all of it is."""
        if self.groups and path[0] in self.kind.model_fields and path[0] not in self.groups:
            return Unknown(path[0])
        return find_unknown(path, self.kind)


PRETRAIN = Owner("pretrain", Config)
NETWORK = Owner("pretrain", Config, groups=("image", "encoder"))  # what a task may set for weights without settings
FINETUNE, SEGMENT = Owner("finetune", FinetuneConfig), Owner("segment", SegmentConfig)
DETECT = Owner("detect", DetectConfig)
ABLATE = Owner("ablate", Config)  # those of its pre-trainings
_ALL = (PRETRAIN, FINETUNE, SEGMENT, DETECT)


def sort_settings(overrides: Sequence[str] | None, *owners: Owner) -> list[list[str]]:
    """The ``--set`` texts of each owner, without the command's name, in the order they were given."""
    shares: list[list[str]] = [[] for _ in owners]
    for override in overrides or ():
        parse_override(override)  # a malformed one is refused before its key is looked at
        place, text = _place(override.strip(), owners)
        shares[place].append(text)
    return shares


def _place(text: str, owners: Sequence[Owner]) -> tuple[int, str]:
    key = text.partition("=")[0].strip()
    command, dot, rest = key.partition(".")
    if dot and command in {owner.command for owner in (*_ALL, ABLATE)}:
        text, key = text.partition(".")[2], rest
        candidates = [place for place, owner in enumerate(owners) if owner.command == command]
        if not candidates:
            takes = ", ".join(dict.fromkeys(owner.command for owner in owners))
            raise UserError(f"--set {command}.{text}: nothing here is a setting of {command}; this takes {takes}.")
    else:
        candidates = [place for place, owner in enumerate(owners) if not owner.by_name]
    path = key.split(".")
    for place in candidates:
        if owners[place].unknown(path) is None:
            return place, text
    raise UserError(_message(path, [owners[place] for place in candidates], owners))


def _message(path: Sequence[str], candidates: Sequence[Owner], owners: Sequence[Owner]) -> str:
    """What is unknown, and the nearest that is not, with its command where that is another one."""
    key = ".".join(path)
    elsewhere = [owner.command for owner in _ALL if owner not in candidates and owner.unknown(path) is None]
    if elsewhere:
        commands = " and ".join(f"`afire {command}`" for command in elsewhere)
        by_name = {owner.command for owner in owners if owner.by_name}
        write = " or ".join(f"{command}.{key}" for command in elsewhere if command in by_name)
        return f"unknown setting {key}: it is one of {commands}{f'; write {write}' if write else ''}."
    mismatches = [(owner, unknown) for owner in candidates if (unknown := owner.unknown(path)) is not None]
    owner, unknown = max(mismatches, key=lambda pair: pair[1].likeness)
    if unknown.nearest is not None and owner.command != candidates[0].command:
        return f"unknown setting {unknown.key}; did you mean {unknown.nearest}, of `afire {owner.command}`?"
    return str(unknown)


def sorted_settings(overrides: list[str] | None) -> dict[str, list[str]]:
    """Those of the pre-training, and by their names those of the commands that follow."""
    owners = [PRETRAIN, *(replace(owner, by_name=True) for owner in (FINETUNE, SEGMENT, DETECT, ABLATE))]
    shares = sort_settings(overrides, *owners)
    return {owner.command: share for owner, share in zip(owners, shares, strict=True)}


def model_config(
    preset: str | None,
    file: Path | None,
    overrides: list[str] | None,
    weights: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """The settings of networks and pre-training, as the options give them, on top of those of ``weights``."""
    [settings] = sort_settings(overrides, PRETRAIN)
    return load_config(preset, file, settings, weights)


def refuse_two_lengths(settings: Sequence[str], group: str = "training") -> None:
    """With ``--minutes``: refuse ``--set`` texts that say otherwise how long the recipe ``group`` is."""
    keys = [f"{group}.{name}" for name in LengthConfig.model_fields]
    for setting in settings:
        if setting.partition("=")[0].strip() in keys:
            raise UserError(f"--minutes and --set {setting} both say how long to train; give one of them.")


def config_from_options(
    preset: str | None,
    file: Path | None,
    overrides: list[str] | None,
    data: Path | None = None,
    weights: str | Path | None = None,
) -> Config | None:
    """The user's settings, completed by those of a file of ``weights``, for films as ``data`` packs them.

    None without any, because a run brings its own.
    """
    from afire.data.pack import config_for

    weights_settings = _settings_of(weights, data, preset)
    if not (preset or file or overrides or weights_settings):
        return None
    config = model_config(preset, file, overrides, weights_settings)
    return config_for(config, data) if data is not None else config


def _settings_of(weights: str | Path | None, data: Path | None, preset: str | None) -> Mapping[str, Any]:
    """Nothing where each seed has weights of its own: those are opened one by one, and must be alike."""
    if weights is None or "{seed}" in str(weights):
        return {}
    from afire.weights import said_by

    return said_by(weights, data, preset)
