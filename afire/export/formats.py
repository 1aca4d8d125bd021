"""Networks in the formats of other libraries: how each is written, and how the library runs it for comparison.

- timm: a folder for ``timm.create_model("local-dir:FOLDER")``
- transformers: a folder for ``ViTModel.from_pretrained(FOLDER, add_pooling_layer=False)``
- torch.export: ``encoder.pt2``, a graph that ``torch.export.load`` opens without afire
- onnxruntime: ``encoder.onnx``, images to tokens and their mean; ``detector.onnx``, to score, p-value and heatmap

The batch size of a graph is free; where it resizes, height and width are too. What comes before the encoder, from a
film to its input, is described in numbers that other tools can follow.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from afire.config import Config, ImageConfig
from afire.detect.base import AnomalyDetector
from afire.errors import UserError
from afire.files import write_json
from afire.nn.vit import Normalise
from afire.weights import Weights
from afire.weights.files import read_tensors, to_huggingface, write_tensors

Preprocess = Literal["none", "normalise", "resize"]
_LARGEST = 16384  # pixels of a side
FITS = {
    "squash": "both sides are scaled to size, each by its own factor",
    "letterbox": "the longer side is scaled to size, the rest is black on both sides",
    "crop": "the central square is scaled to size",
}


def constants(image: ImageConfig) -> tuple[list[float], list[float]] | None:
    """Mean and std of each channel, or None where each film has its own."""
    if image.normalise == "film":
        return None
    normalise = Normalise(image)
    mean, std = normalise.mean.flatten().tolist(), normalise.std.flatten().tolist()
    repeat = image.channels // len(mean)
    return mean * repeat, std * repeat


def input_settings(weights: Weights) -> ImageConfig:
    """How a film becomes the input. A detector with networks of its own takes it grey in [0, 1] and does the rest."""
    image = weights.config.image
    return image if weights.holds_networks else image.model_copy(update={"normalise": "none", "channels": 1})


def preprocessing(image: ImageConfig) -> dict[str, Any]:
    """What ``preprocessing.json`` holds: from a film to the network's input."""
    mean_and_std = constants(image)
    return {
        "size": image.size,
        "channels": image.channels,
        "range": [0.0, 1.0],
        "grey": "black is 0; 8 bits / 255, 16 bits / 65535; DICOM: modality LUT, then VOI, then MONOCHROME1 inverted",
        "voi": image.voi,
        "resize": {"fit": image.fit, "meaning": FITS[image.fit], "filter": "bicubic, antialiased, clipped to [0, 1]"},
        "normalise": image.normalise,
        "mean": mean_and_std[0] if mean_and_std else "of the film",
        "std": mean_and_std[1] if mean_and_std else "of the film, population form, at least 0.001",
        "channels_from_grey": "repeated" if image.channels == 3 else "as it is",
    }


TIMM_WEIGHTS, TIMM_CONFIG = "model.safetensors", "config.json"


def timm_arguments(backbone: Weights) -> dict[str, Any]:
    """Of ``timm.models.vision_transformer.VisionTransformer``."""
    encoder, image = backbone.config.encoder, backbone.config.image
    return {
        "img_size": image.size,
        "patch_size": encoder.patch_size,
        "in_chans": image.channels,
        "embed_dim": encoder.width,
        "depth": encoder.depth,
        "num_heads": encoder.heads,
        "num_classes": 0,
    }


def write_timm(folder: Path, backbone: Weights) -> None:
    image, model_args = backbone.config.image, timm_arguments(backbone)
    write_tensors(folder / TIMM_WEIGHTS, backbone.trunk.state_dict())
    channels, size = model_args.pop("in_chans"), image.size
    mean, std = constants(image) or ([0.0] * channels, [1.0] * channels)
    fixed = {
        "input_size": [channels, size, size],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    write_json(
        folder / TIMM_CONFIG,
        {
            "architecture": "vit_base_patch16_224",  # the class; every size it stands for is overruled by model_args
            "num_classes": model_args.pop("num_classes"),
            "num_features": backbone.config.encoder.width,
            "model_args": {**model_args, "in_chans": channels},
            "pretrained_cfg": {**fixed, "mean": mean, "std": std, "first_conv": "patch_embed.proj", "num_classes": 0},
        },
    )


@torch.no_grad()
def run_timm(folder: Path, backbone: Weights, images: Tensor) -> dict[str, Tensor]:
    from timm.models.vision_transformer import VisionTransformer

    network = VisionTransformer(**timm_arguments(backbone)).eval()
    network.load_state_dict(read_tensors(folder / TIMM_WEIGHTS), strict=True)
    tokens = network.forward_features(backbone.normalise(images))[:, 1:]
    return {"tokens": tokens, "embedding": tokens.mean(dim=1)}


HF_WEIGHTS, HF_CONFIG, PROCESSOR = "model.safetensors", "config.json", "preprocessor_config.json"


def hf_config(config: Config) -> dict[str, Any]:
    """``ViTConfig`` as JSON."""
    encoder, image = config.encoder, config.image
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": encoder.heads,
        "intermediate_size": 4 * encoder.width,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": image.size,
        "patch_size": encoder.patch_size,
        "num_channels": image.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "torch_dtype": "float32",
    }


