from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afire.config import Config, changed, load_config, to_yaml
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.training.checkpoint import save_checkpoint
from afire.weights.open import Backbones, encoder_hash, load_backbone, pick_device
from tests.tasks.conftest import SMALLEST


def make_run(folder: Path, config: Config) -> AFiRe:
    """A run folder with one checkpoint whose teacher is not its student."""
    model = AFiRe(config)
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(0.01)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(folder, model, optimizer, {"step": 5}, keep=1)
    return model


@pytest.fixture
def run(tmp_path: Path, smallest: Config) -> tuple[Path, AFiRe]:
    return tmp_path / "run", make_run(tmp_path / "run", smallest)


def test_random_weights_follow_the_seed_alone(smallest: Config) -> None:
    first, again, other = (load_backbone("random", smallest, seed=seed) for seed in (0, 0, 1))
    assert first.hash == again.hash != other.hash
    assert not first.encoder.training
    with pytest.raises(UserError, match=r"random weights have no architecture.*--preset"):
        load_backbone("random")


def test_a_run_brings_its_own_settings_and_its_teacher(run: tuple[Path, AFiRe]) -> None:
    folder, model = run
    teacher = load_backbone(str(folder))
    student = load_backbone(str(folder), network="student")
    assert teacher.hash == encoder_hash(model.teacher.encoder)
    assert student.hash == encoder_hash(model.student.encoder) != teacher.hash
    assert teacher.config == model.config and teacher.name == "run"
    film = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ours = teacher.encoder(teacher.normalise(film))[:, 1:]
    torch.testing.assert_close(ours, model.encode(film))


def test_each_seed_may_have_a_run_of_its_own(tmp_path: Path, smallest: Config) -> None:
    models = [make_run(tmp_path / f"run-{seed}", changed(smallest, {"seed": seed})) for seed in (0, 1)]
    several = Backbones(f"{tmp_path}/run-{{seed}}", [0, 1])
    assert [several.of(seed).hash for seed in (0, 1)] == [encoder_hash(model.teacher.encoder) for model in models]
    assert several.differ and several.name == "run-{seed}" and several.report.startswith("for each seed its own")
    one = Backbones(f"{tmp_path}/run-0", [0, 1])
    assert not one.differ and one.of(1) is one.of(0) and one.name == "run-0"
    make_run(tmp_path / "run-2", changed(smallest, {"encoder": {"depth": 2}}))
    with pytest.raises(UserError, match=r"run-0 and run-2 differ in their encoder settings"):
        Backbones(f"{tmp_path}/run-{{seed}}", [0, 2]).of(2)
    with pytest.raises(UserError, match="run-7"):
        several.of(7)


def test_a_checkpoint_folder_and_its_file_know_their_run(run: tuple[Path, AFiRe]) -> None:
    folder, _ = run
    expected = load_backbone(str(folder)).hash
    checkpoint = folder / "checkpoints" / "step-00000005"
    assert load_backbone(str(checkpoint)).hash == expected
    assert load_backbone(str(checkpoint / "model.safetensors")).hash == expected


def test_settings_beside_a_run_may_repeat_but_not_contradict(run: tuple[Path, AFiRe]) -> None:
    folder, model = run
    load_backbone(str(folder), model.config)
    other = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    with pytest.raises(UserError, match=r"has encoder.depth 1, but 2 was asked for"):
        load_backbone(str(folder), other)


def test_a_file_needs_the_architecture_and_must_have_it(tmp_path: Path, smallest: Config) -> None:
    encoder = load_backbone("random", smallest, seed=3).encoder
    file = tmp_path / "vit.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, file)
    with pytest.raises(UserError, match="does not say which architecture"):
        load_backbone(str(file))
    assert load_backbone(str(file), smallest).hash == encoder_hash(encoder)
    deeper = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    with pytest.raises(UserError, match=r"another architecture: it lacks blocks\.1\."):
        load_backbone(str(file), deeper)
    wider = load_config("tiny", overrides=[*SMALLEST, "encoder.width=32"])
    with pytest.raises(UserError, match="another architecture"):
        load_backbone(str(file), wider)


def test_more_blocks_than_the_settings_are_another_architecture(tmp_path: Path, smallest: Config) -> None:
    deeper = load_config("tiny", overrides=[*SMALLEST, "encoder.depth=2"])
    file = tmp_path / "vit.safetensors"
    encoder = load_backbone("random", deeper).encoder
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, file)
    with pytest.raises(UserError, match=r"has the additional blocks\.1\."):
        load_backbone(str(file), smallest)


def test_missing_weights_and_devices_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not exist"):
        load_backbone(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_backbone(str(tmp_path / "empty"))
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            pick_device("cuda")
