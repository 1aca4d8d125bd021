"""A full disk: a small file system in memory, filled by the command; then space is freed and the command continues."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from afire.files import sha256_file
from fault_drills import mutated, packing, pretraining
from fault_drills.commands import DrillError, afire, require_documented_end, run, stray_files, succeed, tree_hashes

_KEEP_ALL = ("--set", "run.keep_checkpoints=100")
_ROOM = "256m"


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of so many kilobytes at ``place``; needs root."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "afire-drill", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def can_mount(place: Path) -> bool:
    try:
        with small_disk(place, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass(frozen=True)
class Task:
    """A command that fills ``out``, how to go on with it, and what it should give."""

    name: str
    command: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    outcome: Callable[[Path], Any]
    expected: Any


def one_case(task: Task, disk: Path, kilobytes: int) -> dict[str, Any]:
    """Fill the disk, expect one message, free space, continue, and compare with the result on an empty disk."""
    logs = disk.parent / "logs"
    with small_disk(disk, kilobytes):
        out = disk / "out"
        ended = run(task.command(out), logs / f"{disk.name}-full")
        require_documented_end(ended, task.name, codes=(2,))
        lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or not lines[0].rstrip().endswith("."):
            raise DrillError(f"{task.name} on a full disk does not print exactly one message: {ended.errors[-300:]!r}")
        _require_whole(task, disk, out)
        subprocess.run(["mount", "-o", f"remount,size={_ROOM}", disk], check=True)
        require_documented_end(run(task.again(out), logs / f"{disk.name}-again"), task.name, codes=(0, 1))
        if task.outcome(out) != task.expected:
            raise DrillError(f"{task.name} ends differently after a full disk of {kilobytes} kB")
        if left := stray_files(disk):
            raise DrillError(f"{task.name} left {', '.join(left)} after a full disk")
    return {"command": task.name, "kilobytes": kilobytes, "exit code": 2, "message": _plain(lines[0], disk)}


def _require_whole(task: Task, disk: Path, out: Path) -> None:
    """No temporary files, and every checkpoint is complete."""
    if left := stray_files(disk):
        raise DrillError(f"{task.name} left {', '.join(left)} on the full disk")
    for folder in sorted((out / "checkpoints").glob("step-*")):
        for file in folder.iterdir():
            if sha256_file(file) != task.expected[f"{folder.name}/{file.name}"]:
                raise DrillError(f"{task.name} left {folder.name}/{file.name} truncated on the full disk")


def _plain(line: str, disk: Path) -> str:
    return line.removeprefix("error: ").replace(str(disk), "DISK")


def drill(folder: Path, pack: Path) -> dict[str, Any]:
    """Every command that writes much, on disks of several sizes."""
    folder.mkdir(parents=True)
    if not can_mount(folder / "probe"):
        return {"cases": [], "note": "mounting a small file system needs root"}
    source = folder / "phantom"
    words = ("data", "phantom", "--count", 150, "--size", 96, "--workers", 2, "--out", source)
    succeed(afire(*words), folder / "logs/phantom")
    cases = []
    for task, sizes in (
        _pretraining(folder, pack),
        _packing(folder, source),
        _checking(folder, source),
        _detecting(folder, pack, source),
        _exporting(folder),
    ):
        place = task.name.replace(" ", "-")
        cases += [one_case(task, folder / f"{place}-{kilobytes}", kilobytes) for kilobytes in sizes]
    return {"cases": cases, "note": ""}


def _pretraining(folder: Path, pack: Path) -> tuple[Task, tuple[int, ...]]:
    def command(out: Path) -> list[str]:
        resume = ["--resume"] if (out / "config.yaml").exists() else []
        return pretraining.command(pack, out, *_KEEP_ALL, *resume)

    succeed(command(folder / "whole-run/out"), folder / "logs/whole-run")
    expected = pretraining.outcome(folder / "whole-run/out")
    return Task("pretrain", command, command, pretraining.outcome, expected), (8, 40, 400, 3000, 7000, 17_000)


def _packing(folder: Path, source: Path) -> tuple[Task, tuple[int, ...]]:
    def command(out: Path) -> list[str]:
        return packing.command(source / "images", out)

    succeed(command(folder / "whole-pack/out"), folder / "logs/whole-pack")
    size, expected = _kilobytes(folder / "whole-pack/out"), packing.outcome(folder / "whole-pack/out")
    return Task("data pack", command, command, packing.outcome, expected), (8, size // 4, size * 3 // 4, size - 20)


def _checking(folder: Path, source: Path) -> tuple[Task, tuple[int, ...]]:
    def command(out: Path) -> list[str]:
        return afire("data", "check", "--data", source, "--out", out)

    def outcome(out: Path) -> Any:
        table = pd.read_parquet(out / "measurements.parquet").sort_values("image")
        names = sorted(path.name for path in out.iterdir())
        return table.drop(columns="modified").to_dict("list"), (out / "offenders.csv").read_text(), names

    run(command(folder / "whole-check/out"), folder / "logs/whole-check")
    size = _kilobytes(folder / "whole-check/out")
    return Task("data check", command, command, outcome, outcome(folder / "whole-check/out")), (8, size - 40)


def _detecting(folder: Path, pack: Path, source: Path) -> tuple[Task, tuple[int, ...]]:
    detector = mutated.fit_detector(pack, folder / "detector", folder / "logs")

    def command(out: Path) -> list[str]:
        return mutated.detect_command(source / "images", detector, out)

    def again(out: Path) -> list[str]:
        return [*command(out), "--resume"]

    def outcome(out: Path) -> Any:
        return tree_hashes(out / "pictures"), (out / "results.csv").read_text()

    succeed(command(folder / "whole-detect/out"), folder / "logs/whole-detect")
    size, expected = _kilobytes(folder / "whole-detect/out"), outcome(folder / "whole-detect/out")
    return Task("detect run", command, again, outcome, expected), (8, size // 2, size - 60)


def _exporting(folder: Path) -> tuple[Task, tuple[int, ...]]:
    def command(out: Path) -> list[str]:
        return afire("export", folder / "whole-run/out", "--out", out, "--licence", "mit", "--name", "drill")

    def outcome(out: Path) -> Any:
        succeed(afire("verify", out), folder / "logs/verify")
        return {name: digest for name, digest in tree_hashes(out).items() if name.endswith(".safetensors")}

    succeed(command(folder / "whole-bundle/out"), folder / "logs/whole-bundle")
    return Task("export", command, command, outcome, outcome(folder / "whole-bundle/out")), (8, 300, 1000)


def _kilobytes(folder: Path) -> int:
    """What the files below ``folder`` need, rounded down."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
