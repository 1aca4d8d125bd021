"""Trials of an ablation: side by side on cores or GPUs, and what one trial does in a process of its own.

``python -m afire.studies.ablation_run FOLDER`` is that process, started as a step (:mod:`afire.studies.steps`), so that
a crash or a kill ends one trial and no other: train, probe, detect, and last of all ``trial.json``. How long it took
over all of its starts is kept beside it: a kill loses seconds and not minutes.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from afire import progress
from afire._version import __version__
from afire.config import Config
from afire.data.pack import Films, open_films
from afire.data.splits import Split, read_split
from afire.detect.fit import unadapted
from afire.detect.localise import CHOSEN, score_films
from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json
from afire.methods import make_method
from afire.methods.base import Keys
from afire.processes import usable_cores
from afire.progress import format_seconds
from afire.settings import changed, validate
from afire.studies.ablation_grid import (
    DETECTED_BY,
    DETECTION,
    FORMAT,
    LOG,
    MAIN_SCORE,
    PROBE,
    REQUEST,
    RUN,
    SPLIT,
    TRIAL,
    Study,
    Trial,
    detection_rows,
    relative_cost,
)
from afire.studies.steps import Command, Outcome, Report, Step, run_steps
from afire.tasks.experiment import StoppedBySignal
from afire.tasks.metrics import auc
from afire.tasks.probe import ProbeTask, run_probe
from afire.tasks.results import write_result
from afire.training.batches import normal_training_rows
from afire.training.pretrain import pretrain
from afire.training.run_folder import SUMMARY, RunFolder, environment
from afire.weights import open_weights, pick_device

CLOCK = "seconds.json"
_SECONDS_BETWEEN_WRITES = 5.0
_FORWARD_SHARE = 0.25  # of a training step: one forward of the encoder, without backward, decoder and head
_PASSES = 5.0  # over the films for probe and detection
_START = 15.0  # to import, open and write
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A trial's run is one of many: no pictures, and one checkpoint is enough to go on from.
_QUIET = {"picture_epochs": 0, "probe_epochs": 0, "keep_checkpoints": 1, "checkpoint_epochs": 1}
_RUN_SETTINGS = {**_QUIET, "tracking": ["tensorboard"]}

logger = logging.getLogger("afire")


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
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names or map(str, range(torch.cuda.device_count())))


class TrialStep(Step):
    """A trial in a process of its own: :func:`main` of this module."""

    def __init__(self, study: Study, trial: Trial, workers: Workers) -> None:
        self.study, self.trial, self.workers = study, trial, workers
        self.name, self.cost = trial.name, relative_cost(trial.config)

    def is_done(self) -> bool:
        return self.trial.result() is not None  # not the exit code: the next start reads this file as well

    def command(self, slot: int) -> Command:
        trial, workers = self.trial, self.workers
        write_json(trial.folder / REQUEST, self._request())
        environment = dict.fromkeys(_THREAD_VARIABLES, str(workers.threads))
        if workers.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = workers.gpus[slot % len(workers.gpus)]
        arguments = (str(trial.folder.resolve()),)
        return Command(
            arguments, trial.folder / LOG, trial.folder, module="afire.studies.ablation_run", environment=environment
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
    threads = torch.get_num_threads()
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
        torch.set_num_threads(threads)


class TrialClock:
    """Seconds spent on each stage of a trial, those of earlier starts included.

    Work lost by a kill counts too: the sum is what the trial cost.
    """

    def __init__(self, folder: Path, between_writes: float = _SECONDS_BETWEEN_WRITES) -> None:
        self.path, self.between_writes = folder / CLOCK, between_writes
        self._before = _spent_before(self.path)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block towards ``name``, written every few seconds while it runs."""
        started, end = time.monotonic(), threading.Event()
        earlier_seconds = self._before.get(name, 0.0)

        def note() -> None:
            self._before[name] = earlier_seconds + time.monotonic() - started
            write_json(self.path, {stage: round(seconds, 2) for stage, seconds in self._before.items()})

        def keep() -> None:
            while not end.wait(self.between_writes):
                note()

        writer = threading.Thread(target=keep, daemon=True)
        writer.start()
        try:
            yield
        finally:
            end.set()
            writer.join()
            note()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return {name: round(value, 2) for name, value in self._before.items()}