def hf_processor_config(config: Config) -> dict[str, Any]:
    """``ViTImageProcessor`` as JSON. It has no mean and std of each film: with normalise film it leaves them out."""
    image = config.image
    mean_and_std = constants(image)
    mean, std = mean_and_std or ([0.0] * image.channels, [1.0] * image.channels)
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image.size, "width": image.size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": mean_and_std is not None and image.normalise != "none",
        "image_mean": mean,
        "image_std": std,
        "do_convert_rgb": image.channels == 3,
    }


def write_hf(folder: Path, backbone: Weights) -> None:
    write_tensors(folder / HF_WEIGHTS, to_huggingface(backbone.trunk.state_dict()))
    write_json(folder / HF_CONFIG, hf_config(backbone.config))
    write_json(folder / PROCESSOR, hf_processor_config(backbone.config))


@torch.no_grad()
def run_hf(folder: Path, backbone: Weights, images: Tensor) -> dict[str, Tensor]:
    with _quiet_transformers():
        from transformers import ViTModel

        network = ViTModel.from_pretrained(folder, add_pooling_layer=False, local_files_only=True).eval()
    tokens = network(pixel_values=backbone.normalise(images)).last_hidden_state[:, 1:]
    return {"tokens": tokens, "embedding": tokens.mean(dim=1)}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as theirs

    logger = logging.getLogger("transformers")
    level, bars = logger.level, theirs.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            theirs.enable_progress_bar()


class Graph(nn.Module):
    """Something that takes ``images``.

    ``none``: the network's own input (B, C, S, S). ``normalise``: films (B, 1, S, S) in [0, 1]. ``resize``: films
    (B, 1, H, W) in [0, 1] of any size, squashed as :func:`afire.data.decode.fit_square` does it.
    """

    def __init__(self, image: ImageConfig, preprocess: Preprocess) -> None:
        super().__init__()
        if preprocess == "resize" and image.fit != "squash":
            raise UserError(
                f"a graph can only squash films, but these weights want {image.fit}; use --preprocess normalise."
            )
        self.preprocess, self.size = preprocess, image.size
        self.channels = image.channels if preprocess == "none" else 1

    def square(self, images: Tensor) -> Tensor:
        """Films at the model's size, still in [0, 1]."""
        if self.preprocess != "resize":
            return images
        side = (self.size, self.size)
        # The same filter as pillow's: cubic with a = -0.5, widened by the factor of reduction.
        return F.interpolate(images, size=side, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)

    def trace(self) -> ExportedProgram:
        """With a free batch size and, where it resizes, free height and width."""
        side = (self.size, self.size)
        free: dict[int, Dim] = {0: Dim("batch", min=1)}
        if self.preprocess == "resize":
            side = (self.size + 24, self.size + 8)
            free |= {2: Dim("height", min=2, max=_LARGEST), 3: Dim("width", min=2, max=_LARGEST)}
        # Two films: torch.export takes a batch of one for a fixed one.
        films = torch.linspace(0, 1, side[0] * side[1]).view(1, 1, *side).repeat(2, self.channels, 1, 1)
        return torch.export.export(self.eval(), (films,), dynamic_shapes={"images": free})


class EncoderGraph(Graph):
    """Films -> image tokens (B, L, D) and their mean (B, D)."""

    def __init__(self, backbone: Weights, preprocess: Preprocess = "normalise") -> None:
        super().__init__(backbone.config.image, preprocess)
        self.encoder, self.normalise = backbone.trunk, backbone.normalise

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        films = images if self.preprocess == "none" else self.normalise(self.square(images))
        tokens: Tensor = self.encoder(films)[:, 1:]
        return tokens, tokens.mean(dim=1)


DETECTOR_FILE = "detector.onnx"
DETECTOR_OUTPUTS = ["score", "p_value", "heatmap"]


class DetectorGraph(Graph):
    """Films -> score (B,), p-value (B,), heatmap (B, rows, columns) in sd of normal films."""

    def __init__(self, detector: AnomalyDetector, preprocess: Preprocess = "normalise") -> None:
        super().__init__(detector.config.image, preprocess)
        if preprocess == "none":
            raise UserError("a detector's graph normalises films itself; use --preprocess normalise or resize.")
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor, Tensor] = self.detector(self.square(images))
        return outputs


