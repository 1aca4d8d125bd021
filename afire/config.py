"""Every setting of afire: the one source of defaults, help text and YAML, which `afire.settings` reads and prints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fit = Literal["squash", "letterbox", "crop"]
Voi = Literal["auto", "lut", "window", "none"]
PRESETS = ("paper", "original", "large", "huge", "small", "tiny", "residual")
VIT_SIZES = {  # width, depth, heads
    **{"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)},
    **{"large": (1024, 24, 16), "huge": (1280, 32, 16)},
}


class Section(BaseModel):
    """A group of settings: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    former: ClassVar[tuple[str, ...]] = ()
    """Names of earlier versions, which a validator of the section takes in."""


SectionType = TypeVar("SectionType", bound=Section)


class ImageConfig(Section):
    """How a film becomes a tensor."""

    size: int = Field(224, ge=16, le=4096, description="side of the square network input, in pixels")
    channels: Literal[1, 3] = Field(1, description="1 grey channel, or 3 equal ones for weights trained on RGB")
    fit: Fit = Field(
        "squash", description="how a film that is not square becomes square: squash, letterbox (pad) or centre crop"
    )
    voi: Voi = Field(
        "auto", description="DICOM grey-scale: auto (VOI LUT, else window, else full range), lut, window, or none"
    )
    normalise: Literal["imagenet", "film", "none"] = Field(
        "imagenet", description="imagenet mean and std, each film by its own mean and std, or none (stay in [0,1])"
    )