def _spent_before(path: Path) -> dict[str, float]:
    """What earlier starts spent; nothing where there were none or the file is damaged."""
    try:
        seconds = read_json(path)
    except UserError:
        return {}
    return {str(stage): float(value) for stage, value in seconds.items()} if isinstance(seconds, dict) else {}


def run_trial(folder: Path) -> None:
    """Do what ``request.json`` in ``folder`` asks, going on where an earlier try ended, and write ``trial.json``."""
    request = read_json(folder / REQUEST)
    config = changed(validate(request["config"], Config), {"run": _RUN_SETTINGS})
    root = Path(request["root"]) if request["root"] else None
    data, split = Path(request["data"]), read_split(Path(request["split"]))
    films = open_films(data, root, config.image.size, config.image.fit, config.image.voi)
    clock = TrialClock(folder)
    with clock.stage("train"):
        summary = _train(folder / RUN, config, films, split, data.name, request["device"])
    with clock.stage("probe"):
        probe = _probe(folder, config, data, root, split, request)
    with clock.stage("detection"):
        detection = _detect(folder, films, split, request["device"])
    state = environment()
    write_json(
        folder / TRIAL,
        {
            "format": FORMAT,
            "key": request["key"],
            "name": request["name"],
            "seed": config.seed,
            "config": config.model_dump(exclude={"run"}),
            "probe": probe,
            "detection": detection,
            "detected_by": DETECTED_BY,
            "losses": summary["losses"],
            "health": summary["health"],
            "parameters": summary["parameters"],
            "seconds": clock.seconds(),
            "epochs": config.training.epochs,
            "afire": __version__,
            "machine": {name: state[name] for name in ("system", "cores", "gpus", "python", "git")},
            "torch": state["packages"].get("torch"),
        },
    )


def _train(out: Path, config: Config, films: Films, split: Split, source: str, device: str) -> dict[str, Any]:
    """Train, or go on with a begun training; the run's summary."""
    summary = _summary(out)
    if summary is None:
        rows, message = normal_training_rows(films.manifest, split)
        logger.info("%s", message)
        resume = RunFolder(out).exists
        result = pretrain(config, films, out, rows, source=source, resume=resume, device=device)
        if result.status == "stopped":
            raise StoppedBySignal(result.signal, out)
        summary = read_json(out / SUMMARY)
    return dict(summary)


def _summary(out: Path) -> dict[str, Any] | None:
    """The summary of a finished training, else None."""
    if not (out / SUMMARY).exists():
        return None
    summary = read_json(out / SUMMARY)
    return dict(summary) if summary["status"] == "finished" else None


def _probe(
    folder: Path, config: Config, data: Path, root: Path | None, split: Split, request: dict[str, Any]
) -> dict[str, float]:
    """The linear probe of the trained teacher; its metrics on the test films."""
    task = ProbeTask(
        weights=str(folder / RUN),
        data=data,
        root=root,
        split=split,
        labels=request["labels"],
        seeds=[config.seed],
        name=request["name"],
        device=request["device"],
    )
    _, (result, predictions) = next(run_probe(task))
    write_result(folder / PROBE, result, predictions)
    return {name: value for name, value in result.runs[0].metrics.items() if value == value}


def _detect(folder: Path, films: Films, split: Split, device: str) -> dict[str, float]:
    """AUC of each score of the detector, without adaptation, on the test films; the scores stay beside it."""
    normal = normal_training_rows(films.manifest, split)[0]
    rows, abnormal = detection_rows(films, split.rows(films.manifest)["test"])
    detector = unadapted(open_weights(folder / RUN), films, normal, device)
    scores, _ = score_films(detector, films, rows, "test films")
    del scores[CHOSEN]  # nothing was chosen
    table = films.manifest.table.iloc[rows][["image", "patient"]].reset_index(drop=True)
    table = pd.concat([table, pd.DataFrame({"abnormal": abnormal, **scores})], axis=1)
    write_atomic(folder / DETECTION, lambda path: table.to_parquet(path, index=False))
    return {name: auc(values, abnormal) for name, values in scores.items()}


def main(folder: Path) -> int:
    """Run the trial and return an exit code: 0 done, 2 a mistake, which the log explains, 128 + n ended by signal n."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logger.setLevel(logging.INFO)
    progress.configure("lines")
    try:
        run_trial(folder)
    except StoppedBySignal as stopped:
        logger.info("stopped by signal %d after saving", stopped.signal)
        return 128 + stopped.signal
    except UserError as error:
        logger.error("error: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
