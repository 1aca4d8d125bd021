"""How long a run is: film views and minutes become epochs once, warm-ups keep their share, and a resume is exact."""

from __future__ import annotations

import importlib
import logging
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.settings import changed, load_config
from afire.training.budget import Speed, as_begun, budget_message, enough_epochs, in_epochs, lasting
from afire.training.engine import Schedules
from afire.training.pretrain import pretrain
from afire.training.pretraining import EpochView
from afire.training.run_folder import RunFolder, newest_checkpoint
from tests.training.conftest import SMALLEST

pretraining = importlib.import_module("afire.training.pretrain")  # `afire.training.pretrain` is the function


def test_a_set_of_the_usual_size_gets_what_it_got() -> None:
    config = load_config("small")
    for films in (1200, 1349, 112_000):
        assert enough_epochs(config, films) is config


def test_few_films_get_more_epochs_and_the_same_recipe() -> None:
    config = load_config("small")
    few = enough_epochs(config, 195)
    assert few.training.epochs == 124 == math.ceil(24_000 / 195)
    assert few.training.warmup_epochs == pytest.approx(2 * 124 / 20)
    assert few.training.freeze_last_layer_epochs == 6 and few.losses.teacher_temperature_epochs == 31
    assert (few.run.checkpoint_epochs, few.run.picture_epochs, few.run.probe_epochs) == (6, 31, 0)
    # The rates at the same share of the run are the same: 60 steps stretched to 372.
    short, long = Schedules(config.training, 3), Schedules(few.training, 3)
    assert (short.steps, long.steps) == (60, 372)
    assert (short.warmup_steps, long.warmup_steps) == (6, 37)
    for share in (0.1, 0.3, 0.5, 0.9):
        slow, fast = long.at(round(share * 372)), short.at(round(share * 60))
        assert slow.learning_rate == pytest.approx(fast.learning_rate, abs=0.1 * short.peak_learning_rate)
    assert enough_epochs(few, 195) is few  # also when its recorded settings are used again


def test_what_was_asked_for_is_not_stretched_and_nothing_stays_nothing() -> None:
    settings = ["run.picture_epochs=5", "training.warmup_epochs=0", "training.freeze_last_layer_epochs=0"]
    few = enough_epochs(load_config("small", overrides=settings), 195)
    assert few.run.picture_epochs == 5 and few.training.warmup_epochs == few.training.freeze_last_layer_epochs == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], (20, 24_000, 0)),
        (["training.epochs=10"], (10, 0, 0)),
        (["training.minutes=30"], (20, 0, 30)),
        (["training.film_views_min=500"], (20, 500, 0)),
        (["training.film_views_min=500", "training.epochs=10"], (10, 500, 0)),
        (["training.batch_size=8"], (20, 24_000, 0)),
    ],
)
def test_the_last_word_about_the_length_counts(
    tmp_path: Path, settings: list[str], expected: tuple[int, int, float]
) -> None:
    recipe = load_config("small", overrides=settings).training
    assert (recipe.epochs, recipe.film_views_min, recipe.minutes) == expected
    (tmp_path / "mine.yaml").write_text("training: {minutes: 5}")
    recipe = load_config("small", tmp_path / "mine.yaml", settings).training
    assert (recipe.minutes == 5) == (settings in ([], ["training.batch_size=8"]))
    assert changed(load_config("small"), {"training": {"epochs": 3}}).training.film_views_min == 0


def test_minutes_become_epochs() -> None:
    config = load_config("small", overrides=["training.minutes=10", "run.picture_epochs=0", "run.checkpoint_epochs=0"])
    assert Speed(step=0.5, epoch_end=1.0).epochs(config, 18) == 60
    assert Speed(step=600.0).epochs(config, 18) == 1
    assert Speed(step=0.5, epoch_end=1.0, first=60.0).epochs(config, 18) == 54, "a tenth is spent before the first step"
    assert Speed(step=0.5, first=6000.0).epochs(config, 18) == 1
    by_default = load_config("small", overrides=["training.minutes=10"])  # 20 checkpoints and 4 times pictures
    assert Speed(0.5, 1.0, checkpoint=2.0, observers=5.0).epochs(by_default, 18) == 54
    every = load_config("small", overrides=["training.minutes=10", "run.picture_epochs=2", "run.checkpoint_epochs=1"])
    assert Speed(0.5, 1.0, checkpoint=2.0, observers=4.0).epochs(every, 18) == 600 // 14


def test_studies_count_epochs() -> None:
    base = in_epochs(load_config("small"), 195)
    assert (base.training.epochs, base.training.film_views_min) == (124, 0)
    assert (
        in_epochs(load_config("small"), 5000).training
        == load_config("small", overrides=["training.epochs=20"]).training
    )
    with pytest.raises(UserError, match=r"training\.minutes would make every trial"):
        in_epochs(load_config("small", overrides=["training.minutes=3"]), 5000)


# In a run


def budgeted(*settings: str) -> Config:
    """Eight films in batches of four: two steps an epoch."""
    return load_config("tiny", overrides=[*SMALLEST, "training.epochs=2", "training.batch_size=4", *settings])


@pytest.fixture
def films(packed: Path) -> PackedFilms:
    return PackedFilms(packed)


ROWS = np.arange(8)


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    return checkpoint.model_tensors()


