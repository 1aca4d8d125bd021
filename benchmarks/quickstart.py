"""Follow the quickstart as a new user would and time each step: clone, the README's commands, then one per docs page.

    python benchmarks/quickstart.py --films FOLDER --kind lungmasks --out OUT [--without-tests] [--page FILE]

FOLDER takes the place of FILMS in the README; ``--kind`` replaces its `folder` where the films come with labels or
masks. Everything happens in an empty folder with its own virtual environment, and only with commands that the pages
give. The run stops at the first step that fails; started again, it continues with that step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from timing import machine

ROOT = Path(__file__).resolve().parents[1]
LEAST_FILMS = 12  # given to `detect run` as new ones


@dataclass(frozen=True)
class TimedStep:
    page: str
    command: str
    seconds: float


def readme_commands(text: str) -> list[str]:
    """The commands in the section *Your films*, without comments."""
    chapter = text.split("## Your films", 1)[1]
    block = re.search(r"^```\n(.*?)^```", chapter, re.MULTILINE | re.DOTALL)
    assert block is not None, "the README has no block of commands under Your films"
    return [shlex.join(shlex.split(line, comments=True)) for line in block[1].splitlines() if line.strip()]


# One command from each page of docs/ that builds on the README's files.
DOCS = (
    ("stats", "afire data stats --data films.parquet"),
    ("lesions", "afire lesions preview --data pack --out lesions.png"),
    ("embed", "afire embed --weights runs/first --data pack --out features.parquet"),
    (
        "probe",
        "afire probe --weights random --preset small --data pack --split splits/split.json --out results/probe-random",
    ),
    ("compare", "afire compare results/probe-random results/probe --out tables"),
    (
        "finetune",
        "afire finetune --weights runs/first --data pack --split splits/split.json --recipe quick --seeds 0 "
        "--set training.epochs=5 --out results/finetune",
    ),
    (
        "segment",
        "afire segment --weights runs/first --data pack --split splits/split.json --recipe lungs --seeds 0 "
        "--set training.epochs=5 --out results/segment",
    ),
    ("detect", "afire detect eval --model detector --data pack --split splits/split.json --out results/detect"),
    ("figures", "afire figure tsne --weights AFiRe=runs/first --weights random --data pack --out figures/tsne"),
    ("figures", "afire figure restorations --weights runs/first --data pack --films 50 --out figures/restorations"),
    ("export", "afire export runs/first --out bundle --licence apache-2.0 --name first"),
    ("export", "afire verify bundle"),
)


def run(films: Path, kind: str, out: Path, tests: bool) -> list[TimedStep]:
    out.mkdir(parents=True, exist_ok=True)
    clone = out / "afire"
    steps = [("README", f"git clone {shlex.quote(str(ROOT))} afire", out), ("README", "make demo", clone)]
    steps += [("README", "make test", clone)] if tests else []
    own = out / "own"
    steps.append(("README", f"{shlex.quote(sys.executable)} -m venv own", out))
    for command in readme_commands((ROOT / "README.md").read_text(encoding="utf-8")):
        place = clone if command.startswith("pip") else own
        command = command.replace("build folder", f"build {kind}").replace("NEW_FILMS", "new")
        steps.append(("README", command.replace("FILMS", shlex.quote(str(films))), place))
    steps += [(f"docs/{page}.md", command, own) for page, command in DOCS]
    done = out / "steps.jsonl"
    timed = [TimedStep(**json.loads(line)) for line in done.read_text().splitlines()] if done.exists() else []
    for page, command, place in steps[len(timed) :]:
        if "detect run" in command:
            _new_films(films, own / "new")
        one = _step(page, command, place, out)
        timed.append(one)
        with done.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(vars(one)) + "\n")
        print(f"{one.seconds:7.1f} s  {command}", flush=True)
    return timed


def _new_films(films: Path, new: Path) -> None:
    """Copy a few films, as if a hospital had sent them."""
    new.mkdir(exist_ok=True)
    found = sorted(path for path in films.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg", ".dcm"))
    found = [path for path in found if "mask" not in path.relative_to(films).as_posix().lower()]
    for path in found[:: max(1, len(found) // LEAST_FILMS)][:LEAST_FILMS]:
        shutil.copy(path, new)


def _step(page: str, command: str, place: Path, out: Path) -> TimedStep:
    path = f"{out / 'own' / 'bin'}:{Path('/usr/bin')}:{Path('/bin')}:{Path(sys.executable).resolve().parent}"
    environment = {**os.environ, "PATH": path}
    environment.pop("VIRTUAL_ENV", None)
    start = time.perf_counter()
    done = subprocess.run(
        ["sh", "-c", command], cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.perf_counter() - start
    with (out / "quickstart.log").open("a", encoding="utf-8") as log:
        log.write(f"$ {command}\n{done.stdout}\n")
    if done.returncode and not ("data check" in command and done.returncode == 1):  # 1: it found errors in the films
        sys.exit(f"`{command}` failed with exit code {done.returncode}:\n{done.stdout[-2000:]}")
    return TimedStep(page, command, seconds)


FIXED = """\
- Installation failed with Python 3.11.2: a pinned package needs 3.11.5. Each pin now names the first patch release
  that its package supports.
- `afire data stats` ended with `normal: 1 without tuberculosis, 0 with it`, which reads like a count. It explains what
  the column means, and the output now makes that clear.
"""
PAGE = """\
# Quickstart, with times

From a fresh clone in an empty folder: the commands of the README, unchanged, then one command from each page that
builds on them. The films are {films}; more films take longer. `make demo` and `make test` use generated films.

| from | command | time |
|---|---|---|
{rows}

{total} in all, wall-clock time, including installation and downloads from a nearby package index: {cpu}, {cores} cores,
no GPU, Python {python}, torch {torch}. The command below writes this page and stops at the first step that fails:

```
python benchmarks/quickstart.py --films FOLDER --kind KIND --out OUT --page docs/quickstart.md
```

What went wrong on the first try, and is fixed:

{fixed}"""


def pythons(out: Path) -> str:
    """Versions of the interpreters used: by `make`, and in the virtual environment."""
    tell = "import platform; print(platform.python_version())"
    places = (out / "afire" / ".venv" / "bin" / "python", out / "own" / "bin" / "python")
    found = [subprocess.run([place, "-c", tell], check=True, capture_output=True, text=True).stdout for place in places]
    return " and ".join(sorted({one.strip() for one in found}))


def write_page(timed: list[TimedStep], films: str, python: str) -> str:
    rows = [f"| {one.page} | `{_plain(one.command)}` | {_time(one.seconds)} |" for one in timed]
    total = _time(sum(one.seconds for one in timed))
    return PAGE.format(rows="\n".join(rows), total=total, films=films, fixed=FIXED, **{**machine(), "python": python})


def _plain(command: str) -> str:
    """Without paths of this machine."""
    words = command.replace(str(ROOT), "URL").split()
    return " ".join(
        "python3" if "python" in Path(word).name and "/" in word else Path(word).name if word.startswith("/") else word
        for word in words
    ).replace("|", "\\|")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)}:{int(seconds % 60):02d} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--films", type=Path, required=True)
    parser.add_argument("--kind", default="folder")
    parser.add_argument("--called", default="a folder", help="what the page says of the films")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, or that of a run to continue")
    parser.add_argument("--without-tests", action="store_true")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    timed = run(given.films.resolve(), given.kind, given.out.resolve(), not given.without_tests)
    text = write_page(timed, given.called, pythons(given.out.resolve()))
    (given.page or given.out / "quickstart.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