def write_detector_graph(folder: Path, detector: AnomalyDetector, preprocess: Preprocess = "normalise") -> None:
    """Write the graph of a detector."""
    graph = DetectorGraph(detector, preprocess)
    with _quiet_exporter():
        try:
            program = graph.trace()
        except UserError:
            raise
        except Exception as error:  # torch.export has many, of many kinds
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise UserError(
                f"the detector {detector.method} with the score {detector.choice.name} cannot be written as a graph "
                f"({type(error).__name__}: {reason}); export it in a bundle."
            ) from None
        _save_onnx(program, folder / DETECTOR_FILE, DETECTOR_OUTPUTS)


def run_detector_graph(folder: Path, images: Tensor) -> dict[str, Tensor]:
    """The outputs of onnxruntime, by name."""
    return _run_onnx_file(folder / DETECTOR_FILE, images)


ONNX_FILE = "encoder.onnx"
_OPSET = 18  # the first that can resize without aliasing
_FREE = ("batch", "height", "width")


def write_onnx(folder: Path, backbone: Weights, preprocess: Preprocess = "normalise") -> None:
    with _quiet_exporter():
        _save_onnx(EncoderGraph(backbone, preprocess).trace(), folder / ONNX_FILE, ["tokens", "embedding"])


def _save_onnx(program: ExportedProgram, file: Path, outputs: list[str]) -> None:
    """Translate an exported graph whose only input is ``images``."""
    converted = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        opset_version=_OPSET,
        input_names=["images"],
        output_names=outputs,
    )
    assert converted is not None
    _name_free_sides(converted)
    converted.save(file)


def _name_free_sides(converted: Any) -> None:
    """torch calls them s34 and the like; give them their names back."""
    names: dict[str, str] = {}
    for place, side in zip((0, 2, 3), _FREE, strict=True):
        size = converted.model.graph.inputs[0].shape[place]
        if not isinstance(size, int):
            names[str(size.value)] = side
    for value in [*converted.model.graph.inputs, *converted.model.graph.outputs]:
        for place, size in enumerate(value.shape):
            if not isinstance(size, int) and str(size.value) in names:
                value.shape[place] = names[str(size.value)]


def run_onnx(folder: Path, backbone: Weights, images: Tensor) -> dict[str, Tensor]:
    return _run_onnx_file(folder / ONNX_FILE, images)


def _run_onnx_file(file: Path, images: Tensor) -> dict[str, Tensor]:
    """All outputs of a graph for images, by name, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {"images": images.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter, which prints its progress and warns of things like a missing torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


TORCH_FILE = "encoder.pt2"


def write_torch_export(folder: Path, backbone: Weights, preprocess: Preprocess = "normalise") -> None:
    torch.export.save(EncoderGraph(backbone, preprocess).trace(), folder / TORCH_FILE)


@torch.no_grad()
def run_torch_export(folder: Path, backbone: Weights, images: Tensor) -> dict[str, Tensor]:
    tokens, embedding = torch.export.load(folder / TORCH_FILE).module()(images)
    return {"tokens": tokens, "embedding": embedding}


@dataclass(frozen=True)
class Format:
    """One format: how to write it into a folder, and how the library it is for runs it."""

    name: str
    backend: str
    """The library that runs it."""
    write: Callable[[Path, Weights], None]
    run: Callable[[Path, Weights, Tensor], dict[str, Tensor]]
    """(folder, ours, images (B, 1, S, S) in [0, 1]) -> ``tokens`` (B, L, D) and what else it gives."""
    needs_to_write: tuple[str, ...] = ()
    needs_to_run: tuple[str, ...] = ()
    extra: str = ""
    """The extra of afire that brings them."""
    has_detectors: bool = False
    """Whether a detector can be written too."""
    patches_only: bool = False
    """Whether it is a ViT of another library, whose patches go through one matrix, and no graph."""

    def require_writer(self) -> None:
        """Refuse, with the extra to install, where a package is missing."""
        absent = missing(self.needs_to_write)
        if absent:
            raise UserError(
                f"--format {self.name} needs {', '.join(absent)}; install it with pip install 'afire[{self.extra}]'."
            )


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those of ``modules`` that are not installed."""
    return [name for name in modules if find_spec(name) is None]


FORMATS = {
    form.name: form
    for form in (
        Format(
            "timm",
            "timm",
            write_timm,
            run_timm,
            needs_to_run=("timm", "torchvision"),
            extra="timm",
            patches_only=True,
        ),
        Format(
            "hf",
            "transformers",
            write_hf,
            run_hf,
            needs_to_run=("transformers",),
            extra="transformers",
            patches_only=True,
        ),
        Format(
            "onnx",
            "onnxruntime",
            write_onnx,
            run_onnx,
            needs_to_write=("onnx", "onnxscript"),
            needs_to_run=("onnxruntime",),
            extra="onnx",
            has_detectors=True,
        ),
        Format("torch", "torch.export", write_torch_export, run_torch_export),
    )
}