class LesionConfig(Section):
    """Synthetic lesions. Sizes are in pixels of a 224-px film and scale with the image."""

    kind: Literal["slm", "anatpaste"] = Field("slm", description="slm: the paper's; anatpaste: its ablation")
    count_min: int = Field(1, ge=1, le=16, description="fewest lesions in a film")
    count_max: int = Field(4, ge=1, le=16, description="most lesions in a film")
    size_min: float = Field(16, gt=0, description="smallest side of a lesion")
    size_max: float = Field(64, gt=0, description="largest side of a lesion")
    texture_window: float = Field(60, gt=0, description="side of the window the texture is taken from")
    gamma: float = Field(0.5, gt=0, description="softness of the outline: exp(-(u^2+v^2)/gamma)")
    fade: bool = Field(
        False, description="fade to nothing at the inscribed oval; off: end at the box, as printed, with a faint edge"
    )
    amplitude_min: float = Field(0.2, ge=0, le=1, description="faintest lesion")
    amplitude_max: float = Field(0.8, ge=0, le=1, description="strongest lesion")
    rotate: bool = Field(False, description="turn each lesion by a random angle")
    irregularity: float = Field(
        0.0, ge=0, lt=1, description="how far the outline may dent, as a share of its radius; 0 = an oval"
    )
    place: Literal["anywhere", "lungs"] = Field("anywhere", description="where the centres of lesions may lie")
    haze: float = Field(
        0.0, ge=0, le=1, description="share of lesions that are smooth haze (film blended to its bright level)"
    )
    patchy: float = Field(
        0.0, ge=0, le=1, description="how far gaps between clouds, coarse to fine, thin lesions out and dent their edge"
    )
    paste_size: float = Field(64, gt=0, description="side of the pasted patch (anatpaste only: one lesion, one size)")
    opacities: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the views whose lesions are opacities: patchy haze in the lungs that fades to nothing",
    )
    pasted: float = Field(
        0.0, ge=0, le=1, description="share of the views that get patches of other normal films, without a seam"
    )
    pasted_too: bool = Field(False, description="on: views with patches get lesions as well; off: in their place")
    patches: int = Field(3, ge=1, le=16, description="most patches in a view; one for sure, each further one by a coin")
    blend: Literal["mixed", "poisson", "either"] = Field(
        "either",
        description="poisson: a patch keeps its own steps; mixed: the larger step of film and patch; either: by a coin",
    )
    donors: int = Field(128, ge=0, description="films of the run that patches are cut from; 0 = each film is its own")
    views: int = Field(1, ge=1, le=64, description="lesioned versions of each film in a step (the paper's N)")

    @model_validator(mode="after")
    def _ordered(self) -> LesionConfig:
        for low, high in (("count_min", "count_max"), ("size_min", "size_max"), ("amplitude_min", "amplitude_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is larger than {high} {getattr(self, high)}")
        if self.opacities + self.pasted > 1:
            raise ValueError(f"opacities {self.opacities} and pasted {self.pasted} are more than all views together")
        return self


class EncoderConfig(Section):
    """The encoder: a vision transformer, or the convolutional network of the built-in detector."""

    kind: Literal["vit", "residual"] = Field(
        "vit", description="vision transformer, or the residual network of the built-in detector (for method phantom)"
    )
    size: Literal["tiny", "small", "base", "large", "huge"] | None = Field(
        None, description="tiny, small, base, large or huge instead of width, depth and heads; null = by number"
    )
    width: int = Field(768, ge=12, description="width D of a token")
    depth: int = Field(12, ge=1, description="number of blocks")
    heads: int = Field(12, ge=1, description="attention heads")
    patch_size: int = Field(16, ge=2, description="side of a patch in pixels")
    stem: Literal["patch", "conv"] = Field(
        "patch", description="patches through one matrix, or strided 3x3 convolutions (patch_size a power of 2)"
    )
    positions: Literal["sincos", "learned"] = Field("sincos", description="fixed 2-D sin-cos, or learned")
    drop_path: float = Field(0.0, ge=0, lt=1, description="stochastic depth of the last block, rising linearly")
    gradient_checkpointing: bool = Field(False, description="recompute blocks in backward: less memory, slower")

    @model_validator(mode="before")
    @classmethod
    def _named_size(cls, values: Any) -> Any:
        """A named size fills in width, depth and heads; numbers that contradict it are a mistake, not a choice."""
        if not isinstance(values, Mapping) or values.get("size") not in VIT_SIZES:
            return values
        numbers = dict(zip(("width", "depth", "heads"), VIT_SIZES[values["size"]], strict=True))
        for name, number in numbers.items():
            if values.get(name, number) != number:
                raise ValueError(
                    f"size {values['size']} has {name} {number}, but {name} is {values[name]};"
                    " leave out one of them, or set size to null to choose the numbers"
                )
        return {**values, **numbers}

    @model_validator(mode="after")
    def _divides(self) -> EncoderConfig:
        fits = self.width % 14 == 0 and self.depth % 2 == 1 and self.depth >= 3 and self.patch_size == 8
        if self.kind == "residual" and not fits:
            raise ValueError(
                f"kind residual needs a width that is a multiple of 14, an odd depth of at least 3 and patch_size 8, "
                f"not {self.width}, {self.depth} and {self.patch_size}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.kind == "vit" and self.width % 4:
            raise ValueError(f"width {self.width} is not a multiple of 4, which 2-D sin-cos positions need")
        if self.stem == "conv" and self.patch_size & (self.patch_size - 1):
            raise ValueError(f"stem conv halves films and needs a patch_size such as 8 or 16, not {self.patch_size}")
        return self


class HeadConfig(Section):
    """The projection head h: tokens to K cluster logits."""

    form: Literal["shared", "per_position"] = Field(
        "shared", description="one cluster matrix for all positions, or one for each (paper, original)"
    )
    hidden: int = Field(1024, ge=4, description="width of the two hidden layers")
    bottleneck: int = Field(256, ge=4, description="width of the normalised feature before the clusters")
    clusters: int = Field(256, ge=2, description="number of clusters K")


class DecoderConfig(Section):
    """The restoration decoder."""

    width: int = Field(512, ge=8, description="width of a token in the decoder")
    depth: int = Field(8, ge=1, description="number of blocks")
    heads: int = Field(16, ge=1, description="attention heads")
    mask_token: bool = Field(True, description="replace abnormal tokens by a trainable z_mask before decoding")

    @model_validator(mode="after")
    def _divides(self) -> DecoderConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.width % 4:
            raise ValueError(f"width {self.width} is not a multiple of 4, which 2-D sin-cos positions need")
        return self


class PrototypeConfig(Section):
    """Teacher assignments and the spatial prototypes C."""

    enabled: bool = Field(True, description="keep prototypes over time; off: the batch mean of the step, no memory")
    momentum: float = Field(0.75, ge=0, lt=1, description="share of the old prototype that each step keeps")
    sinkhorn_iterations: int = Field(3, ge=1, description="Sinkhorn-Knopp iterations")
    place: Literal["grid", "anatomy"] = Field(
        "grid", description="what has a prototype: a cell of the film, or a place in the chest by that film's lungs"
    )
    lungs: Literal["otsu", "predicted"] = Field(
        "otsu",
        description="how place anatomy finds them: by Otsu's threshold, or predicted with the heart (method phantom)",
    )
    move: float = Field(
        0.0, ge=0, le=0.5, description="largest shift and zoom of training films, so that no position is one place"
    )


class LossConfig(Section):
    """Token losses and their weights; a weight of 0 switches a loss off."""

    structure: float = Field(1.0, ge=0, description="weight of structure consistency")
    category: float = Field(1.0, ge=0, description="weight of category consistency")
    restoration: float = Field(1.0, ge=0, description="weight of restoration")
    lesion: float = Field(0.0, ge=0, description="weight of the token lesion classifier (ours, not in the paper)")
    lesion_finer: int = Field(
        1, ge=1, le=64, description="cells along a token's side that the lesion classifier tells apart; 1 = the token"
    )
    temperature: float = Field(1.0, gt=0, description="tau in f = exp(-H/tau)")
    similarity: Literal["corrected", "literal"] = Field(
        "corrected", description="corrected: exp(-H/tau); literal: exp(+H/tau) as printed, for study"
    )
    contrast: Literal["probability", "feature"] = Field(
        "probability", description="compare cluster probabilities, or cosine of projected features (ablation)"
    )
    abnormal_consistency: bool = Field(False, description="also pull abnormal tokens together (ablation)")
    abnormal_weight: float = Field(4.0, ge=0, description="weight of abnormal tokens in restoration")
    student_temperature: float = Field(0.1, gt=0, description="tau_s of the student's softmax")
    teacher_temperature: float = Field(0.07, gt=0, description="tau_t of the teacher after warm-up")
    teacher_temperature_start: float = Field(0.04, gt=0, description="tau_t of the teacher at the start")
    teacher_temperature_epochs: int = Field(30, ge=0, description="epochs of tau_t warm-up")

    @model_validator(mode="after")
    def _means_something(self) -> LossConfig:
        if not (self.structure or self.category or self.restoration or self.lesion):
            raise ValueError("structure, category, restoration and lesion all have weight 0: there is nothing to learn")
        if self.contrast == "feature" and self.similarity == "literal":
            raise ValueError("similarity literal is the printed form of probabilities; with contrast feature leave it")
        return self


class LengthConfig(Section):
    """How long networks are trained: a layer of settings that says one of these replaces what earlier ones said."""

    epochs: int = Field(100, ge=1, description="passes over the normal films")
    film_views_min: int = Field(
        0, ge=0, description="films seen in all, at the least: few films get more epochs for it; 0 = epochs alone"
    )
    minutes: float = Field(
        0, ge=0, description="length by the clock: epochs follow from the speed, measured once at the start; 0 = not"
    )


class TrainingConfig(LengthConfig):
    """The pre-training recipe."""

    epochs: int = Field(800, ge=1, description="passes over the normal films")
    batch_size: int = Field(64, ge=1, description="films in one update, of all processes together, before views")
    learning_rate: float = Field(5e-4, gt=0, description="for a batch of 256; scaled linearly with it")
    learning_rate_end: float = Field(1e-6, ge=0, description="learning rate at the end of the cosine")
    warmup_epochs: float = Field(20, ge=0, description="linear warm-up of the learning rate")
    weight_decay: float = Field(0.04, ge=0, description="at the start; none on biases, norms and positions")
    weight_decay_end: float = Field(0.4, ge=0, description="at the end of its cosine")
    teacher_momentum: float = Field(0.99, ge=0, le=1, description="EMA lambda at the start; rises to 1 on a cosine")
    clip: float = Field(3.0, ge=0, description="gradient norm limit, 0 = none")
    freeze_last_layer_epochs: int = Field(1, ge=0, description="epochs in which the head's last layer stays fixed")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="factor on the rate from each layer of the encoder to the one before; for --init"
    )
    frozen_blocks: int = Field(
        0, ge=0, description="first blocks of the encoder that keep their weights, with what precedes them; for --init"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's memory of gradients")
    beta2: float = Field(0.999, gt=0, lt=1, description="AdamW's memory of squared gradients")
    accumulate: int = Field(
        1, ge=1, description="pieces in which each process works through its share of a batch; same result, less memory"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic of the networks")
    compile: bool = Field(False, description="torch.compile the networks")
    shard: Literal["none", "ddp", "fsdp"] = Field(
        "ddp",
        description="how processes share the weights: ddp, each has all; fsdp, each has a part; none: one process only",
    )


class RunConfig(Section):
    """What a run writes and when; nothing here changes the weights it ends with."""

    checkpoint_minutes: float = Field(30, gt=0, description="minutes between checkpoints")
    checkpoint_epochs: int = Field(1, ge=0, description="epochs between checkpoints, 0 = by the clock only")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that stay")
    picture_epochs: int = Field(5, ge=0, description="epochs between pictures, 0 = none")
    probe_epochs: int = Field(0, ge=0, description="epochs between online probes on validation films, 0 = none")
    probe_films: int = Field(2000, ge=10, description="most films that the online probe looks at in each part")
    stop_on_collapse: bool = Field(False, description="end the run when the health line is red two epochs in a row")
    on_bad_film: Literal["skip", "stop"] = Field("skip", description="a film that cannot be read or was altered")
    check_images: bool = Field(
        False, description="look at the values of every batch (a GPU waits for it); for hunting a fault in own code"
    )
    tracking: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        ("tensorboard",), description="where numbers go beside metrics.jsonl: tensorboard, wandb, mlflow; [] = nowhere"
    )
    former = ("wandb",)

    @model_validator(mode="before")
    @classmethod
    def _tracking_by_name(cls, values: Any) -> Any:
        """One name, or several behind commas, instead of a list; and what was ``wandb: true``."""
        if not isinstance(values, Mapping):
            return values
        tracking = values.get("tracking", ("tensorboard",))
        names = (
            [name.strip() for name in tracking.split(",") if name.strip()] if isinstance(tracking, str) else tracking
        )
        if values.get("wandb"):
            logging.getLogger("afire").warning("run.wandb is now run.tracking=tensorboard,wandb.")
            names = [*names, *({"wandb"} - {*names})]
        return {**{key: value for key, value in values.items() if key != "wandb"}, "tracking": names}


class Config(Section):
    """All settings of a run."""

    method: str = Field("afire", description="the pre-training method, see `afire pretrain --help`")
    seed: int = Field(0, ge=0, description="every random choice follows from it")
    image: ImageConfig = Field(default_factory=ImageConfig)
    lesions: LesionConfig = Field(default_factory=LesionConfig)
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    head: HeadConfig = Field(default_factory=HeadConfig)
    decoder: DecoderConfig = Field(default_factory=DecoderConfig)
    prototypes: PrototypeConfig = Field(default_factory=PrototypeConfig)
    losses: LossConfig = Field(default_factory=LossConfig)
    options: dict[str, Any] = Field(
        default_factory=dict, description="the method's own settings, see `afire config --method`"
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="after")
    def _patches_fit(self) -> Config:
        if self.image.size % self.encoder.patch_size:
            raise ValueError(
                f"image.size {self.image.size} is not a multiple of encoder.patch_size {self.encoder.patch_size}"
            )
        if self.prototypes.lungs == "predicted" and self.prototypes.place != "anatomy":
            raise ValueError(
                "prototypes.lungs predicted needs prototypes.place anatomy: cells of the film ask no lungs"
            )
        if self.prototypes.place == "anatomy" and self.head.form == "per_position":
            raise ValueError(
                "prototypes.place anatomy needs head.form shared: with clusters of their own for each position, tokens "
                "of one place cannot be compared"
            )
        return self
