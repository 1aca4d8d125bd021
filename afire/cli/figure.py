"""``afire figure``: figures for papers, each as PNG, PDF and a JSON with every number."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import (
    ConfigFile,
    Data,
    Device,
    Labels,
    Network,
    Preset,
    Quiet,
    Root,
    Seed,
    Set,
    SplitFile,
    Verbose,
    print_line,
)

if TYPE_CHECKING:
    from afire.report.figures.files import FigureFiles, Source

app = typer.Typer(
    no_args_is_help=True,
    help="Figures for papers: PNG (300 dpi), PDF and a JSON with every number, readable for colour-blind people.",
)

NamedWeights = Annotated[
    list[str],
    typer.Option(
        "--weights",
        help="A run folder, a bundle, a weights file or random; repeat for more panels, NAME=PATH to name them.",
        metavar="[NAME=]WEIGHTS",
    ),
]
Run = Annotated[str, typer.Option("--weights", help="The folder of a pre-training run, or a bundle.", metavar="RUN")]
Out = Annotated[Path, typer.Option("--out", help="Where to write, without an ending: OUT.png, OUT.pdf, OUT.json.")]
Part = Annotated[
    Literal["test", "val", "train", "all"],
    typer.Option("--part", help="Films of which subset; all is for a set that is foreign to the weights."),
]
Films = Annotated[int, typer.Option("--films", help="Most films, drawn at random from --seed.", min=1)]
Perplexity = Annotated[float, typer.Option("--perplexity", help="Of t-SNE: about how many neighbours matter.", min=1)]
Neighbours = Annotated[str, typer.Option("--neighbours", help="The k of the k-NN purity, separated by commas.")]
Show = Annotated[int, typer.Option("--show", help="Examples to show, drawn at random.", min=1, max=12)]
Force = Annotated[bool, typer.Option("--force", help="Replace the figure if it is there.")]


@app.callback()
def _figure() -> None:
    """Figures for papers: PNG (300 dpi), PDF and a JSON with every number, readable for colour-blind people."""


@app.command()
def tsne(
    weights: NamedWeights,
    data: Data,
    out: Out,
    labels: Labels = None,
    subset: Part = "test",
    films: Films = 1000,
    classes: Annotated[int, typer.Option(help="Commonest combinations of labels to show.", min=2, max=14)] = 7,
    perplexity: Perplexity = 30,
    neighbours: Neighbours = "5,10,20",
    network: Network = None,
    root: Root = None,
    split: SplitFile = None,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Map of films coloured by class, with silhouette and k-NN purity; several weights side by side.

    Example: [cyan]afire figure tsne --weights K64=runs/k64 --weights K256=runs/k256 --weights random --data PACK
    --out figures/tsne[/cyan]
    """
    from afire.cli.options import parse_labels
    from afire.cli.settings import config_from_options
    from afire.report.figures.maps import draw_tsne

    files = draw_tsne(
        out,
        parse_named(weights),
        _source(data, root, split, subset, films, seed),
        labels=parse_labels(labels),
        classes=classes,
        perplexity=perplexity,
        neighbours=_numbers(neighbours, "--neighbours"),
        network=network,
        config=config_from_options(preset, config_file, overrides, data),
        device=device,
        force=force,
    )
    _show(files, quiet)


