"""Every setting of afire: the one source of defaults, help text and YAML.

Presets are small YAML files beside this module that say only what differs from the defaults.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from afire.errors import UserError

Fit = Literal["squash", "letterbox", "crop"]
Voi = Literal["auto", "lut", "window", "none"]
PRESETS = ("paper", "original", "large", "huge", "small", "tiny")
VIT_SIZES = {  # width, depth, heads
    **{"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)},
    **{"large": (1024, 24, 16), "huge": (1280, 32, 16)},
}
_BUDGETS = ("epochs", "film_views_min", "minutes")  # of a run; the last that is said counts
_PRESET_FOLDER = Path(__file__).parent / "presets"


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
    paste_size: float = Field(64, gt=0, description="side of the pasted patch (anatpaste only: one lesion, one size)")
    views: int = Field(1, ge=1, le=64, description="lesioned versions of each film in a step (the paper's N)")

    @model_validator(mode="after")
    def _ordered(self) -> LesionConfig:
        for low, high in (("count_min", "count_max"), ("size_min", "size_max"), ("amplitude_min", "amplitude_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is larger than {high} {getattr(self, high)}")
        return self


class EncoderConfig(Section):
    """The vision transformer."""

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
        named = dict(zip(("width", "depth", "heads"), VIT_SIZES[values["size"]], strict=True))
        for name, number in named.items():
            if values.get(name, number) != number:
                raise ValueError(
                    f"size {values['size']} has {name} {number}, but {name} is {values[name]};"
                    " leave out one of them, or set size to null to choose the numbers"
                )
        return {**values, **named}

    @model_validator(mode="after")
    def _divides(self) -> EncoderConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.width % 4:
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
    move: float = Field(
        0.0, ge=0, le=0.5, description="largest shift and zoom of training films, so that no position is one place"
    )


class LossConfig(Section):
    """Token losses and their weights; a weight of 0 switches a loss off."""

    structure: float = Field(1.0, ge=0, description="weight of structure consistency")
    category: float = Field(1.0, ge=0, description="weight of category consistency")
    restoration: float = Field(1.0, ge=0, description="weight of restoration")
    lesion: float = Field(0.0, ge=0, description="weight of the token lesion classifier (ours, not in the paper)")
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


class TrainingConfig(Section):
    """The pre-training recipe."""

    epochs: int = Field(800, ge=1, description="passes over the normal films")
    film_views_min: int = Field(
        0, ge=0, description="films seen in all, at the least: few films get more epochs for it; 0 = epochs alone"
    )
    minutes: float = Field(
        0, ge=0, description="length by the clock: epochs follow from the speed, measured once at the start; 0 = not"
    )
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
        asked = values.get("tracking", ("tensorboard",))
        names = [name.strip() for name in asked.split(",") if name.strip()] if isinstance(asked, str) else asked
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
        if self.prototypes.place == "anatomy" and self.head.form == "per_position":
            raise ValueError(
                "prototypes.place anatomy needs head.form shared: with clusters of their own for each position, tokens "
                "of one place cannot be compared"
            )
        return self


def load_config(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Iterable[str] = (),
    weights: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Defaults, then the preset, then the YAML file, then ``key.sub=value`` overrides; each may leave things out.

    What ``weights`` say of themselves counts more than a preset, which cannot know them, and less than the others.
    """
    presets = [_read_yaml(preset_path(preset))] if preset is not None else []
    return load_settings(Config, [*presets, weights, *([file] if file is not None else [])], overrides)


def load_settings(
    kind: type[SectionType], layers: Iterable[Path | Mapping[str, Any]], overrides: Iterable[str] = ()
) -> SectionType:
    """Settings of any kind: defaults, then each YAML file or mapping, then ``key.sub=value`` overrides."""
    values: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for override in overrides:
        _merge(asked, parse_override(override))
    for layer in (*layers, asked):
        _merge(values, _one_budget(_read_yaml(layer) if isinstance(layer, Path) else layer, kind))
    return validate(values, kind)


def changed(config: SectionType, *values: Mapping[str, Any]) -> SectionType:
    """The same settings but for ``values``, which are nested as in a YAML file; later ones count."""
    merged = config.model_dump()
    for each in values:
        _merge(merged, _one_budget(each, type(config)))
    return validate(merged, type(config))


def _one_budget(values: Mapping[str, Any], kind: type[Section]) -> Mapping[str, Any]:
    """Who says how long a run is overrules all that was said before: epochs, say, the film views of a preset."""
    training = values.get("training")
    if (
        not issubclass(kind, Config)
        or not isinstance(training, Mapping)
        or not any(name in training for name in _BUDGETS)
    ):
        return values
    return {**values, "training": {**dict.fromkeys(_BUDGETS[1:], 0), **training}}


