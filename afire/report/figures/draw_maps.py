"""From weights and films to maps: ``draw_tsne`` and ``draw_landmarks``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from afire.config import Config
from afire.model.afire import Network
from afire.report.figures.files import FigureFiles, claim, save
from afire.report.figures.maps import Panel, class_figure, landmark_figure, quality_record
from afire.report.figures.source import Source, as_source, films_text
from afire.report.style import style
from afire.tasks.atlas import standardised
from afire.tasks.backbone import pick_device
from afire.tasks.clusters import NEIGHBOURS, PERPLEXITY, cluster_quality, film_classes, tsne_map, unit_vectors
from afire.tasks.features import film_features
from afire.tasks.figure_weights import describe_backbone, load_backbones
from afire.tasks.landmarks import LANDMARKS, following, landmark_places, landmark_tokens

logger = logging.getLogger("afire")
LANDMARK_FILMS = 200


def draw_tsne(
    out: Path,
    weights: Mapping[str, str | Path],
    source: Source | Path,
    *,
    labels: Sequence[str] | None = None,
    classes: int = 7,
    perplexity: float = PERPLEXITY,
    neighbours: Sequence[int] = NEIGHBOURS,
    network: Network = "teacher",
    config: Config | None = None,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """t-SNE of film representations (mean image token) coloured by class, a panel for each of ``weights``."""
    stem, source, target = claim(out, "tsne", force), as_source(source), pick_device(device)
    backbones = load_backbones(weights, config, network, source.seed)
    first = source.open(next(iter(backbones.values())).config.image)
    part, split_hash = source.rows(first)
    found = film_classes(first.manifest, part, labels, classes)
    rows = source.draw(found.rows)
    number = dict(zip(found.rows.tolist(), found.number.tolist(), strict=True))
    classes_N = np.array([number[row] for row in rows.tolist()], np.int64)
    patients = first.manifest.table["patient"].to_numpy(dtype=object)[rows]
    panels, numbers = [], {}
    for label, backbone in backbones.items():
        logger.info("%s: %s", label, backbone.report)
        features = film_features(backbone, source.open(backbone.config.image), rows, "mean", target)
        unit = unit_vectors(features)
        quality = cluster_quality(unit, classes_N, patients, neighbours, np.random.default_rng(source.seed))
        panels.append(Panel(label, tsne_map(unit, perplexity, source.seed), quality))
        numbers[label] = quality_record(quality)
    data = source.record(first, rows, len(found.rows), split_hash)
    counts = np.bincount(classes_N, minlength=len(found.names)).tolist()
    record: dict[str, Any] = {
        "figure": "tsne",
        "weights": {label: describe_backbone(backbone) for label, backbone in backbones.items()},
        "data": {**data, "left_out": {"rarer_classes": found.others, "unknown_labels": found.unknown}},
        "settings": {"perplexity": perplexity, "neighbours": list(neighbours), "network": network, "seed": source.seed},
        "classes": dict(zip(found.names, counts, strict=True)),
        "numbers": numbers,
    }
    with style(print_size=True):
        caption = f"{films_text(data)}; t-SNE, perplexity {perplexity:g}"
        return save(stem, class_figure(panels, classes_N, found.names, caption, source.seed), record)


def draw_landmarks(
    out: Path,
    weights: Mapping[str, str | Path],
    source: Source | Path,
    *,
    perplexity: float = PERPLEXITY,
    neighbours: Sequence[int] = NEIGHBOURS,
    network: Network = "teacher",
    config: Config | None = None,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """t-SNE of the tokens at nine places of each film, and whether tokens of moved films follow anatomy or place."""
    stem, target = claim(out, "landmarks", force), pick_device(device)
    source = source if isinstance(source, Source) else Source(source, most=LANDMARK_FILMS)
    backbones = load_backbones(weights, config, network, source.seed)
    leader = next(iter(backbones.values()))
    first = source.open(leader.config.image)
    part, split_hash = source.rows(first)
    rows = source.draw(part)
    patients = np.repeat(first.manifest.table["patient"].to_numpy(dtype=object)[rows], 9)
    panels, numbers = [], {}
    for label, backbone in backbones.items():
        logger.info("%s: %s", label, backbone.report)
        films, patch = source.open(backbone.config.image), backbone.config.encoder.patch_size
        places = landmark_places((films.size // patch, films.size // patch))
        tokens = landmark_tokens(backbone, films, rows, places.tokens((films.size // patch,) * 2), target)
        unit = unit_vectors(tokens.reshape(len(rows) * 9, -1))
        which = np.tile(np.arange(9), len(rows))
        quality = cluster_quality(unit, which, patients, neighbours, np.random.default_rng(source.seed))
        moved = following(backbone, films, rows, places, tokens, target)
        panels.append(Panel(label, tsne_map(unit, perplexity, source.seed, "tokens"), quality, moved))
        numbers[label] = {**quality_record(quality), "moved_films": asdict(moved)}
    data = source.record(first, rows, len(part), split_hash)
    patch = leader.config.encoder.patch_size
    places = landmark_places((first.size // patch, first.size // patch))
    record: dict[str, Any] = {
        "figure": "landmarks",
        "weights": {label: describe_backbone(backbone) for label, backbone in backbones.items()},
        "data": data,
        "settings": {"perplexity": perplexity, "neighbours": list(neighbours), "network": network, "seed": source.seed},
        "landmarks": {"names": list(LANDMARKS), "rows": places.rows, "columns": places.columns},
        "numbers": numbers,
    }
    with style(print_size=True):
        mean = standardised(first.batch(rows)).mean(dim=0)[0].numpy()
        caption = f"{films_text(data)}, nine tokens each; t-SNE, perplexity {perplexity:g}"
        return save(stem, landmark_figure(panels, mean, places, patch, caption, source.seed), record)
