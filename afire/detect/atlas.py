"""What normal films look like, place by place, kept beside a detector for people to compare a film with.

The mean film is an average over many patients and shows none of them. Patches are pieces of single films, the pixels of
patients: they are kept only if a setting of the fit asks for it, and a bundle leaves them out.

Shapes: N normal films of S x S pixels, G x G places, K patches of P x P pixels at each place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from afire.data.pack import Films
from afire.errors import UserError
from afire.files import write_atomic
from afire.progress import progress

MEAN_FILE, PATCH_FILE = "atlas.safetensors", "atlas-patches.safetensors"
FEWEST_PATIENTS = 10  # an average over fewer would show them
PATCH = 32  # pixels of a patch, which is two places wide
_MOST_PLACES = 16  # along a side
_MOST_FILMS, _MOST_CANDIDATES = 512, 128  # an average, and a choice, do not change with more
_BATCH = 64

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]


class NormalAtlas:
    """The mean (S, S) of ``films`` normal films; G ``places`` along a side; patches (G, G, K, P, P) where asked for."""

    def __init__(self, films: int, mean: Bytes, places: int, patches: Bytes | None = None) -> None:
        self.films, self.mean, self.places, self.patches = films, mean, places, patches

    def without_patches(self) -> NormalAtlas:
        """The average alone, which may be shared."""
        return NormalAtlas(self.films, self.mean, self.places)

    @property
    def patch_side(self) -> int:
        """Pixels of the film from which patches are cut."""
        return self.places * PATCH // 2

    def closest(self, film_SS: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """Numbers (G, G, count) of the patches most like a square film in [0, 1] at each place, closest first.

        By the mean squared difference of grey values.
        """
        windows = (
            cut_patches(torch.from_numpy(film_SS)[None, None], self.places)[0].flatten(2).numpy().astype(np.float32)
        )
        patches, lengths = self._flat_patches  # of |patch - window|^2, |window|^2 is the same for all
        distances = lengths - 2 * np.matmul(patches, windows[..., None])[..., 0]
        return np.argsort(distances, axis=2, kind="stable")[:, :, :count]

    @cached_property
    def _flat_patches(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(G, G, K, P * P), and their squared lengths."""
        assert self.patches is not None
        flat = self.patches.reshape(*self.patches.shape[:3], -1).astype(np.float32)
        return flat, np.square(flat).sum(axis=3)

    def save(self, folder: Path) -> None:
        """Write it into a detector's folder."""
        facts = {"films": np.array(self.films), "places": np.array(self.places)}
        write_atomic(folder / MEAN_FILE, partial(save_file, {"mean": self.mean, **facts}))
        if self.patches is not None:
            write_atomic(folder / PATCH_FILE, partial(save_file, {"patches": self.patches}))

    @classmethod
    def load(cls, folder: Path) -> NormalAtlas | None:
        """The atlas in a detector's folder; None for detectors of the version before."""
        if not (folder / MEAN_FILE).is_file():
            return None
        try:
            stored = load_file(folder / MEAN_FILE)
            patches = load_file(folder / PATCH_FILE)["patches"] if (folder / PATCH_FILE).is_file() else None
            return cls(int(stored["films"]), stored["mean"], int(stored["places"]), patches)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"{folder / MEAN_FILE} cannot be read ({type(error).__name__}); remove it, or fit the detector again."
            ) from None


def make_atlas(films: Films, rows: Rows, positions: int, patches: int = 0) -> NormalAtlas | None:
    """From the normal films ``rows`` and the number of a detector's positions along a side.

    None where there are too few patients for an average that shows none of them, unless ``patches`` are to be kept.
    """
    patients = films.manifest.table["patient"].iloc[rows]
    if patients.nunique() < FEWEST_PATIENTS and not patches:
        return None
    places = min(max(positions, 2), _MOST_PLACES)
    sample = rows[:: max(1, -(-len(rows) // _MOST_FILMS))]
    candidates = set(_one_each(sample, films.manifest.table["patient"].to_numpy())[:_MOST_CANDIDATES].tolist())
    total, windows = torch.zeros(films.size, films.size, dtype=torch.float64), []
    for batch, images in _batches(films, sample):
        total += images[:, 0].double().sum(dim=0)
        if patches:
            numbers = [place for place, row in enumerate(batch.tolist()) if row in candidates]
            windows.append(cut_patches(images[numbers], places))
    mean = _bytes(total / len(sample))
    typical = pick_typical(torch.cat(windows), patches).numpy() if patches else None
    return NormalAtlas(len(sample), mean, places, typical)


def cut_patches(images_B1SS: Tensor, places: int) -> Tensor:
    """Films -> the surroundings of every place, two places wide and inside the film: uint8 (B, G, G, P, P)."""
    step = PATCH // 2
    side = places * step
    small = F.interpolate(images_B1SS.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    pixels = (small[:, 0].clamp(0, 1) * 255).round().to(torch.uint8)
    starts = (torch.arange(places) * step - step // 2).clamp(0, side - PATCH)
    inside = starts[:, None] + torch.arange(PATCH)  # (G, P)
    return pixels[:, inside[:, None, :, None], inside[None, :, None, :]]


def pick_typical(windows_NGGPP: Tensor, count: int) -> Tensor:
    """For each place ``count`` patches that show its range: (G, G, K, P, P), the most typical one first.

    They come from the half that is closest to the mean patch, so that nothing odd is called normal; each next one is
    the least like those before it.
    """
    films, places = windows_NGGPP.shape[0], windows_NGGPP.shape[1]
    picked = torch.empty((places, places, min(count, films), PATCH, PATCH), dtype=torch.uint8)
    for row in range(places):
        for column in range(places):
            windows = windows_NGGPP[:, row, column].flatten(1).float()
            from_mean = (windows - windows.mean(dim=0)).square().sum(dim=1)
            usual = from_mean.argsort()[: max(picked.shape[2], films // 2)]
            indices = _spread(windows[usual], picked.shape[2])
            picked[row, column] = windows_NGGPP[usual[indices], row, column]
    return picked


def _spread(patches_ND: Tensor, count: int) -> Tensor:
    """Places of the first patch and of those farthest from all before them."""
    distances = torch.cdist(patches_ND, patches_ND)
    indices = [0]
    while len(indices) < count:
        nearest = distances[:, indices].amin(dim=1)
        nearest[indices] = -1
        indices.append(int(nearest.argmax()))
    return torch.tensor(indices)


def _one_each(rows: Rows, patients: NDArray[np.object_]) -> Rows:
    """The first film of every patient."""
    _, indices = np.unique(patients[rows].astype(str), return_index=True)
    return rows[np.sort(indices)]


def _batches(films: Films, rows: Rows) -> Iterator[tuple[Rows, Tensor]]:
    with progress("what is normal at each place", len(rows), "films") as bar:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            yield batch, films.batch(batch)
            bar.advance(len(batch))


def _bytes(film: Tensor) -> Bytes:
    values: Bytes = (film.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return values
