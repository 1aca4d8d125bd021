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
- A full disk during `afire data pack` killed the process with SIGBUS: pixels were written through a memory map, and the system
  kills a process when it cannot extend the file behind the map. They are now written as a file; a full disk gives an error message
  and exit code 2.
- A run of `afire pretrain` that was killed between its last checkpoint and its summary resumed with the right weights, but its
  `summary.json` and `README.md` had no losses and no health. Both are now stored in the checkpoint, as is the number of red epochs
  for `run.stop_on_collapse`.
- Temporary files (`.part-...`) remained after a kill in the middle of a write. The next command that uses the folder now removes them.
- The message about a full disk had no path for small files, in `afire data pack`, and for the pictures and the journal of
  `afire detect run`; in `afire export` it did not say what to do.
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
    parts.append(f"## Bugs found with it\n\nAll fixed, each with a test.\n\n{DEFECTS}")
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
# Faults: kills, full disks and damaged files

```
python benchmarks/faults.py
```

This command kills runs, fills disks and corrupts files, checks that nothing crashes, hangs or gets lost and that every bad file is
reported, and stops with an error at the first failure. It writes this page. A short version (one kill each, two dozen corrupted files)
is part of the tests.
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

{found["drills"]} runs of the `tiny` preset ({found["steps"]} steps, {found["cpu seconds of a run"]:.0f} CPU seconds uninterrupted, a checkpoint after every
step), each killed with all its processes at a random moment, start and end included, {found["kills"]} kills in all, and resumed until
done. In every fifth run the kill waited until a checkpoint was being written, or the end. **{found["identical"]} of {found["drills"]} are
bit-identical** to the uninterrupted run: weights of student, teacher and decoder, prototypes, optimizer and `state.json` of every
checkpoint, pictures, settings, and `metrics.jsonl` except for speed and waiting time. Not compared: `README.md`, `environment.json`, TensorBoard's files, and speed and memory in `summary.json`. No process and no temporary file was left.

{_phases(found)}
{_took(found)}
"""


def _packing(found: Results) -> str:
    return f"""\
## `kill -9` during packing

`afire data pack` of {found["films"]} films on two worker processes ({found["cpu seconds of a pack"]:.0f} CPU seconds uninterrupted), killed {found["kills"]} times at
a random moment; every second kill hit only the parent, and its workers ended by themselves. Running the same command again gave **{found["identical"]}
of {found["kills"]} packs bit-identical** to the uninterrupted one; the original films were unchanged.

{_phases(found)}
{_took(found)}
"""


def _disk(found: Results) -> str:
    if not found["cases"]:
        return f"## A full disk\n\nNot run here: {found['note']}.\n"
    rows = [[one["command"], f"{one['kilobytes']:,} kB", one["message"].replace("|", "/")] for one in found["cases"]]
    table = _table(["command", "disk", "message"], rows).replace("---: |\n", "--- |\n")
    return f"""\
## A full disk

A file system of a few kilobytes to megabytes in memory that fills up during the command. Each of the {len(rows)} cases ends with exit code 2 and
one message; no truncated file has a final name, existing checkpoints are complete, and no temporary file is left. After
space is freed, the command (with `--resume` if it has it) gives the same result as on an empty disk, bit-identical for pre-training,
packs and pictures.

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
    reasons = [[reason, count] for reason, count in found["reasons"].items()]
    counts = ", ".join(f"{count} {name}" for name, count in found["detect run counts"].items())
    largest = found["largest difference of a good film's score"]
    same = "the same score to the last bit" if not largest else f"the same score but for rounding ({largest:.0e})"
    return f"""\
## Mutated files

{found["mutants"]} files made from phantom films in {len(FORMATS)} formats (PNG, JPEG, TIFF, BMP; DICOM native, deflated, RLE, JPEG and JPEG 2000) among
{found["good films"]} intact ones, read by the three commands that take unknown files:

{_table(["mutation", "files", "read", "refused"], rows)}
Files were truncated anywhere; one to eight bits were flipped in the first 400 bytes or after them (a film with a flipped pixel is still a
film); films were given another format's extension, and text, noise, archives or empty files a film's extension; DICOM tags were falsified in {len(TAGS) + len(RAW)} ways,
from 65,535 x 65,535 pixels and a billion frames to NaN slopes, markup in names and sequences 20,000 deep; PNG, TIFF and GIF files of kilobytes
expand to gigabytes of pixels, text or colour profiles; headers have impossible values.

The three commands agree on every file. Each refused file is listed once, with a reason, in `offenders.csv` (as unreadable), `pack.json` and `results.json`;
each intact film gives the same output as without the damaged ones: the same measurements, the same packed bits, {same}. No file was changed. Apart from the DICOM
overlays, no output contains text from an identifying tag. `data pack` without `--on-error skip` stops at the first bad file with one message and exit code 2.

{_table(["command", "exit code", "CPU time", "memory, largest process", "intact films only"], commands)}
`data check` exits with 1 because unreadable films are an error. `detect run` counted: {counts}. Memory is determined by the
limits: a DICOM bomb is inflated up to 787 million bytes before it is refused, and three PNG bombs stay just
below the limit of 120 million pixels and are read as blank films. `detect run` reads two files at a time in one process.

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

{one["cpu"]}, {one["cores"]} cores, {one["files on"]}, Python {one["python"]}, {packages}; one thread per process. The drills were started separately (`--only`), some in parallel and next to other
work, so the minutes mean little. Load at the end of each drill: {loads}. Numbers are in `benchmarks/faults.json`.
"""
