"""The phantom as a dataset: films, masks, lungs, manifest and settings in one folder. A rerun continues.

Worker processes draw the films; each PNG is whole or not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from afire.data.manifest import LABEL_PREFIX, Box, Manifest, make_manifest, write_manifest
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import (
    Bools,
    PhantomFilm,
    bounds,
    check_diseases,
    draw_film,
    draw_findings,
    patient_id,
    sitting_of,
    split_of,
)
from afire.data.phantom.physics import stream
from afire.data.phantom.style import Scanner, draw_style
from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json
from afire.processes import in_processes, usable_cores
from afire.progress import progress

MASK_NUMBERS = {name: number for number, name in enumerate(DISEASES, start=1)}
"""The lower four bits of a mask pixel are the number of the disease there; where two overlap, the upper four are the
second one's."""
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
MANIFEST = "manifest.parquet"
SETTINGS = "phantom.json"
_VERSION = 2  # raise it when the same settings give other films
_ANY: Scanner = "any"
_SMALLEST, _LARGEST = 32, 2048
_CHUNK = 16  # films a worker draws between two reports
_Boxes = dict[int, tuple[Box, ...]]


@dataclass(frozen=True)
class Settings:
    """What decides the films; how many of them there are does not."""

    size: int
    seed: int
    normal_share: float
    findings: tuple[str, ...] = DISEASES
    style: Scanner = _ANY

    def drawn(self, index: int) -> tuple[str, ...]:
        """The diseases of film ``index``."""
        return draw_findings(self.seed, index, self.normal_share, self.findings)


def write_phantom(
    out: Path,
    count: int,
    size: int,
    seed: int,
    workers: int | None = None,
    *,
    normal_share: float = 0.5,
    findings: Sequence[str] = DISEASES,
    style: Scanner = _ANY,
) -> Manifest:
    """Write films 0 .. ``count`` - 1 of the phantom ``seed`` to ``out`` and return their manifest.

    Films that are there already are kept, so an interrupted run continues and a larger ``count`` adds films.
    ``workers`` is the number of processes, all cores by default; the films do not depend on it. ``findings`` are the
    diseases that films may have and that the manifest has labels for. ``style`` asks for digital films, or for scanned
    ones, alone.
    """
    _check(count, size, seed, normal_share)
    if not check_diseases(findings):
        raise UserError("no disease is named; name at least one, or ask for normal films only.")
    settings = Settings(size, seed, normal_share, tuple(name for name in DISEASES if name in findings), style)
    _claim(out, settings, count)
    boxes: _Boxes = {}
    with progress("drawing", count, "films") as bar:
        for finished in _run(out, settings, count, workers):
            boxes.update(finished)
            bar.advance(len(finished))
    manifest = make_manifest(_table(settings, boxes), out, _about(settings))
    write_manifest(manifest, out / MANIFEST)
    return manifest


def _check(count: int, size: int, seed: int, normal_share: float) -> None:
    if count < 1:
        raise UserError(f"a phantom of {count} films is empty; ask for at least 1.")
    if not _SMALLEST <= size <= _LARGEST:
        raise UserError(f"phantom films of {size} px cannot be drawn; choose a size from {_SMALLEST} to {_LARGEST}.")
    if seed < 0:
        raise UserError(f"seed {seed} is negative; choose 0 or more.")
    if not 0 <= normal_share <= 1:
        raise UserError(f"a normal share of {normal_share:g} is not possible; choose from 0 (all ill) to 1 (all well).")


def _identity(settings: Settings) -> dict[str, Any]:
    """What is written down; phantoms of any style say nothing of it, as before styles could be asked for."""
    identity = {"version": _VERSION, **asdict(settings), "findings": list(settings.findings)}
    return identity if settings.style != _ANY else {name: identity[name] for name in identity if name != "style"}


def _about(settings: Settings) -> dict[str, Any]:
    return {"builder": "phantom", "normal": "no disease was drawn", "options": _identity(settings)}


