"""Fine-tuning: all weights of an encoder and a linear layer on the mean of its image tokens, for one or many findings.

:func:`run_finetune` trains and tests; :func:`load_classifier` reads a trained classifier back from its result folder,
with the films it was tested on. A label that is not known (NaN) takes no part in the loss.

Shapes: N films of the manifest, B films of a batch, C labels, D width, S pixels a side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.config import EncoderConfig, ImageConfig
from afire.data.manifest import Manifest, task_labels
from afire.data.pack import Films
from afire.errors import UserError
from afire.nn.residual import Trunk, make_trunk
from afire.nn.vit import Normalise
from afire.settings import validate
from afire.tasks import metrics as m
from afire.tasks.evaluate import Scores, check_classes, evaluate
from afire.tasks.experiment import MODEL, Experiment, Finished, claimed_folders, complete_run, fresh_encoder, open_bench
from afire.tasks.features import predict
from afire.tasks.results import RESULT, Result, Rows, Run, find_results, plan_runs, read_predictions, read_result
from afire.tasks.settings import FinetuneConfig
from afire.tasks.supervised import Objective
from afire.weights import Weights
from afire.weights.files import read_tensors, tensor_hash

_BOOTSTRAP_SEED = 0
_HEAD_STD = 0.01
Floats = NDArray[np.float64]


class Classifier(nn.Module):
    """Images (B, 1, S, S) in [0, 1] -> logits (B, C)."""

    def __init__(self, encoder: Trunk, normalise: Normalise, prior_C: Floats, generator: torch.Generator) -> None:
        """``prior_C`` is how often each finding should be expected before anything is seen: the layer starts there."""
        super().__init__()
        self.encoder, self.normalise = encoder, normalise
        self.head = nn.Linear(encoder.width, len(prior_C))
        nn.init.normal_(self.head.weight, std=_HEAD_STD, generator=generator)
        with torch.no_grad():
            self.head.bias.copy_(torch.logit(torch.from_numpy(prior_C), eps=1e-3))

    def forward(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Images (B, 1, H, W) in [0, 1] -> logits (B, C); ``depth`` are the draws of stochastic depth."""
        tokens = self.encoder(self.normalise(images), depth)
        logits: Tensor = self.head(tokens[:, 1:].mean(dim=1))
        return logits


