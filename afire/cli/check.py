"""``afire data check``: the audit before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Quiet, Root, Verbose

if TYPE_CHECKING:
    from afire.data.audit import Audit
    from afire.data.manifest import Manifest

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
    manifest = _open(data, root, split)

    from rich.text import Text

    from afire.cli.options import console
    from afire.data.audit import audit_manifest, write_audit
    from afire.report.audit_page import PAGE, write_audit_page

    audit = audit_manifest(manifest, out, workers)
    write_audit(audit, out)
    write_audit_page(audit, out / PAGE)
    if not quiet:
        _show(audit)
    failed = audit.invalid or (strict and any(finding.level == "warning" for finding in audit.findings))
    if failed or not quiet:
        screen = console()
        screen.print(Text(audit.verdict, style="bold red" if failed else "bold green"), soft_wrap=True)
        screen.print(str(out / PAGE), soft_wrap=True, markup=False, highlight=False)
    if failed:
        raise typer.Exit(1)


def _open(data: Path, root: Path | None, split: Path | None) -> Manifest:
    from afire.data.datasets.folder import build_folder
    from afire.data.manifest import Manifest, read_manifest
    from afire.errors import UserError

    if not data.exists():
        raise UserError(f"{data} does not exist; give a manifest (.parquet or .csv), a pack or a folder of films.")
    inside = data / "manifest.parquet"  # of a pack or a phantom; their other pictures (masks) are not films
    if data.is_dir() and not inside.is_file():
        manifest = build_folder(data)
    else:
        manifest = read_manifest(inside if data.is_dir() else data, root)
    if split is None:
        return manifest
    from afire.data.splits import read_split

    table = manifest.table.copy()
    parts = read_split(split).rows(manifest)
    table["split"] = ""
    for part, rows in parts.items():
        table.loc[rows, "split"] = part
    return Manifest(table, manifest.root, manifest.info)


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
        findings.add_row(level, finding.kind.replace("-", " "), films, Text(finding.sentence))
    if audit.findings:
        screen.print(findings)
    shortcuts = sorted(audit.shortcuts, key=lambda one: -one.auc)
    shown = [one for one in shortcuts if one.level][:_SHORTCUTS_SHOWN] or shortcuts[:3]
    if not shown:
        return
    table = Table("label", "guessed from", "AUC train", "AUC", "95 % interval", "judged on", title_justify="left")
    table.title = "Without looking at the picture"
    for one in shown:
        style = _LEVEL_STYLE[one.level] if one.level else "dim"
        interval = f"{one.low:.3f} to {one.high:.3f}"
        direction = f" ({one.direction})" if one.direction else ""
        number = Text(f"{one.auc:.3f}", style=style)
        table.add_row(
            Text(one.label), Text(one.feature + direction), f"{one.train_auc:.3f}", number, interval, one.judged
        )
    screen.print(table)
    left_out = len([one for one in shortcuts if one.level]) - len(shown)
    if left_out > 0:
        screen.print(f"and {left_out} more in audit.json", style="dim")
