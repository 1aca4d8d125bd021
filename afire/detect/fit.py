"""Fitting a detector on normal films: adapt the networks, fit, choose the score, calibrate, and record its origin.

Normal films are shared out to fitting, choosing and calibrating; patients never cross. Networks are adapted by the
losses of their own method, with the lesions of detection drawn on the films; :data:`afire.detect.DETECTORS` names what
is fitted. The score is chosen on drawn lesions that training has not seen, the threshold on normals that nothing has
seen.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from afire.config import Config, LengthConfig, LesionConfig
from afire.data.keys import BEHIND, FILMS, remember_behind, remember_films, seen_by_weights
from afire.data.manifest import Manifest
from afire.data.pack import Films, is_pack, read_summary
from afire.data.splits import Split
from afire.detect import DETECTORS
from afire.detect import choose as choosing
from afire.detect.atlas import make_atlas
from afire.detect.base import (
    ADAPT,
    CONFIG,
    MODEL,
    SETTINGS,
    AnomalyDetector,
    FitTask,
    NormalFilms,
    Rows,
    Subsets,
    film_batches,
)
from afire.detect.calibrate import calibrate, parse_scores
from afire.errors import UserError
from afire.files import folder_lock, remove_unfinished, require_own
from afire.methods import method_type
from afire.methods.base import Learner, Method
from afire.methods.dense import cell_side
from afire.settings import changed, load_config, parse_override
from afire.tasks.experiment import StoppedBySignal
from afire.tasks.features import data_content_hash
from afire.tasks.guard import film_digests, group_copies
from afire.tasks.settings import DetectConfig, DetectorConfig
from afire.training.batches import normal_training_rows
from afire.training.pretrain import pretrain
from afire.training.pretraining import Start
from afire.training.run_folder import environment, newest_checkpoint
from afire.weights import RANDOM, Weights, open_weights, said_by, start_from
from afire.weights.hub import local_path


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
        finer, has = task.settings.adapt.lesion_finer, task.pretrained.config.losses.lesion_finer
        if finer not in (None, has):
            raise UserError(
                f"adapt.epochs=0 takes the weights as they are, with lesion_finer {has}; leave out adapt.lesion_finer, "
                "or adapt.epochs."
            )
        return task.pretrained.method
    if task.pretrained is None:
        training = task.config.training
        batch = batch_of(training.batch_size, len(subsets.fit), training.accumulate)
        recipe = task.config.model_copy(update={"training": training.model_copy(update=batch)})
        config = for_detection(recipe, task.settings)
    else:
        config = adaptation(task.config, task.settings, len(subsets.fit))
    train_networks(task, subsets, config, start=_start(task))
    return open_weights(task.out / ADAPT).method


@dataclass(frozen=True)
class Trained:
    """Tensors by name, and the settings they were trained with: film views and minutes have become epochs."""

    config: Config
    tensors: dict[str, Tensor]


def train_networks(
    task: FitTask,
    subsets: Subsets,
    config: Config,
    learner: type[Learner] | None = None,
    start: Start | None = None,
) -> Trained:
    """Train on the normal films that fit, in a folder of the detector, and go on from where a stopped training ended.

    ``learner`` is by default the method that ``config`` names.
    Raises :class:`~afire.tasks.experiment.StoppedBySignal` when a signal ended the training after it was saved.
    """
    _read_once(task.films, np.concatenate([subsets.fit, subsets.held_out]))
    folder = task.out / ADAPT
    result = pretrain(
        config,
        task.films,
        folder,
        subsets.fit,
        source=task.source,
        learner=learner,
        start=start,
        behind=task.init,
        resume=task.resume and (folder / CONFIG).exists(),
        device=task.device,
    )
    if result.status == "stopped":
        raise StoppedBySignal(result.signal, task.out)
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    begun = load_config(file=folder / CONFIG).training
    return Trained(config.model_copy(update={"training": begun}), checkpoint.model_tensors())


def adaptation(config: Config, settings: DetectConfig, films: int) -> Config:
    """The settings of the adaptation: Adam, cosine, no warm-up, AFiRe's teacher at its last temperature."""
    recipe = settings.adapt
    batch = batch_of(recipe.batch_size, films, config.training.accumulate)
    training = config.training.model_copy(
        update={
            **{name: getattr(recipe, name) for name in LengthConfig.model_fields},
            **batch,
            # The loop scales by batch / 256; this undoes it.
            "learning_rate": recipe.learning_rate * 256 / batch["batch_size"],
            "learning_rate_end": min(recipe.learning_rate_end, recipe.learning_rate),
            "warmup_epochs": 0.0,
            "weight_decay": 0.0,  # AdamW without decay is Adam
            "weight_decay_end": 0.0,
            "freeze_last_layer_epochs": 0,
            # Of a pre-training from a start, which this is not.
            "layer_decay": 1.0,
            "frozen_blocks": 0,
        }
    )
    return for_detection(config.model_copy(update={"training": training}), settings, teacher_temperature_epochs=0)


