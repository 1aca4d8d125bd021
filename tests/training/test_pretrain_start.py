"""Pre-training from given weights: layer-wise rates, blocks that keep still, and a resume to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods import METHODS, make_method
from afire.methods.afire import AFiRe
from afire.nn.vit import VisionTransformer, initialise
from afire.training.engine import make_optimizer
from afire.training.pretrain import pretrain
from afire.training.pretraining import Start
from afire.weights import start_from

MakeConfig = Callable[..., Config]
DEEP = ("encoder.depth=3", "training.warmup_epochs=0")


def started(config: Config, file: Path) -> Start:
    """Weights of the encoder in a file, and what puts them into a method."""
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    initialise(encoder, torch.Generator().manual_seed(7))
    save_file(encoder.state_dict(), file)
    return start_from(file)


def last(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "model.safetensors")


def test_rates_fall_from_the_end_of_the_encoder_to_its_beginning(smallest: MakeConfig) -> None:
    model = make_method(smallest(*DEEP, "training.layer_decay=0.5", "encoder.positions=learned"))
    optimizer = make_optimizer(model.parameters_of("all"), model.config.training, layers_behind=model.layers_behind)
    names = {id(weight): name for name, weight in model.named_parameters()}
    scales = {names[id(p)]: group["scale"] for group in optimizer.param_groups for p in group["params"]}
    trunk = "student.encoder."
    assert scales[trunk + "norm.weight"] == scales["decoder.embed.weight"] == 1 == scales["student.head.mlp.0.weight"]
    assert scales[trunk + "blocks.2.attn.qkv.weight"] == 0.5 and scales[trunk + "blocks.0.norm1.bias"] == 0.125
    assert scales[trunk + "pos_embed"] == scales[trunk + "patch_embed.proj.weight"] == 0.0625
    assert not any(name.startswith("teacher") for name in scales)


def test_without_decay_there_is_one_rate(smallest: MakeConfig) -> None:
    model = make_method(smallest(*DEEP))
    groups = make_optimizer(
        model.parameters_of("all"), model.config.training, layers_behind=model.layers_behind
    ).param_groups
    assert [(group["decays"], group["scale"]) for group in groups] == [(True, 1.0), (False, 1.0)]


def test_a_smaller_rate_moves_the_first_block_less(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films, moved = PackedFilms(packed), {}
    start = started(smallest(*DEEP), tmp_path / "vit.safetensors")
    before = load_file(tmp_path / "vit.safetensors")
    for decay in (1.0, 0.1):
        run = tmp_path / f"run-{decay}"
        pretrain(smallest(*DEEP, "training.epochs=1", f"training.layer_decay={decay}"), films, run, start=start)
        after = last(run)
        moved[decay] = [
            float((after[f"student.encoder.{name}"] - before[name]).abs().mean())
            for name in ("blocks.0.mlp.fc1.weight", "blocks.2.mlp.fc1.weight")
        ]
    assert moved[0.1][0] < 0.05 * moved[1.0][0] and 0.05 * moved[1.0][1] < moved[0.1][1] < 0.2 * moved[1.0][1]


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.trains])
def test_frozen_blocks_are_left_out_by_every_method(method: str, smallest: MakeConfig) -> None:
    def trained(blocks: int) -> set[str]:
        config = smallest(*DEEP, f"method={method}", f"training.frozen_blocks={blocks}")
        model = make_method(config.model_copy(update={"options": {}}))
        model.hold_blocks()
        return {name for turn in model.turns for name, _ in model.parameters_of(turn)}

    none, two = trained(0), trained(2)
    still = {name.partition("encoder.")[2] for name in none - two}
    assert {"cls_token", "patch_embed.proj.weight", "blocks.0.norm1.bias", "blocks.1.mlp.fc2.weight"} <= still
    assert not any(name.startswith(("blocks.2.", "norm.")) for name in still) and two < none


def test_frozen_blocks_keep_their_weights_and_the_rest_moves(
    packed: Path, smallest: MakeConfig, tmp_path: Path
) -> None:
    config = smallest(*DEEP, "training.epochs=2", "training.frozen_blocks=2")
    start = started(config, tmp_path / "vit.safetensors")
    before = load_file(tmp_path / "vit.safetensors")
    pretrain(config, PackedFilms(packed), tmp_path / "run", start=start)
    after = last(tmp_path / "run")
    for network in ("student", "teacher"):
        same = {name for name, weight in before.items() if torch.equal(weight, after[f"{network}.encoder.{name}"])}
        assert {"cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.bias"} <= same
        assert not {"blocks.2.attn.qkv.weight", "norm.weight"} & same


def test_a_resumed_run_with_rates_and_frozen_blocks_ends_bit_identical(
    packed: Path, smallest: MakeConfig, tmp_path: Path
) -> None:
    config = smallest(
        *DEEP, "training.layer_decay=0.7", "training.frozen_blocks=1", "run.keep_checkpoints=9", "training.epochs=3"
    )
    films, start = PackedFilms(packed), started(config, tmp_path / "vit.safetensors")
    pretrain(config, films, tmp_path / "whole", start=start)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(sorted((tmp_path / "again" / "checkpoints").iterdir())[-1])
    pretrain(config, films, tmp_path / "again", resume=True)  # what it started from is in its checkpoints
    whole, again = last(tmp_path / "whole"), last(tmp_path / "again")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_nothing_to_keep_is_a_sentence(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films = PackedFilms(packed)
    with pytest.raises(UserError, match=r"keeps blocks as they start: at random; give weights with --init"):
        pretrain(smallest(*DEEP, "training.frozen_blocks=1"), films, tmp_path / "run")
    start = started(smallest(*DEEP), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match=r"training\.frozen_blocks is 4, but the encoder has 3 blocks"):
        pretrain(smallest(*DEEP, "training.frozen_blocks=4"), films, tmp_path / "run", start=start)
    assert not (tmp_path / "run").exists()


def test_what_a_run_set_going_ends_with_it(
    packed: Path, smallest: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def fail(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(AFiRe, "end_run", lambda _: ended.append("end"))
    pretrain(smallest("training.epochs=1"), PackedFilms(packed), tmp_path / "whole")
    assert ended == ["end"]
    monkeypatch.setattr(AFiRe, "after_step", fail)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        pretrain(smallest("training.epochs=1"), PackedFilms(packed), tmp_path / "failed")
    assert ended == ["end", "end"]
