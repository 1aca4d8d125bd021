"""How long a detector trains: film views and minutes become epochs once, as in pre-training, and a resume is exact."""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from afire.cli import app
from afire.data.pack import PackedFilms
from afire.detect import DETECTORS
from afire.detect.base import CONFIG, AnomalyDetector, FitTask
from afire.detect.fit import adaptation, detect_settings, fit_detector, open_networks
from afire.detect.learned import LearnedConfig, LearnedDetector
from afire.errors import UserError
from afire.settings import load_config
from afire.tasks.settings import DetectConfig
from afire.training.budget import Speed, enough_epochs, lasting
from tests.detect.conftest import QUICK, SMALLEST, killed_after_a_checkpoint

pretraining = importlib.import_module("afire.training.pretrain")  # `afire.training.pretrain` is the function
LEARNED = [name for name in DETECTORS if issubclass(DETECTORS[name], LearnedDetector)]
TRUNK = [*SMALLEST, "encoder.depth=2"]
SHORT = {
    "aeu": ["train.epochs=2", "train.batch_size=8", "aeu.width=4"],
    "taught": [
        *("train.epochs=2", "train.batch_size=8", "taught.start=nothing", "taught.films=32"),
        *("taught.width=8", "taught.blocks=1"),
    ],
    "panda": ["train.epochs=2", "train.batch_size=8", "panda.fisher_films=8"],
}


def task_of(method: str, films: PackedFilms, out: Path, *settings: str, resume: bool = False) -> FitTask:
    networks = open_networks("random", "tiny", None, TRUNK)
    chosen = detect_settings([*QUICK, *SHORT.get(method, ()), *settings], method)
    return FitTask(networks.config, chosen, films, out, source="drawn", device="cpu", method=method, resume=resume)


def tensors(detector: AnomalyDetector) -> dict[str, torch.Tensor]:
    return detector.model.state_dict()


