"""``afire data build <kind>``: a manifest of your own films or of a public dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from afire.cli.options import Quiet, Verbose, print_line

if TYPE_CHECKING:
    from afire.data.manifest import Manifest
    from afire.data.stats import Statistics

build_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Build a manifest: the table of films, splits, patients and labels that everything else starts from.",
)

RootFolder = Annotated[Path, typer.Option("--root", help="Folder with the films; the manifest's paths start there.")]
Out = Annotated[Path, typer.Option("--out", help="The manifest to write, .parquet or .csv.")]
Images = Annotated[str, typer.Option("--images", help="Take films only from this folder of the root.")]
Pattern = Annotated[
    str | None,
    typer.Option("--patient-pattern", help="Regular expression on the path; its first group is the patient."),
]
Headers = Annotated[
    bool, typer.Option("--headers", help="Read patient (stored as a hash) and view from the DICOM headers.")
]
Uncertain = Annotated[Literal["ones", "zeros", "ignore"], typer.Option(help="What -1 becomes; ignore = unknown.")]
Blank = Annotated[Literal["zeros", "ignore"], typer.Option(help="What a finding not mentioned becomes.")]
AllViews = Annotated[bool, typer.Option("--all-views", help="Also lateral and other views, not only frontal ones.")]


@build_app.command("folder")
def folder(
    root: RootFolder,
    out: Out,
    patient_pattern: Pattern = None,
    headers: Headers = False,
    all_normal: Annotated[bool, typer.Option("--all-normal", help="State that every film is normal.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """A folder of films without labels, subfolders included.

    Example: [cyan]afire data build folder --root films --out films.parquet --patient-pattern '(p[0-9]+)_'[/cyan]
    """
    _build("folder", root, out, quiet, patient_pattern=patient_pattern, headers=headers, all_normal=all_normal)


@build_app.command("classes")
def classes(
    root: RootFolder,
    out: Out,
    normal_class: Annotated[
        str | None, typer.Option(help="The class that is normal.", show_default="a folder called normal")
    ] = None,
    patient_pattern: Pattern = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Class folders: class/film.png, or split/class/film.png with train, val and test.

    Example: [cyan]afire data build classes --root films --out films.parquet --normal-class healthy[/cyan]
    """
    _build("classes", root, out, quiet, normal_class=normal_class, patient_pattern=patient_pattern)