def test_film_views_are_settled_recorded_and_said(
    tmp_path: Path, films: PackedFilms, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        result = pretrain(budgeted("training.film_views_min=30"), films, tmp_path / "run", ROWS)
    assert result.steps == 4 * 2
    assert "30 film views of 8 films (training.film_views_min): 4 epochs in place of 2, 8 steps" in caplog.text
    recorded = load_config(file=tmp_path / "run" / "config.yaml").training
    assert (recorded.epochs, recorded.film_views_min) == (4, 30)
    explicit = lasting(budgeted(), 4)
    pretrain(explicit, films, tmp_path / "explicit", ROWS)
    said, alone = weights(tmp_path / "explicit"), weights(tmp_path / "run")
    assert all(torch.equal(alone[name], tensor) for name, tensor in said.items())


class Stop:
    """An observer that ends the run as a kill would."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, view: EpochView) -> None:
        if view.epoch == self.epoch:
            raise KeyboardInterrupt


def test_minutes_are_measured_once_and_a_resume_is_exact(
    tmp_path: Path, films: PackedFilms, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Speed] = []

    def measure(*arguments: object) -> Speed:
        measured.append(Speed(step=60 / 2 / 3, epoch_end=0.0))  # three epochs of two steps in a minute
        return measured[-1]

    monkeypatch.setattr(pretraining, "_measured", measure)
    config = budgeted("training.minutes=1", "run.checkpoint_epochs=1", "training.warmup_epochs=1")
    with pytest.raises(KeyboardInterrupt):
        pretrain(config, films, tmp_path / "run", ROWS, observers=[Stop(2)])
    recorded = load_config(file=tmp_path / "run" / "config.yaml").training
    assert (recorded.epochs, recorded.minutes, recorded.warmup_epochs) == (3, 1, 1.5)
    with pytest.raises(UserError, match=r"already holds a run"):
        pretrain(config, films, tmp_path / "run", ROWS)
    result = pretrain(config, films, tmp_path / "run", ROWS, resume=True)
    assert (result.status, result.step) == ("finished", 6) and len(measured) == 1
    pretrain(lasting(budgeted("training.warmup_epochs=1"), 3), films, tmp_path / "whole", ROWS)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_another_budget_is_another_run(tmp_path: Path, films: PackedFilms) -> None:
    pretrain(budgeted("training.film_views_min=30"), films, tmp_path / "run", ROWS)
    with pytest.raises(UserError, match=r"training\.film_views_min was 30, is 60"):
        pretrain(budgeted("training.film_views_min=60"), films, tmp_path / "run", ROWS, resume=True)
    with pytest.raises(UserError, match=r"training\.minutes was 0\.0, is 1\.0"):
        pretrain(budgeted("training.minutes=1"), films, tmp_path / "run", ROWS, resume=True)


def test_a_run_of_before_there_were_film_views_goes_on(tmp_path: Path, films: PackedFilms) -> None:
    pretrain(budgeted(), films, tmp_path / "run", ROWS)
    with RunFolder(tmp_path / "run") as folder:
        begun = as_begun(budgeted("training.epochs=2", "training.film_views_min=30"), folder)
        assert begun is not None and begun.training.epochs == 2 and begun.training.film_views_min == 0
        assert as_begun(budgeted("training.minutes=2"), folder) is None
    assert as_begun(budgeted(), RunFolder(tmp_path / "gone")) is None


def test_the_speed_of_a_trial(tmp_path: Path, films: PackedFilms) -> None:
    seen: list[int] = []

    def watch(view: EpochView) -> None:
        seen.append(view.epoch)
        assert view.out != tmp_path / "run"

    config = budgeted("training.minutes=0.001")
    kind, begun = pretraining.method_type("afire"), time.perf_counter()
    speed = pretraining._measured(config, kind, films, tmp_path, ROWS, None, "cpu", [watch])
    assert speed.step > 0 and speed.epoch_end > 0 and speed.checkpoint > 0 and seen == [1, 0]
    assert 0 < speed.first < time.perf_counter() - begun
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # nothing is kept


def test_a_message_only_where_something_was_derived() -> None:
    config = budgeted()
    assert budget_message(config, config, 8, None, 2) == ""
    said = budget_message(budgeted("training.minutes=3"), lasting(config, 7), 8, Speed(0.25, 0.5), 2)
    long = budget_message(budgeted("training.minutes=0.01"), lasting(config, 1), 8, Speed(0.25, 0.5), 2)
    late = budget_message(budgeted("training.minutes=3"), lasting(config, 7), 8, Speed(0.25, 0.5, first=20.0), 2)
    assert "; 20 s pass before the first step" in late and "before the first step" not in said
    assert "1 epoch in place of 2, 2 steps; an epoch alone takes 0.0167 minutes" in long
    assert said.startswith("3 minutes at 0.25 s a step of 4 films and 0.5 s at the end of an epoch: 7 epochs in place")


def test_minutes_of_a_run_that_keeps_blocks_as_given(
    tmp_path: Path, films: PackedFilms, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial starts from the same weights, or it would be refused."""
    given: list[object] = []
    config = budgeted("training.minutes=0.001", "training.frozen_blocks=1")
    with caplog.at_level(logging.INFO, "afire"):
        result = pretrain(config, films, tmp_path / "run", ROWS, start=given.append)
    assert result.status == "finished" and len(given) == 2 and "0.001 minutes at" in caplog.text
