"""A folder that timm opens: ``timm.create_model("local-dir:FOLDER")``, or a state dict for its VisionTransformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afire.bundle.preprocessing import constants
from afire.files import write_json
from afire.tasks.backbone import Backbone
from afire.weights.tensors import read_tensors, write_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def arguments(backbone: Backbone) -> dict[str, Any]:
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


def write(folder: Path, backbone: Backbone) -> None:
    image, model_args = backbone.config.image, arguments(backbone)
    write_tensors(folder / WEIGHTS, backbone.encoder.state_dict())
    channels, size = model_args.pop("in_chans"), image.size
    mean, std = constants(image) or ([0.0] * channels, [1.0] * channels)
    fixed = {
        "input_size": [channels, size, size],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    write_json(
        folder / CONFIG,
        {
            "architecture": "vit_base_patch16_224",  # the class; every size it stands for is overruled by model_args
            "num_classes": model_args.pop("num_classes"),
            "num_features": backbone.config.encoder.width,
            "model_args": {**model_args, "in_chans": channels},
            "pretrained_cfg": {**fixed, "mean": mean, "std": std, "first_conv": "patch_embed.proj", "num_classes": 0},
        },
    )


@torch.no_grad()
def run(folder: Path, backbone: Backbone, films: Tensor) -> dict[str, Tensor]:
    from timm.models.vision_transformer import VisionTransformer

    network = VisionTransformer(**arguments(backbone)).eval()
    network.load_state_dict(read_tensors(folder / WEIGHTS), strict=True)
    tokens = network.forward_features(backbone.normalise(films))[:, 1:]
    return {"tokens": tokens, "embedding": tokens.mean(dim=1)}
