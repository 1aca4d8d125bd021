"""Which files a film walks through: ``python scripts/trace.py`` traces two tiny runs and writes docs/architecture.md.

Only the run is traced: all of afire is imported before, and the detector is fitted before. An entry is a call of a
function of the file from another file of afire, or from outside of it; the command line is left out.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import afire

ROOT = Path(__file__).parent.parent
PACKAGE = Path(afire.__file__).parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- written by scripts/trace.py -->", "<!-- end of what scripts/trace.py writes -->"
SMALLEST = (
    *("image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"),
    *("head.hidden=16", "head.bottleneck=8", "head.clusters=8", "decoder.width=16", "decoder.heads=2"),
    *("training.batch_size=4", "training.epochs=1", "training.warmup_epochs=0", "lesions.size_min=30"),
    *("run.picture_epochs=0", "run.probe_epochs=0"),
)
Walk = dict[str, int]  # entries of each file, in the order of the first


class Trace:
    """Counts entries of the files of a package while it is on, in all threads that begin meanwhile."""

    def __init__(self, package: Path, without: str) -> None:
        self.prefix, self.without = f"{package}/", f"{package / without}/"
        self.walk: Walk = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (file := self._file(frame)) is not None and self._caller(frame) != file:
            self.walk[file] = self.walk.get(file, 0) + 1

    def _file(self, frame: FrameType) -> str | None:
        """The file of a frame inside the package; None for other libraries, the command line and page templates."""
        name = frame.f_code.co_filename
        is_ours = name.startswith(self.prefix) and name.endswith(".py") and not name.startswith(self.without)
        return name.removeprefix(self.prefix) if is_ours else None

    def _caller(self, frame: FrameType) -> str | None:
        """The file of afire that is on the stack below ``frame``, however many calls of other libraries between."""
        below = frame.f_back
        while below is not None:
            if (file := self._file(below)) is not None:
                return file
            below = below.f_back
        return None

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def import_everything() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "afire."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def run_command(*words: object) -> None:
    from afire.cli import app

    app([str(word) for word in words], standalone_mode=False)


def traced(call: Callable[[], None]) -> Walk:
    trace = Trace(PACKAGE, without="cli")
    with trace.on():
        call()
    return trace.walk


def draw_films(folder: Path, count: int, size: int = 32) -> Path:
    """Smooth random PNGs: enough for networks that need not learn anything."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    for number in range(count):
        coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
        coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{number:03d}.png")
    return folder


def to_checkpoint(folder: Path) -> Walk:
    """Pre-training on a folder of PNGs, two steps."""
    films = draw_films(folder / "films", 8)
    settings = [word for setting in SMALLEST for word in ("--set", setting)]
    options = ["--preset", "tiny", *settings, "--device", "cpu", "--quiet"]
    return traced(lambda: run_command("pretrain", "--data", films, "--out", folder / "run", *options))


def to_report(folder: Path) -> Walk:
    """A fitted detector over two PNGs; the fit is not traced."""
    settings = [word for setting in SMALLEST if "lesions" not in setting for word in ("--set", setting)]
    fit = ["--weights", "random", "--preset", "tiny", *settings, "--set", "false_alarms=0.2", "--device", "cpu"]
    normal = draw_films(folder / "normal", 40)
    run_command("detect", "fit", "--data", normal, "--out", folder / "detector", *fit, "--quiet")
    films = draw_films(folder / "films", 2)
    options = ["--model", folder / "detector", "--out", folder / "out", "--device", "cpu", "--quiet", "--workers", 1]
    return traced(lambda: run_command("detect", "run", films, *options))


def as_markdown(title: str, walk: Walk) -> str:
    """The files of rooms in a table, the modules that every room uses in a line below."""
    in_rooms = {file: count for file, count in walk.items() if "/" in file}
    common = ", ".join(f"`{file}` ({count})" for file, count in walk.items() if "/" not in file)
    rows = "\n".join(f"| {place} | `{file}` | {in_rooms[file]} |" for place, file in enumerate(in_rooms, start=1))
    table = f"| | file | entries |\n|---|---|---|\n{rows}"
    return f"**{title}: {len(in_rooms)} files of rooms**\n\n{table}\n\nand modules that every room uses: {common}."


def walks() -> str:
    """Both walks as the page shows them."""
    import_everything()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = to_checkpoint(Path(folder) / "pretrain")
        report = to_report(Path(folder) / "detect")
    titles = "From a PNG to a checkpoint", "From a PNG to `report.html`"
    return "\n\n".join(as_markdown(title, walk) for title, walk in zip(titles, (checkpoint, report), strict=True))


def main() -> None:
    text = walks()
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no place for the walks"
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page), encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