def batch_of(batch_size: int, films: int, accumulate: int) -> dict[str, int]:
    """A batch of at most as many films as there are, in at least ``accumulate`` pieces of equal size."""
    size = min(batch_size, films)
    pieces = next(count for count in range(min(accumulate, size), size + 1) if size % count == 0)
    return {"batch_size": size, "accumulate": pieces}


def _read_once(films: Films, rows: Rows) -> None:
    """A film that cannot be read is passed over in training, but not afterwards: say so before it."""
    for _ in film_batches(films, rows, "reading films"):
        pass


def for_detection(config: Config, settings: DetectConfig, **losses: int) -> Config:
    """The same with the lesions and the classifier of detection, if the method has any, and a run that keeps little."""
    sections = method_type(config.method).sections
    finer = settings.adapt.lesion_finer or config.losses.lesion_finer
    if settings.adapt.lesion_finer and "losses" in sections:
        cell_side(config.encoder.patch_size, finer, "adapt.lesion_finer")  # the method knows it by another name
    changes = {
        "seed": settings.seed,
        "run": config.run.model_copy(update={"picture_epochs": 0, "probe_epochs": 0, "keep_checkpoints": 1}),
        "lesions": settings.adapt.lesions,
        "losses": config.losses.model_copy(update={"lesion": settings.adapt.lesion, "lesion_finer": finer, **losses}),
    }
    names = ("seed", "run", *sections)
    return config.model_copy(update={name: value for name, value in changes.items() if name in names})


def _start(task: FitTask) -> Start | None:
    """What gives the networks their first weights."""
    if task.pretrained is not None:
        return partial(_take_over, task.pretrained.method.state_dict())
    return start_from(task.init) if task.init is not None else None


def _take_over(weights: Mapping[str, Tensor], method: Method) -> None:
    """Take the weights of the run; a lesion classifier that it does not have, or has for other cells, starts from
    random weights."""
    state = {name: weights.get(name, tensor) for name, tensor in method.state_dict().items()}
    for name, tensor in method.state_dict().items():
        if name.startswith("lesion_classifier.") and state[name].shape != tensor.shape:
            state[name] = tensor
    method.load_state_dict(state)


FEWEST = {"fit": 8, "choose": 4, "calibrate": 4}


def detection_subsets(
    manifest: Manifest, split: Split | None, seed: int, held_out: float = 0.25, choose_share: float = 0.4
) -> Subsets:
    """Draw the subsets by patient; exact copies count as one patient.

    With a split the held-out normals are those of its validation films. Without one a share ``held_out`` of the
    patients with normal training films is held out. Never a film of the test.
    """
    rows, _ = normal_training_rows(manifest, split)
    patients = group_copies(manifest, film_digests(manifest)).table["patient"].to_numpy()
    generator = np.random.default_rng([seed, 6])
    if split is not None:
        held_rows = _normal(manifest, split.rows(manifest)["val"])
        held_rows = held_rows[
            ~np.isin(patients[held_rows], patients[rows])
        ]  # a copy of a training film holds nothing out
        source = f"normal validation films of the split ({split.hash[:12]})"
    else:
        names = generator.permutation(np.unique(patients[rows]))
        held_patients = set(names[: max(1, round(held_out * len(names)))])
        inside = np.array([patient in held_patients for patient in patients[rows]])
        rows, held_rows = rows[~inside], rows[inside]
        source = f"{held_out:.0%} of the patients with normal training films, drawn with seed {seed}"
    names = generator.permutation(np.unique(patients[held_rows]))
    for_choice = set(names[: max(1, round(choose_share * len(names)))])
    inside = np.array([patient in for_choice for patient in patients[held_rows]], bool)
    subsets = Subsets(rows, held_rows[inside], held_rows[~inside], source)
    for name, count in subsets.counts().items():
        if count < FEWEST[name]:
            raise UserError(
                f"{count} normal films are left to {name} the detector, and it needs at least {FEWEST[name]}; give "
                "more normal films, or a split with more validation films."
            )
    return subsets


def _normal(manifest: Manifest, rows: Rows) -> Rows:
    """Normal films among ``rows``; all of them where there are no labels."""
    normal = manifest.table["normal"].to_numpy()[rows]
    return rows if np.isnan(normal.astype(float)).all() else rows[normal == 1]


