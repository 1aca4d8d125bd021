"""How long trials may take: from finished ones, else from two steps of the base on this machine.

Trials in processes side by side: started, watched, stopped, and told about as they end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

from afire.config import Config
from afire.files import write_json
from afire.lesions.synthesis import synthesize_keyed
from afire.methods.afire import AFiRe
from afire.processes import how_it_ended, usable_cores
from afire.studies.ablation_grid import LOG, REQUEST, SPLIT, Study, Trial, relative_cost
from afire.training.engine import StopSignals
from afire.weights.open import pick_device

_FORWARD_SHARE = 0.25  # of a training step: one forward of the encoder, without backward, decoder and head
_PASSES = 2.0  # over the films for probe and detection
_START = 15.0  # to import, open and write


def estimate_seconds(study: Study, trials: Sequence[Trial], workers: Workers) -> dict[str, float]:
    """Seconds of each trial by key."""
    known = [(trial, found) for trial in trials if (found := trial.result()) is not None]
    if known:
        per_cost = [sum(found["seconds"].values()) / relative_cost(trial.config) for trial, found in known]
        return {trial.key: float(np.mean(per_cost)) * relative_cost(trial.config) for trial in trials}
    per_film = _seconds_per_film(study.base, workers)
    films = study.films
    looked_at = _PASSES * _FORWARD_SHARE * sum(films[part] for part in ("train", "val", "test"))
    return {
        trial.key: _START
        + per_film * (trial.config.training.epochs * films["normal"] * relative_cost(trial.config) + looked_at)
        for trial in trials
    }


def _seconds_per_film(config: Config, workers: Workers) -> float:
    """Of one training step: the second of two, on drawn films, with the threads that a trial will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(workers.threads)
    try:
        device = pick_device(workers.device)
        model = AFiRe(config).to(device)
        count, size = config.training.batch_size, config.image.size
        images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        rows = torch.arange(count)
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            lesioned, mask = synthesize_keyed(images, seed=0, epoch=0, indices=rows, config=config.lesions)
            model(images, lesioned, mask).total.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return seconds / (count * relative_cost(config))
    finally:
        torch.set_num_threads(before)


_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_SAVE = 120.0  # a trial that was asked to stop finishes its step and writes a checkpoint
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Workers:
    """How many trials run side by side, with how many threads each, and on which GPUs (none = the CPU)."""

    jobs: int
    threads: int
    device: str
    gpus: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a start of the runner ended: finished and failed trials, and the signal that stopped it (0 = none)."""

    finished: list[Trial] = field(default_factory=list)
    failed: list[tuple[Trial, str]] = field(default_factory=list)
    signal: int = 0


Report = Callable[[Trial, Mapping[str, Any] | None, str, float | None], None]
"""Called as a trial ends: the trial, its result or None, a sentence about its failure, seconds left or None."""


def plan_workers(jobs: int | None, threads: int, device: str, trials: int) -> Workers:
    """One trial a GPU where there are GPUs, else as many as the cores allow; never more than there are trials."""
    gpus = _visible_gpus() if device in ("auto", "cuda") else ()
    if device == "auto" and not gpus:
        # Apple's GPU does not pay for networks of this size, and several processes would share it.
        device = "cpu"
    possible = len(gpus) if gpus else max(1, usable_cores() // threads)
    return Workers(max(1, min(jobs or possible, max(trials, 1))), threads, "cuda" if gpus else device, gpus)


def run_trials(study: Study, trials: Sequence[Trial], workers: Workers, report: Report) -> Outcome:
    """Run all ``trials``; a failing one does not stop the others. SIGINT and SIGTERM let running ones save and end."""
    outcome = Outcome()
    pending = list(trials)
    clock = _Clock(trials, workers.jobs)
    with StopSignals() as stop, _running() as running:
        while (pending or running) and not stop.received:
            free = [slot for slot in range(workers.jobs) if slot not in running]
            for slot in free[: len(pending)]:
                running[slot] = _start(study, pending.pop(0), workers, slot)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for slot, process in list(running.items()):
                code = process.handle.poll()
                if code is None:
                    continue
                del running[slot]
                process.close()
                _note(process, code, outcome, clock, report)
        outcome.signal = stop.received
    return outcome


class _Process:
    """A running trial: its process, the pipe that keeps it alive, its log."""

    def __init__(self, trial: Trial, handle: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.trial, self.handle, self.log = trial, handle, log
        self.started = time.monotonic()

    def close(self) -> None:
        if self.handle.stdin is not None:
            self.handle.stdin.close()
        self.log.close()


class _Clock:
    """Seconds left, from the trials that have ended in this start, weighted by what they cost."""

    def __init__(self, trials: Sequence[Trial], jobs: int) -> None:
        self.left = {trial.key: relative_cost(trial.config) for trial in trials}
        self.jobs = jobs
        self.seconds = self.cost = 0.0

    def ended(self, trial: Trial, seconds: float) -> None:
        self.cost += self.left.pop(trial.key)
        self.seconds += seconds

    def remaining(self) -> float | None:
        if not self.left or not self.cost:
            return None
        return self.seconds / self.cost * sum(self.left.values()) / min(self.jobs, len(self.left))


@contextmanager
def _running() -> Iterator[dict[int, _Process]]:
    """The running trials by slot; whatever ends the block ends them: asked first, then made to."""
    running: dict[int, _Process] = {}
    try:
        yield running
    finally:
        for process in running.values():
            process.handle.terminate()
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        for process in running.values():
            try:
                process.handle.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.handle.kill()
                process.handle.wait()
            process.close()


def _start(study: Study, trial: Trial, workers: Workers, slot: int) -> _Process:
    trial.folder.mkdir(parents=True, exist_ok=True)
    request = {
        "key": trial.key,
        "name": trial.rows[0],
        "config": trial.config.model_dump(),
        "data": str(study.data),
        "root": str(study.root) if study.root else None,
        "split": str((study.out / SPLIT).resolve()),
        "labels": study.labels,
        "device": workers.device,
    }
    write_json(trial.folder / REQUEST, request)
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(workers.threads))}
    if workers.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = workers.gpus[slot % len(workers.gpus)]
    log = (trial.folder / LOG).open("ab")
    # A session of its own: Ctrl-C reaches this process only, which then asks the trials to save.
    handle = subprocess.Popen(
        [sys.executable, "-m", "afire.studies.ablation_trial", str(trial.folder.resolve())],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    return _Process(trial, handle, log)


def _note(process: _Process, code: int, outcome: Outcome, clock: _Clock, report: Report) -> None:
    trial = process.trial
    result = trial.result()  # what decides is the file: the next start will look at nothing else
    clock.ended(trial, time.monotonic() - process.started)
    sentence = "" if result is not None else how_it_ended(trial.folder / LOG, code)
    if result is not None:
        outcome.finished.append(trial)
    else:
        outcome.failed.append((trial, sentence))
    report(trial, result, sentence, clock.remaining())


def _visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    if not torch.cuda.is_available():
        return ()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(torch.cuda.device_count())))
