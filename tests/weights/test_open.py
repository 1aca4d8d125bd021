"""One way to open weights: each kind brings its trunk, its method, or a message why it cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afire.config import Config
from afire.errors import UserError
from afire.methods import Method
from afire.methods.afire import AFiRe
from afire.methods.mae import MAE
from afire.settings import changed, load_config, to_yaml
from afire.training.run_folder import newest_checkpoint, save_checkpoint
from afire.weights import WeightsBySeed, open_weights, pick_device, start_from, tensor_hash
from tests import figure_parts
from tests.tasks.conftest import SMALLEST


def make_run(folder: Path, config: Config) -> AFiRe:
    """A run folder with one checkpoint whose teacher is not its student."""
    model = AFiRe(config)
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(0.01)
    write_run(folder, model)
    return model


def write_run(folder: Path, method: Method) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(method.config))
    optimizer = torch.optim.AdamW(method.parameters())
    save_checkpoint(folder, method, [optimizer], {"step": 5, "steps_per_epoch": 2}, keep=1)


@pytest.fixture
def run(tmp_path: Path, smallest: Config) -> tuple[Path, AFiRe]:
    return tmp_path / "run", make_run(tmp_path / "run", smallest)


def test_random_weights_follow_the_seed_alone(smallest: Config) -> None:
    first, again, other = (open_weights("random", smallest, seed=seed) for seed in (0, 0, 1))
    assert first.hash == again.hash != other.hash
    assert not first.trunk.training and not first.brings_settings
    with pytest.raises(UserError, match=r"random weights have no architecture.*--preset"):
        _ = open_weights("random").trunk


def test_a_run_brings_its_own_settings_and_its_teacher(run: tuple[Path, AFiRe]) -> None:
    folder, model = run
    teacher = open_weights(str(folder))
    student = open_weights(str(folder), network="student")
    assert teacher.hash == tensor_hash(model.teacher.encoder.state_dict())
    assert student.hash == tensor_hash(model.student.encoder.state_dict()) != teacher.hash
    assert teacher.config == model.config and teacher.name == "run"
    film = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ours = teacher.trunk(teacher.normalise(film))[:, 1:]
    torch.testing.assert_close(ours, model.encode(film))


def test_each_seed_may_have_a_run_of_its_own(tmp_path: Path, smallest: Config) -> None:
    models = [make_run(tmp_path / f"run-{seed}", changed(smallest, {"seed": seed})) for seed in (0, 1)]
    several = WeightsBySeed(f"{tmp_path}/run-{{seed}}", [0, 1])
    expected = [tensor_hash(model.teacher.encoder.state_dict()) for model in models]
    assert [several.of(seed).hash for seed in (0, 1)] == expected
    assert several.differ and several.name == "run-{seed}" and several.report.startswith("for each seed its own")
    one = WeightsBySeed(f"{tmp_path}/run-0", [0, 1])
    assert not one.differ and one.of(1) is one.of(0) and one.name == "run-0"
    make_run(tmp_path / "run-2", changed(smallest, {"encoder": {"depth": 2}}))
    with pytest.raises(UserError, match=r"run-0 and run-2 differ in their encoder settings"):
        WeightsBySeed(f"{tmp_path}/run-{{seed}}", [0, 2]).of(2)
    settings = (tmp_path / "run-1/config.yaml").read_text(encoding="utf-8")
    (tmp_path / "run-1/config.yaml").write_text(settings.replace("method: afire", "method: mae"), encoding="utf-8")
    with pytest.raises(UserError, match=r"run-0 and run-1 differ in their method; .* for every seed"):
        WeightsBySeed(f"{tmp_path}/run-{{seed}}", [0, 1]).of(1)
    with pytest.raises(UserError, match="run-7"):
        several.of(7)


def test_a_checkpoint_folder_and_its_file_know_their_run(run: tuple[Path, AFiRe]) -> None:
    folder, _ = run
    expected = open_weights(str(folder)).hash
    checkpoint = folder / "checkpoints" / "step-00000005"
    for source in (checkpoint, checkpoint / "model.safetensors"):
        weights = open_weights(source)
        assert weights.hash == expected and weights.name == "run/step-00000005" and weights.run == folder


def test_settings_beside_a_run_may_repeat_but_not_contradict(run: tuple[Path, AFiRe]) -> None:
    folder, model = run
    open_weights(str(folder), model.config)
    other = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    with pytest.raises(UserError, match=r"has encoder.depth 1, but 2 was asked for"):
        open_weights(str(folder), other)


def test_a_file_says_its_architecture_and_settings_must_have_it(tmp_path: Path, smallest: Config) -> None:
    encoder = open_weights("random", smallest, seed=3).trunk
    file = tmp_path / "vit.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, file)
    alone = open_weights(str(file))
    assert alone.hash == tensor_hash(encoder.state_dict()) and alone.config.encoder.width == smallest.encoder.width
    assert open_weights(str(file), smallest).hash == tensor_hash(encoder.state_dict())
    deeper = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    with pytest.raises(UserError, match=r"another architecture: it lacks blocks\.1\."):
        _ = open_weights(str(file), deeper).trunk
    wider = load_config("tiny", overrides=[*SMALLEST, "encoder.width=32"])
    with pytest.raises(UserError, match="another architecture"):
        _ = open_weights(str(file), wider).trunk


def test_more_blocks_than_the_settings_are_another_architecture(tmp_path: Path, smallest: Config) -> None:
    deeper = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    file = tmp_path / "vit.safetensors"
    encoder = open_weights("random", deeper).trunk
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, file)
    with pytest.raises(UserError, match=r"has the additional blocks\.1\."):
        _ = open_weights(str(file), smallest).trunk


def test_missing_weights_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not exist"):
        open_weights(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_weights(str(tmp_path / "empty"))
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            pick_device("cuda")


def test_a_run_comes_back_whole(tmp_path: Path) -> None:
    run = figure_parts.make_run(tmp_path / "run", ["losses.teacher_temperature_epochs=4"], step=9)
    weights = open_weights(run)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    for name, tensor in checkpoint.model_tensors().items():
        assert torch.equal(weights.method.state_dict()[name], tensor), name
    assert not weights.method.training and weights.name == "run"
    # Half of the warm-up (step 8 of 16) from 0.04 to 0.07.
    assert weights.method.teacher_temperature == pytest.approx(0.055)
    assert open_weights(checkpoint.folder).method_hash == weights.method_hash
    assert weights.method_hash != weights.hash and "of the whole model from step-" in weights.method_report


def test_a_checkpoint_that_does_not_say_its_step(run: tuple[Path, AFiRe]) -> None:
    (run[0] / "checkpoints" / "step-00000005" / "state.json").write_text('{"step": 5}')
    with pytest.raises(UserError, match=r"state\.json does not say its step"):
        _ = open_weights(run[0] / "checkpoints" / "step-00000005").method


def test_the_hash_is_of_what_was_loaded(run: tuple[Path, AFiRe]) -> None:
    """Whoever trains or moves the networks changes no name in a result."""
    weights = open_weights(run[0])
    with torch.no_grad():
        weights.trunk.norm.weight.add_(1)
        weights.method.teacher.encoder.norm.weight.add_(1)
    again = open_weights(run[0])
    assert weights.hash == again.hash and weights.method_hash == again.method_hash


def test_weights_alone_hold_no_method(tmp_path: Path) -> None:
    run = figure_parts.make_run(tmp_path / "run")
    with pytest.raises(UserError, match="random weights restore nothing"):
        _ = open_weights("random").method
    file = tmp_path / "alone.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="weights alone"):
        _ = open_weights(file).method
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    tensors = load_file(checkpoint.folder / "model.safetensors")
    lost = tmp_path / "run" / "checkpoints" / "step-{1}"  # braces in a path are a path's
    lost.mkdir()
    save_file({name: t for name, t in tensors.items() if "mask_token" not in name}, lost / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks decoder\.mask_token; it is not a checkpoint of this run"):
        _ = open_weights(lost).method


def test_another_method_is_opened_as_what_it_is(tmp_path: Path, smallest: Config) -> None:
    config = changed(smallest, {"method": "mae"})
    method = MAE(config)
    write_run(tmp_path / "mae", method)
    weights = open_weights(tmp_path / "mae")
    assert weights.kind is MAE and weights.network == "encoder" and isinstance(weights.method, MAE)
    assert weights.hash == tensor_hash(method.encoder.state_dict())
    assert weights.method_hash == tensor_hash(method.state_dict()) and weights.schedule == {}
    other = AFiRe(smallest)
    start_from(tmp_path / "mae")(other)  # another method may start from it, and the other way round
    assert {tensor_hash(other.trunk(name).state_dict()) for name in other.networks} == {weights.hash}
    write_run(tmp_path / "afire", other)
    again = MAE(changed(config, {"seed": 9}))
    start_from(tmp_path / "afire")(again)
    assert tensor_hash(again.encoder.state_dict()) == weights.hash


def test_a_method_that_is_not_known_is_named(tmp_path: Path, smallest: Config) -> None:
    write_run(tmp_path / "run", AFiRe(smallest))
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("method: afire", "method: afir"))
    with pytest.raises(UserError, match="there is no method 'afir'; did you mean afire"):
        _ = open_weights(tmp_path / "run").trunk


def test_a_method_starts_from_an_encoder(
    run: tuple[Path, AFiRe], tmp_path: Path, smallest: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Every trunk gets the run's teacher; heads and decoder stay as they were drawn."""
    folder, source = run
    method = AFiRe(changed(smallest, {"seed": 5}))
    others = {name: tensor.clone() for name, tensor in method.state_dict().items() if ".encoder." not in name}
    with caplog.at_level(logging.INFO, "afire"):
        start_from(folder)(method)
    expected = tensor_hash(source.teacher.encoder.state_dict())
    for branch in (method.teacher, method.student):
        assert tensor_hash(branch.encoder.state_dict()) == expected
    assert others and all(torch.equal(method.state_dict()[name], tensor) for name, tensor in others.items())
    assert f"start from {folder}:" in caplog.text and "(AFiRe layout)" in caplog.text
    with pytest.raises(UserError, match="do not exist"):  # at once, before there is a method
        start_from(tmp_path / "none")
    with pytest.raises(UserError, match="random weights lie in no file"):
        start_from("random")
