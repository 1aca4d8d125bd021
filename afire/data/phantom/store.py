"""One film of the phantom on disk: image, mask and lungs as PNG, each whole or not there. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.data.manifest import Box
from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import Bools, PhantomFilm, bounds, draw_film
from afire.data.phantom.roster import draw_findings
from afire.files import write_atomic

MASK_BITS = {name: 1 << bit for bit, name in enumerate(DISEASES)}  # a mask pixel is the sum of the diseases there
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Settings:
    """What decides the films; how many of them there are does not."""

    size: int
    seed: int
    normal_share: float


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
            diseases = draw_findings(settings.seed, index, settings.normal_share)
            names = names_of(index, normal=not diseases)
            if all(_is_whole(out / name) for name in (names.image, names.mask, names.lungs) if name):
                boxes[index] = _boxes_on_disk(out / names.mask, diseases) if diseases else ()
                continue
            film = draw_film(settings.seed, index, settings.size, normal_share=settings.normal_share)
            boxes[index] = film.boxes
            writes.append(writer.submit(_write_film, out, names, film))
    for write in writes:
        write.result()  # raises what went wrong
    return boxes


def _write_film(out: Path, names: Names, film: PhantomFilm) -> None:
    _write_png(out / names.lungs, film.lungs.astype(np.uint8) * np.uint8(255))
    if names.mask:
        _write_png(out / names.mask, _flags(film.masks))
    _write_png(out / names.image, np.rint(film.image * 255).astype(np.uint8))


def _flags(masks: dict[str, Bools]) -> NDArray[np.uint8]:
    flags = np.zeros(next(iter(masks.values())).shape, dtype=np.uint8)
    for name, mask in masks.items():
        flags |= mask * np.uint8(MASK_BITS[name])
    return flags


def _boxes_on_disk(path: Path, diseases: Sequence[str]) -> tuple[Box, ...]:
    with Image.open(path) as picture:
        flags = np.asarray(picture)
    return tuple(bounds(name, (flags & MASK_BITS[name]) > 0) for name in diseases)


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
