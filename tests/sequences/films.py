"""Films for a walk: a phantom drawn once, laid out as people keep their films, with what is true about each."""

from __future__ import annotations

import atexit
import csv
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from PIL import Image

from afire.data.phantom.write import write_phantom
from afire.files import sha256_file
from tests.data.dicom_films import make

FILMS, SIDE, PHANTOMS = 72, 36, 2
SHARED = 4  # films that are written so differently that they stand for every other reader
Layout = Literal["phantom", "folder", "dicom", "classes", "table"]
LAYOUTS: tuple[Layout, ...] = ("phantom", "folder", "dicom", "classes", "table")


@dataclass(frozen=True)
class Film:
    """What is true about a film, whatever a manifest says."""

    patient: str  # as the hospital calls them: private
    normal: bool
    subset: str
    digest: str  # of the file
    readable: bool = True


@dataclass(frozen=True)
class Source:
    """A folder of films in a walk's folder, and the options of `afire data build` that read it."""

    folder: str
    layout: Layout
    films: dict[str, Film]  # by their path below the folder
    build: tuple[str, ...] = ()  # none for a phantom, which has its manifest
    knows_patients: bool = True

    @property
    def private(self) -> list[str]:
        """What no output may hold. Names of files are not ours to hide."""
        return sorted({film.patient for film in self.films.values()}) if self.layout in ("dicom", "table") else []

    @property
    def unreadable(self) -> list[str]:
        return [name for name, film in self.films.items() if not film.readable]


@cache
def phantom(seed: int) -> Path:
    """A phantom of small films, drawn once for all walks of a process."""
    folder = Path(tempfile.mkdtemp(prefix="afire-phantom-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_phantom(folder / "phantom", FILMS, SIDE, seed, workers=1, normal_share=0.6)
    return folder / "phantom"


def lay_out(rng: random.Random, world: Path, name: str, spoilt: bool = False) -> Source:
    """Films in ``world / name``, in a layout drawn by ``rng``; with ``spoilt`` some cannot be read."""
    layout = rng.choice(LAYOUTS)
    drawn = phantom(rng.randrange(PHANTOMS))
    table = pd.read_parquet(drawn / "manifest.parquet")
    folder = world / name
    if layout == "phantom":
        shutil.copytree(drawn, folder)
        named = {str(row["image"]): row for _, row in table.iterrows()}
        return Source(name, layout, {image: _film(folder / image, row) for image, row in named.items()})
    rows: dict[str, Any] = {}
    for number, row in table.iterrows():
        image = _write(rng, folder, layout, int(str(number)), row, drawn)
        rows[image] = row
    bad = rng.sample(sorted(rows), 2) if spoilt else []
    for image in bad:
        _spoil(rng, folder / image)
    films = {image: _film(folder / image, row, image not in bad) for image, row in rows.items()}
    build, knows = _build_options(rng, layout, name, world, films)
    return Source(name, layout, films, tuple(build), knows)


def _film(path: Path, row: Any, readable: bool = True) -> Film:
    person = f"DOE^JANE {str(row['patient']).removeprefix('phantom-')}"
    return Film(person, bool(row["normal"] == 1), str(row["split"]), sha256_file(path), readable)


def _write(rng: random.Random, folder: Path, layout: Layout, number: int, row: Any, drawn: Path) -> str:
    """One film as a file; its path below ``folder``."""
    with Image.open(drawn / str(row["image"])) as picture:
        pixels = np.asarray(picture.convert("L"))
    if rng.random() < 0.2:
        pixels = pixels[: rng.randrange(SIDE // 2, SIDE)]  # films are seldom square
    patient = str(row["patient"]).removeprefix("phantom-")
    if layout == "dicom":
        image = f"{number:03d}.dcm"
        _write_dicom(rng, folder / image, pixels, patient)
        return image
    kind = rng.choice(["png", "png", "jpg", "tif"])
    stem = f"p{patient}_{number:03d}.{kind}" if layout == "folder" else f"{number:03d}.{kind}"
    image = f"{row['split']}/{'normal' if row['normal'] == 1 else 'ill'}/{stem}" if layout == "classes" else stem
    path = folder / image
    path.parent.mkdir(parents=True, exist_ok=True)
    deep = kind == "png" and rng.random() < 0.3
    Image.fromarray(pixels.astype(np.uint16) * 257 if deep else pixels).save(path)
    return image


def _write_dicom(rng: random.Random, path: Path, pixels: np.ndarray, patient: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    inverted = rng.random() < 0.3
    dataset = make(
        255 - pixels if inverted else pixels,
        PhotometricInterpretation="MONOCHROME1" if inverted else "MONOCHROME2",
        PatientID=f"DOE^JANE {patient}",
        PatientName=f"DOE^JANE {patient}",
        ViewPosition=rng.choice(["PA", "AP", ""]),
    )
    bare = rng.random() < 0.2  # without a preamble, as some archives send them
    dataset.save_as(path, enforce_file_format=not bare)


def _spoil(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(rng.choice([b"", data[: len(data) // 2], b"not a film", data[:20]]))


def _build_options(
    rng: random.Random, layout: Layout, name: str, world: Path, films: dict[str, Film]
) -> tuple[list[str], bool]:
    """The words of `afire data build` behind --root and --out, and whether they tell it the patients."""
    patients = rng.random() < 0.75
    if layout == "folder":
        words = ["folder", *(["--patient-pattern", r"p(\d+)_"] if patients else [])]
        return [*words, *(["--all-normal"] if rng.random() < 0.3 else [])], patients
    if layout == "dicom":
        return ["folder", *(["--headers"] if patients else []), "--all-normal"], patients
    if layout == "classes":
        return ["classes"], False
    _write_table(rng, world / f"{name}.csv", films)
    columns = [*(["--patient-column", "person"] if patients else []), "--normal-column", "normal"]
    columns += ["--label-columns", "ill"] if rng.random() < 0.7 else []
    columns += ["--split-column", "list"] if patients and rng.random() < 0.5 else []
    return ["csv", "--csv", f"{name}.csv", "--image-column", "file", *columns], patients


def _write_table(rng: random.Random, path: Path, films: dict[str, Film]) -> None:
    """A table as hospitals keep them: names in it, and cells that are empty."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "person", "normal", "ill", "list"])
        for image, film in films.items():
            ill = str(int(not film.normal)) if rng.random() < 0.9 else ""
            normal = str(int(film.normal)) if rng.random() < 0.95 else ""
            writer.writerow([image, film.patient, normal, ill, film.subset])


def with_other_films(rng: random.Random, world: Path, source: Source, name: str, images: Sequence[str]) -> Source:
    """A copy of ``source`` in which the pixels of ``images`` are others."""
    shutil.copytree(world / source.folder, world / name)
    films = dict(source.films)
    for image in images:
        path = world / name / image
        with Image.open(path) as picture:
            noise = np.random.default_rng(rng.randrange(2**31)).integers(0, 255, (picture.height, picture.width))
        Image.fromarray(noise.astype(np.uint8)).save(path)
        old = films[image]
        films[image] = Film(old.patient, old.normal, old.subset, sha256_file(path), old.readable)
    return Source(name, source.layout, films, source.build, source.knows_patients)
