"""A folder that transformers opens as a plain ViT: ``ViTModel.from_pretrained(FOLDER, add_pooling_layer=False)``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afire.bundle.preprocessing import constants
from afire.config import Config
from afire.files import write_json
from afire.tasks.backbone import Backbone
from afire.weights.layouts import to_huggingface
from afire.weights.tensors import write_tensors

WEIGHTS, CONFIG, PROCESSOR = "model.safetensors", "config.json", "preprocessor_config.json"


def model_config(config: Config) -> dict[str, Any]:
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


def processor_config(config: Config) -> dict[str, Any]:
    """``ViTImageProcessor`` as JSON. It knows no mean and std of each film: with normalise film it leaves them out."""
    image = config.image
    known = constants(image)
    mean, std = known or ([0.0] * image.channels, [1.0] * image.channels)
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image.size, "width": image.size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": known is not None and image.normalise != "none",
        "image_mean": mean,
        "image_std": std,
        "do_convert_rgb": image.channels == 3,
    }


def write(folder: Path, backbone: Backbone) -> None:
    write_tensors(folder / WEIGHTS, to_huggingface(backbone.encoder.state_dict()))
    write_json(folder / CONFIG, model_config(backbone.config))
    write_json(folder / PROCESSOR, processor_config(backbone.config))


@torch.no_grad()
def run(folder: Path, backbone: Backbone, films: Tensor) -> dict[str, Tensor]:
    with _quiet_transformers():
        from transformers import ViTModel

        network = ViTModel.from_pretrained(folder, add_pooling_layer=False, local_files_only=True).eval()
    tokens = network(pixel_values=backbone.normalise(films)).last_hidden_state[:, 1:]
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
