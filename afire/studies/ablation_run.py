"""Trials of an ablation side by side: on which cores or GPUs, as steps of their own, and how long they may take."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from afire.config import Config
from afire.files import write_json
from afire.methods import make_method
from afire.methods.base import Keys
from afire.processes import usable_cores
from afire.progress import format_seconds
from afire.studies.ablation_grid import LOG, MAIN_SCORE, REQUEST, SPLIT, Study, Trial, relative_cost
from afire.studies.steps import Command, Outcome, Report, Step, run_steps
from afire.weights import pick_device

_FORWARD_SHARE = 0.25  # of a training step: one forward of the encoder, without backward, decoder and head
_PASSES = 5.0  # over the films for probe and detection
_START = 15.0  # to import, open and write
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Workers:
    """How many trials run side by side, with how many threads each, and on which GPUs (none = the CPU)."""

    jobs: int
    threads: int
    device: str
    gpus: tuple[str, ...] = ()


def plan_workers(jobs: int | None, threads: int, device: str, trials: int) -> Workers:
    """One trial a GPU where there are GPUs, else as many as the cores allow; never more than there are trials."""
    gpus = _visible_gpus() if device in ("auto", "cuda") else ()
    if device == "auto" and not gpus:
        # Apple's GPU does not pay for networks of this size, and several processes would share it.
        device = "cpu"
    possible = len(gpus) if gpus else max(1, usable_cores() // threads)
    return Workers(max(1, min(jobs or possible, max(trials, 1))), threads, "cuda" if gpus else device, gpus)


def _visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if not torch.cuda.is_available():
        return ()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(torch.cuda.device_count())))


class TrialStep(Step):
    """A trial in a process of its own (:mod:`afire.studies.ablation_trial`)."""

    def __init__(self, study: Study, trial: Trial, workers: Workers) -> None:
        self.study, self.trial, self.workers = study, trial, workers
        self.name, self.cost = trial.name, relative_cost(trial.config)

    def is_done(self) -> bool:
        return self.trial.result() is not None  # not the exit code: the next start will look at nothing else

    def command(self, slot: int) -> Command:
        trial, workers = self.trial, self.workers
        write_json(trial.folder / REQUEST, self._request())
        environment = dict.fromkeys(_THREAD_VARIABLES, str(workers.threads))
        if workers.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = workers.gpus[slot % len(workers.gpus)]
        words = (str(trial.folder.resolve()),)
        return Command(
            words,
            trial.folder / LOG,
            trial.folder,
            module="afire.studies.ablation_trial",
            environment=environment,
        )

    def _request(self) -> dict[str, Any]:
        study, trial = self.study, self.trial
        return {
            "key": trial.key,
            "name": trial.rows[0],
            "config": trial.config.model_dump(),
            "data": str(study.data),
            "root": str(study.root) if study.root else None,
            "split": str((study.out / SPLIT).resolve()),
            "labels": study.labels,
            "device": self.workers.device,
        }

    def seconds(self) -> float:
        result = self.trial.result()
        return float(sum(result["seconds"].values())) if result is not None else 0.0

    def summary(self) -> str:
        result = self.trial.result()
        assert result is not None
        probe, detection = result["probe"].get("auc", math.nan), result["detection"][MAIN_SCORE]
        return f"probe AUC {probe:.3f}, detection AUC {detection:.3f}, {format_seconds(self.seconds())}"


def run_trials(study: Study, trials: Sequence[Trial], workers: Workers, report: Report) -> Outcome:
    """Run all ``trials``; a failing one does not stop the others. SIGINT and SIGTERM let running ones save and end."""
    return run_steps([TrialStep(study, trial, workers) for trial in trials], report, jobs=workers.jobs)


def estimate_seconds(study: Study, trials: Sequence[Trial], workers: Workers) -> dict[str, float]:
    """Seconds of each trial by key: from finished ones, else from two steps of the base on this machine."""
    finished = [(trial, result) for trial in trials if (result := trial.result()) is not None]
    if finished:
        per_cost = [sum(result["seconds"].values()) / relative_cost(trial.config) for trial, result in finished]
        return {trial.key: float(np.mean(per_cost)) * relative_cost(trial.config) for trial in trials}
    per_film = _seconds_per_film(study.base, workers)
    films = study.films
    looked_at = _PASSES * _FORWARD_SHARE * sum(films[subset] for subset in ("train", "val", "test"))
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
        model = make_method(config).to(device)
        count, size = config.training.batch_size, config.image.size
        images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        keys = Keys(config.seed, 0, 0, torch.arange(count))
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            torch.autograd.backward(model.losses(model(model.views(images, keys))).total)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return seconds / (count * relative_cost(config))
    finally:
        torch.set_num_threads(before)
