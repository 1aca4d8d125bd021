"""Settings of the tasks: fine-tuning, segmentation and detection.

They stand beside the settings of the model (:mod:`afire.config`), which come with the weights. Presets, called recipes
on the command line, are ``presets/<task>-<name>.yaml`` and say only what differs from the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, overload

from pydantic import Field, model_validator

from afire.config import LengthConfig, LesionConfig, Section
from afire.settings import load_settings, preset_path

TASK_PRESETS = {"finetune": ("nih14", "chexpert5", "quick"), "segment": ("siim", "lungs")}


class SupervisedConfig(Section):
    """The recipe of learning from labels."""

    epochs: int = Field(50, ge=1, description="most passes over the training films; early stopping may end sooner")
    batch_size: int = Field(128, ge=1, description="films in one update, of all processes together")
    learning_rate: float = Field(2e-4, gt=0, description="peak, for the last layers; not scaled by anything")
    learning_rate_end: float = Field(1e-6, ge=0, description="learning rate at the end of the cosine")
    warmup_epochs: float = Field(2, ge=0, description="linear warm-up of the learning rate")
    weight_decay: float = Field(0.05, ge=0, description="constant; none on biases, norms, tokens and positions")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="factor on the learning rate from each block to the one before it; 1 = none"
    )
    drop_path: float = Field(0.0, ge=0, lt=1, description="stochastic depth of the last block, rising linearly")
    clip: float = Field(3.0, ge=0, description="gradient norm limit, 0 = none")
    patience: int = Field(10, ge=1, description="epochs without a better validation result before the run ends")
    min_epoch_steps: int = Field(
        10, ge=1, description="fewest updates in an epoch: a small set is passed several times, so patience means more"
    )
    accumulate: int = Field(
        1, ge=1, description="pieces in which each process works through its share; same result, less memory"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic of the network")


class AugmentConfig(Section):
    """Random changes of the training films, one warp each."""

    crop_min: float = Field(0.5, gt=0, le=1, description="smallest share of the film's area that is shown; 1 = all")
    stretch: float = Field(1.2, ge=1, description="most that a crop's width and height may differ, as a factor")
    rotation: float = Field(10.0, ge=0, le=180, description="largest turn either way, in degrees")
    flip: float = Field(0.5, ge=0, le=1, description="share of films that are mirrored left to right")


class TaskRunConfig(Section):
    """What a run writes and when; nothing here changes the weights it ends with."""

    checkpoint_minutes: float = Field(10, gt=0, description="minutes between checkpoints")
    checkpoint_epochs: int = Field(1, ge=0, description="epochs between checkpoints, 0 = by the clock only")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that stay until the run is finished")
    on_bad_film: Literal["skip", "stop"] = Field("skip", description="a film that cannot be read or was altered")


class FinetuneConfig(Section):
    """All settings of a fine-tuning."""

    seed: int = Field(0, ge=0, description="every random choice follows from it; --seeds sets it for each run")
    labels: list[str] = Field([], description="findings to learn; empty = every label of the manifest")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: a positive counts for as many negatives as there are to it in training"
    )
    class_weight_limit: float = Field(20.0, ge=1, description="largest weight of a positive, and 1 / the smallest")
    bootstrap: int = Field(1000, ge=10, description="resamples of test patients for the 95 % intervals")
    training: SupervisedConfig = Field(default_factory=SupervisedConfig)
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    run: TaskRunConfig = Field(default_factory=TaskRunConfig)


class MaskConfig(Section):
    """Where masks come from and what they mean."""

    column: str = Field("auto", description="manifest column with mask paths or RLE; auto = mask, else rle")
    size: Literal["same", "scaled"] = Field(
        "same", description="same: as many pixels as the film; scaled: drawn on another size of the same film"
    )
    normal_is_empty: bool = Field(False, description="a film labelled normal without a mask has an empty one")


class SegDecoderConfig(Section):
    """The segmentation decoder on tokens from several depths."""

    width: int = Field(64, ge=8, description="channels after the tokens; halved with every doubling of the size")
    levels: int = Field(4, ge=1, description="depths of the encoder that are read, evenly spaced, the last included")
    finest: int = Field(2, ge=1, description="side of the finest predicted cell, in pixels; then interpolated")

    @model_validator(mode="after")
    def _power_of_two(self) -> SegDecoderConfig:
        if self.finest & (self.finest - 1):
            raise ValueError(f"finest {self.finest} is not a power of two")
        return self


class SegmentLossConfig(Section):
    """Weights of the two losses."""

    dice: float = Field(1.0, ge=0, description="weight of the soft Dice loss of each film")
    cross_entropy: float = Field(1.0, ge=0, description="weight of the cross-entropy of each pixel")

    @model_validator(mode="after")
    def _means_something(self) -> SegmentLossConfig:
        if not (self.dice or self.cross_entropy):
            raise ValueError("dice and cross_entropy both have weight 0: there is nothing to learn")
        return self


class SegmentChoiceConfig(Section):
    """What is tried on validation films: the best pair is used on the test films."""

    by: Literal["all", "both"] = Field(
        "all", description="best by Dice over all films, or by the mean of that and of Dice over films with a mask"
    )
    thresholds: list[float] = Field(
        [round(0.05 * step, 2) for step in range(1, 20)], min_length=1, description="probabilities to cut at"
    )
    min_areas: list[float] = Field(
        [0.0, 0.0005, 0.001, 0.002, 0.005, 0.01],
        min_length=1,
        description="connected pieces of a smaller share of the film are dropped",
    )

    @model_validator(mode="after")
    def _shares(self) -> SegmentChoiceConfig:
        if not all(0 < value < 1 for value in self.thresholds):
            raise ValueError("thresholds lie between 0 and 1")
        if not all(0 <= value < 1 for value in self.min_areas):
            raise ValueError("min_areas are shares of the film, from 0 to less than 1")
        return self


class SegmentConfig(Section):
    """All settings of a segmentation."""

    seed: int = Field(0, ge=0, description="every random choice follows from it; --seeds sets it for each run")
    bootstrap: int = Field(1000, ge=10, description="resamples of test patients for the 95 % intervals")
    masks: MaskConfig = Field(default_factory=MaskConfig)
    decoder: SegDecoderConfig = Field(default_factory=SegDecoderConfig)
    losses: SegmentLossConfig = Field(default_factory=SegmentLossConfig)
    choice: SegmentChoiceConfig = Field(default_factory=SegmentChoiceConfig)
    training: SupervisedConfig = Field(default_factory=SupervisedConfig)
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    run: TaskRunConfig = Field(default_factory=TaskRunConfig)


DETECTION_LESIONS = LesionConfig(
    place="lungs", haze=0.5, size_min=16, size_max=128, fade=True, amplitude_min=0.1, amplitude_max=0.6
)


class AdaptConfig(LengthConfig):
    """Adapting the networks to the target's normal films, with both self-supervised tasks."""

    lesions: LesionConfig = Field(
        DETECTION_LESIONS, description="drawn while adapting: in the lungs, up to large, half of them smooth haze"
    )
    lesion: float = Field(
        1.0,
        ge=0,
        description="weight of the token lesion classifier (ours); 0: the paper's losses alone, no such score",
    )
    lesion_finer: int | None = Field(
        None, ge=1, le=64, description="cells along a token's side that it tells apart; null: as the weights have it"
    )
    epochs: int = Field(10, ge=0, description="passes over the normal films; 0 = the weights as they are")
    batch_size: int = Field(64, ge=2, description="films in one update, of all processes together, before views")
    learning_rate: float = Field(1e-4, gt=0, description="of Adam; not scaled by anything")
    learning_rate_end: float = Field(1e-6, ge=0, description="learning rate at the end of the cosine")

    @model_validator(mode="after")
    def _adapts_or_not(self) -> AdaptConfig:
        if not self.epochs and (self.film_views_min or self.minutes):
            raise ValueError("epochs=0 takes the weights as they are; leave out film_views_min and minutes")
        return self


