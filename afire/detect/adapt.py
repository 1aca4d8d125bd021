"""Adapting a pre-trained method to the target's normal films, for detectors that start from its networks.

A run or a bundle goes on learning with its own losses: Adam, cosine, no warm-up (the paper's recipe). An encoder's
weights, or none, are trained by the recipe of their settings instead. AFiRe draws the lesions of detection meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from afire.config import Config, LesionConfig
from afire.detect.base import ADAPT, FitTask, Subsets
from afire.errors import UserError
from afire.methods import Method, method_type
from afire.tasks.experiment import StoppedBySignal
from afire.tasks.settings import DetectConfig
from afire.training.pretrain import Start, pretrain
from afire.weights import open_weights, start_from


def paper_procedure(config: Config) -> dict[str, Any]:
    """Settings by which a detector is made as AFiRe's paper makes it, from networks of the settings ``config``.

    SLM lesions, as many versions of a film as in pre-training, no lesion classifier, the restoration score (in log
    space, where larger is more abnormal). The adaptation is the default one: the paper's losses, Adam at 1e-4, cosine,
    batch 64. What the paper leaves open stays ours: the number of epochs, and a threshold from held-out normal films.
    """
    if config.method != "afire" or not config.losses.restoration:
        raise UserError(
            "--procedure paper scores how well AFiRe's decoder restores a film, and these weights have no such decoder."
        )
    slm = LesionConfig(views=config.lesions.views)
    return {"score": "restoration", "adapt": {"lesion": 0.0, "lesions": slm.model_dump()}}


def adapted(task: FitTask, subsets: Subsets) -> Method:
    """The method after it has seen the normal films that fit; its training is kept in a folder of the detector.

    Raises :class:`~afire.tasks.experiment.StoppedBySignal` when a signal ended the training after it was saved.
    """
    assert isinstance(task.settings, DetectConfig)
    if task.pretrained is not None and task.settings.adapt.epochs == 0:
        return task.pretrained.method
    if task.pretrained is None:
        training = task.config.training
        batch = min(training.batch_size, len(subsets.fit))
        recipe = task.config.model_copy(update={"training": training.model_copy(update={"batch_size": batch})})
        config = _for_detection(recipe, task.settings)
    else:
        config = adaptation(task.config, task.settings, len(subsets.fit))
    folder = task.out / ADAPT
    result = pretrain(
        config,
        task.films,
        folder,
        subsets.fit,
        source=task.source,
        start=_start(task),
        behind=task.init,
        resume=task.resume and (folder / "config.yaml").exists(),
        device=task.device,
    )
    if result.status == "stopped":
        raise StoppedBySignal(result.signal, task.out)
    return open_weights(folder).method


def adaptation(config: Config, settings: DetectConfig, films: int) -> Config:
    """The settings of the adaptation: Adam, cosine, no warm-up, AFiRe's teacher at its last temperature."""
    recipe = settings.adapt
    batch = min(recipe.batch_size, films)
    training = config.training.model_copy(
        update={
            "epochs": recipe.epochs,
            "batch_size": batch,
            "learning_rate": recipe.learning_rate * 256 / batch,  # the loop scales by batch / 256; this undoes it
            "learning_rate_end": min(recipe.learning_rate_end, recipe.learning_rate),
            "warmup_epochs": 0.0,
            "weight_decay": 0.0,  # AdamW without decay is Adam
            "weight_decay_end": 0.0,
            "freeze_last_layer_epochs": 0,
        }
    )
    return _for_detection(config.model_copy(update={"training": training}), settings, teacher_temperature_epochs=0)


def _for_detection(config: Config, settings: DetectConfig, **losses: int) -> Config:
    """The same with the lesions of detection and its classifier, if the method has any, and a run that keeps little."""
    changes = {
        "seed": settings.seed,
        "run": config.run.model_copy(update={"picture_epochs": 0, "probe_epochs": 0, "keep_checkpoints": 1}),
        "lesions": settings.adapt.lesions,
        "losses": config.losses.model_copy(update={"lesion": settings.adapt.lesion, **losses}),
    }
    read = ("seed", "run", *method_type(config.method).sections)
    return config.model_copy(update={name: value for name, value in changes.items() if name in read})


def _start(task: FitTask) -> Start | None:
    """What gives the networks their first weights."""
    if task.pretrained is not None:
        return partial(_take_over, task.pretrained.method.state_dict())
    return start_from(task.init) if task.init is not None else None


def _take_over(known: Mapping[str, Tensor], method: Method) -> None:
    """The weights of the run; a lesion classifier that it does not have starts anew."""
    method.load_state_dict({name: known.get(name, tensor) for name, tensor in method.state_dict().items()})