class LabelObjective:
    """Binary cross-entropy of every known label; validation by the mean AUC of labels that have both classes."""

    metric = "auc"
    spatial = False

    def __init__(self, truth_NC: Floats, train: Rows, config: FinetuneConfig) -> None:
        self.truth = truth_NC
        self._targets = torch.from_numpy(truth_NC).float()
        self.weights_C = positive_weights(truth_NC[train], config)
        self._weights = torch.from_numpy(self.weights_C).float()

    def targets(self, rows: Rows) -> Tensor:
        return self._targets[torch.from_numpy(rows)]

    def terms(self, targets: Tensor) -> Tensor:
        return (~targets.isnan()).sum()

    def loss(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        known = ~targets.isnan()
        weights = self._weights.to(outputs.device)
        terms = F.binary_cross_entropy_with_logits(
            outputs, targets.nan_to_num(0.0), pos_weight=weights, reduction="none"
        )
        return {"cross_entropy": (terms * known).sum()}

    def keep(self, outputs: Tensor, rows: Rows) -> Tensor:
        return outputs.sigmoid()

    def score(self, summaries: NDArray[Any], rows: Rows) -> float:
        values = [m.auc(summaries[:, c].astype(np.float64), self.truth[rows, c]) for c in range(self.truth.shape[1])]
        return float(np.nanmean(values))

    def prior(self, train: Rows) -> Floats:
        """How often each finding occurs in training (C,), as the weights see it; a half where nothing is known."""
        positives, negatives = _counts(self.truth[train])
        weighted = self.weights_C * positives
        total = weighted + negatives
        prior: Floats = np.divide(weighted, total, out=np.full(len(total), 0.5), where=total > 0)
        return prior


def positive_weights(truth_NC: Floats, config: FinetuneConfig) -> Floats:
    """What a positive counts for, (C,): 1, or negatives / positives within the limit."""
    positives, negatives = _counts(truth_NC)
    if config.class_weights == "none":
        return np.ones(truth_NC.shape[1])
    ratio = np.divide(negatives, positives, out=np.ones(len(positives)), where=(positives > 0) & (negatives > 0))
    return np.clip(ratio, 1 / config.class_weight_limit, config.class_weight_limit)


def _counts(truth_NC: Floats) -> tuple[Floats, Floats]:
    return (truth_NC == 1).sum(axis=0).astype(np.float64), (truth_NC == 0).sum(axis=0).astype(np.float64)


class Finetuning:
    """The task: a :class:`Classifier` that learns the labels ``truth`` (films, C)."""

    def __init__(self, films: Films, truth_NC: Floats, config: FinetuneConfig) -> None:
        self.films, self.truth, self.config = films, truth_NC, config

    def build(self, run: Run, backbone: Weights) -> tuple[Classifier, LabelObjective]:
        train = run.rows["train"]
        objective = LabelObjective(self.truth, train, self.config)
        encoder, normalise = fresh_encoder(backbone)
        generator = torch.Generator().manual_seed(run.seed)
        return Classifier(encoder, normalise, objective.prior(train), generator), objective

    def answer(
        self, model: nn.Module, objective: Objective, run: Run, accelerator: Accelerator
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Probabilities (films of the subset, C) for val and test; there is nothing to choose."""
        answers = {
            subset: predict(model, self.films, run.rows[subset], accelerator, objective.keep)
            for subset in ("val", "test")
        }
        return answers, {}


def run_finetune(experiment: Experiment, config: FinetuneConfig) -> Iterator[tuple[float, Result, pd.DataFrame]]:
    """For each label fraction its result and predictions. A collective call when several processes run it."""
    bench = open_bench(experiment, config.training.precision)
    films, manifest = bench.films, bench.films.manifest
    names, truth = task_labels(manifest, config.labels)
    # All plans first: a split or a label that cannot work ends the command before the first run.
    plans = {fraction: _plan(experiment, manifest, fraction, truth) for fraction in experiment.folders}
    notes = {
        fraction: [f"{run.name}: {note}" for run in runs for note in check_classes(names, truth, run.rows)]
        for fraction, runs in plans.items()
    }
    seen, seen_notes = bench.seen(next(iter(plans.values())))  # the test films are those of every fraction
    with claimed_folders(bench, plans):
        task = Finetuning(films, truth, config)
        for fraction, runs in plans.items():
            finished = [complete_run(bench, task, run, fraction) for run in runs]
            outcomes = [_scores(run) for run in finished]
            generator = np.random.default_rng(_BOOTSTRAP_SEED)
            evaluation = evaluate(manifest, names, truth, outcomes, generator, config.bootstrap)
            result = bench.result(
                evaluation,
                runs,
                config,
                task="finetune",
                method="fine-tuned",
                title="fine-tuned",
                labels=names,
                fraction=fraction,
                notes=[*seen_notes, *notes[fraction]],
                seen=seen,
            )
            yield fraction, result, evaluation.predictions


def _scores(finished: Finished) -> Scores:
    val, test = (finished.answers[subset].astype(np.float64) for subset in ("val", "test"))
    return Scores(finished.run, val, test, finished.weights_hash, finished.chosen)


def _plan(experiment: Experiment, manifest: Manifest, fraction: float, truth: Floats) -> list[Run]:
    """The runs of a fraction; training films without any known label are left out of them."""
    known: NDArray[np.bool_] = np.asarray(~np.isnan(truth).all(axis=1))
    runs = []
    for run in plan_runs(manifest, experiment.split, experiment.seeds, fraction, experiment.folds):
        train = run.rows["train"][known[run.rows["train"]]]
        if len(train) == 0:
            raise UserError(f"no training film of {run.name} has a value for any of the labels; choose others.")
        runs.append(replace(run, rows={**run.rows, "train": train}))
    return runs


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier in evaluation mode, its labels, and the films it may be shown on."""

    model: Classifier
    labels: list[str]
    result: Result
    run: str
    hash: str  # of the classifier's tensors
    test_images: list[str]  # of this run, as the manifest names them

    @property
    def image(self) -> ImageConfig:
        """How its films are read."""
        return validate(self.result.config["image"], ImageConfig)


def load_classifier(path: Path, run: str | None = None) -> TrainedClassifier:
    """From the folder of a fine-tuning (its first run unless ``run`` names one), or the folder of one of its runs."""
    folder, run = _result_folder(path, run)
    result = read_result(folder)
    if result.task != "finetune":
        raise UserError(f"{folder} is the result of {result.task}, not of a fine-tuning; give one of `afire finetune`.")
    names = [entry.name for entry in result.runs]
    run = run or names[0]
    if run not in names:
        raise UserError(f"{folder} has no run {run}; its runs are {', '.join(names)}.")
    file = folder / run / MODEL
    if not file.is_file():
        raise UserError(f"{file} does not exist: the weights of the run were removed; run `afire finetune` again.")
    model = _build(result, file)
    predictions = read_predictions(folder)
    tested = predictions[(predictions["run"] == run) & (predictions["part"] == "test")]["image"].tolist()
    return TrainedClassifier(model, list(result.labels), result, run, tensor_hash(model.state_dict()), tested)


def _result_folder(path: Path, run: str | None) -> tuple[Path, str | None]:
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a result of `afire finetune`.")
    if not (path / RESULT).exists() and (path / MODEL).exists() and (path.parent / RESULT).exists():
        return path.parent, run or path.name
    folders = find_results(path)
    if len(folders) > 1:
        names = f"{folders[0].name}, {folders[1].name}, ..."
        raise UserError(f"{path} holds {len(folders)} results ({names}); give one of them.")
    return folders[0], run


def _build(result: Result, file: Path) -> Classifier:
    encoder_config = validate(result.config["encoder"], EncoderConfig)
    image = validate(result.config["image"], ImageConfig)
    encoder = make_trunk(encoder_config, image)
    prior = np.full(len(result.labels), 0.5)
    model = Classifier(encoder, Normalise(image), prior, torch.Generator())
    try:
        model.load_state_dict(read_tensors(file))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{file} does not fit the settings in {RESULT} ({reason}); run the task again.") from None
    return model.eval()
