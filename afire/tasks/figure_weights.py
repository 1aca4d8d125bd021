"""Several weights side by side in one figure, each under a label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afire.config import Config
from afire.errors import UserError
from afire.model.afire import Network
from afire.tasks.backbone import RANDOM, Backbone, load_backbone, run_config_file
from afire.weights.bundle import is_bundle
from afire.weights.hub import local_path


def load_backbones(
    weights: Mapping[str, str | Path], config: Config | None = None, network: Network = "teacher", seed: int = 0
) -> dict[str, Backbone]:
    """A backbone for each label. Runs bring their own settings; ``config`` is for random weights and foreign files.

    Without ``config``, random weights take the architecture of the first run beside them: the fair thing to compare.
    """
    if not weights:
        raise UserError("a figure needs at least one --weights.")
    found = {
        label: load_backbone(str(path), None if _brings_settings(path) else config, network=network, seed=seed)
        for label, path in weights.items()
        if str(path) != RANDOM
    }
    if config is None and found:
        config = next(iter(found.values())).config
    for label, path in weights.items():
        if label not in found:
            found[label] = load_backbone(str(path), config, network=network, seed=seed)
    return {label: found[label] for label in weights}


def _brings_settings(weights: str | Path) -> bool:
    path = local_path(weights)
    return is_bundle(path) or run_config_file(path) is not None


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """What a figure's JSON says about weights."""
    return {
        "name": backbone.name,
        "hash": backbone.hash,
        "report": backbone.report,
        "clusters": backbone.config.head.clusters if backbone.name != RANDOM else None,
        "width": backbone.config.encoder.width,
        "depth": backbone.config.encoder.depth,
        "image_size": backbone.config.image.size,
    }