def equal(first: AnomalyDetector, second: AnomalyDetector) -> bool:
    ours, theirs = tensors(first), tensors(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def length_of(detector: AnomalyDetector) -> tuple[int, int, float]:
    """What the detector's own settings say, and what those in its folder say."""
    recipe = detector.config.training
    return recipe.epochs, recipe.film_views_min, recipe.minutes


# What is said


def test_the_last_word_about_the_length_counts() -> None:
    def said(*settings: str, method: str = "taught") -> tuple[int, int, float]:
        recipe = detect_settings(settings, method).train  # type: ignore[attr-defined]
        return recipe.epochs, recipe.film_views_min, recipe.minutes

    assert said() == (12, 0, 0)
    assert said("train.epochs=20") == (20, 0, 0)
    assert said("train.film_views_min=500") == (12, 500, 0)
    assert said("train.film_views_min=500", "train.epochs=20") == (20, 0, 0)
    assert said("train.minutes=5") == (12, 0, 5)
    assert said("train.film_views_min=500", "train.batch_size=8") == (12, 500, 0)
    assert said("train.film_views_min=500", method="nsa") == (240, 500, 0)
    adapt = detect_settings(["adapt.film_views_min=900"]).adapt  # type: ignore[attr-defined]
    assert (adapt.epochs, adapt.film_views_min) == (10, 900)


def test_by_default_a_length_is_a_number_of_epochs() -> None:
    for method in LEARNED:
        settings = DETECTORS[method].Settings()
        assert isinstance(settings, LearnedConfig)
        assert settings.train.epochs == DETECTORS[method].published_epochs
        assert settings.train.film_views_min == settings.train.minutes == 0
    assert DetectConfig().adapt.film_views_min == DetectConfig().adapt.minutes == 0


def test_a_small_set_gets_as_many_updates_as_a_large_one() -> None:
    kind = DETECTORS["taught"]
    config, settings = (
        load_config(overrides=["image.size=128"]),
        detect_settings(["train.film_views_min=8000"], "taught"),
    )

    def epochs(films: int) -> int:
        return enough_epochs(kind.config_of(config, settings, films), films).training.epochs

    assert [epochs(films) for films in (195, 667, 5000)] == [math.ceil(8000 / 195), 12, 12]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("afire", ["adapt.epochs=0", "adapt.minutes=3"], "epochs=0 takes the weights as they are"),
        ("afire", ["adapt.epochs=0", "adapt.film_views_min=3"], "epochs=0 takes the weights as they are"),
        ("panda", ["panda.against=early", "train.minutes=3"], "panda.against=early ends after panda.updates"),
        ("panda", ["panda.against=early", "train.film_views_min=3"], "panda.against=early ends after panda.updates"),
        ("patchcore", ["train.minutes=3"], "unknown setting train"),
    ],
)
def test_settings_that_contradict_are_refused(method: str, settings: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect_settings(settings, method)


# In a fit


@pytest.mark.parametrize("method", ["aeu", "panda"])
def test_film_views_are_settled_recorded_and_said(
    method: str, films: PackedFilms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        detector = fit_detector(task_of(method, films, tmp_path / "views", "train.film_views_min=100"))
    fitted = detector.origin["parts"]["fit"]
    epochs = math.ceil(100 / fitted)
    assert f"100 film views of {fitted} films (training.film_views_min): {epochs} epochs in place of 2" in caplog.text
    assert length_of(detector) == (epochs, 100, 0)
    recorded = load_config(file=tmp_path / "views" / CONFIG).training
    assert (recorded.epochs, recorded.film_views_min) == (epochs, 100)
    alone = fit_detector(task_of(method, films, tmp_path / "epochs", f"train.epochs={epochs}"))
    assert equal(detector, alone) and length_of(alone) == (epochs, 0, 0)


@pytest.mark.parametrize("method", ["aeu", "taught", "afire"])
def test_minutes_are_measured_once_and_a_resume_is_exact(
    method: str, films: PackedFilms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []

    def measure(config: object, learner: object, films: object, beside: object, rows: object, *others: object) -> Speed:
        measured.append(learner)
        steps = len(rows) // config.training.batch_size  # type: ignore[arg-type,attr-defined]
        return Speed(step=60 / 4 / steps)  # four epochs in a minute

    monkeypatch.setattr(pretraining, "_measured", measure)

    def task(out: Path, resume: bool = False, minutes: bool = True) -> FitTask:
        if method != "afire":
            return task_of(method, films, out, "train.minutes=1" if minutes else "train.epochs=4", resume=resume)
        task, length = task_of(method, films, out, resume=resume), {"minutes": 1.0}
        config = task.config
        timed = config.model_copy(update={"training": config.training.model_copy(update=length)})
        return replace(task, config=timed if minutes else lasting(config, 4))

    with killed_after_a_checkpoint():
        fit_detector(task(tmp_path / "resumed"))
    resumed = fit_detector(task(tmp_path / "resumed", resume=True))
    assert len(measured) == 1 and length_of(resumed)[0] == 4 and length_of(resumed)[2] == 1
    assert load_config(file=tmp_path / "resumed" / CONFIG).training.epochs == 4
    assert equal(resumed, fit_detector(task(tmp_path / "whole", minutes=False))) and len(measured) == 1


def test_an_adaptation_takes_the_same_lengths() -> None:
    config = load_config("small")
    for settings, expected in (
        ([], (10, 0, 0)),
        (["adapt.film_views_min=2000"], (10, 2000, 0)),
        (["adapt.minutes=3"], (10, 0, 3)),
    ):
        chosen = detect_settings(settings)
        assert isinstance(chosen, DetectConfig)
        recipe = adaptation(config, chosen, 195).training
        assert (recipe.epochs, recipe.film_views_min, recipe.minutes) == expected


@pytest.mark.parametrize("method", LEARNED)
def test_the_speed_of_every_kind_can_be_measured(method: str, films: PackedFilms, tmp_path: Path) -> None:
    settings = [*SHORT.get(method, ()), "train.batch_size=8", "train.minutes=0.0001"]
    if method == "fanogan":
        settings += ["fanogan.width=4"]
    task = task_of(method, films, tmp_path, *settings)
    kind = DETECTORS[method]
    config = kind.config_of(load_config("tiny", overrides=TRUNK), task.settings, 16)
    rows = torch.arange(16).numpy()
    start = kind.first_weights(task)
    speed = pretraining._measured(config, kind.Networks, films, tmp_path, rows, start, "cpu", ())
    assert speed.step > 0 and speed.first > 0 and not list(tmp_path.iterdir())


# On the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "aeu", "--set", "train.epochs=3"], "--minutes and --set train.epochs=3 both say"),
        (["--method", "aeu", "--set", "detect.train.film_views_min=3"], "--minutes and --set train.film_views_min=3"),
        (["--weights", "random", "--preset", "tiny", "--set", "training.epochs=3"], "--set training.epochs=3 both"),
        (["--method", "patchcore", "--weights", "random", "--preset", "tiny"], "patchcore trains nothing; leave out"),
        (
            ["--method", "panda", "--weights", "random", "--preset", "tiny", "--set", "panda.against=early"],
            "ends after",
        ),
    ],
)
def test_minutes_beside_another_length(films: PackedFilms, tmp_path: Path, words: list[str], message: str) -> None:
    command = ["detect", "fit", "--data", str(films.folder), "--out", str(tmp_path / "out"), "--minutes", "1", *words]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError) and message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_minutes_on_the_command_line(films: PackedFilms, tmp_path: Path) -> None:
    own = [
        word
        for setting in ("held_out=0.4", "false_alarms=0.2", "train.batch_size=8", "aeu.width=4")
        for word in ("--set", setting)
    ]
    command = [
        "detect",
        "fit",
        "--data",
        str(films.folder),
        "--method",
        "aeu",
        *own,
        "--minutes",
        "0.02",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    recorded = load_config(file=tmp_path / "out" / CONFIG).training
    assert recorded.minutes == 0.02 and recorded.epochs >= 1
