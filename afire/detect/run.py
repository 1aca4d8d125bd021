"""A detector over a file or a folder of films, several batches side by side.

A thread takes a batch all the way: it reads and resizes the films, runs the networks on them, and draws the
results. The journal ``results.jsonl`` gets a line when everything of a film is on disk. Memory does not grow with the
number of films but for one line each; a killed run goes on where the journal ends.

There is about one thread for each core. With readers, networks and painters in threads of their own, there were three
times as many, which took the cores and Python's lock from each other: a tenth of the time was lost. One batch on
all cores would be slower still: the threads of an operation wait for whichever was kept from its core. Only of large
networks a batch gets several cores: films are read and drawn in less than a hundredth of the time they take.

Shapes: B films of S x S pixels, heat of R x C cells, H x W pixels of a film as it is shown.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, TextIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from afire.config import ImageConfig
from afire.data.decode import FitMode, decode_film, fit_square, read_file
from afire.data.dicom_grey import Voi
from afire.data.film import Film, FilmInfo, picture_alone, quiet_readers
from afire.data.pack import is_pack
from afire.data.sources.disk import list_films
from afire.detect.base import CONFIG, MODEL, SETTINGS, TENSORS, AnomalyDetector
from afire.detect.findings import (
    CSV,
    JOURNAL,
    JSON,
    OUT_OF_DOMAIN,
    SCORED,
    UNREADABLE,
    FilmResult,
    read_journal,
    shown_name,
    to_line,
)
from afire.errors import UserError
from afire.files import folder_lock, names_path, remove_empty, require_own, sha256_file, sha256_text
from afire.lesions.places import region_message, regions
from afire.processes import usable_cores
from afire.progress import progress

LONGEST_SIDE = 512  # of a film as it is shown
BATCH = 32
_MOST_SIDE_BY_SIDE = 8  # batches: each holds its own activations
_LARGE = 32_000_000  # weights of networks: many times what a cache holds
_CORES_OF_LARGE = 8
_FEWEST = 4  # films of a batch, where there are so few that not every thread gets one
PAGE = "report.html"
_WRITTEN = (JOURNAL, CSV, JSON, PAGE)
_DRAWN = {  # folder -> names of what is drawn of films in its subfolders
    "pictures": re.compile(r"\d{6,}-(film|heat|overlay|restored|difference)\.(jpg|png)"),
    "dicom": re.compile(r"\d{6,}-(sc|sr|seg|gsps)\.dcm"),
}
T = TypeVar("T")
Job = tuple[int, str]  # number and name of a film

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class ReadFilm:
    """A film that could be read."""

    number: int
    file: str
    path: Path
    square: Film  # (S, S), what the networks see
    shown: NDArray[np.uint8] | None  # (H, W), what people see
    info: FilmInfo
    jpeg: bytes | None = None  # the same, if the file had it in a form to be shown as it is


@dataclass(frozen=True)
class Drawing:
    """Everything there is to draw of a film. A film out of domain has no heat: it would mean nothing."""

    film: ReadFilm
    result: FilmResult
    heat: NDArray[np.float32] | None  # (R, C)
    restored: NDArray[np.float32] | None  # (S, S)


@dataclass(frozen=True)
class Drawn:
    """Pictures that were written, kind -> file relative to the results' folder, and what went wrong with others."""

    pictures: dict[str, str]
    notes: tuple[str, ...] = ()


Draw = Callable[[Drawing], Drawn]
Read = Callable[[Path, Voi], tuple[Film, FilmInfo, bytes | None]]
"""A film, what is known about it, and the file as it is, where that may be shown."""


@dataclass(frozen=True)
class RunTask:
    """A detector and the films to run it over. ``draw`` is called in other threads; without it nothing is drawn."""

    detector: AnomalyDetector
    model_hash: str
    source: Path
    out: Path
    draw: Draw | None = None
    restore: bool = True  # whether ``draw`` is given the restored film, which takes a pass more
    picture_settings: str = ""  # those of ``draw``: a resumed run must draw alike
    batch: int = BATCH
    workers: int | None = None
    recursive: bool = True
    resume: bool = False
    force: bool = False


