"""Settings read, merged, checked and printed: presets, YAML files, ``--set``, and messages for what is wrong.

What there is to set is in :mod:`afire.config`. Presets are small YAML files that say only what differs from the
defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from afire.config import PRESETS, Config, LengthConfig, Section, SectionType
from afire.errors import UserError

_PRESET_FOLDER = Path(__file__).parent / "presets"


def load_config(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Iterable[str] = (),
    weights: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Defaults, then the preset, then the YAML file, then ``key.sub=value`` overrides; each may leave things out.

    Settings that come with ``weights`` override the preset; the file and the overrides override both.
    """
    presets = [_read_yaml(preset_path(preset))] if preset is not None else []
    return load_settings(Config, [*presets, weights, *([file] if file is not None else [])], overrides)


def load_settings(
    kind: type[SectionType], layers: Iterable[Path | Mapping[str, Any]], overrides: Iterable[str] = ()
) -> SectionType:
    """Settings of any kind: defaults, then each YAML file or mapping, then ``key.sub=value`` overrides."""
    values: dict[str, Any] = {}
    override_values: dict[str, Any] = {}
    for override in overrides:
        _merge(override_values, parse_override(override))
    for layer in (*layers, override_values):
        _merge(values, _one_budget(_read_yaml(layer) if isinstance(layer, Path) else layer, kind))
    return validate(values, kind)


def changed(config: SectionType, *values: Mapping[str, Any]) -> SectionType:
    """The same settings but for ``values``, which are nested as in a YAML file; later ones count."""
    merged = config.model_dump()
    for layer in values:
        _merge(merged, _one_budget(layer, type(config)))
    return validate(merged, type(config))


def _one_budget(values: Mapping[str, Any], kind: type[Section]) -> Mapping[str, Any]:
    """A layer that sets the length of a run replaces every earlier length: epochs replace a preset's film views."""
    return {name: _one_length(value) if _says_length(name, value, kind) else value for name, value in values.items()}


def _says_length(name: str, value: Any, kind: type[Section]) -> bool:
    group = kind.model_fields[name].annotation if name in kind.model_fields else None
    is_recipe = isinstance(group, type) and issubclass(group, LengthConfig)
    return is_recipe and isinstance(value, Mapping) and any(length in value for length in LengthConfig.model_fields)


def _one_length(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"film_views_min": 0, "minutes": 0, **recipe}


def preset_path(name: str, presets: Iterable[str] = PRESETS, prefix: str = "") -> Path:
    """The YAML file of a preset, one of ``presets``; those of a task carry its name as ``prefix``."""
    names = list(presets)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(f"there is no preset {name!r}{hint} Presets are {', '.join(names)}.")
    return _PRESET_FOLDER / f"{prefix}{name}.yaml"


def to_yaml(config: Section, leave_out: Iterable[str] = (), options: Section | None = None) -> str:
    """Settings as YAML with every setting's meaning beside it; reads back as the same settings.

    ``leave_out`` names groups that the method does not read; ``options`` explains its own.
    """
    lines: list[str] = []
    replacements = {"options": options} if options is not None else {}
    _describe(config, lines, 0, frozenset(leave_out), replacements)
    return "\n".join(lines) + "\n"


def validate(values: Mapping[str, Any], kind: type[SectionType]) -> SectionType:
    """Build settings of a kind; every mistake becomes a message that names the key and what is allowed."""
    _check_names(values, kind, path="")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(_message(dict(item)) for item in error.errors())) from None


def parse_override(text: str) -> dict[str, Any]:
    """``training.epochs=3`` -> ``{"training": {"epochs": 3}}``; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r} is not key=value, as in --set training.epochs=10.")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise UserError(f"--set {text!r}: {raw!r} is not a YAML value; quote it.") from None
    if isinstance(value, str):
        value = _number_or_text(value)
    for name in reversed(key.strip().split(".")):
        value = {name: value}
    return dict(value)


def _number_or_text(text: str) -> float | str:
    """YAML 1.1 takes 1e-4 (no dot) for a text; a user who writes it means the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"configuration file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"configuration file {path} is not valid YAML{line}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"configuration file {path} holds no settings; it should look like `afire config` prints.")
    return values


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Unknown:
    """A name that settings do not have, and the nearest that they have; ``likeness`` of the two is at most 1."""

    key: str
    nearest: str | None = None
    likeness: float = 0.0

    def __str__(self) -> str:
        return f"unknown setting {self.key}{f'; did you mean {self.nearest}?' if self.nearest else '.'}"


def find_unknown(path: Sequence[str], kind: type[Section]) -> Unknown | None:
    """The first name of a dotted key that settings of a kind do not have; None where they have all of it."""
    section = kind
    for depth, name in enumerate(path):
        if name in section.former:
            return None
        if name not in section.model_fields:
            return _unknown(name, section, "".join(f"{above}." for above in path[:depth]))
        annotation = section.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return None  # a value, or a mapping that its reader checks
        section = annotation
    return None


def _unknown(name: str, section: type[Section], path: str) -> Unknown:
    names = _all_names(section)
    below = [candidate for candidate in names if candidate.rpartition(".")[2] == name]
    if below:
        return Unknown(f"{path}{name}", f"{path}{below[0]}", 1.0)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        return Unknown(f"{path}{name}")
    return Unknown(f"{path}{name}", f"{path}{close[0]}", difflib.SequenceMatcher(None, name, close[0]).ratio())


def _check_names(values: Mapping[str, Any], section: type[Section], path: str) -> None:
    fields = section.model_fields
    for key, value in values.items():
        if key in section.former:
            continue
        if key not in fields:
            raise UserError(str(_unknown(str(key), section, path)))
        annotation = fields[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            if not isinstance(value, Mapping):
                raise UserError(f"{path}{key} is a group of settings ({', '.join(annotation.model_fields)}).")
            _check_names(value, annotation, f"{path}{key}.")


def _all_names(section: type[Section]) -> list[str]:
    """Names in the section, and dotted names below it, so that `epochs` finds `training.epochs`."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        names.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            names.extend(f"{name}.{below}" for below in field.annotation.model_fields)
    return names


def _message(error: dict[str, Any]) -> str:
    key = ".".join(str(name) for name in error["loc"])
    message = str(error["msg"])
    if error["type"] == "value_error":
        return message.removeprefix("Value error, ") if not key else f"{key}: {message.removeprefix('Value error, ')}"
    return f"{key} is {error['input']!r}, but {message[0].lower()}{message[1:]}"


def _describe(
    section: Section,
    lines: list[str],
    indent: int,
    leave_out: frozenset[str] = frozenset(),
    replacements: Mapping[str, Section] = MappingProxyType({}),
) -> None:
    pad = "  " * indent
    for name, field in type(section).model_fields.items():
        if name in leave_out:
            continue
        value = replacements.get(name, getattr(section, name))
        if isinstance(value, Section) and type(value).model_fields:
            summary = (type(value).__doc__ or "").splitlines()[0]
            lines.append(f"{pad}{name}:  # {summary}")
            _describe(value, lines, indent + 1)
        elif isinstance(value, Section):
            lines.append(f"{pad}{name}: {{}}  # {field.description or ''}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=100_000).rstrip("\n").removesuffix("\n...")
            lines.append(f"{pad}{name}: {text}  # {field.description or ''}{_choices(field.annotation)}".rstrip(" #"))


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f" ({'|'.join(str(choice) for choice in get_args(annotation))})"
    return ""
