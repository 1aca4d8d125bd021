"""What the audit measures of one film, and the facts in it from which a label might be guessed.

The film is decoded once. Its small picture holds ranks instead of grey values, so that gamma, windowing and histogram
equalisation, which is what copies of a film usually differ in, leave it as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.decode import fit_square, read_film
from afire.data.manifest import META_PREFIX
from afire.errors import UserError
from afire.files import sha256_file

Group = Literal["file", "pixels", "demographics", "other"]
"""``file``: how the film was made and stored (size, bytes, bits, view), which should know nothing of disease.
``pixels``: summaries of the grey values; disease may move them a little. ``demographics``: age and sex, which may
truly go with disease. ``other``: numbers of the manifest whose meaning only the user knows."""
Facts = list[tuple[str, Group, pd.Series]]
# The size before resizing has facts of its own; the row in a pack says where a film is kept, not what it is, and a
# digest that happens to read as a number is none.
_NOT_FACTS = ("orig_width", "orig_height", "pack_row", "pixel_digest", "file_digest")
VERSION = 2
"""Changes when a measurement changes, so that measurements of an older version are not taken from the cache."""
THUMB_SIDE = 32
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
        # The name in the manifest: an audit is passed on, and where the data lie on this machine is nobody's business.
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
    """A column of facts: ``name`` in words, ``values`` one for each film (text for a category)."""

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
