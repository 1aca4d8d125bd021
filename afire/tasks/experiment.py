"""An experiment of a trained task: several runs (seeds, folds) in several label fractions, each in a folder of its own.

    OUT[/10pct]/seed-0[-fold-3]/   a run: settings, metrics, checkpoints while it lasts; then
        model.safetensors          the best weights, the encoder under ``encoder.*``
        answers.npz                its outputs for validation and test films
        summary.json               written last: its presence says that the run is finished

With ``resume``, finished runs are read and not run again, and a begun one goes on from its newest checkpoint.
"""

from __future__ import annotations

import copy
import logging
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from afire.config import Config, Section
from afire.data.keys import Seen
from afire.data.pack import Films, PackedFilms, config_for, open_films
from afire.data.splits import Split
from afire.errors import UserError
from afire.files import folder_lock, read_json, require_own, sha256_text, write_atomic, write_json
from afire.nn.residual import Trunk
from afire.nn.vit import Normalise
from afire.tasks.evaluate import Evaluation, classification_result
from afire.tasks.features import check_size, data_content_hash
from afire.tasks.guard import seen_in_pretraining
from afire.tasks.results import RESULT, Result, Run
from afire.tasks.settings import FinetuneConfig, SegmentConfig
from afire.tasks.supervised import Job, Learnt, Objective, learn
from afire.training.engine import make_accelerator, on_first_process
from afire.training.run_folder import CHECKPOINTS, SUMMARY, RunFolder
from afire.weights import Weights, WeightsBySeed

MODEL, ANSWERS = "model.safetensors", "answers.npz"

logger = logging.getLogger("afire")


class StoppedBySignal(Exception):  # noqa: N818  not an error: the run was told to end, and saved itself
    """A run ended by SIGTERM or SIGINT after saving; ``signal`` is its number."""

    def __init__(self, signal: int, folder: Path) -> None:
        super().__init__(f"{folder} was stopped by a signal; add --resume to go on.")
        self.signal = signal


@dataclass(frozen=True)
class Experiment:
    """What every trained task needs to know; ``folders`` maps each label fraction to where its result goes."""

    weights: str
    data: Path
    folders: Mapping[float, Path]
    seeds: Sequence[int]
    root: Path | None = None
    split: Split | None = None
    folds: int = 0
    name: str | None = None
    model: Config | None = None  # the architecture, where the weights do not say it
    network: str | None = None
    device: str = "auto"
    resume: bool = False
    force: bool = False


def fresh_encoder(backbone: Weights) -> tuple[Trunk, Normalise]:
    """A copy of the encoder and of how films are normalised for it, to be trained."""
    return copy.deepcopy(backbone.trunk), copy.deepcopy(backbone.normalise)


@dataclass(frozen=True)
class Bench:
    """An experiment with its films and weights opened, and the engine it runs on."""

    experiment: Experiment
    films: Films
    backbones: WeightsBySeed
    accelerator: Accelerator

    @cached_property
    def hashes(self) -> tuple[str, str]:
        """Of the films themselves, and of the manifest with its labels."""
        return data_content_hash(self.films), self.films.manifest.hash

    @property
    def data(self) -> dict[str, Any]:
        """What a result says about its films."""
        return {
            "name": self.experiment.data.name,
            "hash": self.hashes[0],
            "films": len(self.films),
            "size": self.films.size,
        }

    def seen(self, runs: Sequence[Run]) -> tuple[dict[str, Seen], list[str]]:
        """What the pre-training saw of the test films of ``runs``, and notes about it."""
        weights = {run.name: self.backbones.of(run.seed) for run in runs}
        seen, notes = seen_in_pretraining(weights, self.films, {run.name: run.rows["test"] for run in runs})
        return {"pretraining": seen}, notes

    def settings(self, config: Section) -> dict[str, Any]:
        """What a result says about its settings."""
        experiment, model = self.experiment, self.backbones.first.config
        plan = {"seeds": list(experiment.seeds), "folds": experiment.folds, "network": self.backbones.first.network}
        architecture = {"encoder": model.encoder.model_dump(), "image": model.image.model_dump()}
        return {**plan, **config.model_dump(exclude={"seed", "run"}), **architecture}

    def result(
        self,
        evaluation: Evaluation,
        runs: Sequence[Run],
        config: Section,
        *,
        task: str,
        method: str,
        title: str,
        labels: Sequence[str],
        fraction: float,
        notes: Sequence[str],
        seen: Mapping[str, Seen],
    ) -> Result:
        """The result of a label fraction; it is called by the experiment's name, or by its weights and ``title``."""
        return classification_result(
            evaluation,
            task=task,
            method=method,
            name=self.experiment.name or f"{self.backbones.name}, {title}",
            data=self.data,
            manifest=self.films.manifest,
            planned=runs,
            weights_name=self.backbones.name,
            weights_report=self.backbones.report,
            labels=labels,
            fraction=fraction,
            config=self.settings(config),
            notes=notes,
            seen=seen,
        )


