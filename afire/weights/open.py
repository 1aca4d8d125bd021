"""The encoder a task starts from: random, of a run, a bundle or a file; always with a hash of what is in it.

The whole of a pre-training run for looking at it: both networks, decoder and prototypes, not the encoder alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from afire.config import Config, load_config
from afire.errors import UserError
from afire.files import read_json
from afire.methods.afire import AFiRe, Network
from afire.nn.layers import Normalise
from afire.nn.vit import VisionTransformer, initialise
from afire.training.checkpoint import MODEL, STATE, newest_checkpoint
from afire.training.engine import Schedules
from afire.training.run_folder import CONFIG
from afire.weights.bundle import Bundle, is_bundle, open_bundle
from afire.weights.files import load_encoder, read_tensors
from afire.weights.hub import bundle_name, local_path

RANDOM = "random"
SEED = "{seed}"  # in a path: each seed's own weights
# What a run's settings need not repeat: no other weights follow from them. A named size stands for width, depth, heads.
_FREE = ("encoder.size", "encoder.drop_path", "encoder.gradient_checkpointing", "image.fit", "image.voi")


@dataclass(frozen=True)
class Backbone:
    """An encoder in evaluation mode on the CPU, how films are normalised for it, and where it came from."""

    encoder: VisionTransformer
    normalise: Normalise
    config: Config
    hash: str  # of the encoder's tensors
    name: str  # for tables: random, the run's folder or the file's name
    report: str  # one sentence: what was loaded


def load_backbone(
    weights: str, config: Config | None = None, *, network: Network = "teacher", seed: int = 0
) -> Backbone:
    """``random``, a run folder (its newest whole checkpoint), a checkpoint folder, a bundle, or a weights file.

    ``hf://owner/name`` is any of them, but a run, on a hub. A run and a bundle bring their own settings, and ``config``
    may only repeat them. Random weights and files need ``config`` for
    the architecture. ``seed`` draws the random weights; ``network`` chooses in a run.
    """
    if weights == RANDOM:
        config = _required(config, "random weights have no architecture of their own")
        encoder = VisionTransformer.from_config(config.encoder, config.image)
        initialise(encoder, torch.Generator().manual_seed(seed))
        report = f"random weights from seed {seed}"
        return _finish(encoder, config, RANDOM, report)
    path = local_path(weights)
    if is_bundle(path):
        return _load_bundle(open_bundle(path), config, network, bundle_name(weights))
    file = weights_file(path)
    settings = run_config_file(path)
    if settings is not None:
        config = _same_config(load_config(file=settings), config, f"the run in {settings.parent}")
        encoder = VisionTransformer.from_config(config.encoder, config.image)
        report = _load_run(encoder, file, network)
        return _finish(encoder, config, path.resolve().name, report)
    config = _required(config, f"{path} does not say which architecture it has")
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    report = _load_foreign(encoder, file)
    return _finish(encoder, config, path.stem if path.is_file() else path.resolve().name, report)


@dataclass
class Backbones:
    """The encoders of an experiment's runs: random weights are drawn anew for each seed, and ``runs/mine-{seed}`` is a
    pre-training for each seed; others are the same for all."""

    weights: str
    seeds: Sequence[int]
    config: Config | None = None  # the architecture, where the weights do not say it
    network: Network = "teacher"
    _loaded: dict[int, Backbone] = field(default_factory=dict)

    @property
    def differ(self) -> bool:
        """Whether each seed has its own weights."""
        return self.weights == RANDOM or SEED in self.weights

    def of(self, seed: int) -> Backbone:
        """The backbone of a run."""
        key = seed if self.differ else self.seeds[0]
        if key not in self._loaded:
            weights = self.weights.replace(SEED, str(key))
            loaded = load_backbone(weights, self.config, network=self.network, seed=key)
            if key != self.seeds[0]:
                self._check_same_kind(loaded)
            self._loaded[key] = loaded
        return self._loaded[key]

    def _check_same_kind(self, other: Backbone) -> None:
        """One experiment, one architecture: else its mean over seeds would be of different things."""
        first = self.first
        for section in ("encoder", "image"):
            if getattr(first.config, section) != getattr(other.config, section):
                raise UserError(
                    f"{first.name} and {other.name} differ in their {section} settings; {self.weights} must be "
                    "the same network for every seed."
                )

    @property
    def first(self) -> Backbone:
        return self.of(self.seeds[0])

    @property
    def name(self) -> str:
        if self.weights == RANDOM:
            return "random weights"
        return Path(self.weights).name if SEED in self.weights else self.first.name

    @property
    def report(self) -> str:
        if self.weights == RANDOM:
            return "drawn from each run's seed"
        return f"for each seed its own: {self.first.report}" if SEED in self.weights else self.first.report


def run_config_file(path: Path) -> Path | None:
    """The settings of the run that a run folder, a checkpoint folder or a checkpoint's file belongs to."""
    for folder in (path, *list(path.resolve().parents)[:3]):
        if (folder / CONFIG).is_file() and (folder == path or folder / "checkpoints" in path.resolve().parents):
            return folder / CONFIG
    return None


