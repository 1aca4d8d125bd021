"""``benchmarks/faults.md``, from the results."""

# ruff: noqa: E501 - prose of a page, as long as its lines are there

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from fault_drills.films import FORMATS
from fault_drills.hostile_tags import RAW, TAGS

Results = Mapping[str, Any]

_WIDTH = 135
DEFECTS = """\
- A disk that fills up during `afire data pack` ended the process with SIGBUS: pixels were written through a memory map, and the
  system kills a process whose map has no room behind it. They are now written as a file; a full disk is a sentence and exit code 2.
- A run of `afire pretrain` that was killed between its last checkpoint and its summary came back with the right weights, but its
  `summary.json` and `README.md` had no losses and no health. Both are now kept with the checkpoint, as is the count of red epochs of
  `run.stop_on_collapse`.
- Files under a temporary name (`.part-...`) stayed after a kill in the middle of a write. Whoever takes up the folder now removes them.
- A full disk was said without a path where a small file was being written, by `afire data pack`, and by `afire detect run`
  under its pictures or its journal; and without advice by `afire export`.
"""


def write_page(results: Results) -> str:
    """The page; a drill that was not run is left out."""
    parts = [_HEAD]
    for name, section in {
        "pretraining": _pretraining,
        "packing": _packing,
        "disk": _disk,
        "mutated": _mutated,
    }.items():
        if name in results:
            parts.append(section(results[name]))
    parts.append(f"## Defects found in writing and running it\n\nMended, each with a test.\n\n{DEFECTS}")
    parts.append(_where(results))
    return _wrapped("\n".join(part.rstrip("\n") + "\n" for part in parts))