def open_bench(experiment: Experiment, precision: str) -> Bench:
    """Open weights and films; a size that does not fit is refused."""
    accelerator = make_accelerator(precision, experiment.device)
    model = config_for(experiment.model, experiment.data) if experiment.model is not None else None
    backbones = WeightsBySeed(experiment.weights, experiment.seeds, model, experiment.network)
    if accelerator.is_main_process:
        logger.info("%s: %s", backbones.name, backbones.report)
    image = backbones.first.config.image
    films = open_films(experiment.data, experiment.root, image.size, image.fit, image.voi)
    check_size(backbones.first, films)
    if accelerator.is_main_process and not isinstance(films, PackedFilms):
        logger.info("these films are decoded again in every epoch; `afire data pack` does it once")
    return Bench(experiment, films, backbones, accelerator)


class Task(Protocol):
    """What differs from task to task in a run."""

    @property
    def config(self) -> FinetuneConfig | SegmentConfig: ...

    def build(self, run: Run, backbone: Weights) -> tuple[nn.Module, Objective]:
        """A model to train, with an encoder of its own, and what it should learn."""
        ...

    def answer(
        self, model: nn.Module, objective: Objective, run: Run, accelerator: Accelerator
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The answers of the best weights for val and test, and what was chosen on val. A collective call."""
        ...


@dataclass(frozen=True)
class Finished:
    """A finished run: its answers, and what was chosen on validation."""

    run: Run
    answers: Mapping[str, NDArray[Any]]
    chosen: Mapping[str, Any]
    weights_hash: str


@contextmanager
def claimed_folders(bench: Bench, plans: Mapping[float, Sequence[Run]]) -> Iterator[None]:
    """Hold the folders; refuse to mix with runs that are there already, which ``force`` alone removes.

    A collective call.
    """
    experiment = bench.experiment

    def claim() -> None:
        for fraction, runs in plans.items():
            folder = experiment.folders[fraction]
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder} is a file; --out needs a folder.")
            stack.enter_context(folder_lock(folder, "the runs in"))
            require_own(folder, RESULT)
            run_folders = [folder / run.name for run in runs if RunFolder(folder / run.name).exists]
            if experiment.resume or not (run_folders or (folder / RESULT).exists()):
                continue
            if not experiment.force:
                raise UserError(
                    f"{folder} already holds {'runs' if run_folders else 'a result'}; add --resume to go on with them, "
                    "--force to start again, or choose another --out."
                )
            (folder / RESULT).unlink(missing_ok=True)
            for run_folder in run_folders:
                shutil.rmtree(run_folder)

    with ExitStack() as stack:
        on_first_process(bench.accelerator, claim, "in --out")
        yield


def complete_run(bench: Bench, task: Task, run: Run, fraction: float) -> Finished:
    """Train, choose on validation, answer for val and test once; or read what a finished run answered.

    Raises :class:`StoppedBySignal` when the training was told to end. A collective call.
    """
    experiment, accelerator = bench.experiment, bench.accelerator
    folder, backbone = experiment.folders[fraction] / run.name, bench.backbones.of(run.seed)
    config = task.config.model_copy(update={"seed": run.seed})
    data = _run_data(bench, run, fraction, backbone)
    stored = _read_finished(folder, config, data, experiment.force, accelerator)
    if stored is None:
        model, objective = task.build(run, backbone)
        job = Job(model, objective, bench.films, run.rows["train"], run.rows["val"], config, data, folder)
        learnt = learn(job, accelerator, experiment.resume and RunFolder(folder).exists, experiment.force)
        if learnt.signal:
            raise StoppedBySignal(learnt.signal, folder)
        answers, choices = task.answer(model, objective, run, accelerator)
        summary = _summary(learnt, objective.metric, {"epoch": learnt.epoch, **choices})
        _leave(folder, model, answers, summary, accelerator)
        if accelerator.is_main_process:
            facts = (folder, objective.metric, learnt.value, learnt.epoch, learnt.epochs)
            logger.info("%s: best validation %s %.3f in epoch %d of %d", *facts)
        stored = answers, summary
    return Finished(run, stored[0], stored[1]["chosen"], backbone.hash)


def _run_data(bench: Bench, run: Run, fraction: float, backbone: Weights) -> dict[str, Any]:
    """What ``data.json`` of a run says: which films in which subsets, and which weights it starts from."""
    lists = [",".join(map(str, rows)) for rows in run.rows.values()]
    return {
        "source": bench.experiment.data.name,
        "films": {subset: len(rows) for subset, rows in run.rows.items()},
        "hash": sha256_text("\n".join([*bench.hashes, *lists])),
        "split_hash": run.split.hash,
        "weights": bench.backbones.name,
        "weights_hash": backbone.hash,
        "fraction": fraction,
        "fold": run.fold,
    }


def _read_finished(
    folder: Path, config: Section, data: Mapping[str, Any], force: bool, accelerator: Accelerator
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Answers and summary of a finished run, else None; one of other settings is refused or, by force, removed."""
    if not (folder / SUMMARY).exists():
        return None
    changes = RunFolder(folder).changes(config, data)
    if changes and not force:
        raise UserError(
            f"the finished run in {folder} was made with other settings ({'; '.join(changes)}); add --force to run it "
            "again, or choose another --out."
        )
    if changes:
        accelerator.wait_for_everyone()  # until all have read what the first process is about to remove
        on_first_process(accelerator, lambda: shutil.rmtree(folder), "in --out")
        return None
    try:
        with np.load(folder / ANSWERS, allow_pickle=False) as stored:
            return dict(stored), dict(read_json(folder / SUMMARY))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{folder / ANSWERS} cannot be read ({error}); delete {folder} and run again.") from None


def _leave(
    folder: Path,
    model: nn.Module,
    answers: Mapping[str, NDArray[Any]],
    summary: Mapping[str, Any],
    accelerator: Accelerator,
) -> None:
    """Write what a finished run leaves behind, and drop what only a resume would need."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}

    def write() -> None:
        write_atomic(folder / MODEL, lambda path: save_file(tensors, path))
        write_atomic(folder / ANSWERS, lambda path: np.savez(path, **answers))  # type: ignore[arg-type]
        write_json(folder / SUMMARY, dict(summary))
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for file in folder.glob("best-*.safetensors"):
            file.unlink()

    on_first_process(accelerator, write, "its result")


def _summary(learnt: Learnt, metric: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": learnt.status,
        f"val_{metric}": learnt.value,
        "chosen": dict(chosen),
        "epochs": learnt.epochs,
        "steps": learnt.steps,
        "images_per_second": learnt.images_per_second,
    }