def encoder_hash(encoder: VisionTransformer) -> str:
    """Content hash of the encoder's tensors by name; the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def pick_device(device: str) -> torch.device:
    """``auto`` is the best device torch sees; a named one that is not there is a sentence."""
    if device == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: torch sees no Apple GPU; use --device cpu or auto.")
    return torch.device(device)


def _finish(encoder: VisionTransformer, config: Config, name: str, report: str) -> Backbone:
    return Backbone(encoder.eval(), Normalise(config.image), config, encoder_hash(encoder), name, report)


def _required(config: Config | None, why: str) -> Config:
    if config is None:
        raise UserError(f"{why}; add --preset, --config or --set encoder.* to say it.")
    return config


def _same_config(config: Config, asked: Config | None, whose: str) -> Config:
    """``config``, which the weights bring; what was asked beside it must not contradict."""
    if asked is None:
        return config
    for section in ("encoder", "image"):
        ours, theirs = getattr(config, section).model_dump(), getattr(asked, section).model_dump()
        for key, value in ours.items():
            if f"{section}.{key}" not in _FREE and theirs[key] != value:
                raise UserError(
                    f"{whose} has {section}.{key} {value}, but {theirs[key]} was asked for; "
                    "leave out --preset, --config and --set: a run brings its own settings."
                )
    return config


def _load_bundle(bundle: Bundle, asked: Config | None, network: Network, name: str) -> Backbone:
    config = _same_config(bundle.config, asked, f"the bundle {bundle.folder}")
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    file = bundle.encoder_file(network)
    tensors = read_tensors(file)
    _check_whole(encoder.state_dict(), tensors, file)
    encoder.load_state_dict(tensors)
    report = f"{len(tensors)} tensors of the {network} from the bundle {name} ({bundle.hash[:12]})"
    return _finish(encoder, config, name, report)


def _load_run(encoder: VisionTransformer, file: Path, network: Network) -> str:
    prefix = f"{network}.encoder."
    found = {n.removeprefix(prefix): t for n, t in read_tensors(file).items() if n.startswith(prefix)}
    _check_whole(encoder.state_dict(), found, file)
    encoder.load_state_dict(found)
    return f"{len(found)} tensors of the {network} from {file.parent.name}/{file.name}"


def _check_whole(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], file: Path) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise UserError(f"{file} lacks {name}; it is not a checkpoint of this run.")
        if found[name].shape != tensor.shape:
            raise UserError(
                f"{file}: {name} is {tuple(found[name].shape)}, but the run's settings say {tuple(tensor.shape)}."
            )
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        raise UserError(f"{file} holds {extra[0]}, which the run's settings do not have.")


def _load_foreign(encoder: VisionTransformer, file: Path) -> str:
    report = load_encoder(encoder, file)
    # Fewer or more blocks than the settings say: each name fits, and yet it is another network.
    for names, what in ((report.missing, "lacks"), (report.unexpected, "has the additional")):
        wrong = [name for name in names if name.startswith(("blocks.", "patch_embed."))]
        if wrong:
            raise UserError(
                f"{file} has another architecture: it {what} {wrong[0]}; "
                "set encoder.width, depth, heads and patch_size as in the weights."
            )
    return report.sentence()


def weights_file(weights: str | Path) -> Path:
    """The weights behind a path: a file, a bundle's encoder, or the newest whole checkpoint of a run folder.

    ``hf://owner/name`` is downloaded, or found in the local cache.
    """
    path = local_path(weights)
    if not path.exists():
        raise UserError(f"weights {path} do not exist; give a run folder, a bundle, a .safetensors or a .pth file.")
    if path.is_file():
        return path
    if is_bundle(path):
        return open_bundle(path).encoder_file()
    if (path / MODEL).exists():
        return path / MODEL
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} holds no checkpoint; give a run folder, a bundle, a .safetensors or a .pth file.")
    return checkpoint.folder / MODEL


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode on the CPU, and where it came from."""

    model: AFiRe
    hash: str  # of all its tensors
    name: str  # of the run's folder
    report: str  # one sentence: what was loaded


def load_pretrained(weights: str | Path) -> Pretrained:
    """A run folder (its newest whole checkpoint), a checkpoint folder of a run, or a bundle, here or on a hub."""
    if str(weights) == RANDOM:
        raise UserError("random weights restore nothing and have no prototypes; give the folder of a pre-training run.")
    path = local_path(weights)
    if is_bundle(path):
        bundle = open_bundle(path)
        name = bundle_name(weights)
        model = bundle.model()
        return Pretrained(
            model, model_hash(model), name, f"the whole model from the bundle {name} ({bundle.hash[:12]})"
        )
    file = weights_file(path)
    settings = run_config_file(path)
    if settings is None:
        raise UserError(
            f"{path} is weights alone, without a decoder and prototypes; give the folder of a pre-training run."
        )
    model = AFiRe(load_config(file=settings))
    tensors = read_tensors(file)
    _check_fit(model, tensors, file)
    model.load_state_dict(tensors)
    model.teacher_temperature = _teacher_temperature(model, file.parent / STATE)
    report = f"{len(tensors)} tensors of the whole model from {file.parent.name}/{file.name}"
    return Pretrained(model.eval(), model_hash(model), settings.parent.resolve().name, report)


def model_hash(model: AFiRe) -> str:
    """Content hash of all tensors by name; the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_fit(model: AFiRe, found: Mapping[str, Tensor], file: Path) -> None:
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise UserError(f"{file} lacks {missing[0]}; it is not a checkpoint of this run.")
    if extra:
        raise UserError(f"{file} holds {extra[0]}, which the run's settings do not have.")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise UserError(
                f"{file}: {name} is {tuple(found[name].shape)}, but the run's settings say {tuple(tensor.shape)}."
            )


def _teacher_temperature(model: AFiRe, state_file: Path) -> float:
    """tau_t at the checkpoint's step; where no step is known, that after the warm-up."""
    losses = model.config.losses
    if not state_file.exists():
        return losses.teacher_temperature
    state = read_json(state_file)
    schedules = Schedules(model.config.training, losses, int(state["steps_per_epoch"]), 1)
    return schedules.at(max(int(state["step"]) - 1, 0)).teacher_temperature