def _wrapped(text: str) -> str:
    """Paragraphs of prose in lines of even length; everything else as it is."""
    blocks = text.split("\n\n")
    plain = [block[:1].isalnum() or block.startswith(("`data", "`afire")) for block in blocks]
    return "\n\n".join(
        textwrap.fill(block, _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n" * block.endswith("\n")
        if prose
        else block
        for block, prose in zip(blocks, plain, strict=True)
    )


_HEAD = """\
# Faults: what happens when things go wrong

```
python benchmarks/faults.py
```

kills, fills disks and mutates files, and ends with an error at the first promise that does not hold: no crash, no hang, nothing lost,
each file named. It writes this page. A short form (one kill each, two dozen mutated files) is among the tests.
"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _phases(found: Results) -> str:
    return _table(["killed while", "kills"], [[name, count] for name, count in found["killed while"].items()])


def _took(found: Results) -> str:
    return f"Seed {found['seed']}; {found['seconds in all'] / 60:.0f} minutes."


def _pretraining(found: Results) -> str:
    return f"""\
## `kill -9` during pre-training

{found["drills"]} runs of the `tiny` preset ({found["steps"]} steps, {found["cpu seconds of a run"]:.0f} CPU seconds undisturbed, a checkpoint after every
step), each killed with all its processes at a random moment of its computing time, start and end included, {found["kills"]} kills in all, then resumed until
done. Every fifth run waited from that moment on for the first sight of a checkpoint being written, or the end. **{found["identical"]} of {found["drills"]} end
bit-identical** to the undisturbed run: weights of student, teacher and decoder, prototypes, optimizer and `state.json` of every
checkpoint, pictures, settings, and `metrics.jsonl` but for speed and waiting time. Not compared: `README.md`, `environment.json`, TensorBoard's files, and speed and memory in `summary.json`. No process was left, and no file under a temporary name.

{_phases(found)}
{_took(found)}
"""


def _packing(found: Results) -> str:
    return f"""\
## `kill -9` during packing

`afire data pack` of {found["films"]} films on two worker processes ({found["cpu seconds of a pack"]:.0f} CPU seconds undisturbed), {found["kills"]} times killed at
a random moment; every second kill was of the parent alone, and its workers ended by themselves. The same command again gave **{found["identical"]}
of {found["kills"]} packs bit-identical** to the undisturbed one; the films packed are untouched.

{_phases(found)}
{_took(found)}
"""


def _disk(found: Results) -> str:
    if not found["cases"]:
        return f"## A full disk\n\nNot run here: {found['note']}.\n"
    rows = [[one["command"], f"{one['kilobytes']:,} kB", one["said"].replace("|", "/")] for one in found["cases"]]
    table = _table(["command", "disk", "what it said"], rows).replace("---: |\n", "--- |\n")
    return f"""\
## A full disk

A file system of a few kilobytes to megabytes in memory, really full at some point of the command. Each of the {len(rows)} cases ends with
exit code 2 and one sentence; nothing is torn under a final name, checkpoints that were there are whole, and no temporary file is left. Then the
disk gets room and the command (with `--resume` where it has one) ends with what an empty disk gives: the same bits for pre-training, packs
and pictures.

{table}
{_took(found)}
"""


def _mutated(found: Results) -> str:
    kinds = found["kinds"]
    rows = [[name, row["files"], row["read"], row["refused"]] for name, row in kinds.items()]
    rows.append(["**all**", *(sum(row[what] for row in kinds.values()) for what in ("files", "read", "refused"))])
    commands = [
        [
            f"`afire {name}`",
            one["exit code"],
            f"{one['cpu seconds']:.0f} s",
            f"{one['peak_megabytes']:,} MB",
            f"{one['alone']['peak_megabytes']:,} MB",
        ]
        for name, one in found["commands"].items()
    ]
    reasons = [[words, count] for words, count in found["reasons"].items()]
    counts = ", ".join(f"{count} {name}" for name, count in found["detect run counts"].items())
    largest = found["largest difference of a good film's score"]
    same = "the same score to the last bit" if not largest else f"the same score but for rounding ({largest:.0e})"
    return f"""\
## Mutated files

{found["mutants"]} files made from phantom films in {len(FORMATS)} formats (PNG, JPEG, TIFF, BMP; DICOM native, deflated, RLE, JPEG and JPEG 2000) among
{found["good films"]} good ones, through the three commands that meet strangers' files:

{_table(["mutation", "files", "read", "refused"], rows)}
Truncated anywhere; one to eight bits flipped in the first 400 bytes or behind them (a film with a flipped pixel is still a film); films
under another format's ending, and text, noise, archives or nothing under a film's; {len(TAGS) + len(RAW)} lies in DICOM tags, from 65,535 x 65,535 pixels
and a billion frames to NaN slopes, markup in names and sequences 20,000 deep; PNG, TIFF and GIF of kilobytes that would be gigabytes, in
pixels, texts or colour profiles; headers that no film has.

The three commands agree on every file. Each refused one is named once, with a reason, in `offenders.csv` (as unreadable), `pack.json` and `results.json`;
each good film comes out as it does alone: the same measurements, the same packed bits, {same}. No file changed. No text of an
identifying tag is in anything said or written but the DICOM overlays. `data pack` without `--on-error skip` ends at the first with
one sentence and exit code 2.

{_table(["command", "exit code", "CPU time", "memory, largest process", "on the good films alone"], commands)}
`data check` ends with 1 because unreadable films are an error of the set. `detect run` said: {counts}. The
memory is that of the limits: a DICOM bomb is inflated up to 787 million bytes before it is refused, and three PNG bombs stay just
below the 120 million pixels that are allowed and are read, as blank films. `detect run` reads two files at a time in one process.

The most frequent reasons:

{_table(["reason", "files"], reasons)}
{_took(found)}
"""


def _where(results: Results) -> str:
    places = {name: results[name]["where"] for name in results}
    one = next(iter(places.values()))
    packages = ", ".join(f"{name} {number}" for name, number in one["packages"].items())
    loads = ", ".join(f"{name} {place['load']}" for name, place in places.items() if "load" in place)
    return f"""\
## Where

{one["cpu"]}, {one["cores"]} cores, {one["files on"]}, Python {one["python"]}, {packages}; one thread a process. The drills were started one by one (`--only`), some side by side and beside other
work, so minutes say little. Load at the end of each drill: {loads}. Numbers are in `benchmarks/faults.json`.
"""