@dataclass(frozen=True)
class Networks:
    """Settings, and either a whole model (``pretrained``, of the run in ``run``) or an encoder's weights (``init``)."""

    config: Config
    pretrained: Weights | None = None
    run: Path | None = None
    init: str | None = None


def open_networks(
    weights: str,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    data: Path | None = None,
) -> Networks:
    """``weights`` is a run, a checkpoint of one, a bundle, an encoder's file or ``random``.

    A run and a bundle bring their settings, a file its architecture for films as ``data`` packs them.
    """
    for override in overrides:
        if override.strip().startswith("lesions."):
            raise UserError(f"--set {override}: the lesions that a detector learns on are adapt.{override.strip()}.")
    opened = open_weights(weights)
    opened.check_trunk()
    if opened.brings_settings:
        _refuse_settings(preset, file, overrides)
        return Networks(opened.config, opened, opened.run)
    weights_settings = said_by(weights, data, preset)
    requested_config = (
        load_config(preset, file, overrides, weights_settings)
        if preset or file or overrides or weights_settings
        else None
    )
    config = open_weights(weights, requested_config).config
    return Networks(config, init=None if weights == RANDOM else weights)


def networks_for(
    method: str,
    weights: str | None,
    data: Path,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Sequence[str] = (),
) -> Networks:
    """What a detector ``method`` starts from: the user's weights, or none where it takes none.

    A detector without weights looks at films of the size they were packed at.
    """
    if DETECTORS[method].takes != "nothing":
        if weights is None:
            raise UserError(
                f"the detector {method} needs --weights: a run, a bundle, a file of a ViT, or random (with --preset)."
            )
        networks = open_networks(weights, preset, file, overrides, data)
        if networks.config.encoder.kind != "vit" and not DETECTORS[method].any_trunk:
            raise UserError(
                f"the detector {method} needs a ViT, and {weights} holds a residual network; give a run, a bundle or a "
                "file of a ViT, or choose --method patchcore."
            )
        return networks
    if weights is not None:
        raise UserError(f"the detector {method} trains networks of its own; leave out --weights.")
    config = load_config(preset, file, overrides)
    if is_pack(data) and "size" not in config.image.model_fields_set:
        config = load_config(preset, file, [*overrides, f"image.size={read_summary(data).settings.size}"])
    return Networks(config)


def _refuse_settings(preset: str | None, file: Path | None, overrides: Sequence[str]) -> None:
    if preset is not None or file is not None:
        raise UserError("a run and a bundle bring their own settings; leave out --preset and --config.")
    if overrides:
        raise UserError(
            f"--set {overrides[0]} would change the networks of these weights, which bring their own settings; those "
            f"of the detector are {', '.join(DetectConfig.model_fields)}."
        )


def detect_settings(
    overrides: Sequence[str], method: str = "afire", procedure: Mapping[str, Any] | None = None
) -> DetectorConfig:
    """The detector's settings: defaults, changed by ``overrides``, each of which may change one of a group.

    A ``procedure`` is a set of choices that overrides may complete and not contradict.
    """
    defaults: DetectorConfig = DETECTORS[method].Settings()
    changes = [parse_override(override) for override in overrides]
    settings = changed(defaults, procedure or {}, *changes)
    if procedure and changed(settings, procedure) != settings:
        raise UserError(
            "--procedure says the score, the lesions and the lesion classifier itself; leave out --score and --set "
            "that say otherwise."
        )
    return settings


logger = logging.getLogger("afire")


def fit_detector(task: FitTask) -> AnomalyDetector:
    """Start, fit, choose and calibrate; writes ``task.out``, which is locked meanwhile.

    Raises :class:`~afire.tasks.experiment.StoppedBySignal` when a signal ended the training after it was saved.
    """
    _refuse_several_processes()
    with folder_lock(task.out, "the detector in"):
        if (task.out / SETTINGS).exists():
            raise UserError(f"{task.out} already holds a detector; choose another --out.")
        require_own(task.out, FILMS, (CONFIG, MODEL))
        return _fit_detector(task)


