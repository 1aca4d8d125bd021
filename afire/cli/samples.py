"""What afire draws itself: ``afire data phantom``, a dataset without patients, and ``afire lesions``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Preset, Quiet, Root, Seed, Set, Verbose

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor

    from afire.config import LesionConfig
    from afire.data.manifest import Manifest
    from afire.data.pack import Films

_SHEET_COLUMNS = 8
_FRAME = (255, 176, 32)


def phantom(
    out: Annotated[Path, typer.Option("--out", help="Folder of the phantom.")],
    count: Annotated[int, typer.Option("--count", help="How many films.")] = 1000,
    size: Annotated[int, typer.Option("--size", help="Side of the films in pixels.")] = 224,
    seed: Seed = 0,
    normal_share: Annotated[float, typer.Option("--normal-share", help="Share of films without disease.")] = 0.5,
    findings: Annotated[
        str | None, typer.Option("--findings", help="Diseases to draw, as in Mass,Nodule; all fourteen by default.")
    ] = None,
    style: Annotated[
        Literal["any", "digital", "scanned"],
        typer.Option(help="Digital films, processed by a scanner's software, or scanned ones: softer and grainier."),
    ] = "any",
    workers: Annotated[int | None, typer.Option("--workers", help="Processes; all cores by default.", min=1)] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw chest films with fourteen diseases, masks, boxes and lung fields.

    A rerun continues, and a larger --count adds films.

    Example: [cyan]afire data phantom --count 2000 --size 224 --seed 1 --out phantom[/cyan]
    """
    from afire.cli.options import console, parse_labels
    from afire.data.phantom.diseases import DISEASES
    from afire.data.phantom.write import write_phantom
    from afire.files import write_atomic

    kinds = parse_labels(findings) or DISEASES
    manifest = write_phantom(out, count, size, seed, workers, normal_share=normal_share, findings=kinds, style=style)
    sheet = _sheet(manifest)
    write_atomic(out / "contact_sheet.png", lambda temporary: sheet.save(temporary, format="PNG"))
    if not quiet:
        _summarise(manifest)
        console().print(
            f"{len(manifest):,} films of {size} px: {out / 'manifest.parquet'}; look at {out / 'contact_sheet.png'}",
            soft_wrap=True,
        )


def _summarise(manifest: Manifest) -> None:
    """Films with each finding, by split."""
    from rich.table import Table

    from afire.cli.options import console
    from afire.data.manifest import LABEL_PREFIX, SPLITS

    table = Table("films", *SPLITS, "all")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"normal": manifest.table["normal"]}
    rows |= {name: manifest.table[f"{LABEL_PREFIX}{name}"] for name in manifest.labels}
    rows["all"] = manifest.table["normal"] * 0 + 1
    for name, present in rows.items():
        counts = [int(present[manifest.table["split"] == split].sum()) for split in SPLITS]
        table.add_row(
            name, *(f"{n:,}" for n in counts), f"{int(present.sum()):,}", end_section=name == manifest.labels[-1]
        )
    console().print(table)


def _sheet(manifest: Manifest) -> Image.Image:
    """A row of normal films and one for each disease, with the diseases' boxes."""
    import numpy as np
    from PIL import Image

    from afire.data.manifest import LABEL_PREFIX
    from afire.report.sheets import contact_sheet

    kinds = [manifest.table["normal"], *(manifest.table[f"{LABEL_PREFIX}{name}"] for name in manifest.labels)]
    rows: list[int] = []
    for present in kinds:
        rows += [int(row) for row in np.flatnonzero(present == 1) if row not in rows][:_SHEET_COLUMNS]
    pictures, captions = [], []
    for row in rows:
        with Image.open(manifest.path(row)) as picture:
            pictures.append(_with_boxes(picture.convert("RGB"), str(manifest.table["boxes"].iloc[row])))
        findings = [name for name in manifest.labels if manifest.table[f"{LABEL_PREFIX}{name}"].iloc[row] == 1]
        captions.append(" + ".join(findings) or "normal")
    return contact_sheet(pictures, captions, _SHEET_COLUMNS)


def _with_boxes(picture: Image.Image, boxes: str) -> NDArray[np.uint8]:
    """The film with a thin frame around each finding, (H, W, 3)."""
    import json

    import numpy as np
    from PIL import ImageDraw

    draw = ImageDraw.Draw(picture)
    for box in json.loads(boxes or "[]"):
        left, top = box["x"] * picture.width, box["y"] * picture.height
        right, bottom = left + box["w"] * picture.width, top + box["h"] * picture.height
        draw.rectangle((left - 1, top - 1, right, bottom), outline=_FRAME)
    return np.asarray(picture)


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

    Films marked normal are preferred, as in pre-training. Patches are cut from the films shown. Try other lesions with
    --set:

    Example: [cyan]afire lesions preview --data FILMS --out sheet.png --set lesions.haze=0.5[/cyan]
    """
    from afire.cli.settings import model_config
    from afire.data.pack import config_for, open_films
    from afire.errors import UserError
    from afire.lesions.pastes import Donors
    from afire.lesions.synthesis import synthesize_keyed, token_labels
    from afire.report.sheets import check_name, lesion_sheet, save_sheet

    check_name(out)
    settings = config_for(model_config(preset, config, set_), data)
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
    donors = Donors.of(images) if lesions.donors else None  # of a training: films of its own
    lesioned, masks = synthesize_keyed(images, seed=seed, epoch=0, indices=rows, config=lesions, donors=donors)
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

    images: dict[int, Tensor] = {}
    for row in rows:
        try:
            images[row] = films[row]
        except ImageError as error:
            _log.warning("left out: %s", error)
        if len(images) == count:
            break
    if not images:
        raise ImageError(f"none of the {len(rows)} films could be read; see the reasons above.")
    read_rows = sorted(images)
    return read_rows, torch.stack([images[row] for row in read_rows])


def _describe(config: LesionConfig) -> str:
    """The settings that differ from the defaults, for the sheet's title."""
    defaults = type(config)()
    changed = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}".lower()
        for name, value in config.model_dump().items()
        if name != "kind" and value != getattr(defaults, name)
    ]
    return ", ".join([config.kind, *changed])
