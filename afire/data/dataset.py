"""Films as tensors, from whatever the user has: a pack, a manifest or a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from afire.config import Fit, Voi
from afire.data.decode import read_film
from afire.data.manifest import Manifest, read_manifest
from afire.data.pack import IMAGES, MANIFEST, PART, ROW, SUMMARY, read_summary
from afire.data.resize import fit_square
from afire.errors import UserError


class Films(Protocol):
    """What training and tasks see of a dataset: the manifest, and films by row."""

    manifest: Manifest
    size: int

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> torch.Tensor:
        """Film (1, S, S), float32 in [0,1]."""
        ...

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        ...


class PackedFilms(Dataset[torch.Tensor]):
    """Films straight from a pack's memory map: no decoding, no copy but the one that makes the tensor."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        self.summary = read_summary(folder)
        self.manifest = read_manifest(folder / MANIFEST)
        self.size = self.summary.settings.size
        self._rows = self.manifest.table[ROW].to_numpy(dtype=np.int64)
        self._images = self._map()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def raw(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, S, S) as stored, uint8 or uint16: a quarter of the bytes to move to a device."""
        return torch.from_numpy(self._images[self._rows[np.asarray(rows)]])

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        return self.to_unit(self.raw(rows))

    def to_unit(self, raw_BSS: torch.Tensor) -> torch.Tensor:
        """Stored values to float32 (B, 1, S, S) in [0,1], on the device they are on."""
        return raw_BSS.float().div_(255 if self.summary.settings.bits == 8 else 65535).unsqueeze(1)

    def _map(self) -> np.ndarray:
        try:
            images: np.ndarray = np.load(self.folder / IMAGES, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder / IMAGES} cannot be mapped ({error}); pack again.") from None
        if images.ndim != 3 or len(images) <= self._rows.max() or images.shape[1:] != (self.size, self.size):
            raise UserError(
                f"{self.folder / IMAGES} has shape {images.shape}, which is not what pack.json says; pack again."
            )
        return images

    def __getstate__(self) -> dict[str, object]:
        # Sent to a loader process, the map is opened again there, not copied.
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]


class DecodedFilms(Dataset[torch.Tensor]):
    """Films decoded from their files each time: for a look or a small set; training wants a pack."""

    def __init__(self, manifest: Manifest, size: int, fit: Fit = "squash", voi: Voi = "auto") -> None:
        self.manifest, self.size, self.fit, self.voi = manifest, size, fit, voi

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, row: int) -> torch.Tensor:
        film, _ = read_film(self.manifest.path(row), voi=self.voi)
        return torch.from_numpy(fit_square(film, self.size, self.fit)).unsqueeze(0)

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Films (B, 1, S, S), float32 in [0,1]."""
        return torch.stack([self[int(row)] for row in rows])


def open_films(
    source: Path, root: Path | None = None, size: int = 224, fit: Fit = "squash", voi: Voi = "auto"
) -> Films:
    """Open a pack folder, a manifest file or a folder of images. A pack keeps the size it was made with."""
    if is_pack(source):
        return PackedFilms(source)
    return DecodedFilms(open_manifest(source, root), size, fit, voi)


def open_manifest(source: Path, root: Path | None = None) -> Manifest:
    """The manifest of a pack folder, of a manifest file, or of a folder of images."""
    if not source.exists():
        raise UserError(f"{source} does not exist; give a pack, a manifest (.parquet or .csv) or a folder of films.")
    if is_pack(source):
        read_summary(source)
        return read_manifest(source / MANIFEST, root)
    if source.is_dir():
        from afire.data.datasets.folder import build_folder

        return build_folder(source)
    return read_manifest(source, root)


def is_pack(source: Path) -> bool:
    """Whether ``source`` is a pack, finished or begun."""
    return (source / SUMMARY).exists() or (source / PART).exists()
