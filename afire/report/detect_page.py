"""The results of `afire detect run` as an HTML page that opens from disk and needs no network.

Pictures, thumbnails and rows lie beside it and are loaded when they are needed, so that it takes any number of films.
The page's policy allows its own script, named by its hash, the scripts that this one loads, named by a nonce, and
pictures of its own folder: every connection is forbidden. Names that come from a user's files reach the page as text
alone, and control characters in them are spelt out.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from afire._version import __version__
from afire.detect.base import DISCLAIMER, AnomalyDetector
from afire.detect.findings import JOURNAL, FilmResult, Rule, counts, ranked, read_header
from afire.detect.run import PAGE
from afire.files import sha256_text, write_text
from afire.lesions.places import SIDES
from afire.report.detect_files import ACROSS, THUMB, Beside, remove_others, visible, write_beside
from afire.report.detect_near import PER_FILE, shown_pieces
from afire.report.detect_pictures import (
    DIFFERENCE_TOP,
    FOLDER,
    KINDS,
    PER_FOLDER,
    css_gradient,
    difference_colours,
    heat_on_grey,
)

__all__ = ["visible", "write_detect_page"]

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("state", "list", "threshold", "viewer", "normal", "marks", "live", "keys")  # detect_NAME.js, in this order


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
        "notes": list(detector.origin.get("notes") or []),
    }
