"""The results of `afire detect run` as one HTML page that needs no network and no other file.

Pictures are data URIs. The page's policy forbids every connection and every script but its own, which is named by its
hash; names that come from a user's files are escaped by the template, and control characters in them are spelt out.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from afire._version import __version__
from afire.detect.base import DISCLAIMER, AnomalyDetector
from afire.detect.findings import OUT_OF_DOMAIN, SCORED, UNREADABLE, FilmResult, Rule, counts, ranked
from afire.detect.run import PAGE
from afire.files import write_text
from afire.lesions.places import SIDES
from afire.processes import usable_cores
from afire.progress import track
from afire.report.detect_pictures import DIFFERENCE_TOP, MOST_ON_PAGE, css_gradient, difference_colours, heat_on_grey

MOST_ROWS = 5000  # of each kind; the rest is in results.csv
_THUMB, _FILM = 96, 448  # longest sides
_CHART_WIDTH, _CHART_HEIGHT, _BINS = 760, 84, 60


@dataclass(frozen=True)
class Row:
    """A film on the page. ``pictures`` are data URIs, or links where there are too many films."""

    id: int
    file: str
    group: str  # alarm, ok, out, bad
    score: float | None
    percentile: float | None
    p_value: float | None
    words: str
    view: str
    thumb: str
    pictures: dict[str, str]
    links: dict[str, str]
    x: float | None
    y: float | None


def write_detect_page(
    out: Path, results: Sequence[FilmResult], rule: Rule, detector: AnomalyDetector, model: dict[str, str]
) -> Path:
    """Write ``report.html`` into the results' folder; pictures are taken from the files there."""
    write_text(out / PAGE, render_detect_page(out, results, rule, detector, model))
    return out / PAGE


def render_detect_page(
    out: Path, results: Sequence[FilmResult], rule: Rule, detector: AnomalyDetector, model: dict[str, str]
) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (templates / "detect.js").read_text(encoding="utf-8")
    in_order = ranked(results)
    shown = [film for status in (SCORED, OUT_OF_DOMAIN, UNREADABLE) for film in _of(in_order, status)[:MOST_ROWS]]
    embed = len(results) <= MOST_ON_PAGE  # with more, thumbnails and links to the pictures beside it
    rows = _rows(out, shown, rule, embed)
    return environment.get_template("detect.html").render(
        version=__version__,
        disclaimer=DISCLAIMER,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii"),
        scored=[row for row in rows if row.group in ("alarm", "ok")],
        outside=[row for row in rows if row.group == "out"],
        unreadable=[row for row in rows if row.group == "bad"],
        viewer=_viewer(rows) if embed else {},
        left_out=len(results) - len(shown),
        counts=counts(results, rule),
        films=len(results),
        restores=any("restored" in film.pictures for film in results),
        rule=rule,
        threshold=rule.threshold if np.isfinite(rule.threshold) else None,
        chart=_chart([film.score for film in results if film.status == SCORED and film.score is not None], rule),
        scale=detector.scale,
        heat_gradient=css_gradient(heat_on_grey()),
        difference_gradient=css_gradient(difference_colours()),
        difference_top=DIFFERENCE_TOP,
        sides=SIDES,
        choice=detector.choice,
        origin=_origin(detector),
        model=model,
    )


def _of(results: Sequence[FilmResult], status: str) -> list[FilmResult]:
    return [result for result in results if result.status == status]


def _rows(out: Path, results: Sequence[FilmResult], rule: Rule, embed: bool) -> list[Row]:
    with ThreadPoolExecutor(usable_cores()) as pool:
        made = pool.map(lambda result: _row(out, result, rule, embed), results)
        return list(track(made, "drawing the page", total=len(results), unit="films"))


