"""Which of the kept pieces of normal films are closest to a film, place by place, for the page to show.

A page opened from disk may show pictures but not read their pixels, so this is computed when it is written, from the
film's own picture. Only detectors that keep pieces of single films have something to choose from.

Shapes: G x G places, of each of which K pieces are kept and M are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.data.decode import FitMode, fit_square
from afire.detect.atlas import NormalAtlas
from afire.detect.findings import FilmResult
from afire.processes import usable_cores
from afire.progress import track

PER_FILE = 100  # films
MOST = 4  # pieces that are shown of a place
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"

Bytes = NDArray[np.uint8]


def shown_pieces(atlas: NormalAtlas | None) -> int:
    """M: how many pieces of single films are shown at a place."""
    return min(MOST, atlas.patches.shape[2]) if atlas is not None and atlas.patches is not None else 0


def closest_pieces(atlas: NormalAtlas, film: Bytes, fit: FitMode) -> str:
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
