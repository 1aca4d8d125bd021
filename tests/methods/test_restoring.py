"""Methods that restore spoilt films in the loop: resumed, in pieces, on two processes, with pictures and a verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from afire.config import Config, load_config
from afire.data.pack import PackedFilms
from afire.methods import complete, make_method, method_type, unread
from afire.methods.base import Keys
from afire.methods.restoring import Restoring, judged, restored_well, squared_error
from afire.report.sheets import EpochPictures
from afire.training.pretrain import pretrain
from tests import commands
from tests.training.conftest import SMALLEST, packed, smallest  # noqa: F401 - fixtures

MakeConfig = Callable[..., Config]
OWN = {
    "genesis": [],
    "transvw": ["options.words=6", "options.films=12"],
    "dira": ["options.queue=24", "options.key_width=8", "options.hidden=16", "options.adversary_width=2"],
    "pcrl": ["options.queue=24", "options.key_width=8", "options.hidden=16"],
}
"""Settings of each method for runs of seconds."""
METHODS = list(OWN)


def settings(method: str) -> list[str]:
    return [f"method={method}", *OWN[method]]


def newest(run: Path) -> dict[str, Tensor]:
    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    tensors = load_file(folder / "model.safetensors")
    return tensors | {f"optimizer {key}": value for key, value in load_file(folder / "optimizer.safetensors").items()}


def numbers(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "total" in record]


def film_model(method: str, *overrides: str) -> Restoring:
    model = make_method(load_config("tiny", overrides=[*SMALLEST, *settings(method), *overrides]))
    assert isinstance(model, Restoring)
    return model


def films(count: int = 4, seed: int = 0, size: int = 32) -> Tensor:
    coarse = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


def keys(count: int = 4, step: int = 0) -> Keys:
    return Keys(0, step, step, torch.arange(count))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_run_resumes_bit_identical_and_in_pieces_is_the_same(
    packed: Path,  # noqa: F811
    smallest: MakeConfig,  # noqa: F811
    tmp_path: Path,
    method: str,
) -> None:
    own, packed_films = [*settings(method), "encoder.drop_path=0.2"], PackedFilms(packed)
    every_step = ["run.keep_checkpoints=100", "run.checkpoint_minutes=1e-9", "run.picture_epochs=3"]
    config = smallest(*own, *every_step)
    whole, resumed, pieces = (tmp_path / name for name in ("whole", "resumed", "pieces"))
    pretrain(config, packed_films, whole, observers=[EpochPictures(3, 3)])
    assert [path.name for path in (whole / "pictures").iterdir()] == ["restorations-0003.png"]
    epochs = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines() if '"health"' in line]
    assert len(epochs) == 3 and all(epoch["health"] in ("green", "amber", "red") for epoch in epochs)
    shutil.copytree(whole, resumed)
    for step in range(8, 16):  # from the middle of the second epoch on
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    pretrain(config, packed_films, resumed, resume=True)
    first, second = newest(whole), newest(resumed)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    pretrain(smallest(*own, "training.accumulate=4"), packed_films, pieces)
    for one, other in zip(numbers(whole), numbers(pieces), strict=True):
        shared = one.keys() - {"seconds", "images_per_second", "time", "data_wait"}
        for name in shared & {"total", "restoration", "gradient_norm", "classification", "contrast", "adversary"}:
            assert other[name] == pytest.approx(one[name], rel=2e-3), (one["step"], name)


@pytest.mark.slow
def test_two_processes_equal_one(packed: Path, tmp_path: Path, method: str) -> None:  # noqa: F811
    read = [text for text in SMALLEST if text.partition(".")[0] not in unread(method)]
    words = [word for text in [*read, *settings(method)] for word in ("--set", text)]
    words = ["pretrain", "--data", str(packed), "--preset", "tiny", *words]
    commands.run(*words, "--out", tmp_path / "one")
    commands.run_processes(2, *words, "--out", tmp_path / "two")
    totals = [[record["total"] for record in numbers(tmp_path / name)] for name in ("one", "two")]
    assert totals[0] == pytest.approx(totals[1], rel=1e-3) and len(totals[0]) == 9
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    for name in one:
        if "qkv.bias" not in name and "optimizer" not in name:  # the bias of the keys does nothing
            torch.testing.assert_close(one[name], two[name], rtol=2e-3, atol=1e-4, msg=lambda text, n=name: n + text)


def test_every_parameter_has_a_gradient_and_flops_are_counted(method: str) -> None:
    model = film_model(method, "encoder.drop_path=0.2").train()
    trained = dict(model.named_parameters())
    for turn in model.turns:
        model.zero_grad()
        model.losses(model(model.views(films(), keys())), turn).total.backward()
        for name, parameter in model.parameters_of(turn):
            assert parameter.grad is not None, (turn, name)
            del trained[name]
    assert not [name for name, parameter in trained.items() if parameter.requires_grad]
    assert model.flops() > 0


def test_views_follow_from_film_and_epoch_alone(method: str) -> None:
    model, images = film_model(method), films()
    whole = model.views(images, keys())
    part = model.views(images[1:3], Keys(0, 0, 0, torch.tensor([1, 2])))
    other = model.views(images, keys(step=1))
    for name, view in whole.items():
        torch.testing.assert_close(part[name], view[1:3], msg=lambda text, n=name: f"{n}: {text}")
    assert any(not torch.equal(other[name], view) for name, view in whole.items() if view.dtype == torch.float32)


def test_restoring_with_and_without_hidden_patches(method: str) -> None:
    model, images = film_model(method).eval(), films()
    hidden = torch.zeros(4, 16, dtype=torch.bool)
    hidden[:, 5] = True
    with torch.no_grad():
        seen, covered = model.restore(images), model.restore(images, hidden)
        assert seen.shape == covered.shape == model.patches(images).shape and not torch.allclose(seen, covered)
        changed = images.clone()
        changed[:, :, 8:16, 8:16] = 0  # the hidden patch: what is in it does not matter
        torch.testing.assert_close(model.restore(changed, hidden), covered)
        assert model.restore(films(size=64)).shape == (4, 64, 64)  # another size


def test_settings_have_defaults_and_limits(method: str) -> None:
    completed = complete(load_config("tiny", overrides=[f"method={method}"]), method_type(method)).options
    assert completed and completed.keys() == method_type(method).settings_type.model_fields.keys()


def test_the_error_and_what_was_restored_against_slow_references() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, target, spoilt = (torch.rand(3, 2, 5, generator=generator) for _ in range(3))
    drawn.requires_grad_()
    slow = sum((one - other) ** 2 for one, other in zip(drawn.flatten(), target.flatten(), strict=True)) / 30
    loss = squared_error(drawn, target)
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close(torch.autograd.grad(loss, drawn), torch.autograd.grad(slow, drawn))
    well = restored_well(drawn.detach(), spoilt, target)
    assert well.explained == pytest.approx(
        1 - float(slow.detach()) / float(target.var(0, correction=0).mean()), rel=1e-4
    )
    assert well.against_copy == pytest.approx(
        1 - float(slow.detach()) / float((spoilt - target).square().mean()), rel=1e-4
    )
    assert restored_well(target, spoilt, target) == (1.0, 1.0)
    mean_film = restored_well(target.mean(0).expand(3, -1, -1), target, target)
    assert abs(mean_film.explained) < 1e-5 and mean_film.against_copy < 0


def test_the_verdict_names_the_first_rule_that_holds() -> None:
    rules = [("amber", False, "one"), ("amber", True, "two"), ("amber", True, "three")]
    assert judged({"effective_rank": 9.0}, rules, "good", "").reason == "two"
    assert judged({"effective_rank": 9.0}, [], "good", "shown").colour == "green"
    assert judged({"effective_rank": 1.2}, rules, "good", "").reason.startswith("collapse: the encoder's features")
