"""The networks a detector starts from: a whole pre-trained model to adapt, or an encoder or nothing to train from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afire.config import Config, ImageConfig, changed, load_config, parse_override
from afire.errors import UserError
from afire.task_config import DetectConfig
from afire.tasks.backbone import RANDOM, run_config_file
from afire.tasks.detect.detector import CONFIG, SETTINGS
from afire.tasks.pretrained import Pretrained, load_pretrained
from afire.weights.bundle import is_bundle
from afire.weights.hub import local_path


@dataclass(frozen=True)
class Networks:
    """Settings, and either a whole model (``pretrained``, of the run in ``run``) or an encoder's weights (``init``)."""

    config: Config
    pretrained: Pretrained | None = None
    run: Path | None = None
    init: str | None = None


def open_networks(
    weights: str, preset: str | None = None, file: Path | None = None, overrides: Sequence[str] = ()
) -> Networks:
    """``weights`` is a run, a checkpoint of one, a bundle, an encoder's file or ``random``.

    A run and a bundle bring their settings; the others need them.
    """
    for override in overrides:
        if override.strip().startswith("lesions."):
            raise UserError(f"--set {override}: the lesions that a detector learns on are adapt.{override.strip()}.")
    if weights == RANDOM:
        return Networks(_asked(preset, file, overrides, "random weights have no architecture of their own"))
    path = local_path(weights)
    settings = run_config_file(path)
    if settings is None and not is_bundle(path):
        if not path.exists():
            raise UserError(f"{path} does not exist; give a run, a bundle, a weights file or random.")
        return Networks(_asked(preset, file, overrides, f"{path} does not say which architecture it has"), init=weights)
    _refuse_settings(preset, file, overrides)
    pretrained = load_pretrained(weights)
    return Networks(pretrained.model.config, pretrained, settings.parent if settings is not None else None)


def _asked(preset: str | None, file: Path | None, overrides: Sequence[str], why: str) -> Config:
    if preset is None and file is None and not overrides:
        raise UserError(f"{why}; add --preset, --config or --set encoder.* to say it.")
    return load_config(preset, file, overrides)


def _refuse_settings(preset: str | None, file: Path | None, overrides: Sequence[str]) -> None:
    if preset is not None or file is not None:
        raise UserError("a run and a bundle bring their own settings; leave out --preset and --config.")
    if overrides:
        raise UserError(
            f"--set {overrides[0]} would change the networks of these weights, which bring their own settings; those "
            f"of the detector are {', '.join(DetectConfig.model_fields)}."
        )


def image_settings(model: Path) -> ImageConfig:
    """How a detector's films are read, before its weights are."""
    if not (model / SETTINGS).is_file():
        raise UserError(f"{model} holds no detector ({SETTINGS}); make one with `afire detect fit`.")
    return load_config(file=model / CONFIG).image


def detect_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the detector's own settings, and those of the networks'."""
    own = [text for text in overrides if text.partition("=")[0].strip().split(".")[0] in DetectConfig.model_fields]
    return own, [text for text in overrides if text not in own]


def detect_settings(overrides: Sequence[str]) -> DetectConfig:
    """The detector's settings: defaults, changed by ``overrides`` one by one, so that a part of a part may change."""
    settings = DetectConfig()
    for override in overrides:
        settings = changed(settings, parse_override(override))
    return settings