def preset_path(name: str, presets: Iterable[str] = PRESETS, prefix: str = "") -> Path:
    """The YAML file of a preset, one of ``presets``; those of a task carry its name as ``prefix``."""
    known = list(presets)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(f"there is no preset {name!r}{hint} Presets are {', '.join(known)}.")
    return _PRESET_FOLDER / f"{prefix}{name}.yaml"


def to_yaml(config: Section, leave_out: Iterable[str] = (), options: Section | None = None) -> str:
    """Settings as YAML with every setting's meaning beside it; reads back as the same settings.

    ``leave_out`` names groups that nobody reads; ``options`` explains those of the method.
    """
    lines: list[str] = []
    shown = {"options": options} if options is not None else {}
    _describe(config, lines, 0, frozenset(leave_out), shown)
    return "\n".join(lines) + "\n"


def validate(values: Mapping[str, Any], kind: type[SectionType]) -> SectionType:
    """Build settings of a kind; every mistake becomes a message that names the key and what is allowed."""
    _check_names(values, kind, path="")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(_message(dict(item)) for item in error.errors())) from None


def parse_override(text: str) -> dict[str, Any]:
    """``training.epochs=3`` -> ``{"training": {"epochs": 3}}``; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r} is not key=value, as in --set training.epochs=10.")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise UserError(f"--set {text!r}: {raw!r} is not a YAML value; quote it.") from None
    if isinstance(value, str):
        value = _number_or_text(value)
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _number_or_text(text: str) -> float | str:
    """YAML 1.1 takes 1e-4 (no dot) for a text; a user who writes it means the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"configuration file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise UserError(f"configuration file {path} is not valid YAML{line}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"configuration file {path} holds no settings; it should look like `afire config` prints.")
    return values


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Unknown:
    """A name that settings do not have, and the nearest that they have; ``likeness`` of the two is at most 1."""

    key: str
    nearest: str | None = None
    likeness: float = 0.0

    def __str__(self) -> str:
        return f"unknown setting {self.key}{f'; did you mean {self.nearest}?' if self.nearest else '.'}"


def find_unknown(path: Sequence[str], kind: type[Section]) -> Unknown | None:
    """The first name of a dotted key that settings of a kind do not have; None where they have all of it."""
    section = kind
    for depth, name in enumerate(path):
        if name in section.former:
            return None
        if name not in section.model_fields:
            return _unknown(name, section, "".join(f"{above}." for above in path[:depth]))
        annotation = section.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return None  # a value, or a mapping that its reader checks
        section = annotation
    return None


def _unknown(name: str, section: type[Section], path: str) -> Unknown:
    names = _all_names(section)
    below = [candidate for candidate in names if candidate.rpartition(".")[2] == name]
    if below:
        return Unknown(f"{path}{name}", f"{path}{below[0]}", 1.0)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        return Unknown(f"{path}{name}")
    return Unknown(f"{path}{name}", f"{path}{close[0]}", difflib.SequenceMatcher(None, name, close[0]).ratio())


def _check_names(values: Mapping[str, Any], section: type[Section], path: str) -> None:
    known = section.model_fields
    for key, value in values.items():
        if key in section.former:
            continue
        if key not in known:
            raise UserError(str(_unknown(str(key), section, path)))
        annotation = known[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            if not isinstance(value, Mapping):
                raise UserError(f"{path}{key} is a group of settings ({', '.join(annotation.model_fields)}).")
            _check_names(value, annotation, f"{path}{key}.")


def _all_names(section: type[Section]) -> list[str]:
    """Names in the section, and dotted names below it, so that `epochs` finds `training.epochs`."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        names.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            names.extend(f"{name}.{below}" for below in field.annotation.model_fields)
    return names


def _message(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"])
    if error["type"] == "value_error":
        return (
            message.removeprefix("Value error, ") if not where else f"{where}: {message.removeprefix('Value error, ')}"
        )
    return f"{where} is {error['input']!r}, but {message[0].lower()}{message[1:]}"


def _describe(
    section: Section,
    lines: list[str],
    indent: int,
    leave_out: frozenset[str] = frozenset(),
    instead: Mapping[str, Section] = MappingProxyType({}),
) -> None:
    pad = "  " * indent
    for name, field in type(section).model_fields.items():
        if name in leave_out:
            continue
        value = instead.get(name, getattr(section, name))
        if isinstance(value, Section) and type(value).model_fields:
            summary = (type(value).__doc__ or "").splitlines()[0]
            lines.append(f"{pad}{name}:  # {summary}")
            _describe(value, lines, indent + 1)
        elif isinstance(value, Section):
            lines.append(f"{pad}{name}: {{}}  # {field.description or ''}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=100_000).rstrip("\n").removesuffix("\n...")
            lines.append(f"{pad}{name}: {text}  # {field.description or ''}{_choices(field.annotation)}".rstrip(" #"))


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f" ({'|'.join(str(choice) for choice in get_args(annotation))})"
    return ""
