"""AFiRe on views with patches of other films: its donors, every way to train on them, runs, and other owners of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.detect.fit import adaptation, for_detection
from afire.detect.maps import MapDetector
from afire.lesions.pastes import donor_rows
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.methods.phantom import PhantomTaught
from afire.settings import load_config
from afire.tasks.settings import DetectConfig
from afire.training.pretrain import pretrain
from tests import commands
from tests.training.conftest import SMALLEST, draw_pack

SIZE = 32
MIXED = ("lesions.pasted=0.5", "lesions.opacities=0.25", "lesions.donors=5")
VARIANTS = [
    (),
    ("lesions.views=3",),
    ("image.channels=3", "image.normalise=imagenet"),
    ("encoder.drop_path=0.3", "lesions.views=2"),
    ("lesions.pasted_too=true", "losses.lesion=1", "lesions.donors=0"),
]
RUN = ("run.checkpoint_minutes=1e-9", "run.keep_checkpoints=100", "training.learning_rate=1e-2")


def config(*overrides: str) -> Config:
    return load_config("tiny", overrides=[*SMALLEST, *MIXED, *overrides])


def films(count: int = 8, seed: int = 0) -> Tensor:
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic").clamp(0, 1)


def begun(model: AFiRe) -> AFiRe:
    model.begin_run(torch.arange(100), lambda rows: torch.cat([films(1, 1000 + int(row)) for row in rows]))
    return model.train()


def keys(rows: list[int]) -> Keys:
    return Keys(0, 1, 0, torch.tensor(rows))


def test_donors_are_some_films_of_the_run_and_no_part_of_the_weights() -> None:
    model = begun(AFiRe(config()))
    assert model.donors is not None
    expected = torch.cat([films(1, 1000 + int(row)) for row in donor_rows(torch.arange(100), 5, 0)])
    assert torch.equal(model.donors.films, expected[:, 0])
    assert model.state_dict().keys() == AFiRe(config("lesions.pasted=0")).state_dict().keys()
    assert not any("donor" in name for name in (*model.state_dict(), *dict(model.named_buffers())))
    for setting in ("lesions.donors=0", "lesions.pasted=0"):
        assert begun(AFiRe(config(setting))).donors is None
    other = AFiRe(config("lesions.pasted=1", "lesions.opacities=0"))
    without = other.views(films(), keys([*range(8)]))["lesioned"]  # before a run begins a film is its own donor
    assert not torch.allclose(begun(other).views(films(), keys([*range(8)]))["lesioned"], without, atol=1e-3)


@pytest.mark.parametrize("overrides", VARIANTS, ids="+".join)
def test_steps_in_pieces_equal_whole_ones(overrides: tuple[str, ...]) -> None:
    model = begun(AFiRe(config(*overrides)))
    rows, gradients = [7, 2, 90, 5, 41, 3, 64, 11], []
    for pieces in (1, 2, 4):
        model.zero_grad()
        outputs = [
            model(model.views(images, keys(some.tolist())))
            for images, some in zip(films().chunk(pieces), torch.tensor(rows).chunk(pieces), strict=True)
        ]
        joined = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        losses = model.losses(joined)
        losses.total.backward()
        gradients.append({name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert gradients[0].keys() == trained and torch.isfinite(losses.total)
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_decoder_is_to_restore_the_film_behind_a_patch() -> None:
    model = begun(AFiRe(config("lesions.pasted=1", "lesions.opacities=0")))
    images = films()
    views = model.views(images, keys([*range(8)]))
    assert (views["lesioned"] != images).flatten(1).any(1).all()
    outputs = model(views)
    torch.testing.assert_close(outputs["target"], model.patches(images))
    changed = torch.nn.functional.max_pool2d((views["lesioned"] != images).float(), 8).flatten(1) > 0
    assert outputs["abnormal"].any(1).all() and changed[outputs["abnormal"]].all()


def test_patches_cost_no_operations_of_the_networks() -> None:
    assert AFiRe(config("lesions.pasted=1", "lesions.opacities=0")).flops() == AFiRe(config("lesions.pasted=0")).flops()
    taught = ("method=phantom", "options.afire=1", "options.films=4", "lesions.opacities=0")
    with_patches, without = (PhantomTaught(config(*taught, f"lesions.pasted={share}")) for share in (1, 0))
    assert with_patches.flops() == without.flops()
    assert with_patches.afire is not None and with_patches.afire.config.lesions.pasted == 1


def test_teaching_by_phantoms_begins_its_afire_too() -> None:
    settings = config("method=phantom", "options.afire=1", "options.films=4", "lesions.pasted=1", "lesions.opacities=0")
    model = PhantomTaught(settings)
    model.begin_run(torch.arange(100), lambda rows: torch.cat([films(1, 1000 + int(row)) for row in rows]))
    assert model.afire is not None and model.afire.donors is not None and len(model.afire.donors.films) == 5
    reference = begun(AFiRe(settings.model_copy(update={"method": "afire", "options": {}})))
    views = model.train().views(films(), keys([*range(8)]))
    assert torch.equal(views["lesioned"], reference.views(films(), keys([*range(8)]))["lesioned"])
    losses = model.losses(model(views))
    losses.total.backward()
    assert torch.isfinite(losses.total) and not any("donor" in name for name in model.state_dict())


# Runs


def newest(run: Path) -> dict[str, Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def test_a_run_that_was_killed_ends_bit_identical(tmp_path: Path) -> None:
    packed, settings = PackedFilms(draw_pack(tmp_path / "data")), config(*RUN, "lesions.views=2")
    assert pretrain(settings, packed, tmp_path / "whole").status == "finished"
    whole = newest(tmp_path / "whole")
    assert not any(tensor.numel() == 5 * SIZE * SIZE or "donor" in name for name, tensor in whole.items())
    for kept in (2, 5):  # in the middle of an epoch, and at the end of one
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"resumed after {kept}")
        for checkpoint in sorted((run / "checkpoints").glob("step-*"))[kept:]:
            (checkpoint / "state.json").unlink()  # as a kill while writing leaves them
        pretrain(settings, packed, run, resume=True)
        resumed = newest(run)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    plain = config(*RUN, "lesions.views=2", "lesions.pasted=0")
    pretrain(plain, packed, tmp_path / "plain")
    assert not torch.equal(newest(tmp_path / "plain")["student.encoder.cls_token"], whole["student.encoder.cls_token"])


def test_adaptation_of_a_detector_draws_them_too(tmp_path: Path) -> None:
    lesions = {"pasted": 1.0, "donors": 3}
    settings = DetectConfig.model_validate({"adapt": {"epochs": 1, "lesions": lesions}})
    packed = PackedFilms(draw_pack(tmp_path / "data"))
    adapted = adaptation(config("lesions.pasted=0", "lesions.opacities=0"), settings, 16)
    assert adapted.lesions.pasted == 1 and adapted.lesions.donors == 3
    seen: list[int] = []

    class Watched(AFiRe):
        def views(self, images: Tensor, keys: Keys) -> dict[str, Tensor]:
            assert self.donors is not None
            seen.append(len(self.donors.films))
            return dict(super().views(images, keys))

    assert pretrain(adapted, packed, tmp_path / "run", learner=Watched).status == "finished"
    assert set(seen) == {3}
    description = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert description["status"] == "finished"
    assert MapDetector.training_flops(config(), settings) == AFiRe(for_detection(config(), settings)).flops()


def gradients(model: torch.nn.Module, bare: AFiRe, share: slice) -> dict[str, Tensor]:
    rows = torch.tensor([7, 2, 90, 5, 41, 3, 64, 11])[share]
    losses = bare.losses(model(bare.views(films()[share], keys(rows.tolist()))))
    losses.total.backward()
    found = {name: weight.grad for name, weight in bare.named_parameters() if weight.grad is not None}
    return {**found, "total": losses.total.detach()}


def work(rank: int, folder: str) -> None:
    bare = begun(AFiRe(config("lesions.views=2")))
    torch.save(gradients(DistributedDataParallel(bare), bare, slice(4 * rank, 4 * rank + 4)), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    commands.fork_group(work, tmp_path)
    bare = begun(AFiRe(config("lesions.views=2")))
    expected = gradients(bare, bare, slice(0, 8))
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert result.keys() == expected.keys() and len(result) > 10
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n} {text}"
            )
