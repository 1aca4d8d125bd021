"""The files beside the page of `afire detect run`, which it loads when they are needed.

A page opened from disk may load scripts and pictures from its own folder and nothing else. So the films are rows of
arrays in scripts of a few thousand rows, thumbnails share sheets in the order of the rows, and what normal films look
like is a picture or two. Names begin with a tag of the content: a page never loads files of another page, and the old
ones are removed once the new page is written.

Such a page may show pictures but not read their pixels: which of the kept pieces of normal films are closest to a film
is computed when it is written, from the film's own picture. Only detectors that keep pieces of single films have any.

Shapes: G x G places, of each of which K pieces are kept and M are shown.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.data.decode import FitMode, fit_square
from afire.detect.atlas import NormalAtlas
from afire.detect.findings import SCORED, UNREADABLE, FilmResult, Status
from afire.files import remove_unfinished, sha256_text, write_atomic
from afire.processes import usable_cores
from afire.progress import track
from afire.report.detect_pictures import KINDS, picture_name

FOLDER = "page"
ROWS = 2000  # in a file
THUMB, ACROSS = 96, 10  # pixels of a thumbnail's longest side; thumbnails along a side of a sheet
NOTHING = "nothing stands out"  # the region of a film whose heat stays below the scale
PER_FILE = 100  # films in a script of closest pieces
MOST_PIECES = 4  # shown of a place
_STATUS: dict[Status, int] = {SCORED: 0, "out of domain": 1, UNREADABLE: 2}
_OURS = re.compile(r"[0-9a-f]{12}-(films|sheet|normal|patches|near)\b")
_BACKGROUND = (11, 13, 15)  # of the viewer
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"


@dataclass(frozen=True)
class Beside:
    """The files beside a page, relative to it, and what they are about."""

    tag: str
    chunks: list[str]
    sheets: list[str]
    regions: list[str]
    mean: str = ""
    patches: str = ""
    near: list[str] = field(default_factory=list)

    def names(self) -> set[str]:
        """Every file."""
        return {name for name in (*self.chunks, *self.sheets, *self.near, self.mean, self.patches) if name}


def write_beside(
    out: Path, in_order: Sequence[FilmResult], low: float, atlas: NormalAtlas | None, fit: FitMode
) -> Beside:
    """Write rows, sheets and pictures of normal films; ``low`` is the foot of the heat scale."""
    regions = region_names(in_order, low)
    rows = [film_row(film, regions, low) for film in in_order]
    texts = [_chunk(start, rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)]
    tag = sha256_text("\n".join(texts))[:12]
    chunks = _write(out, f"{tag}-films", "js", [text.encode("ascii") for text in texts])
    has_pictures = any(film.pictures for film in in_order)
    sheets = _write_sheets(out, tag, in_order) if has_pictures else []
    mean, patches = _write_atlas(out, tag, atlas) if has_pictures and atlas is not None else ("", "")
    near: list[str] = []
    if patches and atlas is not None:
        scripts = near_scripts(out, in_order, atlas, fit)
        near = _write(out, f"{tag}-near", "js", [text.encode("ascii") for text in scripts])
    return Beside(tag, chunks, sheets, list(regions), mean, patches, near)


def remove_others(out: Path, beside: Beside) -> None:
    """Remove files of earlier pages and nothing else; call it once the new page is written."""
    remove_unfinished(out / FOLDER)
    for file in (out / FOLDER).glob("*"):
        if _OURS.match(file.name) and f"{FOLDER}/{file.name}" not in beside.names():
            file.unlink()


def visible(text: str) -> str:
    """Characters that show nothing or turn text around are spelt out, so that a name looks like what it is."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def region_names(results: Sequence[FilmResult], low: float) -> dict[str, int]:
    """The names of the regions that occur, each with its number, those with most films first."""
    names = [_region(film, low) for film in results if film.status == SCORED]
    regions, counts = np.unique(np.array(names, dtype=object).astype(str), return_counts=True)
    order = np.lexsort((regions, -counts))
    return {str(regions[place]): number for number, place in enumerate(order)}


def _region(film: FilmResult, low: float) -> str:
    return film.region_words if film.region_sd is not None and film.region_sd >= low else NOTHING


def film_row(film: FilmResult, regions: dict[str, int], low: float) -> list[Any]:
    """The fields in the order that the page's script expects. A score that is not to be trusted is left out."""
    scored = film.status == SCORED
    name = visible(film.file)
    has_picture = [film.pictures.get(kind) == picture_name(film.number, kind) for kind in KINDS]
    return [
        film.number,
        name,
        _STATUS[film.status],
        film.score if scored else None,
        regions[_region(film, low)] if scored else -1,
        visible(film.region if scored else "; ".join(film.objections)),
        _short(film.x),
        _short(film.y),
        visible(film.view),
        sum(1 << bit for bit, is_drawn in enumerate(has_picture) if is_drawn),
        *([film.file] if name != film.file else []),
    ]