def _row(out: Path, result: FilmResult, rule: Rule, embed: bool) -> Row:
    judged = rule.judge(result)
    group = {OUT_OF_DOMAIN: "out", UNREADABLE: "bad"}.get(result.status, "alarm" if judged and judged.alarm else "ok")
    return Row(
        id=result.number,
        file=visible(result.file),
        group=group,
        score=result.score if judged else None,
        percentile=judged.percentile if judged else None,
        p_value=judged.p_value if judged else None,
        words=visible(result.region if judged else "; ".join(result.objections)),
        view=visible(result.view),
        thumb=_picture(out, result.pictures.get("overlay") or result.pictures.get("film"), _THUMB),
        pictures=_embedded(out, result) if embed else {},
        links={
            kind: quote(name)
            for kind, name in result.pictures.items()
            if not embed and kind in ("overlay", "restored", "difference")
        },
        x=result.x,
        y=result.y,
    )


def visible(text: str) -> str:
    """Characters that show nothing or turn text around are spelt out, so that a name looks like what it is."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def _embedded(out: Path, result: FilmResult) -> dict[str, str]:
    pictures = {
        "film": _picture(out, result.pictures.get("film"), _FILM),
        "heat": _file(out, result.pictures.get("heat")),
        "restored": _picture(out, result.pictures.get("restored"), _FILM),
        "difference": _file(out, result.pictures.get("difference")),
    }
    return {kind: picture for kind, picture in pictures.items() if picture}


def _picture(out: Path, name: str | None, side: int) -> str:
    """A JPEG data URI with no side longer than ``side``; empty when the file is not there any more."""
    if not name:
        return ""
    try:
        with Image.open(out / name) as image:
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=82)
    except OSError:
        return ""
    return _uri("image/jpeg", buffer.getvalue())


def _file(out: Path, name: str | None) -> str:
    """A PNG as it is."""
    try:
        return _uri("image/png", (out / name).read_bytes()) if name else ""
    except OSError:
        return ""


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode("ascii")


def _viewer(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What the script needs to show a film large: nothing that comes from a user's file names."""
    return {str(row.id): {"x": row.x, "y": row.y, **row.pictures} for row in rows if row.pictures}


def _chart(scores: Sequence[float], rule: Rule) -> dict[str, Any]:
    """Where the films lie among the calibration normals: bars of the normals, a tick for each film."""
    normal = rule.calibration.normal_scores
    values = np.concatenate([normal, scores, [rule.threshold] if np.isfinite(rule.threshold) else []])
    low, high = float(values.min()), float(values.max())
    room = 0.03 * max(high - low, 1e-9)
    low, high = low - room, high + room

    def place(score: float) -> float:
        return round((score - low) / (high - low) * _CHART_WIDTH, 1)

    heights, edges = np.histogram(normal, bins=_BINS, range=(low, high))
    tallest = max(int(heights.max()), 1)
    bars = [
        (place(edges[k]), round(_CHART_WIDTH / _BINS - 1, 2), round(float(height) / tallest * _CHART_HEIGHT, 1))
        for k, height in enumerate(heights)
        if height
    ]
    shown = scores if len(scores) <= 2000 else np.quantile(scores, np.linspace(0, 1, 2000)).tolist()
    return {
        "width": _CHART_WIDTH,
        "height": _CHART_HEIGHT,
        "bars": bars,
        "films": [(place(score), score >= rule.threshold) for score in shown],
        "threshold": place(rule.threshold) if np.isfinite(rule.threshold) else None,
        "ticks": [(place(tick), f"{tick:g}") for tick in _ticks(low, high)],
        "normals": len(normal),
    }


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** np.floor(np.log10((high - low) / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    first = np.ceil(low / step) * step
    return [round(float(value), 10) + 0.0 for value in np.arange(first, high, step)]


def _origin(detector: AnomalyDetector) -> dict[str, Any]:
    data, parts = detector.origin.get("data") or {}, detector.origin.get("parts") or {}
    return {
        "data": data.get("name") or "unknown films",
        "fit": parts.get("fit"),
        "held_out_by": detector.origin.get("held_out_by") or "",
        "notes": list(detector.origin.get("notes") or []),
    }
