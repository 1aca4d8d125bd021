"""Layer-wise decay and the learning rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afire.nn.vit import Normalise, VisionTransformer
from afire.tasks.finetune import Classifier
from afire.tasks.settings import SupervisedConfig
from afire.tasks.supervised import layer_of, learning_rate, make_layered_optimizer
from tests.tasks.drawn import smallest_model


def test_every_parameter_has_its_layer() -> None:
    config = smallest_model(["encoder.depth=3", "encoder.positions=learned"])
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    model = Classifier(encoder, Normalise(config.image), np.array([0.5, 0.1]), torch.Generator())
    optimizer = make_layered_optimizer(model, 3, SupervisedConfig(layer_decay=0.5, weight_decay=0.1))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {name: group_of[id(p)] for name, p in model.named_parameters()}
    scales = {name: group["scale"] for name, group in found.items()}
    assert scales["head.weight"] == scales["encoder.norm.weight"] == 1
    assert scales["encoder.blocks.2.mlp.fc1.weight"] == 0.5 and scales["encoder.blocks.0.norm1.bias"] == 0.125
    assert (
        scales["encoder.cls_token"] == scales["encoder.pos_embed"] == scales["encoder.patch_embed.proj.bias"] == 0.0625
    )
    plain = {name for name, group in found.items() if group["weight_decay"] == 0}
    assert plain == {name for name in found if name.endswith(("bias", "cls_token", "pos_embed")) or "norm" in name}


def test_layers_count_from_the_patches_to_the_head() -> None:
    names = (
        "encoder.patch_embed.proj.weight",
        "encoder.blocks.0.x",
        "encoder.blocks.11.x",
        "encoder.norm.bias",
        "decoder.x",
    )
    assert [layer_of(name, 12) for name in names] == [0, 1, 12, 13, 13]


def test_rate_rises_in_warm_up_and_falls_to_the_end() -> None:
    config = SupervisedConfig(epochs=10, warmup_epochs=2, learning_rate=1e-3, learning_rate_end=1e-5)
    rates = [learning_rate(config, step, 7) for step in range(70)]
    assert rates[0] == pytest.approx(1e-3 / 14) and rates[13] == rates[14] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-5) and rates == sorted(rates[:14]) + sorted(rates[14:], reverse=True)
    assert learning_rate(SupervisedConfig(epochs=1, warmup_epochs=5), 3, 4) == pytest.approx(2e-4)