def detector_hash(folder: Path) -> str:
    """Of all that decides a detector's answers."""
    return sha256_text("\n".join(sha256_file(folder / name) for name in (CONFIG, MODEL, TENSORS, SETTINGS)))


def run_detector(task: RunTask) -> list[FilmResult]:
    """Score every film, draw it, and keep the journal; returns all results, those of an earlier run included."""
    root, names = _films(task)
    require_own(task.out, JOURNAL)
    with folder_lock(task.out, "the results in"):
        earlier = _earlier(task, root)
        earlier_files = {result.file for result in earlier}
        first_number = 1 + max((result.number for result in earlier), default=-1)
        jobs = [
            (first_number + place, name)
            for place, name in enumerate(n for n in names if shown_name(n) not in earlier_files)
        ]
        if earlier:
            logger.info("%s films are done, %s are left", f"{len(earlier):,}", f"{len(jobs):,}")
        with names_path(task.out / JOURNAL), (task.out / JOURNAL).open("a", encoding="utf-8") as journal:
            # A resumed journal may end in a truncated line.
            journal.write("\n" if journal.tell() else json.dumps({"run": _header(task, root)}) + "\n")
            journal.flush()
            results = _run(task, root, jobs, journal)
    return [*earlier, *results]


def _films(task: RunTask) -> tuple[Path, list[str]]:
    """The folder, and the films in it by relative name; nothing that a run has written."""
    source = task.source
    if not source.exists():
        raise UserError(f"{source} does not exist; give a film or a folder of films.")
    if is_pack(source):
        raise UserError(f"{source} is a pack; give it with --data {source}, or the folder of its films.")
    if source.suffix.lower() in (".parquet", ".csv"):
        raise UserError(
            f"{source} is a manifest; give the folder of its films, or pack them and give that with --data."
        )
    if source.is_file():
        return source.parent, [source.name]
    names = list_films(source, look_inside=True, any_name=True, recursive=task.recursive)
    out, root = task.out.resolve(), source.resolve()
    if out == root:
        raise UserError(f"--out {task.out} is the folder of films itself; choose another, or one inside it.")
    if out.is_relative_to(root):
        names = [name for name in names if not name.startswith(out.relative_to(root).as_posix() + "/")]
    if not names:
        raise UserError(f"there are no films (PNG, JPEG, TIFF, DICOM) in {source}.")
    return source, names


def _earlier(task: RunTask, root: Path) -> list[FilmResult]:
    """What an earlier run has done, when it is to be resumed; an --out with results is otherwise left alone."""
    written = [name for name in _WRITTEN if (task.out / name).exists()]
    if task.resume and (task.out / JOURNAL).exists() and (task.out / JOURNAL).stat().st_size:
        header, results = read_journal(task.out / JOURNAL)
        for name, value in _header(task, root).items():
            if header.get(name) != value:
                raise UserError(
                    f"{task.out} was begun with another {name.replace('_', ' ')}; resume with the same, or add "
                    "--force instead of --resume to begin again."
                )
        return results
    if written and not (task.force or (task.resume and written == [JOURNAL])):
        raise UserError(f"{task.out} already holds {written[0]}; add --resume to go on, --force to begin again.")
    for name in written:
        (task.out / name).unlink()
    if task.force:
        remove_drawn(task.out)
    return []


def remove_drawn(out: Path) -> None:
    """Remove what an earlier run drew: these are patients' films, and nobody sends them with the new results.

    A file of any other name is not ours and stays.
    """
    for kind, name in _DRAWN.items():
        for path in list((out / kind).glob("[0-9]*/*")):
            if name.fullmatch(path.name):
                path.unlink()
        for folder in (*(out / kind).glob("[0-9]*"), out / kind):
            remove_empty([folder])


