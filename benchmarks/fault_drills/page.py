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
- A run of `afire pretrain` killed between its last checkpoint and its summary resumed with the right weights, but without losses and
  health in `summary.json` and `README.md`. Both are now stored in the checkpoint, as is the number of red epochs for
  `run.stop_on_collapse`.
- Temporary files (`.part-...`) remained after a kill during a write. The next command that uses the folder now removes them.
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

This command kills runs, fills disks and corrupts files. It checks that nothing crashes, hangs or gets lost and that every bad file is
reported, stops with an error at the first failure, and writes this page. A short version (one kill each, two dozen corrupted files)
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
step). Each was killed with all its processes at a random moment, including start and end, and resumed until done: {found["kills"]} kills in all. In every
fifth run, the kill waited for the writing of a checkpoint, or for the end. **{found["identical"]} of {found["drills"]} are bit-identical** to the uninterrupted run. No process and
no temporary file was left.

- Compared: weights of student, teacher and decoder, prototypes, optimizer and `state.json` of every checkpoint, pictures, settings, and
  `metrics.jsonl` except for speed and waiting time.
- Not compared: `README.md`, `environment.json`, TensorBoard's files, and speed and memory in `summary.json`.

{_phases(found)}
{_took(found)}
"""


def _packing(found: Results) -> str:
    return f"""\
## `kill -9` during packing

`afire data pack` of {found["films"]} films on two worker processes ({found["cpu seconds of a pack"]:.0f} CPU seconds uninterrupted), killed {found["kills"]} times at
a random moment. Every second kill hit only the parent; its workers then ended by themselves. After running the same command again, **{found["identical"]}
of {found["kills"]} packs were bit-identical** to the uninterrupted one, and the original films were unchanged.

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

A file system in memory, of a few kilobytes to megabytes, fills up during the command. Each of the {len(rows)} cases ends with exit code 2 and
one message. No truncated file has a final name, existing checkpoints are complete, and no temporary file is left. After
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
{found["good films"]} intact ones, read by the three commands that accept unknown files:

{_table(["mutation", "files", "read", "refused"], rows)}
- Truncated: anywhere in the file.
- Bits flipped: one to eight, in the first 400 bytes or after them. A film with a flipped pixel is still a film.
- Wrong extension: films with another format's extension; text, noise, archives or empty files with a film's extension.
- Hostile DICOM tags: falsified in {len(TAGS) + len(RAW)} ways, from 65,535 x 65,535 pixels and a billion frames to NaN slopes, markup in names and
  sequences 20,000 deep.
- Zip bomb: PNG, TIFF and GIF files of kilobytes that expand to gigabytes of pixels, text or colour profiles.
- Absurd header: impossible values.

The three commands agree on every file. Each refused file is listed once, with a reason, in `offenders.csv` (as unreadable), `pack.json` and `results.json`.
Each intact film gives the same output as without the damaged ones: the same measurements, the same packed bits, {same}. No file was changed. Apart from the DICOM
overlays, no output contains text from an identifying tag. `data pack` without `--on-error skip` stops at the first bad file with one message and exit code 2.

{_table(["command", "exit code", "CPU time", "memory, largest process", "intact films only"], commands)}
`data check` exits with 1 because unreadable films are an error. `detect run` counted: {counts}. The limits determine the
memory: a DICOM bomb is inflated up to 787 million bytes before it is refused, and three PNG bombs stay just
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

{one["cpu"]}, {one["cores"]} cores, {one["files on"]}, Python {one["python"]}, {packages}; one thread per process. The drills were started separately (`--only`), some in parallel and on a busy machine,
so the minutes mean little. Load at the end of each drill: {loads}. Numbers are in `benchmarks/faults.json`.
"""