def _refuse_several_processes() -> None:
    """A fit reads, chooses and writes in one process: others would wait for it, or write the same folder."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a detector is fitted in one process; start `afire detect fit` without torchrun or accelerate.")


def _fit_detector(task: FitTask) -> AnomalyDetector:
    kind, settings = DETECTORS[task.method], task.settings
    subsets = detection_subsets(
        task.films.manifest, task.split, settings.seed, settings.held_out, settings.choose_share
    )
    logger.info(
        "%s normal films fit, %s choose the score, %s calibrate it: %s",
        *(f"{count:,}" for count in subsets.counts().values()),
        subsets.held_out_by,
    )
    _check(task, subsets, kind.meanings)
    notes = [*kind.remarks(task), *_seen_before(task, subsets)]
    detector: AnomalyDetector = kind.start(task, subsets)
    calibrate(detector, task.films, subsets)
    detector.atlas = make_atlas(task.films, subsets.fit, detector.grid[0], settings.atlas.patches)
    notes += choosing.warnings(detector.choice)
    for note in notes:
        logger.warning("%s", note)
    detector.origin = _origin(task, subsets, notes)
    for folder in (task.out, task.out / BEHIND):  # what a killed fit left half-written
        remove_unfinished(folder)
    _remember(task, subsets)
    detector.save(task.out)
    shutil.rmtree(task.out / ADAPT / "checkpoints", ignore_errors=True)  # the weights are in the detector now
    return detector


def unadapted(weights: Weights, films: Films, rows: Rows, device: str = "auto") -> AnomalyDetector:
    """The detector `afire` of pre-trained weights as they are, fitted on the normal films ``rows``.

    What `afire detect fit --set adapt.epochs=0` begins with: its scores, without a choice among them and without a
    calibration, which need normal films of their own. For studies that compare weights score by score.
    """
    settings = detect_settings(["adapt.epochs=0"])
    no_films = np.empty(0, np.int64)
    task = FitTask(weights.config, settings, films, Path(), weights, device=device)
    detector: AnomalyDetector = DETECTORS[task.method].start(
        task, Subsets(rows, no_films, no_films, "nothing is held out")
    )
    detector.fit(NormalFilms(films, rows))
    return detector


def _check(task: FitTask, subsets: Subsets, scores: Collection[str]) -> None:
    """Make what would fail after the training fail before it."""
    size = task.config.image.size
    if task.films.size != size:
        raise UserError(f"the films are {task.films.size} px, but the networks take {size}; pack them at that size.")
    parse_scores(task.settings.score, scores)
    smallest = 1 / (1 + len(subsets.calibrate))
    if task.settings.false_alarms < smallest:
        raise UserError(
            f"{len(subsets.calibrate)} calibration films cannot vouch for a false-alarm rate of "
            f"{task.settings.false_alarms:g}; set false_alarms to {smallest:.3f} or more."
        )


def _seen_before(task: FitTask, subsets: Subsets) -> Iterator[str]:
    """A held-out film that pre-training has seen is not held out: its scores are too low, false alarms too frequent."""
    if _is_from_nothing(task):
        return
    seen = seen_by_weights(_behind(task), task.films, subsets.held_out)
    if seen.answer == "seen":
        yield (
            f"{seen.seen:,} of {seen.films:,} held-out normals were seen in pre-training, so false alarms will be more "
            "frequent than stated; pre-train and fit with the same --split, whose validation films are then unseen"
        )
    elif seen.answer == "unknown":
        yield (
            f"whether {seen.unknown:,} of {seen.films:,} held-out normals were seen in pre-training is not known: "
            f"{_weights_name(task)['name']} does not say; if they were, false alarms will be more frequent than stated"
        )


def _remember(task: FitTask, subsets: Subsets) -> None:
    """One-way keys of the films that made the detector, so that a test can tell which films were used."""
    remember_films(task.out, task.films, np.concatenate([subsets.fit, subsets.held_out]))
    if not _is_from_nothing(task):
        remember_behind(task.out, _behind(task))


def _is_from_nothing(task: FitTask) -> bool:
    """Whether the networks start from random weights, which have seen no film."""
    return _behind(task) is None and task.pretrained is None


def _behind(task: FitTask) -> str | Path | None:
    """Where the weights are that it starts from, with the record of the films that they have seen."""
    detector = DETECTORS[task.method].begins_with(task)
    return task.run or task.init or (local_path(detector) if detector is not None else None)


def _origin(task: FitTask, subsets: Subsets, notes: list[str]) -> dict[str, Any]:
    return {
        "data": {"name": task.source, "hash": data_content_hash(task.films), "films": len(task.films)},
        "parts": subsets.counts(),
        "held_out_by": subsets.held_out_by,
        "split": task.split.hash if task.split is not None else None,
        "weights": _weights_name(task),
        "procedure": task.procedure,
        "notes": notes,
        "environment": environment(),
    }


def _weights_name(task: FitTask) -> dict[str, str]:
    weights = task.pretrained
    if weights is not None:
        return {"name": weights.name, "hash": weights.method_hash if weights.holds_method else weights.hash}
    behind = _behind(task)
    return {"name": "random" if behind is None else Path(behind).name}
