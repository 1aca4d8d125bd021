"""Which films a run has trained on, so that later tasks can tell what is new to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from afire.data.dataset import Films
from afire.data.pack import DIGEST
from afire.files import sha256_text, write_text

FILMS = "films.txt"


def film_keys(films: Films, rows: np.ndarray) -> list[str]:
    """A key for each film, one-way: of its pixels in a pack, else of its path within the dataset."""
    table = films.manifest.table
    column = DIGEST if DIGEST in table else "image"
    return [sha256_text(str(value))[:24] for value in table[column].iloc[rows]]


def remember_films(out: Path, films: Films, rows: np.ndarray) -> None:
    """Write the keys of a run's films into its folder."""
    write_text(out / FILMS, "".join(f"{key}\n" for key in film_keys(films, rows)))


def films_seen(run: Path, films: Films, rows: np.ndarray) -> int:
    """How many of ``rows`` the run was trained on; 0 where the run does not say."""
    file = run / FILMS
    if not file.is_file():
        return 0
    known = set(file.read_text(encoding="utf-8").split())
    return sum(key in known for key in film_keys(films, rows))