@build_app.command("csv")
def csv(
    root: RootFolder,
    out: Out,
    table: Annotated[Path, typer.Option("--csv", help="Your table, .csv or .tsv, also .gz.")],
    image_column: Annotated[str, typer.Option(help="Path of the film.")] = "image",
    patient_column: Annotated[str | None, typer.Option(help="An id that groups films of one person.")] = None,
    split_column: Annotated[str | None, typer.Option(help="train, val or test.")] = None,
    view_column: Annotated[str | None, typer.Option(help="PA, AP, LATERAL.")] = None,
    label_columns: Annotated[str, typer.Option(help="Columns of 1, 0 and empty (unknown), with commas.")] = "",
    normal_column: Annotated[str | None, typer.Option(help="Column of 1, 0 and empty (unknown).")] = None,
    findings_column: Annotated[
        str | None, typer.Option(help="Names of findings in one cell, as in Mass|Nodule.")
    ] = None,
    findings_separator: Annotated[str, typer.Option(help="What stands between them.")] = "|",
    normal_finding: Annotated[str | None, typer.Option(help="The finding that means normal.")] = None,
    mask_column: Annotated[str | None, typer.Option(help="Path of the mask.")] = None,
    meta_columns: Annotated[str, typer.Option(help="Other columns to keep, with commas; no identifying ones.")] = "",
    path_prefix: Annotated[str, typer.Option(help="Put before every film's path, as in images/.")] = "",
    path_suffix: Annotated[str, typer.Option(help="Put after every film's path, as in .png.")] = "",
    mask_prefix: Annotated[str, typer.Option(help="Put before every mask's path.")] = "",
    uncertain: Annotated[
        Literal["ones", "zeros", "ignore"] | None, typer.Option(help="What -1 becomes.", show_default="refused")
    ] = None,
    no_label_is_normal: Annotated[
        bool, typer.Option("--no-label-is-normal", help="A film with 0 in every label is normal.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Your own table; say which column is what.

    Example: [cyan]afire data build csv --root films --csv list.csv --image-column file --label-columns tb,mass
    --patient-column pid --out films.parquet[/cyan]
    """
    from afire.data.sources.table import Columns

    columns = Columns(
        image=image_column,
        patient=patient_column,
        split=split_column,
        view=view_column,
        normal=normal_column,
        labels=_names(label_columns),
        findings=findings_column,
        separator=findings_separator,
        normal_finding=normal_finding,
        mask=mask_column,
        meta=_names(meta_columns),
    )
    paths = {"prefix": path_prefix, "suffix": path_suffix, "mask_prefix": mask_prefix}
    choices = {"uncertain": uncertain, "no_label_is_normal": no_label_is_normal}
    _build("csv", root, out, quiet, csv=table, columns=columns, **choices, **paths)


@build_app.command("childcxr")
def childcxr(root: RootFolder, out: Out, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """ChildCXR: {train,test,val}/{NORMAL,PNEUMONIA}, official split, bacteria and virus from the names.

    Example: [cyan]afire data build childcxr --root chest_xray --out childcxr.parquet[/cyan]
    """
    _build("childcxr", root, out, quiet)


@build_app.command("nih")
def nih(
    root: RootFolder,
    out: Out,
    images: Images = "",
    readers: Annotated[
        Path | None,
        typer.Option(
            "--readers",
            help="Google's table of what radiologists said of some films: four findings, or all. Test films are then "
            "normal or not as they say, and unknown where nobody read them.",
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """NIH ChestX-ray14: official lists, 14 labels, boxes; .png or .jpg in any subfolder.

    Example: [cyan]afire data build nih --root nih --out nih.parquet[/cyan]
    """
    _build("nih", root, out, quiet, images=images, readers=readers)


@build_app.command("chexpert")
def chexpert(
    root: RootFolder,
    out: Out,
    labels: Annotated[Literal[5, 14], typer.Option(help="The five of the competition, or all 14.")] = 5,
    uncertain: Uncertain = "ones",
    blank: Blank = "zeros",
    all_views: AllViews = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """CheXpert: train.csv is train, valid.csv is test; frontal films.

    Example: [cyan]afire data build chexpert --root CheXpert-v1.0-small --out chexpert.parquet --uncertain ignore[/cyan]
    """
    _build("chexpert", root, out, quiet, labels=labels, uncertain=uncertain, blank=blank, all_views=all_views)


@build_app.command("mimic")
def mimic(
    root: RootFolder,
    out: Out,
    uncertain: Uncertain = "ignore",
    blank: Blank = "zeros",
    all_views: AllViews = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """MIMIC-CXR-JPG: official split, 14 labels, the paper's rule for normal films; frontal films.

    Example: [cyan]afire data build mimic --root mimic-cxr-jpg/2.0.0 --out mimic.parquet[/cyan]
    """
    _build("mimic", root, out, quiet, uncertain=uncertain, blank=blank, all_views=all_views)


@build_app.command("rsna")
def rsna(
    root: RootFolder,
    out: Out,
    images: Images = "",
    headers: Headers = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """RSNA pneumonia challenge: normal, lung opacity with boxes, or not normal; patients from its file of mappings.

    Example: [cyan]afire data build rsna --root rsna --out rsna.parquet --headers[/cyan]
    """
    _build("rsna", root, out, quiet, images=images, headers=headers)


@build_app.command("siim")
def siim(
    root: RootFolder,
    out: Out,
    table: Annotated[
        Path | None, typer.Option("--csv", help="The table of masks.", show_default="train-rle.csv in the root")
    ] = None,
    images: Images = "",
    size: Annotated[int, typer.Option(help="Side of the film the masks were drawn on.", min=1)] = 1024,
    headers: Headers = False,
    no_label_is_normal: Annotated[
        bool, typer.Option("--no-label-is-normal", help="A film without a pneumothorax is normal: for detectors.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """SIIM-ACR pneumothorax: one row per film, its masks united; .dcm, .png or .jpg in any subfolder, or its PNG copy.

    Example: [cyan]afire data build siim --root siim --out siim.parquet --headers[/cyan]
    """
    choices = {"headers": headers, "no_label_is_normal": no_label_is_normal}
    _build("siim", root, out, quiet, csv=table, images=images, size=size, **choices)


@build_app.command("shenzhen", hidden=True)
@build_app.command("lungmasks")
def lungmasks(root: RootFolder, out: Out, images: Images = "", quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Films with lung masks, normal or tuberculosis: Shenzhen, Montgomery. Also called shenzhen.

    Example: [cyan]afire data build lungmasks --root shenzhen --out shenzhen.parquet[/cyan]
    """
    _build("lungmasks", root, out, quiet, images=images)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _build(kind: str, root: Path, out: Path, quiet: bool, **options: Any) -> None:
    from afire.data.manifest import write_manifest
    from afire.data.sources import build

    _check_out(out)
    manifest = build(kind, root, **options)
    write_manifest(manifest, out)
    if not quiet:
        _say(manifest, out)


def _check_out(out: Path) -> None:
    """Refuse a name that cannot be written, or a file that is not a manifest, before the work starts."""
    from afire.data.manifest import check_manifest_name, is_manifest
    from afire.errors import UserError

    check_manifest_name(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file.")
    if out.exists() and not is_manifest(out):
        raise UserError(f"{out} exists and is no manifest written by afire; choose another name or remove it.")


def _say(manifest: Manifest, out: Path) -> None:
    from afire.cli.options import console
    from afire.cli.stats import show, split_table
    from afire.data.stats import describe

    counts = describe(manifest, combinations=False)
    show(console(), "films per split", split_table(counts))
    labels = f", {len(counts.labels)} label{'s' if len(counts.labels) > 1 else ''}" if counts.labels else ""
    print_line(f"wrote {out}: {_patients(counts)}{labels}")


def _patients(counts: Statistics) -> str:
    total, without = counts.splits["all"], counts.films_without_patient
    if without == total.films:
        return f"{total.films:,} films, patients unknown"
    suffix = f" and {without:,} without a patient id" if without else ""
    return f"{total.films - without:,} films of {total.patients - without:,} patients{suffix}"
