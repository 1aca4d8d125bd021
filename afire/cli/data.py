"""``afire data``: build, join, check, split and pack a dataset, count it, or draw the phantom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.build import build_app
from afire.cli.options import Address, Engine, Finish, Fit, Quiet, Root, Seed, ShardOf, Shards, Verbose, Voi, print_line
from afire.cli.samples import phantom
from afire.cli.stats import stats

if TYPE_CHECKING:
    from afire.data.audit.run import Audit

_LEVEL_STYLE = {"error": "bold red", "warning": "yellow", "notice": "cyan"}
_SHORTCUTS_SHOWN = 14


def check(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv), a pack or a folder of films.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for audit.html, audit.json and offenders.csv.")],
    root: Root = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="A split file to check instead of the manifest's own split.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that read films; default: one a core.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings too.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Audit a set before training: broken films, copies, leaks, negatives, and labels that metadata give away.

    Exits with 1 when something was found that invalidates results. A second run reuses the measurements in --out.

    Example: [cyan]afire data check --data childcxr.parquet --out audits/childcxr[/cyan]
    """
    from rich.text import Text

    from afire.cli.options import console
    from afire.data.audit.run import audit_manifest, write_audit
    from afire.data.pack import open_manifest
    from afire.data.splits import listed_as, read_split
    from afire.report.audit import PAGE, write_audit_page

    manifest = open_manifest(data, root)
    if split is not None:
        manifest = listed_as(manifest, read_split(split))
    audit = audit_manifest(manifest, out, workers)
    write_audit(audit, out)
    write_audit_page(audit, out / PAGE)
    if not quiet:
        _show(audit)
    failed = audit.invalid or (strict and any(finding.level == "warning" for finding in audit.findings))
    if failed or not quiet:
        screen = console()
        screen.print(Text(audit.verdict, style="bold red" if failed else "bold green"), soft_wrap=True)
        print_line(out / PAGE)
    if failed:
        raise typer.Exit(1)


def _show(audit: Audit) -> None:
    from rich.table import Table
    from rich.text import Text

    from afire.cli.options import console

    screen = console()
    findings = Table("level", "what", "films", "finding", title="Findings", title_justify="left")
    findings.columns[2].justify = "right"
    for finding in audit.findings:
        films = f"{len(finding.films):,}" if finding.groups else ""
        level = Text(finding.level, style=_LEVEL_STYLE[finding.level])
        findings.add_row(level, finding.kind.replace("-", " "), films, Text(finding.message))
    if audit.findings:
        screen.print(findings)
    shortcuts = sorted(audit.shortcuts, key=lambda shortcut: -shortcut.auc)
    notable = [shortcut for shortcut in shortcuts if shortcut.level]
    shortcuts_shown = notable[:_SHORTCUTS_SHOWN] or shortcuts[:3]
    if not shortcuts_shown:
        return
    table = Table("label", "guessed from", "AUC train", "AUC", "95 % interval", "judged on", title_justify="left")
    table.title = "Without looking at the picture"
    for shortcut in shortcuts_shown:
        style = _LEVEL_STYLE[shortcut.level] if shortcut.level else "dim"
        direction = f" ({shortcut.direction})" if shortcut.direction else ""
        table.add_row(
            Text(shortcut.label),
            Text(shortcut.feature + direction),
            f"{shortcut.train_auc:.3f}",
            Text(f"{shortcut.auc:.3f}", style=style),
            f"{shortcut.low:.3f} to {shortcut.high:.3f}",
            shortcut.judged,
        )
    screen.print(table)
    if len(notable) > len(shortcuts_shown):
        screen.print(f"and {len(notable) - len(shortcuts_shown)} more in audit.json", style="dim")