def _short(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _chunk(start: int, rows: Sequence[list[Any]]) -> str:
    """A script that hands its rows to the page."""
    return f"afireFilms({start},{json.dumps(rows, separators=(',', ':'), allow_nan=False)});\n"


def _write(out: Path, stem: str, suffix: str, contents: Sequence[bytes]) -> list[str]:
    names = [f"{FOLDER}/{stem}-{number:03d}.{suffix}" for number in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        _write_bytes(out / name, content)
    return names


def _write_bytes(path: Path, content: bytes) -> None:
    write_atomic(path, lambda temporary: _put(temporary, content))


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _write_sheets(out: Path, tag: str, in_order: Sequence[FilmResult]) -> list[str]:
    on_one = ACROSS * ACROSS
    batches = [in_order[start : start + on_one] for start in range(0, len(in_order), on_one)]
    names = [f"{FOLDER}/{tag}-sheet-{number:04d}.jpg" for number in range(len(batches))]
    with ThreadPoolExecutor(usable_cores()) as pool:
        sheets = pool.map(partial(_write_sheet, out), names, batches)
        for _ in track(sheets, "drawing thumbnails", total=len(batches), unit="sheets"):
            pass
    return names


def _write_sheet(out: Path, name: str, films: Sequence[FilmResult]) -> None:
    rows = -(-len(films) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * THUMB, rows * THUMB), _BACKGROUND)
    for place, film in enumerate(films):
        for thumb in _thumbnail(out, film):
            left, top = place % ACROSS * THUMB, place // ACROSS * THUMB
            sheet.paste(thumb, (left + (THUMB - thumb.width) // 2, top + (THUMB - thumb.height) // 2))
    _write_bytes(out / name, jpeg(sheet))


def _thumbnail(out: Path, film: FilmResult) -> Iterator[Image.Image]:
    """One thumbnail, or none when the picture is gone."""
    name = film.pictures.get("overlay") or film.pictures.get("film")
    if not name:
        return
    try:
        with Image.open(out / name) as image:
            image.draft("RGB", (THUMB, THUMB))  # a JPEG is decoded small
            image.thumbnail((THUMB, THUMB), Image.Resampling.BILINEAR)
            yield image.convert("RGB")
    except OSError:
        return


def _write_atlas(out: Path, tag: str, atlas: NormalAtlas) -> tuple[str, str]:
    mean = f"{FOLDER}/{tag}-normal.jpg"
    _write_bytes(out / mean, jpeg(Image.fromarray(atlas.mean)))
    if atlas.patches is None:
        return mean, ""
    patches = f"{FOLDER}/{tag}-patches.jpg"
    _write_bytes(out / patches, jpeg(sheet_of_pieces(atlas.patches)))
    return mean, patches


def sheet_of_pieces(patches: NDArray[np.uint8]) -> Image.Image:
    """Those of single films, (G, G, K, P, P): places as on the film, the pieces of a place side by side."""
    rows, columns, count, side, _ = patches.shape
    strip = patches.transpose(0, 3, 1, 2, 4).reshape(rows * side, columns * count * side)
    return Image.fromarray(np.ascontiguousarray(strip))


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def shown_pieces(atlas: NormalAtlas | None) -> int:
    """M: how many pieces of single films are shown at a place."""
    return min(MOST_PIECES, atlas.patches.shape[2]) if atlas is not None and atlas.patches is not None else 0


def closest_pieces(atlas: NormalAtlas, film: NDArray[np.uint8], fit: FitMode) -> str:
    """For a film as it is shown, (H, W): a digit for each of the M closest pieces, of each place, row by row.

    They index the sheet of all pieces: ``0`` is the first one of its place.
    """
    square = fit_square(np.divide(film, 255, dtype=np.float32), atlas.patch_side, fit)
    return "".join(_DIGITS[number] for number in atlas.closest(square, shown_pieces(atlas)).ravel())


def near_script(start: int, films: Sequence[str]) -> str:
    """A script that gives the page the pieces of films from row ``start`` on."""
    return f"afireNear({start},{json.dumps(list(films), separators=(',', ':'))});\n"


def near_scripts(out: Path, in_order: Sequence[FilmResult], atlas: NormalAtlas, fit: FitMode) -> Iterator[str]:
    """For the films of a report, a hundred in each; a film whose picture is missing has none."""

    def of_film(film: FilmResult) -> str:
        name = film.pictures.get("film")
        if not name:
            return ""
        try:
            with Image.open(out / name) as image:
                return closest_pieces(atlas, np.asarray(image.convert("L")), fit)
        except OSError:
            return ""

    with ThreadPoolExecutor(usable_cores()) as pool:
        texts = track(pool.map(of_film, in_order), "closest normal pieces", total=len(in_order), unit="films")
        batch: list[str] = []
        for number, text in enumerate(texts, 1):
            batch.append(text)
            if len(batch) == PER_FILE or number == len(in_order):
                yield near_script(number - len(batch), batch)
                batch = []
