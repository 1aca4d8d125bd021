"""Which files a film walks through: ``python scripts/trace.py`` traces two tiny runs and writes docs/architecture.md.

A file is on the walk when a function of it is handed a film, or what was computed from one (an array of two or more
dimensions, alone or inside of a batch, a mapping or a record), by another file, or hands one back. So set-up, schedules
and progress are not on it; the files that only do such things are named below it. The command line is left out. Only
the run is traced: all of afire is imported before, and the detector is fitted before; the first walk ends with the
first checkpoint.
"""

from __future__ import annotations

import dataclasses
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
import torch
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
    *("run.picture_epochs=0", "run.probe_epochs=0", "run.checkpoint_minutes=1e-9"),
)
ENDS = ("save_checkpoint", "write_detect_page")  # what a walk ends with, whatever it is handed


class Trace:
    """Counts calls that hand films to the files of a package while it is on, in all threads that begin meanwhile.

    ``walk`` has the entries of each file, in the order of the first; ``beside`` the other files that run.
    """

    def __init__(self, package: Path, without: str) -> None:
        self.prefix, self.without = f"{package}/", f"{package / without}/"
        self.walk: dict[str, int] = {}
        self.entered: set[str] = set()
        self.done = False

    @property
    def beside(self) -> list[str]:
        return sorted(self.entered - self.walk.keys())

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = self._file(frame)
        if file is None or event not in ("call", "return"):
            return
        self.entered.add(file)
        if not self.done and (caller := self._caller(frame)) != file:
            self._note(file, caller, frame, event, argument)

    def _note(self, file: str, caller: str | None, frame: FrameType, event: str, argument: Any) -> None:
        """Put a call or a return between two files on the walk where it carries a film."""
        is_end = frame.f_code.co_name in ENDS
        handed = given(frame) if event == "call" else [argument]
        if is_end or any(map(holds_film, handed)):
            if caller is not None:
                self.walk.setdefault(caller, 0)  # who hands a film on has it
            if event == "call":
                self.walk[file] = self.walk.get(file, 0) + 1
            self.walk.setdefault(file, 0)
        self.done = is_end and event == "return"

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


def given(frame: FrameType) -> list[Any]:
    """The arguments of a call, without the object it is a method of."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [frame.f_locals.get(name) for name in names if name not in ("self", "cls")]


def holds_film(value: Any, depth: int = 2) -> bool:
    """Whether there is an array of two or more dimensions in it, at most ``depth`` containers deep."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim >= 2 and not isinstance(value, torch.nn.Parameter)
    if depth == 0:
        return False
    if isinstance(value, list | tuple):
        return any(holds_film(entry, depth - 1) for entry in value[:4])
    if isinstance(value, dict):
        return any(holds_film(entry, depth - 1) for entry in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds_film(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return False


def import_everything() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "afire."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def run_command(*words: object) -> None:
    from afire.cli import app

    app([str(word) for word in words], standalone_mode=False)


def traced(call: Callable[[], None]) -> Trace:
    trace = Trace(PACKAGE, without="cli")
    with trace.on():
        call()
    return trace


def draw_films(folder: Path, count: int, size: int = 32) -> Path:
    """Smooth random PNGs: enough for networks that need not learn anything."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    for number in range(count):
        coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
        coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{number:03d}.png")
    return folder


def to_checkpoint(folder: Path) -> Trace:
    """Pre-training on a folder of PNGs, two steps."""
    films = draw_films(folder / "films", 8)
    settings = [word for setting in SMALLEST for word in ("--set", setting)]
    options = ["--preset", "tiny", *settings, "--device", "cpu", "--quiet"]
    return traced(lambda: run_command("pretrain", "--data", films, "--out", folder / "run", *options))


def to_report(folder: Path) -> Trace:
    """A fitted detector over two PNGs; the fit is not traced."""
    settings = [word for setting in SMALLEST if "lesions" not in setting for word in ("--set", setting)]
    fit = ["--weights", "random", "--preset", "tiny", *settings, "--set", "false_alarms=0.2", "--device", "cpu"]
    normal = draw_films(folder / "normal", 40)
    run_command("detect", "fit", "--data", normal, "--out", folder / "detector", *fit, "--quiet")
    films = draw_films(folder / "films", 2)
    options = ["--model", folder / "detector", "--out", folder / "out", "--device", "cpu", "--quiet", "--workers", 1]
    return traced(lambda: run_command("detect", "run", films, *options))


def as_markdown(title: str, trace: Trace) -> str:
    """The files of the walk in the order of their first entry, and those beside it."""
    walk = trace.walk
    rows = "\n".join(f"| {place} | `{file}` | {walk[file]} |" for place, file in enumerate(walk, start=1))
    table = f"| | file | entries |\n|---|---|---|\n{rows}"
    beside = ", ".join(f"`{file}`" for file in trace.beside)
    return f"**{title}: {len(walk)} files**\n\n{table}\n\n{len(trace.beside)} more files run beside it: {beside}."


def walks(folder: Path) -> dict[str, Trace]:
    """Both walks by their titles."""
    import_everything()
    return {
        "From a PNG to a checkpoint": to_checkpoint(folder / "pretrain"),
        "From a PNG to `report.html`": to_report(folder / "detect"),
    }


def main() -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        traces = walks(Path(folder))
    text = "\n\n".join(as_markdown(title, trace) for title, trace in traces.items())
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no place for the walks"
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page), encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
