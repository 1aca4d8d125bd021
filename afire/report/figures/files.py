"""Where a figure goes: ``NAME.png`` for the eye, ``NAME.pdf`` for the paper, ``NAME.json`` with every number in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from afire.errors import UserError
from afire.files import write_json
from afire.report.style import PRINT_DPI, save_figure
from afire.report.words import DISCLAIMER
from afire.tasks.results import to_json
from afire.training.run_folder import environment

FORMAT = 1
_ENDINGS = (".png", ".pdf", ".json")


@dataclass(frozen=True)
class FigureFiles:
    """The files of a figure, and what its JSON says."""

    png: Path
    pdf: Path
    json: Path
    record: Mapping[str, Any]

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What was measured."""
        found: Mapping[str, Any] = self.record["numbers"]
        return found


def claim(out: Path, name: str, force: bool) -> Path:
    """The files' common path without an ending; refuses to write over a figure unless asked to.

    ``out`` is that path, with or without one of the endings, or an existing folder, in which the figure is ``name``.
    """
    named = out.with_suffix("") if out.suffix.lower() in _ENDINGS else out
    stem = out / name if out.is_dir() else named
    there = [path for path in _paths(stem) if path.exists()]
    if there and not force:
        raise UserError(f"{there[0]} already exists; add --force to replace the figure, or choose another --out.")
    return stem


def save(stem: Path, figure: Figure, record: Mapping[str, Any]) -> FigureFiles:
    """Write the picture and then its record, whose presence says that the figure is whole."""
    png, pdf, json = _paths(stem)
    json.unlink(missing_ok=True)
    save_figure(figure, stem, PRINT_DPI)
    state = environment()
    whole = to_json(
        {"format": FORMAT, **record, "command": state.pop("command"), "environment": state, "note": DISCLAIMER}
    )
    write_json(json, whole)
    return FigureFiles(png, pdf, json, whole)


def _paths(stem: Path) -> tuple[Path, Path, Path]:
    png, pdf, json = (stem.with_name(stem.name + ending) for ending in _ENDINGS)
    return png, pdf, json
