"""How well `afire pretrain` uses the machine: the command against its bare step, and two processes against one.

    python benchmarks/scaling.py [--json FILE]

Goals: images/s of the whole command at least 95 % of the bare step (same batch, same threads), and two processes of
one thread at least 1.8 times one process of one thread. Every run makes the same number of steps, so two processes
see twice as many films, and the first step, the health check and the checkpoint weigh the same in both. Two
independent bare steps at once, against one, show the limit of the machine. All in alternation; what is compared with is
measured before and after, and both together are one value: with the better of two it would have more chances. The
fastest round of each counts. The images are noise: only their size matters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import numpy as np
import pandas as pd
import torch
from figures import Figure, Findings, Table, digits
from timing import machine, report

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.settings import load_config
from afire.training.engine import make_optimizer

STEPS, BATCH, SIZE = 30, 32, 128  # enough steps that the first one and the last checkpoint weigh little
LOOP_GOAL, PAIR_GOAL = 0.95, 1.8
SETTINGS = ["training.epochs=1", "run.picture_epochs=0", f"image.size={SIZE}"]


def make_pack(folder: Path, films: int) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / "films").mkdir(parents=True)
    names = [f"{index:04d}.png" for index in range(films)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (SIZE, SIZE), dtype=np.uint8)).save(folder / "films" / name)
    pack(make_manifest(pd.DataFrame({"image": names}), folder / "films"), folder / "pack", PackSettings(size=SIZE))
    return folder / "pack"


def whole_command(data: Path, out: Path, processes: int, threads: int, batch: int) -> float:
    """Images per second that the run itself reports."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    settings = [word for s in [*SETTINGS, f"training.batch_size={batch}"] for word in ("--set", s)]
    command = [
        *start,
        "afire",
        "pretrain",
        "--data",
        str(data),
        "--out",
        str(out),
        "--preset",
        "small",
        "-q",
        *settings,
    ]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return float(json.loads((out / "summary.json").read_text())["images_per_second"])


def bare_step(config: Config, steps: int) -> float:
    """Images per second of lesions, losses, backward, clip, AdamW and EMA on one batch in memory."""
    model = AFiRe(config).train()
    optimizer = make_optimizer(model.parameters_of("all"), config.training)
    images = torch.rand(BATCH, 1, SIZE, SIZE)
    keys = Keys(0, 0, 0, torch.arange(BATCH))

    def step() -> None:
        losses = model.losses(model(model.views(images, keys)))
        torch.autograd.backward(losses.total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        model.after_step(losses)

    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * BATCH / (time.perf_counter() - start)


def bare_processes(count: int, steps: int) -> float:
    """Images per second of so many bare steps at once, a process of one thread each."""
    command = [sys.executable, __file__, "--bare", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in started)


def bare_here(steps: int) -> None:
    """In a process of :func:`bare_processes`: get ready, wait for the signal, then report images per second."""
    config = load_config("small", overrides=[*SETTINGS, f"training.batch_size={BATCH}"])
    bare_step(config, 1)
    print("ready", flush=True)
    sys.stdin.readline()
    print(bare_step(config, steps), flush=True)


def run(rounds: int, length: int) -> dict[str, Any]:
    config = load_config("small", overrides=[*SETTINGS, f"training.batch_size={BATCH}"])
    threads = torch.get_num_threads()
    steps = max(1, length // 2)  # before and after: together as many as the command makes
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        data = make_pack(Path(name) / "data", length * BATCH)
        twice = make_pack(Path(name) / "twice", 2 * length * BATCH)
        for number in range(rounds):
            out = Path(name) / f"round{number}"
            found = {
                "bare": bare_step(config, steps),
                "loop": whole_command(data, out / "loop", 1, threads, BATCH),
                "bare again": bare_step(config, steps),
                "one process": whole_command(data, out / "one", 1, 1, BATCH),
                "two processes": whole_command(twice, out / "two", 2, 1, 2 * BATCH),
                "one process again": whole_command(data, out / "again", 1, 1, BATCH),
                "one bare": bare_processes(1, steps),
                "two bare": bare_processes(2, steps),
            }
            for key in found:
                if not key.endswith(" again"):
                    taken.setdefault(key, []).append(harmonic_mean([found[key], found.get(f"{key} again", found[key])]))

    def ratio(of: str, to: str) -> float:
        """Of the fastest runs: the machine slows down for minutes, which hits two processes more often than one."""
        return round(max(taken[of]) / max(taken[to]), 3)

    loop, scaling = ratio("loop", "bare"), ratio("two processes", "one process")
    return {
        "machine": machine(),
        "preset": f"small, {SIZE} px, batch {BATCH} per process",
        **{f"{key}, images/s": round(max(values), 1) for key, values in taken.items()},
        "all, images/s": {key: [round(value, 1) for value in values] for key, values in taken.items()},
        "loop / bare step": loop,
        "goal for the loop": f"at least {LOOP_GOAL}: {'met' if loop >= LOOP_GOAL else 'missed'}",
        "two processes / one": scaling,
        "goal for two processes": f"at least {PAIR_GOAL}: {'met' if scaling >= PAIR_GOAL else 'missed'}",
        "two bare steps at once / one": ratio("two bare", "one bare"),
    }


def measure(quick: bool = False) -> Findings:
    found = run(1 if quick else 3, 2 if quick else STEPS)
    threads = torch.get_num_threads()
    figures = [
        Figure("images/s, `afire pretrain` / bare step", found["loop / bare step"], "share", LOOP_GOAL),
        Figure("images/s, two processes / one, one thread each", found["two processes / one"], "x", PAIR_GOAL),
        Figure("images/s, two separate bare steps at once / one", found["two bare steps at once / one"], "x"),
    ]
    names = {
        "bare": ("bare step", 1, threads),
        "loop": ("`afire pretrain`", 1, threads),
        "one process": ("`afire pretrain`", 1, 1),
        "two processes": ("`afire pretrain`", 2, 1),
        "one bare": ("bare step", 1, 1),
        "two bare": ("independent bare steps", 2, 1),
    }
    rows = [
        [what, str(processes), str(each), digits(found[f"{key}, images/s"])]
        for key, (what, processes, each) in names.items()
    ]
    for row, key in zip(rows, names, strict=True):
        row.append(", ".join(map(digits, found["all, images/s"][key])))
    columns = ["", "processes", "threads each", "images/s", "all rounds"]
    table = Table(f"Preset {found['preset']}", columns, rows)
    return Findings(figures, [table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3, help="in turns; the fastest of each counts")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)  # a process of bare_processes
    options = parser.parse_args()
    if options.bare:
        bare_here(options.bare)
        return
    report(run(options.rounds, STEPS), options.json)


if __name__ == "__main__":
    main()
