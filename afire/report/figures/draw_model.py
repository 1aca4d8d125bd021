"""From a whole pre-training run to ``draw_restorations`` and ``draw_atlas``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from afire.data.dataset import Films
from afire.errors import UserError
from afire.report.figures.atlas_page import SIDE, atlas_figure
from afire.report.figures.files import FigureFiles, claim, save
from afire.report.figures.restored import ERROR_TOP, restoration_figure
from afire.report.figures.source import Source, films_text
from afire.report.style import style
from afire.tasks.atlas import Atlas, build_atlas
from afire.tasks.backbone import pick_device
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.figure_films import Rows
from afire.tasks.pretrained import Pretrained, load_pretrained
from afire.tasks.restorations import Errors, check_restores, restoration_errors, restore_films
from afire.tasks.results import Estimate, estimate
from afire.training.selection import normal_training_rows

logger = logging.getLogger("afire")
RESTORED_FILMS, ATLAS_FILMS, NEAREST = 200, 400, 8


def draw_restorations(
    out: Path,
    weights: str | Path,
    source: Source | Path,
    *,
    show: int = 3,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """Restorations of normal films, lesioned and as they are, with tokens hidden behind z_mask and with all seen."""
    stem, target = claim(out, "restorations", force), pick_device(device)
    source = source if isinstance(source, Source) else Source(source, most=RESTORED_FILMS)
    run = load_pretrained(weights)
    check_restores(run.model, run.name)
    logger.info("%s: %s", run.name, run.report)
    films = source.open(run.model.config.image)
    part, split_hash = source.rows(films)
    normal = _normal(films, part, source.part)
    rows = source.draw(normal)
    errors = restoration_errors(run.model, films, rows, source.seed, target)
    estimates = _error_estimates(films, rows, errors, source.seed)
    some = np.sort(np.random.default_rng(source.seed).permutation(rows)[:show])
    shown = restore_films(run.model, films.batch(some).to(target), some, source.seed)
    data = source.record(films, rows, len(normal), split_hash)
    record: dict[str, Any] = {
        "figure": "restorations",
        "weights": _describe(run),
        "data": {**data, "kind": "normal films"},
        "settings": {"lesions": run.model.config.lesions.model_dump(), "error_top": ERROR_TOP, "seed": source.seed},
        "shown": films.manifest.table["image"].iloc[some].tolist(),
        "numbers": {
            name: {
                way: {"hidden_tokens": vars(estimates[name, way][0]), "elsewhere": vars(estimates[name, way][1])}
                for way in ("z_mask", "all_seen", "untouched")
            }
            for name in ("lesioned", "normal")
        },
    }
    with style(print_size=True):
        caption = f"{run.name}; errors over {films_text(data, 'normal')}; blue outline: tokens hidden by z_mask"
        return save(stem, restoration_figure(shown, estimates, caption), record)


def draw_atlas(
    out: Path,
    weights: str | Path,
    source: Source | Path,
    *,
    nearest: int = NEAREST,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """The prototypes place by place: entropy, likeliest cluster, typical and nearest patches of training normals."""
    stem, target = claim(out, "atlas", force), pick_device(device)
    source = source if isinstance(source, Source) else Source(source, most=ATLAS_FILMS)
    run = load_pretrained(weights)
    logger.info("%s: %s", run.name, run.report)
    films = source.open(run.model.config.image)
    normal, sentence = normal_training_rows(films.manifest, source.split)
    logger.info("%s", sentence)
    rows = source.draw(normal)
    atlas = build_atlas(run.model, films, rows, max(nearest, SIDE * SIDE), target)
    split_hash = source.split.hash if source.split else None
    data = source.record(films, rows, len(normal), split_hash, "train")
    record: dict[str, Any] = {
        "figure": "atlas",
        "weights": _describe(run),
        "data": {**data, "kind": "normal films"},
        "settings": {"nearest": max(nearest, SIDE * SIDE), "distance": "Hellinger", "seed": source.seed},
        "numbers": {
            "mean_entropy": float(atlas.entropy.mean()),
            "clusters": atlas.clusters,
            "likeliest_clusters": len(np.unique(atlas.cluster)),
            "at_home": float(atlas.own_place.mean()),
            "at_home_or_beside": float(atlas.near_place.mean()),
            "at_home_by_chance": 1 / len(atlas.entropy),
            "nearest_distance": float(atlas.nearest_distance.mean()),
            "places": _places(atlas, films),
        },
    }
    with style(print_size=True):
        share, chance = 100 * float(atlas.own_place.mean()), 100 / len(atlas.entropy)
        home = f"a film's closest patch lies at home in {share:.0f} % (by chance {chance:.1f} %)"
        caption = f"{run.name}; {films_text(data, 'normal')}; {home}"
        return save(stem, atlas_figure(atlas, caption), record)


def _normal(films: Films, part: Rows, name: str) -> Rows:
    normal: Rows = part[films.manifest.table["normal"].to_numpy()[part] == 1]
    if len(normal) == 0:
        raise UserError(f"no {name} film is labelled normal, and synthetic lesions are drawn on normal films.")
    return normal


def _error_estimates(
    films: Films, rows: Rows, errors: Errors, seed: int
) -> dict[tuple[str, str], tuple[Estimate, Estimate]]:
    """Means over films with 95 % intervals over patients, inside the hidden tokens and outside."""
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[rows]
    found = []
    for values in (errors.inside, errors.outside):
        named = {f"{name} {way}": column for (name, way), column in values.items()}
        draws = bootstrap_means([named], [patients], np.random.default_rng(seed))
        found.append({key: estimate([float(np.nanmean(v))], draws[" ".join(key)]) for key, v in values.items()})
    return {key: (found[0][key], found[1][key]) for key in found[0]}


def _places(atlas: Atlas, films: Films) -> list[dict[str, Any]]:
    images = films.manifest.table["image"]
    places = []
    for place in range(len(atlas.entropy)):
        row, column = divmod(place, atlas.grid[1])
        nearest = [
            {
                "image": str(images.iloc[film]),
                "row": int(at) // atlas.grid[1],
                "column": int(at) % atlas.grid[1],
                "distance": float(far),
            }
            for film, at, far in zip(
                atlas.nearest_film[place], atlas.nearest_place[place], atlas.nearest_distance[place], strict=True
            )
        ]
        places.append(
            {
                "row": row,
                "column": column,
                "entropy": float(atlas.entropy[place]),
                "cluster": int(atlas.cluster[place]),
                "probability": float(atlas.probability[place]),
                "at_home": float(atlas.own_place[place]),
                "at_home_or_beside": float(atlas.near_place[place]),
                "typical": str(images.iloc[atlas.typical_film[place]]),
                "nearest": nearest,
            }
        )
    return places


def _describe(run: Pretrained) -> dict[str, Any]:
    return {"name": run.name, "hash": run.hash, "report": run.report, "clusters": run.model.config.head.clusters}