@app.command()
def landmarks(
    weights: NamedWeights,
    data: Data,
    out: Out,
    subset: Part = "test",
    films: Films = 200,
    perplexity: Perplexity = 30,
    neighbours: Neighbours = "5,10,20",
    network: Network = None,
    root: Root = None,
    split: SplitFile = None,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Map of the tokens at nine places, and whether tokens of moved films follow anatomy or place.

    Example: [cyan]afire figure landmarks --weights AFiRe=runs/nih --weights random --data PACK
    --out figures/landmarks[/cyan]
    """
    from afire.cli.settings import config_from_options
    from afire.report.figures.maps import draw_landmarks

    files = draw_landmarks(
        out,
        parse_named(weights),
        _source(data, root, split, subset, films, seed),
        perplexity=perplexity,
        neighbours=_numbers(neighbours, "--neighbours"),
        network=network,
        config=config_from_options(preset, config_file, overrides, data),
        device=device,
        force=force,
    )
    _show(files, quiet)


@app.command()
def gradcam(
    weights: Annotated[
        list[str],
        typer.Option(
            "--weights",
            help="A result of `afire finetune`, or one of its runs; repeat to compare, NAME=PATH to name them.",
            metavar="[NAME=]RESULT",
        ),
    ],
    data: Data,
    out: Out,
    show: Show = 6,
    block: Annotated[
        int | None, typer.Option(help="Tokens after so many blocks; default: after the last norm.", min=1)
    ] = None,
    subset: Part = "test",
    root: Root = None,
    split: SplitFile = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Grad-CAM of fine-tuned classifiers beside lesion boxes, with pointing game and IoU over all boxes.

    Example: [cyan]afire figure gradcam --weights AFiRe=results/nih --data packs/nih --out figures/gradcam[/cyan]
    """
    from afire.report.figures.classifiers import draw_gradcam

    source = _source(data, root, split, subset, 1, seed)
    files = draw_gradcam(out, parse_named(weights), source, show=show, block=block, device=device, force=force)
    _show(files, quiet)


@app.command()
def restorations(
    weights: Run,
    data: Data,
    out: Out,
    show: Show = 3,
    subset: Part = "test",
    films: Films = 200,
    root: Root = None,
    split: SplitFile = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Restorations with and without z_mask, of lesioned and of normal films, with their errors.

    Example: [cyan]afire figure restorations --weights runs/nih --data packs/nih --out figures/restorations[/cyan]
    """
    from afire.report.figures.pretrained import draw_restorations

    source = _source(data, root, split, subset, films, seed)
    _show(draw_restorations(out, weights, source, show=show, device=device, force=force), quiet)


@app.command()
def atlas(
    weights: Run,
    data: Data,
    out: Out,
    films: Films = 400,
    nearest: Annotated[int, typer.Option(help="Nearest patches of a place.", min=4, max=16)] = 8,
    root: Root = None,
    split: SplitFile = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Atlas of the prototypes: entropy, cluster, typical and nearest patches of every place, from training normals.

    Example: [cyan]afire figure atlas --weights runs/nih --data packs/nih --out figures/atlas[/cyan]
    """
    from afire.report.figures.pretrained import draw_atlas

    source = _source(data, root, split, "train", films, seed)
    _show(draw_atlas(out, weights, source, nearest=nearest, device=device, force=force), quiet)


@app.command()
def auc(
    results: Annotated[
        list[str],
        typer.Option("--results", help="A result folder; repeat for bars side by side.", metavar="[NAME=]RESULT"),
    ],
    out: Out,
    metric: Annotated[str, typer.Option(help="auc, average_precision, accuracy, f1.")] = "auc",
    allow_different_films: Annotated[
        bool, typer.Option("--allow-different-films", help="Although the results were tested on different films.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Bars of each finding's AUC with intervals over test patients, sorted, several results side by side.

    Example: [cyan]afire figure auc --results AFiRe=results/afire --results random=results/random
    --out figures/auc[/cyan]
    """
    from afire.report.figures.classifiers import draw_auc

    paths = {name: Path(path) for name, path in parse_named(results).items()}
    _show(draw_auc(out, paths, metric=metric, allow_different_films=allow_different_films, force=force), quiet)


def parse_named(values: list[str]) -> dict[str, str]:
    """``NAME=PATH`` or ``PATH`` (named by its last name), each name once."""
    from afire.errors import UserError

    paths: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        # A path may hold = itself; what exists, or has a slash before the =, is a path.
        if not equals or not name.strip() or "/" in name or Path(value).exists():
            name, path = (value if value.startswith("hf:") else Path(value).name or value), value
        name = name.strip()
        if not path:
            raise UserError(f"{value!r} names nothing; write NAME=PATH.")
        if name in paths:
            raise UserError(f"two of them are called {name!r}; name them with NAME=PATH.")
        paths[name] = path
    return paths


def _numbers(text: str, option: str) -> list[int]:
    from afire.errors import UserError

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text!r} is not a list of whole numbers such as 5,10,20.")
    return numbers


def _source(
    data: Path,
    root: Path | None,
    split: Path | None,
    subset: Literal["test", "val", "train", "all"],
    films: int,
    seed: int,
) -> Source:
    from afire.data.splits import read_split
    from afire.report.figures.files import Source

    return Source(data, root, read_split(split) if split is not None else None, subset, films, seed)


def _show(files: FigureFiles, quiet: bool) -> None:
    if quiet:
        return
    from afire.cli.options import console
    from afire.report.figures.files import number_table
    from afire.report.table import show_table

    show_table(console(), number_table(files))
    for path in (files.png, files.pdf, files.json):
        print_line(path)