def split(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv) or a pack.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the split files.")],
    root: Root = None,
    val: Annotated[float, typer.Option(help="Share of the training films that becomes validation.")] = 0.1,
    test: Annotated[
        float | None,
        typer.Option(help="Draw a test subset of this share by patient instead of using the official one."),
    ] = None,
    development: Annotated[
        bool,
        typer.Option(
            "--development",
            help="Draw all subsets from the official training films, to choose settings by; --test is then 0.25.",
        ),
    ] = False,
    train_list: Annotated[
        Path | None, typer.Option("--train-list", help="A text file with the training films' names; with --test-list.")
    ] = None,
    val_list: Annotated[
        Path | None, typer.Option("--val-list", help="The same for validation; without it --val is carved from train.")
    ] = None,
    test_list: Annotated[Path | None, typer.Option("--test-list", help="The same for the test films.")] = None,
    fractions: Annotated[str, typer.Option(help="Label fractions in percent, nested.")] = "100",
    folds: Annotated[int, typer.Option(help="Grouped k-fold over all films instead of one split; 0 = off.")] = 0,
    seed: Seed = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Split by patient: official or drawn, with nested label fractions or folds.

    Example: [cyan]afire data split --data nih.parquet --out splits/nih --fractions 1,10,100[/cyan]
    """
    from rich.table import Table

    from afire.cli.options import console
    from afire.data.manifest import SPLITS
    from afire.data.pack import open_manifest
    from afire.data.splits import (
        check_same_split,
        development_split,
        fold_splits,
        fraction_of,
        list_split,
        official_split,
        random_split,
        write_split,
    )
    from afire.errors import UserError

    if folds and test is not None:
        raise UserError("--folds and --test exclude each other: every fold brings its own test subset.")
    if folds and development:
        raise UserError("--folds and --development exclude each other: folds go over all films.")
    options = {"train": train_list, "val": val_list, "test": test_list}
    lists = {name: path for name, path in options.items() if path is not None}
    if lists and not {"train", "test"} <= lists.keys():
        raise UserError("lists of films come in pairs at least: give --train-list and --test-list.")
    if lists and (folds or development or test is not None):
        raise UserError("lists of films say which film is where; leave out --folds, --development and --test.")
    manifest = open_manifest(data, root)
    percents = _percents(fractions)
    if lists:
        bases = {"split": list_split(manifest, lists, val, seed)}
    elif folds:
        bases = {f"fold-{i}": base for i, base in enumerate(fold_splits(manifest, folds, val, seed))}
    elif development:
        bases = {"development": development_split(manifest, val, 0.25 if test is None else test, seed)}
    elif test is not None:
        bases = {"split": random_split(manifest, val, test, seed)}
    else:
        bases = {"split": official_split(manifest, val, seed)}
    splits = {
        out / (f"{name}.json" if percent == 100 else f"{name}-{percent:g}pct.json"): (
            base if percent == 100 else fraction_of(base, manifest, percent / 100, seed)
        )
        for name, base in bases.items()
        for percent in percents
    }
    for path, film_split in splits.items():
        check_same_split(film_split, path)  # of all, before the first is written
    table = Table("file", "train", "val", "test", "patients", "hash")
    for path, film_split in splits.items():
        write_split(film_split, path)
        films = [f"{film_split.films[name]:,}" for name in SPLITS]
        patients = " + ".join(f"{len(film_split.patients[name]):,}" for name in SPLITS)
        table.add_row(str(path), *films, patients, film_split.hash[:12])
    if not quiet:
        console().print(table)


def _percents(text: str) -> list[float]:
    from afire.errors import UserError

    try:
        return [float(percent) for percent in text.split(",")]
    except ValueError:
        raise UserError(f"--fractions {text!r} is not a list of percentages such as 1,10,100.") from None


def join(
    data: Annotated[list[Path], typer.Option("--data", help="A manifest (.parquet or .csv). Give it for each set.")],
    split: Annotated[
        list[Path] | None,
        typer.Option("--split", help="A split file for each --data, in their order; its subsets become the lists."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="The joined manifest (.parquet or .csv).")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Join manifests into one, to pre-train on several sets; patients of different sets are kept apart.

    Example: [cyan]afire data join --data childcxr.parquet --data nih.parquet --out both.parquet[/cyan]
    """
    from rich.table import Table

    from afire.cli.options import console
    from afire.data.manifest import check_manifest_name, read_manifest, write_manifest
    from afire.data.splits import join_manifests, listed_as, read_split
    from afire.errors import UserError

    check_manifest_name(out)
    names = [path.stem for path in data]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"two manifests are called {twice[0]}; rename one, its name tells the sets apart.")
    if split and len(split) != len(data):
        raise UserError(f"{len(data)} --data need {len(data)} --split in the same order, not {len(split)}.")
    manifests = {path.stem: read_manifest(path) for path in data}
    if split:
        pairs = zip(manifests.items(), split, strict=True)
        manifests = {name: listed_as(manifest, read_split(file)) for (name, manifest), file in pairs}
    joined = join_manifests(manifests)
    write_manifest(joined, out)
    if quiet:
        return
    table = Table("set", "films", "patients", "normal")
    for name, manifest in [*manifests.items(), (out.name, joined)]:
        normal = int((manifest.table["normal"] == 1).sum())
        table.add_row(name, f"{len(manifest):,}", f"{manifest.table['patient'].nunique():,}", f"{normal:,}")
    console().print(table)


