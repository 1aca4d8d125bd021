"""A fine-tuned classifier read back from its result folder, with the films it was tested on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from afire.config import EncoderConfig, ImageConfig, validate
from afire.errors import UserError
from afire.model.pixels import Normalise
from afire.model.vit import VisionTransformer
from afire.tasks.experiment import MODEL
from afire.tasks.finetune import Classifier
from afire.tasks.results import RESULT, Result, find_results, read_predictions, read_result
from afire.weights import read_tensors


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier in evaluation mode, what it knows, and the films it may be shown on."""

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
    names = [one.name for one in result.runs]
    run = run or names[0]
    if run not in names:
        raise UserError(f"{folder} has no run {run}; its runs are {', '.join(names)}.")
    file = folder / run / MODEL
    if not file.is_file():
        raise UserError(f"{file} does not exist: the weights of the run were removed; run `afire finetune` again.")
    model = _build(result, file)
    predictions = read_predictions(folder)
    tested = predictions[(predictions["run"] == run) & (predictions["part"] == "test")]["image"].tolist()
    return TrainedClassifier(model, list(result.labels), result, run, _hash(model), tested)


def _result_folder(path: Path, run: str | None) -> tuple[Path, str | None]:
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a result of `afire finetune`.")
    if not (path / RESULT).exists() and (path / MODEL).exists() and (path.parent / RESULT).exists():
        return path.parent, run or path.name
    found = find_results(path)
    if len(found) > 1:
        raise UserError(f"{path} holds {len(found)} results ({found[0].name}, {found[1].name}, ...); give one of them.")
    return found[0], run


def _build(result: Result, file: Path) -> Classifier:
    encoder_config = validate(result.config["encoder"], EncoderConfig)
    image = validate(result.config["image"], ImageConfig)
    encoder = VisionTransformer.from_config(encoder_config, image)
    prior = np.full(len(result.labels), 0.5)
    model = Classifier(encoder, Normalise(image), prior, torch.Generator())
    try:
        model.load_state_dict(read_tensors(file))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{file} does not fit the settings in {RESULT} ({reason}); run the task again.") from None
    return model.eval()


def _hash(model: Classifier) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
