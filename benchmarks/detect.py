"""`afire detect run` on a folder against the bare forward passes of the networks it uses. Goal: 80 % of their films/s.

python benchmarks/detect.py [--network small|vit-b|builtin] [--films N] [--side PIXELS] [--clock cpu] [--json FILE]

The detector has random weights and a score that needs everything: teacher, student, head, and a pass of the decoder
with tokens hidden; the detector that comes with afire is measured as it is. The bare passes use batches in memory. The
run lists, decodes and resizes JPEG files, checks the domain, finds regions, keeps its journal and, with pictures, draws
and writes up to five files per film. One-time costs (loading the model, the page) are excluded. The files are in memory
(/dev/shm) if there is space: ext4 takes milliseconds for a new file when thousands were deleted minutes ago, as
benchmarks do. The clock ``cpu`` adds up the time of all threads: the limit when every core is busy with the networks,
and the fair clock on a busy machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Figure, Findings, Table, digits
from PIL import Image
from timing import CLOCKS, Clock, interleaved, machine, median_ratio, report

from afire.data.decode import fit_square, read_film
from afire.data.film import picture_alone
from afire.data.phantom.film import draw_film
from afire.detect.base import AnomalyDetector, HeatScale, NormalFilms, load_detector
from afire.detect.choose import Choice, Component
from afire.detect.findings import SCORED, FilmResult
from afire.detect.maps import Evidence, MapDetector
from afire.detect.run import Drawing, ReadFilm, RunTask, run_detector
from afire.detect.taught import Taught
from afire.lesions.places import regions
from afire.methods.afire import AFiRe
from afire.report.detect_pictures import Painter
from afire.settings import load_config
from afire.weights.hub import BUILTIN, local_path

GOAL = 0.80
_IN_MEMORY, _ROOM = Path("/dev/shm"), 1 << 30
BATCH = 32
# Preset, size, films. So many of ViT-B that the start of a run, in which memory is new, does not decide.
NETWORKS = {"small": ("small", 128, 512), "vit-b": ("paper", 224, 64), BUILTIN: (BUILTIN, 128, 512)}
LABELS = {"small": "preset small, 128 px", "vit-b": "ViT-B, 224 px", BUILTIN: "built-in detector"}
SIDE = 256  # of the JPEG files, as in the public copies
# Network, side of the files, rounds.
CASES = (("small", SIDE, 5), ("small", 512, 5), ("vit-b", SIDE, 2), (BUILTIN, SIDE, 5), (BUILTIN, 512, 5))
COMPONENTS = ("gaussian_peak", "two_pass")


def place() -> str | None:
    """Where films and pictures are written: in memory if there is space, else in the temporary folder."""
    return str(_IN_MEMORY) if _IN_MEMORY.is_dir() and disk_usage(_IN_MEMORY).free > _ROOM else None


def draw_folder(folder: Path, count: int, side: int) -> torch.Tensor:
    """JPEG films on disk, and the same as (N, 1, side, side); a few phantoms over and over."""
    folder.mkdir()
    drawn = [draw_film(0, index, side).image for index in range(16)]
    for index in range(count):
        film = Image.fromarray((drawn[index % len(drawn)] * 255).astype(np.uint8))
        film.save(folder / f"{index:05d}.jpg", quality=90)
    return torch.from_numpy(np.stack([drawn[index % len(drawn)] for index in range(count)]))[:, None]


class Drawn:
    """Films in memory, as a fit reads them."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def batch(self, rows: Any) -> torch.Tensor:
        return self.images[rows]


def random_detector(preset: str, size: int, images: torch.Tensor) -> MapDetector:
    """Random weights, fitted on a few films: statistics without meaning, of the shapes that a detector has."""
    detector = MapDetector(AFiRe(load_config(preset, overrides=[f"image.size={size}"])))
    normals = NormalFilms(Drawn(images), np.arange(8))  # type: ignore[arg-type]
    detector.fit(normals)
    detector.domain.fit(normals.rank_pictures())
    detector.choice = Choice(tuple(Component(name, 0.0, 1.0) for name in COMPONENTS), 0.5)
    detector.calibration.fit(np.linspace(-3, 3, 99))
    detector.scale = HeatScale(1.0, 4.0)
    return detector


def make_detector(preset: str, size: int, images: torch.Tensor) -> AnomalyDetector:
    """The one that comes with afire, or one with random weights."""
    return load_detector(local_path(BUILTIN)) if preset == BUILTIN else random_detector(preset, size, images)


def bare_passes(detector: AnomalyDetector, images: torch.Tensor) -> Callable[[], None]:
    """The networks alone, each once: teacher, student with its head, decoder behind the most surprising quarter; of
    the detector that comes with afire its one network."""

    @torch.inference_mode()
    def passes() -> None:
        for films in torch.split(images, BATCH):
            prepared = detector.prepared(films)
            if isinstance(detector, Taught):
                detector.model.place_logits(prepared)
                continue
            assert isinstance(detector, MapDetector)
            evidence = Evidence(detector.model, prepared, detector.surprising)
            assert evidence.tokens is not None and evidence.behind is not None

    return passes


