"""Who is on which film, in which part of the data, with which findings: all from the film's number alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.frame import stream

# Films come in blocks of 12 that 5 patients share, so a film's patient is known without counting from the first.
_FILMS_PER_BLOCK = 12
_PATIENTS_PER_BLOCK = 5
_GOLDEN = 0.6180339887498949
_SECOND_FINDING = 0.15


def patient_of(seed: int, index: int) -> int:
    """Number of the patient on film ``index``; patients have 1 to 8 films, mostly 1 to 4, in a row."""
    block, position = divmod(index, _FILMS_PER_BLOCK)
    return block * _PATIENTS_PER_BLOCK + sum(position >= cut for cut in _cuts(seed, block))


@lru_cache(maxsize=1024)
def _cuts(seed: int, block: int) -> tuple[int, ...]:
    """Where in a block the next patient begins."""
    places = stream(seed, "roster", block).choice(_FILMS_PER_BLOCK - 1, _PATIENTS_PER_BLOCK - 1, replace=False)
    return tuple(sorted(int(place) + 1 for place in places))


def patient_id(number: int) -> str:
    """The id a manifest carries."""
    return f"phantom-{number:06d}"


def split_of(seed: int, number: int) -> str:
    """``train`` (70 %), ``val`` (10 %) or ``test`` (20 %) for a patient, whatever the size of the phantom.

    Steps of the golden ratio spread consecutive patients evenly, so that a small phantom has all three parts too.
    """
    start = stream(seed, "roster").random()
    place = (start + number * _GOLDEN) % 1.0
    return "train" if place < 0.7 else "val" if place < 0.8 else "test"


def draw_findings(seed: int, index: int, normal_share: float) -> tuple[str, ...]:
    """Diseases of film ``index``: none on ``normal_share`` of the films, else one, sometimes two."""
    rng = stream(seed, "findings", index)
    if rng.random() < normal_share:
        return ()
    count = 2 if rng.random() < _SECOND_FINDING else 1
    chosen = rng.permutation(len(DISEASES))[:count]
    return tuple(DISEASES[i] for i in np.sort(chosen))