def pack(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv) or a folder of films.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the pack.")],
    root: Root = None,
    size: Annotated[int, typer.Option(help="Side of the packed films in pixels.", min=16, max=4096)] = 224,
    bits: Annotated[Literal[8, 16], typer.Option(help="8 or 16 bits per pixel.")] = 8,
    fit: Annotated[Fit, typer.Option(help="How a film becomes square.")] = "squash",
    voi: Annotated[Voi, typer.Option(help="DICOM grey-scale.")] = "auto",
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with a film that cannot be read.")
    ] = "stop",
    workers: Annotated[int | None, typer.Option(help="Processes; all cores by default.", min=1)] = None,
    shards: Shards = None,
    shard: ShardOf = None,
    finish: Finish = False,
    disks: Annotated[
        list[Path] | None, typer.Option("--disk", help="With --shards: a folder for them. Repeat for more, in turn.")
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Decode and resize every film once, into one memory-mapped array or into shards of it. A rerun continues.

    Example: [cyan]afire data pack --data nih.parquet --out packs/nih --size 224 --on-error skip[/cyan]

    In shards: [cyan]--shard 0/64[/cyan] to [cyan]63/64[/cyan] on any machines, then [cyan]--finish[/cyan]; or
    [cyan]--shards 64 --engine ray[/cyan].
    """
    from afire.cli.options import console
    from afire.cluster.shards import Where, shards_asked
    from afire.data.pack import PackSettings, open_manifest
    from afire.data.pack import pack as pack_films
    from afire.data.shards import ShardedPack, begun_shards, pack_sharded
    from afire.errors import UserError

    count, single = shards_asked(shards, shard, finish)
    where = Where(engine, address, workers)
    settings = PackSettings(size, bits, fit, voi)
    count = count or begun_shards(out) if finish else count
    if count is None:
        if disks or engine == "ray":
            raise UserError("--disk and --engine ray are for packs in shards; add --shards.")
        summary = pack_films(open_manifest(data, root), out, settings, on_error, workers)
    else:
        job = ShardedPack(open_manifest(data, root), out, settings, count, on_error, workers, tuple(disks or ()))
        if single is not None:
            packed = job.pack([single], where)
            if not quiet:
                print_line(f"shard {single}: {f'{packed:,} films packed' if packed else 'nothing to do'}: {out}")
            return
        summary = job.finish() if finish else pack_sharded(job, where)
    if not quiet:
        skipped = f", {len(summary.skipped)} skipped (named in pack.json)" if summary.skipped else ""
        pieces = f" in {summary.shards} shards" if summary.shards is not None else ""
        message = f"packed {summary.films:,} films of {size} px{pieces}{skipped}: {out}, hash {summary.hash[:12]}"
        console().print(message)


app = typer.Typer(no_args_is_help=True, help="Build, join, check, split and pack a dataset, or draw the phantom.")
app.add_typer(build_app, name="build")
app.command("stats")(stats)
app.command("join")(join)
app.command("split")(split)
app.command("pack")(pack)
app.command("check")(check)
app.command("phantom")(phantom)
