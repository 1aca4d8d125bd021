"""``afire lesions``: look at the synthetic lesions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import ConfigFile, Preset, Quiet, Root, Seed, Set, Verbose

if TYPE_CHECKING:
    from torch import Tensor

    from afire.config import LesionConfig
    from afire.data.dataset import Films
    from afire.data.manifest import Manifest

_log = logging.getLogger(__name__)
app = typer.Typer(no_args_is_help=True, help="Synthetic lesions: look at what the model is trained to find.")


@app.callback()
def _lesions() -> None:
    """Synthetic lesions: look at what the model is trained to find."""


@app.command()
def preview(
    data: Annotated[Path, typer.Option("--data", help="A pack, a manifest, or a folder of films.")],
    out: Annotated[Path, typer.Option("--out", help="The PNG to write.")],
    count: Annotated[int, typer.Option("--count", help="How many films, drawn at random.", min=1, max=64)] = 8,
    size: Annotated[
        int | None, typer.Option("--size", help="Side in pixels; else image.size, or the pack's own.", min=16)
    ] = None,
    root: Root = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Set = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw a contact sheet: normal film, lesion mask, lesioned film, abnormal tokens.

    Films marked normal are preferred, as in pre-training. Try other lesions with --set:

    Example: [cyan]afire lesions preview --data FILMS --out sheet.png --set lesions.haze=0.5[/cyan]
    """
    from afire.config import load_config
    from afire.data.dataset import open_films
    from afire.errors import UserError
    from afire.lesions import synthesize_keyed, token_labels
    from afire.report.lesion_sheet import check_name, lesion_sheet, save_sheet

    check_name(out)
    settings = load_config(preset, config, set_ or ())
    films = open_films(data, root, size or settings.image.size, settings.image.fit, settings.image.voi)
    if size is not None and films.size != size:
        raise UserError(f"the pack {data} holds films of {films.size} px; leave --size out, or pack again.")
    patch_size = settings.encoder.patch_size
    if films.size % patch_size:
        raise UserError(
            f"size {films.size} is not a multiple of encoder.patch_size {patch_size}; choose another --size."
        )
    rows, images = _read(films, _in_random_order(films.manifest, seed), count)
    lesions = settings.lesions.model_copy(update={"views": 1})
    lesioned, masks = synthesize_keyed(images, seed=seed, epoch=0, indices=rows, config=lesions)
    abnormal = token_labels(masks, patch_size)
    names = [str(name) for name in films.manifest.table["image"].iloc[rows]]
    title = f"{_describe(lesions)}   |   {films.size} px, patch {patch_size}, seed {seed}"
    save_sheet(lesion_sheet(images, masks, lesioned, abnormal, patch_size, title, names), out)
    films_shown = f"{len(rows)} film{'s' if len(rows) > 1 else ''}"
    typer.echo(f"{out}: {films_shown}, {100 * float(abnormal.float().mean()):.0f} % of tokens abnormal")


def _in_random_order(manifest: Manifest, seed: int) -> list[int]:
    """Rows of films worth showing: normal ones if any are marked so."""
    import numpy as np

    normal = np.flatnonzero(manifest.table["normal"].to_numpy() == 1.0)
    rows = normal if len(normal) else np.arange(len(manifest))
    return [int(row) for row in np.random.default_rng(seed).permutation(rows)]


def _read(films: Films, rows: list[int], count: int) -> tuple[list[int], Tensor]:
    """The first ``count`` films that can be read, and their rows. One broken film should not hide all the others."""
    import torch

    from afire.errors import ImageError

    read: dict[int, Tensor] = {}
    for row in rows:
        try:
            read[row] = films[row]
        except ImageError as error:
            _log.warning("left out: %s", error)
        if len(read) == count:
            break
    if not read:
        raise ImageError(f"none of the {len(rows)} films could be read; see the reasons above.")
    chosen = sorted(read)
    return chosen, torch.stack([read[row] for row in chosen])


def _describe(config: LesionConfig) -> str:
    """The settings that differ from the defaults, for the sheet's title."""
    defaults = type(config)()
    changed = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}".lower()
        for name, value in config.model_dump().items()
        if name != "kind" and value != getattr(defaults, name)
    ]
    return ", ".join([config.kind, *changed])