def _header(task: RunTask, root: Path) -> dict[str, Any]:
    """What a resumed run must have in common with the one that began. The folder is hashed: its path is private."""
    return {
        "model": task.model_hash,
        "source": sha256_text(shown_name(str(root.resolve()))),
        "picture_settings": task.picture_settings,
    }


def _run(task: RunTask, root: Path, jobs: Sequence[Job], journal: TextIO) -> list[FilmResult]:
    workers = task.workers or usable_cores()
    side = side_by_side(task.detector, workers)
    batches = list(_batches(jobs, task.batch, workers))
    looking = BoundedSemaphore(side)
    results: list[FilmResult] = []
    with (
        share_of_cores(min(side, len(batches))),
        _threads(workers) as threads,
        progress("detecting", len(jobs), "films") as bar,
    ):
        score = partial(score_batch, task.detector, root, draw=task.draw, looking=looking, restore=task.restore)
        calls = (partial(score, batch) for batch in batches)
        for batch_results in _ahead(threads, calls, 2 * workers + 1):
            journal.writelines(to_line(result) for result in batch_results)
            journal.flush()
            results += batch_results
            bar.advance(len(batch_results))
    return results


def _batches(jobs: Sequence[Job], limit: int, workers: int) -> Iterator[Sequence[Job]]:
    """Batches of nearly one size, at most ``limit`` films, and as many for each thread: all end at about the same time.

    No small ones towards the end: a batch costs the networks as much as one or two films more, whatever its size.
    """
    rounds = -(-len(jobs) // (limit * workers))
    count = rounds * workers if rounds > 1 else min(workers, -(-len(jobs) // min(_FEWEST, limit)))
    for start, end in pairwise(number * len(jobs) // count for number in range(count + 1) if count):
        yield jobs[start:end]


def side_by_side(detector: AnomalyDetector, workers: int, alone: bool = False) -> int:
    """How many batches the networks may score at once.

    Large networks take several cores for a batch, unless each batch is to have one core ``alone``: beside them, what is
    read and drawn is nothing to wait for, while copies of one network side by side compete for memory.
    """
    if detector.device.type != "cpu":
        return 1
    large = sum(tensor.numel() for tensor in detector.model.parameters()) > _LARGE
    return min(max(1, workers // _CORES_OF_LARGE) if large and not alone else workers, _MOST_SIDE_BY_SIDE)


@contextmanager
def share_of_cores(side: int) -> Iterator[None]:
    """For so many batches side by side: threads that start within use a share of torch's threads each."""
    threads = torch.get_num_threads()
    if side > 1:
        torch.set_num_threads(max(1, threads // side))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def read_with_bytes(path: Path, voi: Voi) -> tuple[Film, FilmInfo, bytes | None]:
    """Any film from its file."""
    data = read_file(path)
    return (*decode_film(path, data, voi=voi), data)


def score_batch(
    detector: AnomalyDetector,
    root: Path,
    jobs: Sequence[Job],
    *,
    draw: Draw | None,
    looking: BoundedSemaphore,
    restore: bool = True,
    read: Read = read_with_bytes,
) -> list[FilmResult]:
    """Read, score, draw: the results of a batch, in its order. ``looking`` limits the batches scored at once."""
    image, shows = detector.config.image, draw is not None
    with quiet_readers():  # once: to silence them takes longer than to open a film
        opened = [_read(root, number, name, image, shows, read) for number, name in jobs]
    films = [film for film in opened if isinstance(film, ReadFilm)]
    results = {result.number: result for result in opened if isinstance(result, FilmResult)}
    for result in results_of(detector, films, draw=draw, looking=looking, restore=restore):
        results[result.number] = result
    return [results[number] for number, _ in jobs]


def results_of(
    detector: AnomalyDetector,
    films: Sequence[ReadFilm],
    *,
    draw: Draw | None,
    looking: BoundedSemaphore,
    restore: bool = True,
) -> Iterator[FilmResult]:
    """The results of films that were read, with pictures if there is a ``draw``."""
    for drawing in _drawings(detector, films, draw is not None and restore, looking) if films else ():
        pictures = draw(drawing) if draw is not None else Drawn({})
        yield replace(drawing.result, pictures=pictures.pictures, notes=(*drawing.result.notes, *pictures.notes))


def _drawings(
    detector: AnomalyDetector, films: Sequence[ReadFilm], restore: bool, looking: BoundedSemaphore
) -> Iterator[Drawing]:
    squares = np.stack([film.square for film in films])
    images = torch.from_numpy(squares)[:, None]
    with looking:
        scored = detector.score(images, restore=restore)
    objections, warnings = detector.domain.verdicts(images, [film.info for film in films])
    places = regions(squares, scored.heat)
    for number, film in enumerate(films):
        trusted = not objections[number]
        place = places[number]
        x, y = _on_film(place.x, place.y, film.info, detector.config.image.fit)
        result = FilmResult(
            film.number,
            film.file,
            SCORED if trusted else OUT_OF_DOMAIN,
            score=float(scored.score[number]),
            region=region_message(place, detector.scale.low) if trusted else "",
            region_words=place.words if trusted else "",
            region_sd=place.sd if trusted else None,
            x=x if trusted else None,
            y=y if trusted else None,
            view=film.info.view,
            stored_inverted=film.info.inverted,
            objections=tuple(objections[number]),
            notes=tuple(warnings[number]) if trusted else (),
        )
        restored = scored.restored[number] if trusted and scored.restored is not None else None
        yield Drawing(film, result, scored.heat[number] if trusted else None, restored)


def _on_film(x: float, y: float, info: FilmInfo, fit: FitMode) -> tuple[float, float]:
    """A place on the square film, in fractions of the film itself."""
    if fit == "squash":
        return x, y
    side = (max if fit == "letterbox" else min)(info.width, info.height)
    across, down = (0.5 + (at - 0.5) * side / length for at, length in ((x, info.width), (y, info.height)))
    return min(max(across, 0.0), 1.0), min(max(down, 0.0), 1.0)


def _read(root: Path, number: int, name: str, image: ImageConfig, shows: bool, read: Read) -> ReadFilm | FilmResult:
    file, path = shown_name(name), root / name
    try:
        film, info, data = read(path, image.voi)
        square = fit_square(film, image.size, image.fit)
        if not shows:
            return ReadFilm(number, file, path, square, None, info)
        as_it_is = info.kind == "jpeg" and max(film.shape) <= LONGEST_SIDE
        jpeg = picture_alone(data) if as_it_is and data is not None else None
        return ReadFilm(number, file, path, square, _shown(film), info, jpeg)
    except UserError as error:
        # The message starts with the path, which stands beside it already, and whose folders are private.
        reason = shown_name(str(error)).removeprefix(shown_name(str(path))).lstrip(": ")
    except (MemoryError, OSError, ValueError, ArithmeticError) as error:  # one film must not end a batch
        reason = f"cannot be read ({type(error).__name__})"
    return FilmResult(number, file, UNREADABLE, objections=(reason,))


def _shown(film: Film) -> NDArray[np.uint8]:
    """The film in its own proportions, no side longer than ``LONGEST_SIDE``."""
    height, width = film.shape
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    if scale < 1:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        film = np.asarray(Image.fromarray(film).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))
    grey = film * np.float32(255)  # in [0, 255]: readers keep to [0, 1], and so do averages
    pixels: NDArray[np.uint8] = np.rint(grey, out=grey).astype(np.uint8)
    return pixels


def _ahead(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], limit: int) -> Iterator[T]:
    """Results in order, with ``limit`` calls under way or waiting to be fetched."""
    waiting: deque[Future[T]] = deque()
    for call in calls:
        waiting.append(pool.submit(call))
        if len(waiting) >= limit:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that, when the body fails, drops what has not begun instead of finishing it."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
