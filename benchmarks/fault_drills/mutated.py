"""Mutated files among good films, through ``data check``, ``data pack`` and ``detect run``."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fault_drills.commands import (
    DrillError,
    Ended,
    afire,
    require_documented_end,
    run,
    stray_files,
    succeed,
    tree_hashes,
)
from fault_drills.films import SECRET
from fault_drills.mutants import Mutant, write_good, write_mutants

Verdicts = dict[str, str]
"""For each file the reason why it was refused, or empty where it was read."""
_WORKERS = 2
_SECONDS = 1800.0


def fit_detector(pack: Path, out: Path, logs: Path) -> Path:
    """A detector with tiny random networks: its scores mean nothing; only that it gives some is tested."""
    succeed(
        afire(
            *("detect", "fit", "--weights", "random", "--preset", "tiny", "--data", pack, "--out", out),
            *("--device", "cpu", "--set", "adapt.epochs=1", "--set", "held_out=0.5", "--set", "false_alarms=0.2"),
        ),
        logs / "fit",
    )
    return out


def check_command(films: Path, out: Path) -> list[str]:
    return afire("data", "check", "--data", films, "--out", out, "--workers", _WORKERS)


def pack_command(films: Path, out: Path, on_error: str = "skip") -> list[str]:
    words = ("data", "pack", "--data", films, "--out", out, "--size", 64, "--workers", _WORKERS)
    return afire(*words, "--on-error", on_error)


def detect_command(films: Path, detector: Path, out: Path, *extra: str) -> list[str]:
    words = ("detect", "run", films, "--model", detector, "--out", out, "--device", "cpu", "--workers", _WORKERS)
    return afire(*words, "--dicom-out", "sc,sr,seg,gsps", *extra)


def of_check(out: Path) -> tuple[Verdicts, dict[str, Any]]:
    """What ``data check`` says of each file, and what it measured of it."""
    table = pd.read_parquet(out / "measurements.parquet").set_index("image")
    with (out / "offenders.csv").open(newline="", encoding="utf-8") as stream:
        named = [(row["image"], row["note"]) for row in csv.DictReader(stream) if row["kind"] == "unreadable"]
    verdicts = dict.fromkeys(map(str, table.index), "") | _once(named, "offenders.csv")
    return verdicts, {str(image): row.to_dict() for image, row in table.drop(columns="modified").iterrows()}


def of_pack(out: Path) -> tuple[Verdicts, dict[str, Any]]:
    """What ``data pack`` says of each file, and its packed pixels."""
    summary = json.loads((out / "pack.json").read_text())
    table = pd.read_parquet(out / "manifest.parquet")
    pixels = np.load(out / "images.npy", mmap_mode="r")
    rows = zip(table["image"], table["meta:pack_row"], strict=True)
    packed = {image: pixels[int(row)].tobytes() for image, row in rows}
    if both := packed.keys() & summary["skipped"].keys():
        raise DrillError(f"the pack both holds and skips {sorted(both)}")
    return dict.fromkeys(packed, "") | _once(list(summary["skipped"].items()), "pack.json"), packed


def of_detect(out: Path) -> tuple[Verdicts, dict[str, Any]]:
    """What ``detect run`` says of each file, and its score."""
    films = json.loads((out / "results.json").read_text())["films"]
    counts = Counter(film["file"] for film in films)
    if twice := [file for file, count in counts.items() if count > 1]:
        raise DrillError(f"results.json names {twice} more than once")
    bad = [(film["file"], film["reason"]) for film in films if film["status"] == "unreadable"]
    scores = {film["file"]: film["score"] or film["score_not_to_be_trusted"] for film in films}
    return dict.fromkeys(counts, "") | _once(bad, "results.json"), scores


def _once(named: list[tuple[str, str]], where: str) -> Verdicts:
    """Refused files with their reasons: each once, none without a reason."""
    wrong = [file for file, count in Counter(file for file, _ in named).items() if count > 1]
    wrong += [file for file, reason in named if not reason.strip()]
    if wrong:
        raise DrillError(f"{where} names {', '.join(wrong[:5])} more than once or without a reason")
    return dict(named)


READERS = {"data check": of_check, "data pack": of_pack, "detect run": of_detect}


def run_all(films: Path, out: Path, detector: Path, logs: Path) -> dict[str, Ended]:
    commands = {
        "data check": check_command(films, out / "data check"),
        "data pack": pack_command(films, out / "data pack"),
        "detect run": detect_command(films, detector, out / "detect run"),
    }
    ended = {}
    for name, command in commands.items():
        ended[name] = run(command, logs / f"{out.name} {name}", seconds=_SECONDS)
        require_documented_end(ended[name], f"{name} on {films.name}", codes=(0, 1) if name == "data check" else (0,))
        if left := stray_files(out):
            raise DrillError(f"{name} left {', '.join(left)}")
    return ended


def _require_good(good: list[str], alone: Mapping[str, Any], mixed: Mapping[str, Any], name: str) -> float:
    """Good films came out as they do alone; the largest difference of a score, 0 where bits are compared."""
    different = [file for file in good if file not in mixed or alone[file] != mixed[file]]
    if not different:
        return 0.0
    if name != "detect run" or any(mixed.get(file) is None for file in different):
        raise DrillError(f"{name} gives {', '.join(different[:5])} another outcome among bad files than alone")
    largest = max(abs(float(alone[file]) - float(mixed[file])) for file in different)
    if largest > 1e-5:  # networks round differently in batches of other sizes
        raise DrillError(f"{name} scores good films differently among bad files: by up to {largest:.1e}")
    return largest


def _require_discretion(out: Path, logs: Path) -> None:
    """Nothing but DICOM overlays, which belong to the study, may repeat an identifying tag."""
    for path in [*out.rglob("*"), *logs.glob(f"{out.name} *")]:
        if path.is_file() and path.suffix != ".dcm" and SECRET.encode() in path.read_bytes():
            raise DrillError(f"{path.name} repeats an identifying tag of a film")


def _require_stop(films: Path, folder: Path) -> None:
    """Without ``--on-error skip`` packing ends at the first bad film, with one message that names it."""
    ended = run(pack_command(films, folder / "stopped", "stop"), folder / "logs/stopped", seconds=_SECONDS)
    require_documented_end(ended, "data pack --on-error stop", codes=(2,))
    lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
    if len(lines) != 1 or str(films) not in lines[0] or (folder / "stopped/pack.json").exists():
        raise DrillError(f"data pack --on-error stop does not end as documented: {lines}")


def table_of(mutants: list[Mutant], verdicts: Verdicts) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one in mutants:
        row = found.setdefault(one.kind, {"files": 0, "read": 0, "refused": 0})
        row["files"] += 1
        row["refused" if verdicts[one.file] else "read"] += 1
    return found


def drill(folder: Path, detector: Path, *, mutants: int, good: int, seed: int) -> dict[str, Any]:
    """``mutants`` bad files among ``good`` films through the three commands."""
    logs, alone, films = folder / "logs", folder / "good", folder / "films"
    names = write_good(alone, good)
    bad = write_mutants(films, mutants, seed)
    for name in names:
        shutil.copy2(alone / name, films / name)
    before = tree_hashes(films)
    ended = run_all(films, folder / "of all", detector, logs)
    verdicts, outcomes = judge(folder / "of all", logs, bad, names)
    reference = run_all(alone, folder / "of the good", detector, logs)
    expected = {name: read(folder / "of the good" / name)[1] for name, read in READERS.items()}
    differences = {name: _require_good(names, expected[name], outcomes[name], name) for name in READERS}
    _require_stop(films, folder)
    if tree_hashes(films) != before:
        raise DrillError("a command changed the films it was given")
    return {
        "mutants": len(bad),
        "good films": len(names),
        "kinds": table_of(bad, verdicts),
        "commands": {name: one.as_row() | {"alone": reference[name].as_row()} for name, one in ended.items()},
        "detect run counts": json.loads((folder / "of all/detect run/results.json").read_text())["counts"],
        "largest difference of a good film's score": differences["detect run"],
        "reasons": _reasons(bad, verdicts),
    }


def judge(out: Path, logs: Path, bad: list[Mutant], good: list[str]) -> tuple[Verdicts, dict[str, Any]]:
    """The verdict on each file, the same of all commands, and what each command made of it."""
    _require_discretion(out, logs)
    verdicts: dict[str, Verdicts] = {}
    outcomes: dict[str, Any] = {}
    files = {*good, *(one.file for one in bad)}
    for name, read in READERS.items():
        verdicts[name], outcomes[name] = read(out / name)
        if lost := files ^ verdicts[name].keys():
            raise DrillError(f"{name} lost or invented {', '.join(sorted(lost)[:5])}")
    _require_verdicts(bad, good, verdicts)
    return verdicts["detect run"], outcomes


def _require_verdicts(bad: list[Mutant], good: list[str], verdicts: Mapping[str, Verdicts]) -> None:
    """The three commands agree on each file, good films are read, and certain files meet their fate."""
    for file in [*good, *(one.file for one in bad)]:
        refused = {name: bool(found[file]) for name, found in verdicts.items()}
        if len(set(refused.values())) > 1:
            raise DrillError(f"{file} is refused by some commands and read by others: {refused}")
    for file in good:
        if verdicts["data pack"][file]:
            raise DrillError(f"the good film {file} is refused: {verdicts['data pack'][file]}")
    for one in bad:
        fate = "refused" if verdicts["data pack"][one.file] else "read"
        if one.must and fate != one.must:
            raise DrillError(f"{one.file} ({one.kind}, {one.what}) is {fate}, but must be {one.must}")


def _reasons(bad: list[Mutant], verdicts: Verdicts) -> dict[str, int]:
    """How often the most frequent reasons were given, without the advice behind them."""
    words = (verdicts[one.file].split(";")[0].split("(")[0].strip().rstrip(".") for one in bad if verdicts[one.file])
    return dict(Counter(words).most_common(8))
