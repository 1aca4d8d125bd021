"""One trial of an ablation, in a process of its own: train, probe, detect, and last of all ``trial.json``.

Started by :mod:`afire.studies.ablation_run` as a step (:mod:`afire.studies.steps`), so that a crash or a kill ends one
trial and no other. How long it took over all of its starts is kept beside it: a kill loses seconds and not minutes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from afire import progress
from afire._version import __version__
from afire.config import Config, changed, validate
from afire.data.pack import Films, open_films
from afire.data.splits import Split, read_split
from afire.detect.fit import unadapted
from afire.detect.localise import CHOSEN, score_films
from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json
from afire.studies.ablation_grid import DETECTED_BY, DETECTION, FORMAT, PROBE, REQUEST, RUN, TRIAL, detection_rows
from afire.tasks.experiment import StoppedBySignal
from afire.tasks.metrics import auc
from afire.tasks.probe import ProbeTask, run_probe
from afire.tasks.results import write_result
from afire.training.batches import normal_training_rows
from afire.training.pretrain import pretrain
from afire.training.run_folder import SUMMARY, RunFolder, environment
from afire.weights import open_weights

CLOCK = "seconds.json"
_SECONDS_BETWEEN_WRITES = 5.0


class TrialClock:
    """Seconds spent on each stage of a trial, those of earlier starts included.

    Work that a kill threw away was spent all the same and counts: the sum is what the trial cost.
    """

    def __init__(self, folder: Path, between_writes: float = _SECONDS_BETWEEN_WRITES) -> None:
        self.path, self.between_writes = folder / CLOCK, between_writes
        self._before = _read(self.path)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block towards ``name``, written every few seconds while it runs."""
        started, ended = time.monotonic(), threading.Event()
        before = self._before.get(name, 0.0)

        def note() -> None:
            self._before[name] = before + time.monotonic() - started
            write_json(self.path, {stage: round(seconds, 2) for stage, seconds in self._before.items()})

        def keep() -> None:
            while not ended.wait(self.between_writes):
                note()

        writer = threading.Thread(target=keep, daemon=True)
        writer.start()
        try:
            yield
        finally:
            ended.set()
            writer.join()
            note()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return {name: round(value, 2) for name, value in self._before.items()}


def _read(path: Path) -> dict[str, float]:
    """What earlier starts spent; nothing where there were none or the file is not ours."""
    try:
        seconds = read_json(path)
    except UserError:
        return {}
    return {str(stage): float(value) for stage, value in seconds.items()} if isinstance(seconds, dict) else {}


# A trial's run is one of many: no pictures, and one checkpoint is enough to go on from.
_RUN_SETTINGS = {"picture_epochs": 0, "probe_epochs": 0, "keep_checkpoints": 1, "checkpoint_epochs": 1, "wandb": False}

logger = logging.getLogger("afire")


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
    """Run the trial and return an exit code: 0 done, 2 a mistake, told in the log, 128 + n ended by signal n."""
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
