"""The detector `nsa`: what is drawn and labelled, donors that are never saved, resuming, and several processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.config import Config, ImageConfig, RunConfig, TrainingConfig
from afire.data.pack import PackedFilms
from afire.detect.atlas import MEAN_FILE
from afire.detect.fit import fit_detector
from afire.detect.nsa import NSA, DefectFinder, NSASettings
from afire.methods.base import Keys
from afire.training.pretrain import pretrain
from tests import commands
from tests.detect.test_learned import SIZE, phantoms, task_of  # noqa: F401 - a fixture
from tests.training.conftest import draw_pack

ROWS = torch.tensor([7, 3, 11, 5, 90, 41, 2, 64])
STILL = {"turn": 0, "zoom": 0, "shift": 0, "gamma": 0, "blur": 0, "noise": 0}


def config(size: int = SIZE, **options: object) -> Config:
    settings = NSASettings.model_validate({"width": 8, "blocks": 1, "donors": 5, **options})
    training = TrainingConfig(epochs=3, batch_size=8, learning_rate=1e-2, warmup_epochs=0)
    run = RunConfig(picture_epochs=0, keep_checkpoints=100, checkpoint_minutes=1e-9)
    return Config(method="nsa", image=ImageConfig(size=size), options=settings.model_dump(), training=training, run=run)


def draw(count: int, seed: int = 0) -> Tensor:
    """Smooth films of their own each."""
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic").clamp(0, 1)


def with_donors(model: DefectFinder) -> DefectFinder:
    model.begin_run(torch.arange(100), lambda rows: torch.cat([draw(1, 1000 + int(row)) for row in rows]))
    return model


def test_labels_lie_where_something_was_drawn() -> None:
    model = with_donors(DefectFinder(config(augment=STILL, clean=0.0)))
    films = draw(8)
    keys = Keys(0, 0, 0, ROWS)
    change = (model.with_defects(films, keys) - films).abs()
    labels = model.views(films, keys)["labels"]
    assert labels.shape == (8, 1, SIZE // 4, SIZE // 4) and labels.min() >= 0 and labels.max() <= 1
    places = torch.nn.functional.avg_pool2d(change, 4)
    assert (labels[places > 0.1] > 0.5).all() and labels.flatten(1).amax(1).min() > 0.1
    around = torch.nn.functional.max_pool2d(places, 3, 1, 1)
    assert (labels[around == 0] == 0).all()


@pytest.mark.parametrize(("clean", "haze"), [(0.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_films_are_clean_hazy_or_pasted_by_their_shares(clean: float, haze: float) -> None:
    model = with_donors(DefectFinder(config(clean=clean, haze=haze)))
    films = draw(1).expand(300, -1, -1, -1)
    keys = Keys(0, 0, 0, torch.arange(300))
    drawn = model.with_defects(films, keys)
    changed = (drawn != films).flatten(1).any(1)
    assert abs(changed.float().mean() - (1 - clean)) < 0.1
    darker = (drawn < films - 1e-3).flatten(1).any(1)
    assert darker.float().mean() == 0 if haze == 1 else darker.float().mean() > 0.1  # haze only brightens


def test_what_a_film_gets_does_not_depend_on_the_batch() -> None:
    model, films = with_donors(DefectFinder(config())), draw(8)
    whole, some = model.views(films, Keys(0, 4, 0, ROWS)), torch.tensor([6, 1, 3])
    alone = model.views(films[some], Keys(0, 4, 9, ROWS[some]))
    for name in ("images", "labels"):
        torch.testing.assert_close(alone[name], whole[name][some], atol=1e-4, rtol=0)
    assert not torch.allclose(model.views(films, Keys(0, 5, 0, ROWS))["images"], whole["images"], atol=1e-2)


def test_donors_are_some_of_the_films_and_no_part_of_the_weights() -> None:
    model = with_donors(DefectFinder(config()))
    assert model.donors is not None and model.donors.films.shape == (5, SIZE, SIZE)
    again = with_donors(DefectFinder(config()))
    assert again.donors is not None and torch.equal(model.donors.films, again.donors.films)
    assert not any("donor" in name for name in model.state_dict())
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == sum(p.numel() for p in model.parameters())
    with_none = DefectFinder(config(donors=0))
    assert with_donors(with_none).donors is None
    assert torch.isfinite(with_none.views(draw(8), Keys(0, 0, 0, ROWS))["images"]).all()


def test_no_film_lies_in_the_folder_of_a_detector(phantoms: PackedFilms, tmp_path: Path) -> None:  # noqa: F811
    """Every tensor that is saved is a weight, or a number for a place or a film; none but the mean resembles a film."""
    detector = fit_detector(task_of("nsa", phantoms, tmp_path / "out", "train.epochs=1"))
    assert isinstance(detector, NSA)
    films = phantoms.batch(range(len(phantoms))).flatten(1)
    films = films - films.mean(dim=1, keepdim=True)
    for file in tmp_path.rglob("*.safetensors"):
        if file.name == MEAN_FILE:  # an average over many patients
            continue
        for name, tensor in load_file(file).items():
            assert "donor" not in name
            if tensor.numel() >= SIZE * SIZE:
                rows = tensor.flatten().float().unfold(0, SIZE * SIZE, 97)
                likeness = torch.cosine_similarity((rows - rows.mean(1, keepdim=True))[:, None], films[None], dim=2)
                assert likeness.abs().max() < 0.5, name


def newest(run: Path) -> dict[str, Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def test_what_is_resumed_in_the_middle_of_an_epoch_ends_bit_identical(tmp_path: Path) -> None:
    films = PackedFilms(draw_pack(tmp_path / "data"))
    assert pretrain(config(), films, tmp_path / "whole", learner=DefectFinder).status == "finished"
    whole = newest(tmp_path / "whole")
    for kept in (2, 5):  # of fifteen checkpoints: in the middle of an epoch, and at the end of one
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"resumed after {kept}")
        for checkpoint in sorted((run / "checkpoints").glob("step-*"))[kept:]:
            (checkpoint / "state.json").unlink()  # as a kill while writing leaves them
        pretrain(config(), films, run, learner=DefectFinder, resume=True)
        resumed = newest(run)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def gradients(model: torch.nn.Module, bare: DefectFinder, share: slice) -> dict[str, Tensor]:
    views = bare.views(draw(8)[share], Keys(0, 0, 0, ROWS[share]))
    losses = bare.losses(model(views))
    losses.total.backward()
    found = {name: weight.grad for name, weight in bare.named_parameters() if weight.grad is not None}
    return {**found, "total": losses.total.detach()}


def work(rank: int, folder: str) -> None:
    bare = with_donors(DefectFinder(config()))
    torch.save(gradients(DistributedDataParallel(bare), bare, slice(4 * rank, 4 * rank + 4)), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    commands.fork_group(work, tmp_path)
    bare = with_donors(DefectFinder(config()))
    expected = gradients(bare, bare, slice(0, 8))
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert result.keys() == expected.keys() and len(result) > 10
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n} {text}"
            )


def test_the_score_is_the_mean_of_the_map_and_the_peak_its_highest_tenth(phantoms: PackedFilms) -> None:  # noqa: F811
    task = task_of("nsa", phantoms, Path("nowhere"))
    detector = NSA(NSA.config_of(task.config, task.settings, 64), task.settings)
    images = phantoms.batch([0, 1, 2])
    with torch.inference_mode():
        said = detector.model.abnormality(images)
        examined = detector.examine(images, restore=False)
    assert said.shape == (3, 1, SIZE // 4, SIZE // 4) and detector.grid == (SIZE // 8, SIZE // 8)
    np.testing.assert_allclose(examined.scores["mean"], said.mean(dim=(1, 2, 3)), rtol=1e-5)
    highest = said.flatten(1).sort(dim=1, descending=True).values[:, :6]
    np.testing.assert_allclose(examined.scores["peak"], highest.mean(dim=1), rtol=1e-5)
    cells = torch.nn.functional.avg_pool2d(said, 2).flatten(1)
    np.testing.assert_allclose(examined.map, cells, rtol=1e-5)