def run(preset: str, size: int, films: int, side: int, repetitions: int, clock: Clock) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=place()) as name:
        folder = Path(name)
        large = draw_folder(folder / "films", films, side)
        images = torch.from_numpy(np.stack([fit_square(one[0].numpy(), size) for one in large]))[:, None]
        detector = make_detector(preset, size, images)
        runs = {
            "bare": bare_passes(detector, images),
            "run": lambda: one_run(detector, folder, pictures=False),
            "run with pictures": lambda: one_run(detector, folder, pictures=True),
        }
        interleaved(runs, 1)
        times = interleaved(runs, repetitions, clock)
    ratios = {name: median_ratio(times["bare"], times[name]) for name in ("run", "run with pictures")}
    return {
        "size": size,
        "films": films,
        **{f"{name}, films/s": round(films / median(taken), 1) for name, taken in times.items()},
        **{f"{name} / bare": round(ratio, 3) for name, ratio in ratios.items()},
        "goal": f"at least {GOAL:g}: {'met' if ratios['run with pictures'] >= GOAL else 'missed'} with pictures, "
        f"{'met' if ratios['run'] >= GOAL else 'missed'} without",
    }


def one_run(detector: AnomalyDetector, folder: Path, pictures: bool) -> None:
    out = Path(tempfile.mkdtemp(dir=folder)) / "out"  # a new one: clearing the last one is not part of a run
    painter = make_painter(detector, out) if pictures else None
    run_detector(RunTask(detector, "0" * 64, folder / "films", out, painter, batch=BATCH))


def make_painter(detector: AnomalyDetector, out: Path) -> Painter:
    return Painter(out, detector.scale, detector.config.image.fit)


def pieces(preset: str, size: int, side: int, repetitions: int) -> dict[str, float]:
    """CPU milliseconds of one film on one thread, by component: why a run takes longer than its networks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=place()) as name:
        folder = Path(name)
        large = draw_folder(folder / "films", BATCH, side)[:, 0].numpy()
        files = sorted((folder / "films").iterdir())
        squares = np.stack([fit_square(film, size) for film in large])
        images = torch.from_numpy(squares)[:, None]
        detector = random_detector(preset, size, images)
        found = detector.score(images, restore=True)
        assert found.restored is not None
        infos = [read_film(file)[1] for file in files]
        shown = (large * 255).astype(np.uint8)
        drawings = [
            Drawing(
                ReadFilm(
                    number,
                    file.name,
                    file,
                    squares[number],
                    shown[number],
                    infos[number],
                    picture_alone(file.read_bytes()),
                ),
                FilmResult(number, file.name, SCORED),
                found.heat[number],
                found.restored[number],
            )
            for number, file in enumerate(files)
        ]

        def draw() -> None:
            paint = make_painter(detector, Path(tempfile.mkdtemp(dir=folder)))
            for drawing in drawings:
                paint(drawing)

        works = {
            "networks": bare_passes(detector, images),
            "decode and resize": lambda: [fit_square(read_film(file)[0], size) for file in files],
            "domain": lambda: detector.domain.objections(images, infos),
            "region": lambda: regions(squares, found.heat),
            "pictures": draw,
        }
        interleaved(works, 1)
        times = interleaved(works, repetitions, CLOCKS["cpu"])
    torch.set_num_threads(threads)
    return {name: 1000 * min(taken) / BATCH for name, taken in times.items()}


def measure(quick: bool = False) -> Findings:
    figures: list[Figure] = []
    rows: list[list[str]] = []
    for name, side, repetitions in CASES[:1] if quick else CASES:
        preset, size, films = NETWORKS[name]
        found = run(preset, size, 16 if quick else films, side, 1 if quick else repetitions, CLOCKS["wall"])
        label = LABELS[name] + (f", films of {side} px" if side != SIDE else "")
        for kind in ("run", "run with pictures"):
            title = f"films/s, `afire detect run`{kind[3:] or ' without pictures'} / bare forward, {label}"
            figures.append(Figure(title, found[f"{kind} / bare"], "share", GOAL))
        speeds = [digits(found[f"{kind}, films/s"]) for kind in ("bare", "run", "run with pictures")]
        rows.append([LABELS[name], str(side), str(found["films"]), *speeds])
    speeds = [f"{kind}, films/s" for kind in ("bare", "run without pictures", "run with pictures")]
    columns = ["network", "JPEG side", "films", *speeds]
    found = pieces("small", 128, SIDE, 1 if quick else 5)
    split = [[name, digits(taken), digits(taken / found["networks"])] for name, taken in found.items()]
    together = sum(found.values())
    split.append(["total", digits(together), digits(together / found["networks"])])
    tables = [
        Table("JPEG films, batches of 32", columns, rows),
        Table(
            f"One film of {SIDE} px with `small` on one thread, by component",
            ["component", "CPU ms", "to the networks"],
            split,
        ),
    ]
    best = digits(found["networks"] / together)
    note = f"When every core is busy with the networks, a run with pictures and `small` reaches {best} at best."
    return Findings(figures, tables, [note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=[*NETWORKS, "all"], default="all")
    parser.add_argument("--films", type=int, default=None)
    parser.add_argument("--side", type=int, default=SIDE, help="of the JPEG files")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results: dict[str, object] = {
        "machine": machine(),
        "JPEG side": options.side,
        "batch": BATCH,
        "clock": options.clock,
    }
    for name in NETWORKS if options.network == "all" else [options.network]:
        preset, size, films = NETWORKS[name]
        clock = CLOCKS[options.clock]
        results[name] = run(preset, size, options.films or films, options.side, options.repetitions, clock)
    report(results, options.json)


if __name__ == "__main__":
    main()
