"""The results of `afire detect run` as an HTML page that opens from disk and needs no network.

Pictures, thumbnails and rows lie beside it and are loaded when they are needed, so that it takes any number of films.
The page's policy allows its own script, named by its hash, the scripts that this one loads, named by a nonce, and
pictures of its own folder: every connection is forbidden. Names that come from a user's files reach the page as text
alone, and control characters in them are spelt out.

The same page is the live list of a service: its newest films, drawn when they are viewed. A film is then kept as what
is shown of it and its heat, small; pictures are made of these on request, and nothing is on disk.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire._version import __version__
from afire.detect.base import DISCLAIMER, AnomalyDetector
from afire.detect.findings import JOURNAL, FilmResult, Rule, counts, ranked, read_header, warnings_of
from afire.detect.run import PAGE
from afire.files import sha256_text, write_text
from afire.lesions.places import SIDES
from afire.report.detect_files import (
    ACROSS,
    PER_FILE,
    THUMB,
    Beside,
    closest_pieces,
    film_row,
    jpeg,
    near_script,
    region_names,
    remove_others,
    sheet_of_pieces,
    shown_pieces,
    write_beside,
)
from afire.report.detect_pictures import (
    DIFFERENCE_TOP,
    FOLDER,
    KINDS,
    PER_FOLDER,
    css_gradient,
    difference_colours,
    heat_on_grey,
    laid_over,
    picture_name,
    transparent,
)

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("state", "list", "threshold", "viewer", "normal", "marks", "live", "keys")  # detect_NAME.js, in this order
MEAN, PIECES = "page/normal.jpg", "page/patches.jpg"  # of a live list
_SECONDS = 3  # between two requests to the service


def write_detect_page(
    out: Path, results: Sequence[FilmResult], rule: Rule, detector: AnomalyDetector, model: dict[str, str]
) -> Path:
    """Write ``report.html`` and the files beside it into the results' folder; pictures are taken from there."""
    beside = write_beside(out, ranked(results), detector.scale.low, detector.atlas, detector.config.image.fit)
    nonce = base64.b64encode(hashlib.sha256(f"{beside.tag} {model['hash']}".encode()).digest()[:18]).decode("ascii")
    facts = script_facts(_report_id(out, model["hash"]), nonce, len(results), rule, detector, model, beside)
    restores = any("restored" in film.pictures for film in results)
    page = render_page(facts, counts(results, rule), rule, detector, model, restores=restores)
    write_text(out / PAGE, page)
    remove_others(out, beside)
    return out / PAGE


def render_page(
    facts: dict[str, Any],
    groups: Mapping[str, int],
    rule: Rule,
    detector: AnomalyDetector,
    model: dict[str, str],
    *,
    restores: bool,
) -> str:
    """The page as text. ``facts`` are those of :func:`script_facts`, ``groups`` the number of films of each kind."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = page_script()
    return environment.get_template("detect.html").render(
        version=__version__,
        disclaimer=DISCLAIMER,
        style=(_TEMPLATES / "detect.css").read_text(encoding="utf-8"),
        script=script,
        policy=page_policy(facts["nonce"]),
        report=facts,
        live=facts["live"],
        films=facts["films"],
        counts=groups,
        restores=restores,
        rule=rule,
        calibration=len(rule.calibration),
        scale=detector.scale,
        heat_gradient=css_gradient(heat_on_grey()),
        difference_gradient=css_gradient(difference_colours()),
        difference_top=DIFFERENCE_TOP,
        sides=SIDES,
        choice=detector.choice,
        origin=_origin(detector),
        warnings=warnings_of(detector, groups, rule),
        atlas=detector.atlas,
        model=model,
    )


def page_policy(nonce: str) -> str:
    """What the page may do: run its own script and those that this one loads, and show pictures from where it lies."""
    script_hash = base64.b64encode(hashlib.sha256(page_script().encode("utf-8")).digest()).decode("ascii")
    return (
        "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{script_hash}' 'nonce-{nonce}'; base-uri 'none'; form-action 'none'"
    )


@cache
def page_script() -> str:
    """The whole script of the page: its files in one function, so that nothing of it is global."""
    files = [(_TEMPLATES / f"detect_{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '(() => {\n"use strict";\n' + "\n".join(files) + "})();"


def script_facts(
    report_id: str,
    nonce: str,
    films: int,
    rule: Rule,
    detector: AnomalyDetector,
    model: dict[str, str],
    beside: Beside,
    live: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the script needs before any film; nothing comes from a film's name. ``live``: a service feeds the list."""
    atlas = detector.atlas
    pieces = atlas.patches.shape[2] if atlas is not None and atlas.patches is not None and beside.patches else 0
    return {
        "id": report_id,
        "nonce": nonce,
        "live": live,
        "films": films,
        "chunks": beside.chunks,
        "sheets": {"files": beside.sheets, "thumb": THUMB, "across": ACROSS},
        "pictures": {"folder": FOLDER, "per_folder": PER_FOLDER, "kinds": list(KINDS.items())},
        "regions": beside.regions,
        "threshold": _finite(rule.threshold),
        "words": rule.words,
        "calibration": rule.calibration.normal_scores.tolist(),
        "fit": detector.config.image.fit,
        "places": atlas.places if atlas is not None else detector.grid[0],
        "normal": {
            "mean": beside.mean,
            "patches": beside.patches,
            "kept": pieces,
            "shown": shown_pieces(atlas) if pieces else 0,
            "near": beside.near,
            "per_file": PER_FILE,
        },
        "model": model["hash"],
        "afire": __version__,
    }


def _finite(threshold: float) -> float | None:
    """JSON has no infinity: None flags nothing, the lowest number everything."""
    return None if threshold == np.inf else max(threshold, float(np.finfo(np.float64).min))


def _report_id(out: Path, model_hash: str) -> str:
    """An id by which a browser finds its marks again: one for a detector and a folder of films, resumed or not."""
    source = read_header(out / JOURNAL).get("source", "") if (out / JOURNAL).is_file() else ""
    return sha256_text(f"{model_hash} {source}")[:24]


def _origin(detector: AnomalyDetector) -> dict[str, Any]:
    data, subsets = detector.origin.get("data") or {}, detector.origin.get("parts") or {}
    return {
        "data": data.get("name") or "unknown films",
        "fit": subsets.get("fit"),
        "held_out_by": detector.origin.get("held_out_by") or "",
    }


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
