"""``afire data phantom``: draw a dataset that needs nobody's films."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Quiet, Seed, Verbose

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from afire.data.manifest import Manifest

_SHEET_COLUMNS = 8
_FRAME = (255, 176, 32)


def phantom(
    out: Annotated[Path, typer.Option("--out", help="Folder of the phantom.")],
    count: Annotated[int, typer.Option("--count", help="How many films.")] = 1000,
    size: Annotated[int, typer.Option("--size", help="Side of the films in pixels.")] = 224,
    seed: Seed = 0,
    normal_share: Annotated[float, typer.Option("--normal-share", help="Share of films without disease.")] = 0.5,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes; all cores by default.", min=1)] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw chest films with five diseases, masks, boxes and lung fields.

    A rerun continues, and a larger --count adds films.

    Example: [cyan]afire data phantom --count 2000 --size 224 --seed 1 --out phantom[/cyan]
    """
    from afire.cli.options import console
    from afire.data.phantom import write_phantom
    from afire.files import write_atomic

    manifest = write_phantom(out, count, size, seed, workers, normal_share=normal_share)
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
    from afire.report.sheet import contact_sheet

    kinds = [manifest.table["normal"], *(manifest.table[f"{LABEL_PREFIX}{name}"] for name in manifest.labels)]
    chosen: list[int] = []
    for present in kinds:
        chosen += [int(row) for row in np.flatnonzero(present == 1) if row not in chosen][:_SHEET_COLUMNS]
    pictures, captions = [], []
    for row in chosen:
        with Image.open(manifest.path(row)) as picture:
            pictures.append(_with_boxes(picture.convert("RGB"), str(manifest.table["boxes"].iloc[row])))
        found = [name for name in manifest.labels if manifest.table[f"{LABEL_PREFIX}{name}"].iloc[row] == 1]
        captions.append(" + ".join(found) or "normal")
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