class AtlasConfig(Section):
    """What a detector keeps of normal films for the report, where people compare a film with them."""

    patches: int = Field(
        0,
        ge=0,
        le=32,
        description="pieces of single training films kept for each place, which are patients' pixels; 0: averages only",
    )


class DetectorConfig(Section):
    """What every detector is fitted with: which normal films do what, the score, and the false-alarm rate."""

    seed: int = Field(0, ge=0, description="every random choice follows from it")
    score: str = Field("auto", description="a score, several joined by +, or auto: chosen on held-out normals")
    held_out: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="share of the normal patients that choose and calibrate; with --split: its val films",
    )
    choose_share: float = Field(0.4, gt=0, lt=1, description="share of the held-out patients that choose the score")
    false_alarms: float = Field(0.1, gt=0, lt=1, description="share of normal films that may be flagged")
    atlas: AtlasConfig = Field(default_factory=AtlasConfig)


class DetectConfig(DetectorConfig):
    """All settings of fitting the detector `afire`."""

    adapt: AdaptConfig = Field(default_factory=AdaptConfig)


@overload
def load_task_config(
    kind: Literal["finetune"], preset: str | None = None, file: Path | None = None, overrides: Iterable[str] = ()
) -> FinetuneConfig: ...


@overload
def load_task_config(
    kind: Literal["segment"], preset: str | None = None, file: Path | None = None, overrides: Iterable[str] = ()
) -> SegmentConfig: ...


def load_task_config(
    kind: Literal["finetune", "segment"],
    preset: str | None = None,
    file: Path | None = None,
    overrides: Iterable[str] = (),
) -> FinetuneConfig | SegmentConfig:
    """Defaults of a task, then its preset, then the YAML file, then ``key.sub=value`` overrides."""
    files = [preset_path(preset, TASK_PRESETS[kind], f"{kind}-")] if preset is not None else []
    files += [file] if file is not None else []
    if kind == "finetune":
        return load_settings(FinetuneConfig, files, overrides)
    return load_settings(SegmentConfig, files, overrides)
