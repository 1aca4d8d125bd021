"""The page of `afire detect run` as a live list: the newest films of a service, drawn when they are viewed.

A film is kept as what is shown of it and its heat, small; pictures are made of these on request. Nothing is on disk.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, Rule, ranked
from afire.report.detect_files import THUMB, Beside, film_row, jpeg, region_names, sheet_of_pieces
from afire.report.detect_near import closest_pieces, near_script, shown_pieces
from afire.report.detect_page import render_page, script_facts
from afire.report.detect_pictures import laid_over, picture_name, transparent

MEAN, PIECES = "page/normal.jpg", "page/patches.jpg"
_SECONDS = 3  # between two looks at the service


@dataclass(frozen=True)
class LiveFilm:
    """A film of the list: its result, what is shown of it (H, W) and the steps of its heat, if it could be read."""

    result: FilmResult
    shown: NDArray[np.uint8] | None
    levels: Image.Image | None

    @classmethod
    def of(cls, result: FilmResult, shown: NDArray[np.uint8] | None, levels: Image.Image | None) -> LiveFilm:
        """With the names that the page has for its pictures."""
        kinds = ["film"] if shown is not None else []
        kinds += ["heat", "overlay"] if levels is not None else []
        pictures = {kind: picture_name(result.number, kind) for kind in kinds}
        return cls(replace(result, pictures=pictures), shown, levels)


def live_page(detector: AnomalyDetector, rule: Rule, model_hash: str, run: str, nonce: str) -> str:
    """The page without films; by ``run`` it recognises its service."""
    atlas, model = detector.atlas, {"name": "of this service", "hash": model_hash}
    beside = Beside("", [], [], [], MEAN if atlas is not None else "", PIECES if shown_pieces(atlas) else "")
    live = {"run": run, "seconds": _SECONDS}
    facts = script_facts(f"live {model_hash[:16]}", nonce, 0, rule, detector, model, beside, live)
    return render_page(facts, {"alarm": 0}, rule, detector, model, restores=False)


def live_script(films: Sequence[LiveFilm] | None, low: float, about: Mapping[str, Any]) -> str:
    """A script that hands films to the page, in the order of a report; None: they have not changed."""
    facts = dict(about)
    if films is not None:
        in_order = ranked([film.result for film in films])
        regions = region_names(in_order, low)
        facts |= {"films": [film_row(film, regions, low) for film in in_order], "regions": list(regions)}
    return f"afireLive({json.dumps(facts, separators=(',', ':'), allow_nan=False)});\n"


def live_picture(film: LiveFilm, kind: str) -> tuple[bytes, str] | None:
    """A picture of a film and its type; None for a kind that it does not have."""
    if film.shown is None or kind not in (*film.result.pictures, "thumb"):
        return None
    if kind == "heat":
        assert film.levels is not None
        stream = io.BytesIO()
        transparent(film.levels).save(stream, "PNG")
        return stream.getvalue(), "image/png"
    image = Image.fromarray(film.shown)
    if film.levels is not None and kind != "film":
        image = laid_over(film.shown, film.levels)
    if kind == "thumb":
        image.thumbnail((THUMB, THUMB), Image.Resampling.BILINEAR)
    return jpeg(image), "image/jpeg"


def live_normals(detector: AnomalyDetector, name: str) -> bytes | None:
    """A picture of what normal films look like, by its name on the page."""
    atlas = detector.atlas
    if atlas is not None and name == MEAN:
        return jpeg(Image.fromarray(atlas.mean))
    if atlas is not None and atlas.patches is not None and name == PIECES:
        return jpeg(sheet_of_pieces(atlas.patches))
    return None


def live_near(detector: AnomalyDetector, film: LiveFilm) -> str:
    """A script with the kept pieces of normal films that are closest to a film."""
    atlas = detector.atlas
    text = ""
    if film.shown is not None and atlas is not None and atlas.patches is not None:
        text = closest_pieces(atlas, film.shown, detector.config.image.fit)
    return near_script(film.result.number, [text])
