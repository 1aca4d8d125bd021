"""What the audit measures of a film, what it calls a finding, and the area under a curve it judges by.

A measurement is of one file: sizes, grey levels, sharpness, a thumbnail, digests. Features are the numbers of it that
could give a label away. A finding is a message with a level and the films it is about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from afire.data.decode import fit_square, read_film
from afire.data.manifest import META_PREFIX
from afire.errors import UserError
from afire.files import sha256_file

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
"""From worst to mildest. An error invalidates results, a warning may, a notice is worth knowing."""
Number = int | float | str | None
_DRAWS = 500
_ROWS_AT_ONCE = 4_000_000  # entries of a draws x films matrix, to bound memory on large sets


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``groups`` holds the films, as rows of the manifest: one film to a group, or the films that belong together (a pair
    of duplicates, the films of one patient). ``notes`` has one short text for each group, or nothing.
    """

    level: Level
    kind: str
    message: str
    groups: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)

    @property
    def films(self) -> list[int]:
        """Every film concerned, once, in order of appearance."""
        return list(dict.fromkeys(row for group in self.groups for row in group))


def single(rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of one film each."""
    return tuple((int(row),) for row in rows)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a level in the order in which the checks ran."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def count_levels(findings: Sequence[Finding]) -> dict[Level, int]:
    """How many findings there are of each level."""
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def verdict(findings: Sequence[Finding]) -> str:
    """A message about the whole set."""
    counts = count_levels(findings)
    if counts["error"]:
        worst = [finding for finding in findings if finding.level == "error"]
        if all(finding.kind == "shortcut" for finding in worst):
            labels = " or ".join(str(finding.numbers["label"]) for finding in worst)
            return f"A result on {labels} can be explained without disease; report a metadata-only row beside it."
        return "Results on this set would not be valid until the errors are dealt with."
    if counts["warning"]:
        return "Nothing was found that invalidates results; look at the warnings before training."
    return "Nothing was found that invalidates results."


def it_or_them(count: int) -> str:
    """The word for ``count`` films that were just named."""
    return "it" if count == 1 else "them"


def films_in_words(count: int) -> str:
    """``1 film``, ``1,234 films``."""
    return f"{count:,} film{'' if count == 1 else 's'}"


def auc(scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_]) -> float:
    """Chance that a positive film scores higher than a negative one, ties counting half. NaN without both classes."""
    return float(weighted_auc(scores_N, positive_N, np.ones((1, len(scores_N))))[0])


def weighted_auc(
    scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_], weights_BN: NDArray[np.float64]
) -> NDArray[np.float64]:
    """AUC (B,) for each row of film weights; NaN where a class has no weight."""
    order = np.argsort(scores_N, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores_N[order]) != 0])
    positive = positive_N[order]
    weights = weights_BN[:, order]
    positives = np.add.reduceat(weights * positive, starts, axis=1)  # weight at each distinct score
    negatives = np.add.reduceat(weights * ~positive, starts, axis=1)
    below = np.cumsum(negatives, axis=1) - negatives / 2
    total = positives.sum(axis=1) * negatives.sum(axis=1)
    wins = (positives * below).sum(axis=1)
    areas: NDArray[np.float64] = np.divide(wins, total, out=np.full(len(weights), np.nan), where=total > 0)
    return areas


def auc_interval(
    scores_N: NDArray[np.float64],
    positive_N: NDArray[np.bool_],
    patients_N: NDArray[np.object_],
    generator: np.random.Generator,
) -> tuple[float, float]:
    """95 % bootstrap interval: patients are drawn with replacement, each with all of their films."""
    names, patient = np.unique(patients_N.astype(str), return_inverse=True)
    at_once = max(1, _ROWS_AT_ONCE // max(len(scores_N), 1))
    values = []
    for start in range(0, _DRAWS, at_once):
        draws = min(at_once, _DRAWS - start)
        drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
        values.append(weighted_auc(scores_N, positive_N, drawn[:, patient].astype(np.float64)))
    low, high = np.nanpercentile(np.concatenate(values), [2.5, 97.5])
    return float(low), float(high)


Group = Literal["file", "edge", "pixels", "demographics", "other"]
"""``file``: how the film was made and stored (size, bytes, bits, view), which should know nothing of disease.
``edge``: the outermost tenth of the film, where hardly any lung lies: framing, collimation, markers, arms.
``pixels``: summaries of the grey values; disease may move them a little. ``demographics``: age and sex, which may
truly go with disease. ``other``: numbers of the manifest whose meaning only the user knows."""
Facts = list[tuple[str, Group, pd.Series]]
# The size before resizing has facts of its own; the row in a pack says where a film is kept, not what it is, and a
# digest that happens to read as a number is none.
_NOT_FACTS = ("orig_width", "orig_height", "pack_row", "pixel_digest", "file_digest")
VERSION = 2
"""Changes when a measurement changes, so that measurements of an older version are not taken from the cache."""
THUMB_SIDE = 32
EDGE_CELLS = 3  # of the thumbnail along each side: a tenth of the film
_WORKING_SIDE = 128  # sharpness is read here, where originals of different size can be compared
_HASH_SIDE = 8
# Rows of the DCT-II up to a factor: (8, 32).
_COSINES = np.cos(np.pi / THUMB_SIDE * np.arange(_HASH_SIDE)[:, None] * (np.arange(THUMB_SIDE)[None, :] + 0.5))


@dataclass(frozen=True)
class Measurement:
    """One film. ``error`` is empty when the film could be read; everything after it is then filled."""

    image: str
    error: str = ""
    file_bytes: int = 0
    modified: int = 0
    """Time of last change in nanoseconds; with the size it tells whether a cached measurement still holds."""
    sha256: str = ""
    """Hash of the file's bytes."""
    pixels: str = ""
    """Hash of the decoded film: equal for one film stored as PNG and as DICOM."""
    phash: int = 0
    """64-bit perceptual hash: signs of the lowest frequencies."""
    ranks: bytes = b""
    """The film at 32 x 32 as ranks 0..255, row by row."""
    width: int = 0
    height: int = 0
    bits: int = 0
    unused_bits: int = 0
    """Bits of the file beside them that no pixel uses."""
    file_kind: str = ""
    file_view: str = ""
    """View according to the file itself (DICOM), if it says so."""
    constant: bool = False
    colour: bool = False
    brightness: float = float("nan")
    """Mean grey value in [0,1]."""
    contrast: float = float("nan")
    """Standard deviation of the grey values."""
    sharpness: float = float("nan")
    """Variance of the Laplacian at 128 x 128."""


def measure_film(path: Path, image: str) -> Measurement:
    """Measure the film at ``path``, called ``image`` in the manifest. Never raises because of the film."""
    try:
        status = path.stat()
        film, info = read_film(path, voi="auto")
        digest = sha256_file(path)
    except UserError as error:
        # The name in the manifest: an audit is passed on and must not show where the data lie on this machine.
        return Measurement(image, error=str(error).replace(str(path), image))
    except FileNotFoundError:
        return Measurement(image, error=f"{image} does not exist.")
    except OSError as error:
        return Measurement(image, error=f"{image} cannot be read: {error.strerror or 'input/output error'}.")
    except (
        Exception
    ) as error:  # a defect in a decoder must not end an audit of 100,000 films; no detail: it may quote tags
        return Measurement(image, error=f"{image} cannot be decoded ({type(error).__name__}).")
    small = fit_square(film, _WORKING_SIDE, "squash")
    ranks = rank_thumb(small)
    return Measurement(
        image=image,
        file_bytes=status.st_size,
        modified=status.st_mtime_ns,
        sha256=digest,
        pixels=hash_pixels(film),
        phash=perceptual_hash(ranks),
        ranks=ranks.tobytes(),
        width=info.width,
        height=info.height,
        bits=info.bits,
        unused_bits=info.unused_bits,
        file_kind=info.kind,
        file_view=info.view,
        constant=info.constant,
        colour=info.colour,
        brightness=float(film.mean(dtype=np.float64)),
        contrast=float(film.std(dtype=np.float64)),
        sharpness=laplacian_variance(small),
    )


def hash_pixels(film: NDArray[np.float32]) -> str:
    """Hash of the shape and the grey values (H, W) at 16 bits, which every bit depth in use fits into."""
    digest = hashlib.sha256(f"{film.shape[0]}x{film.shape[1]}".encode())
    digest.update(np.round(film * 65535.0).astype("<u2").tobytes())
    return digest.hexdigest()


def rank_thumb(small: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Ranks 0..255 (32, 32) of a square film whose side is a multiple of 32; equal values share their mean rank."""
    step = small.shape[0] // THUMB_SIDE
    means = small.reshape(THUMB_SIDE, step, THUMB_SIDE, step).mean(axis=(1, 3))
    # Rounding first: what a blank film has left of noise is below a tenth of a grey level and must stay tied.
    _, place, count = np.unique(np.round(means, 4), return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count + 1) / 2  # from 0
    ranks = mean_rank[place].reshape(THUMB_SIDE, THUMB_SIDE)
    return np.round(ranks * (255 / (ranks.size - 1))).astype(np.uint8)


def edge_ranks(ranks_NP: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Thumbnails as ranks (N, P) -> ranks 0..1 (N, E) of the cells along the edge, among themselves.

    Ranked anew, because the rank of a cell in the whole film also says how bright the lungs are.
    """
    inner = slice(EDGE_CELLS, -EDGE_CELLS)
    edge = np.ones((THUMB_SIDE, THUMB_SIDE), dtype=bool)
    edge[inner, inner] = False
    cells = ranks_NP[:, edge.ravel()]
    ranks: NDArray[np.float32] = ((rankdata(cells, axis=1) - 1) / (cells.shape[1] - 1)).astype(np.float32)
    return ranks


def perceptual_hash(ranks: NDArray[np.uint8]) -> int:
    """64 bits: which of the 8 x 8 lowest DCT frequencies of the rank picture lie above their median."""
    frequencies = (_COSINES @ ranks.astype(np.float64) @ _COSINES.T).ravel()
    bits = frequencies > np.median(frequencies[1:])  # the first is the mean, which ranks make equal for all films
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def laplacian_variance(small: NDArray[np.float32]) -> float:
    """Variance of the 4-neighbour Laplacian inside the film (S, S): small when it is blurred."""
    inner = small[1:-1, 1:-1]
    laplacian = small[:-2, 1:-1] + small[2:, 1:-1] + small[1:-1, :-2] + small[1:-1, 2:] - 4 * inner
    return float(laplacian.var(dtype=np.float64))


@dataclass(frozen=True)
class Feature:
    """A column of facts: ``name`` for people, ``values`` one for each film (text for a category)."""

    name: str
    group: Group
    values: pd.Series

    @property
    def is_category(self) -> bool:
        """Whether the values are names, not numbers."""
        return not pd.api.types.is_numeric_dtype(self.values)


def film_features(table: pd.DataFrame, measured: pd.DataFrame) -> list[Feature]:
    """All facts that vary between the films; ``table`` is the manifest's, ``measured`` has the same rows.

    ``meta:orig_width`` and ``meta:orig_height`` are the size before someone resized the films. Where they are missing
    the stored size stands for them.
    """
    readable = measured["error"] == ""
    facts = [*_size_features(table, measured), *_file_features(table, measured), *_meta_features(table)]
    features = [Feature(name, group, values.where(readable)) for name, group, values in facts]
    return [feature for feature in features if feature.values.nunique(dropna=True) > 1]


def _size_features(table: pd.DataFrame, measured: pd.DataFrame) -> Facts:
    stored = _sizes("stored", measured["width"], measured["height"])
    if {"meta:orig_width", "meta:orig_height"} <= set(table.columns):
        width, height = (pd.to_numeric(table[f"meta:orig_{side}"], errors="coerce") for side in ("width", "height"))
        original = _sizes("original", width.fillna(measured["width"]), height.fillna(measured["height"]))
        return original + stored[:2]  # area and aspect would only say once more what the original ones say
    return [(name.removeprefix("stored "), group, values) for name, group, values in stored]


def _sizes(which: str, width: pd.Series, height: pd.Series) -> Facts:
    width, height = width.astype("float64"), height.astype("float64")
    return [
        (f"{which} width", "file", width),
        (f"{which} height", "file", height),
        (f"{which} area", "file", width * height),
        (f"{which} aspect", "file", width / height.where(height > 0)),
    ]


def _file_features(table: pd.DataFrame, measured: pd.DataFrame) -> Facts:
    view = table["view"].where(table["view"] != "", measured["file_view"])
    return [
        ("file size", "file", measured["file_bytes"].astype("float64")),
        ("bit depth", "file", measured["bits"].astype("float64")),
        ("file format", "file", measured["file_kind"].where(measured["file_kind"] != "").astype("object")),
        ("view", "file", view.where(view != "").astype("object")),
        ("brightness", "pixels", measured["brightness"]),
        ("contrast", "pixels", measured["contrast"]),
        ("sharpness", "pixels", measured["sharpness"]),
    ]


def _meta_features(table: pd.DataFrame) -> Facts:
    facts: Facts = []
    for column in table.columns:
        name = str(column).removeprefix(META_PREFIX)
        if not str(column).startswith(META_PREFIX) or name in _NOT_FACTS:
            continue
        values = table[column]
        if name == "sex":
            facts.append(("sex", "demographics", values.where(values.notna() & (values != "")).astype("object")))
            continue
        # Text is left out: it often is the label in other words (a subtype, a report).
        numbers = pd.to_numeric(values, errors="coerce").astype("float64").replace([np.inf, -np.inf], np.nan)
        if numbers.notna().any():
            facts.append((name, "demographics" if name == "age" else "other", numbers))
    return facts