def _claim(out: Path, settings: Settings, count: int) -> None:
    """Mark the folder as this phantom's, or say why it cannot be."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; the phantom needs a folder.")
    identity = _identity(settings)
    if (out / SETTINGS).exists():
        earlier = read_json(out / SETTINGS)
        earlier = earlier if isinstance(earlier, dict) else {}
        earlier.setdefault("style", _ANY)
        for name, value in {**identity, "style": settings.style}.items():
            if earlier.get(name) != value:
                raise UserError(
                    f"{out} holds a phantom with {name} {earlier.get(name)}, not {value}; choose another folder."
                )
        if int(earlier.get("count", 0)) > count:
            raise UserError(
                f"{out} holds a phantom of {earlier['count']} films, more than {count}; choose another folder."
            )
    elif out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no phantom; choose a new folder.")
    for leftover in out.glob("*/.part-*.png"):  # of a run that was killed while it wrote
        leftover.unlink(missing_ok=True)
    write_json(out / SETTINGS, {**identity, "count": count, "mask_numbers": MASK_NUMBERS})


def _table(settings: Settings, boxes: _Boxes) -> pd.DataFrame:
    rows = []
    for index in sorted(boxes):
        diseases = settings.drawn(index)
        names = names_of(index, normal=not diseases)
        sitting = sitting_of(settings.seed, index)
        patient = sitting.patient
        rows.append(
            {
                "image": names.image,
                "split": split_of(settings.seed, patient.number),
                "patient": patient_id(patient.number),
                "view": sitting.view,
                "normal": float(not diseases),
                **{f"{LABEL_PREFIX}{name}": float(name in diseases) for name in settings.findings},
                "boxes": json.dumps([asdict(box) for box in boxes[index]]) if diseases else "",
                "mask": names.mask,
                "meta:lungs": names.lungs,
                "meta:age": int(patient.years),
                "meta:sex": "F" if patient.female else "M",
            }
        )
    return pd.DataFrame(rows)


def _run(out: Path, settings: Settings, count: int, workers: int | None) -> Iterator[_Boxes]:
    """Boxes of the films as they are finished."""
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    processes = min(workers if workers is not None else usable_cores(), len(chunks))
    try:
        yield from in_processes(store_films, ((out, settings, chunk) for chunk in chunks), processes)
    except BrokenProcessPool:
        raise UserError(
            "a process that draws films has died, perhaps for lack of memory; run again with fewer workers to continue."
        ) from None


@dataclass(frozen=True)
class Names:
    """Paths of one film's files relative to the phantom's folder; ``mask`` is empty for a normal film."""

    image: str
    mask: str
    lungs: str


def names_of(index: int, normal: bool) -> Names:
    """Where film ``index`` is kept."""
    file = f"{index:06d}.png"
    return Names(f"images/{file}", "" if normal else f"masks/{file}", f"lungs/{file}")


def store_films(out: Path, settings: Settings, indices: Sequence[int]) -> dict[int, tuple[Box, ...]]:
    """Make sure that the films are on disk, drawing those that are not; return each film's boxes."""
    boxes: dict[int, tuple[Box, ...]] = {}
    writes: list[Future[None]] = []
    # Waiting for the disk takes half as long as drawing: one thread waits while the next film is drawn.
    with ThreadPoolExecutor(1) as writer:
        for index in indices:
            diseases = settings.drawn(index)
            names = names_of(index, normal=not diseases)
            if all(_is_whole(out / name) for name in (names.image, names.mask, names.lungs) if name):
                boxes[index] = _boxes_on_disk(out / names.mask, diseases) if diseases else ()
                continue
            style = draw_style(stream(settings.seed, "style", index), settings.style)
            film = draw_film(settings.seed, index, settings.size, diseases=diseases, style=style)
            boxes[index] = film.boxes
            writes.append(writer.submit(_write_film, out, names, film))
    for write in writes:
        write.result()  # raises what went wrong
    return boxes


def _write_film(out: Path, names: Names, film: PhantomFilm) -> None:
    _write_png(out / names.lungs, film.lungs.astype(np.uint8) * np.uint8(255))
    if names.mask:
        _write_png(out / names.mask, numbered(film.masks))
    _write_png(out / names.image, np.rint(film.image * 255).astype(np.uint8))


def numbered(masks: dict[str, Bools]) -> NDArray[np.uint8]:
    """One image of up to two masks; see ``MASK_NUMBERS``."""
    pixels = np.zeros(next(iter(masks.values())).shape, dtype=np.uint8)
    for name, mask in masks.items():
        number = np.uint8(MASK_NUMBERS[name])
        pixels += mask * np.where(pixels == 0, number, number << 4).astype(np.uint8)
    return pixels


def mask_of(pixels: NDArray[np.uint8], name: str) -> Bools:
    """Where a disease is, in the pixels of a film's mask."""
    number = MASK_NUMBERS[name]
    mask: Bools = ((pixels & 15) == number) | ((pixels >> 4) == number)
    return mask


def _boxes_on_disk(path: Path, diseases: Sequence[str]) -> tuple[Box, ...]:
    with Image.open(path) as picture:
        pixels = np.asarray(picture)
    return tuple(bounds(name, mask_of(pixels, name)) for name in diseases)


def _write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    # level 1: noise hardly compresses, and the default level takes longer than drawing the film
    write_atomic(path, lambda temporary: Image.fromarray(pixels).save(temporary, format="PNG", compress_level=1))


def _is_whole(path: Path) -> bool:
    """A PNG that begins and ends as one: a copy or a disk may have cut it short."""
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_PNG_START))
            stream.seek(-len(_PNG_END), 2)
            return start == _PNG_START and stream.read() == _PNG_END
    except OSError:
        return False
