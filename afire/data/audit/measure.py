"""What the audit measures of one film: hashes, size, brightness, sharpness and a small picture of ranks.

The film is decoded once. The small picture holds ranks instead of grey values, so that gamma, windowing and histogram
equalisation, which is what copies of a film usually differ in, leave it as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afire.data.decode import read_film
from afire.data.resize import fit_square
from afire.errors import UserError
from afire.files import sha256_file

VERSION = 1
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
