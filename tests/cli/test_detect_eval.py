"""``afire detect fit`` and ``afire detect eval`` from the shell's side."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.config import LesionConfig
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.detect.base import load_detector
from afire.errors import UserError
from afire.settings import load_config
from afire.weights import open_weights
from tests import commands
from tests.tasks.conftest import SMALLEST, draw_films

DISCLAIMER = "Research software, not a medical device."
SETTINGS = [word for text in [*SMALLEST, "training.epochs=1"] for word in ("--set", text)]


RANDOM = ["fit", "--weights", "random", "--preset", "tiny", "--data", "PACK", "--out", "OUT"]
PAPER = [*RANDOM, "--procedure", "paper"]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    pack(
        make_manifest(draw_films(folder / "films"), folder / "films"), folder / "pack", PackSettings(size=32), workers=1
    )
    return folder / "pack"


def test_fit_then_eval(films: Path, tmp_path: Path) -> None:
    runner, model, out = CliRunner(), tmp_path / "model", tmp_path / "result"
    own = ["--set", "held_out=0.4", "--set", "false_alarms=0.2", "--seed", "3", "--score", "gaussian+surprise"]
    fit = ["detect", "fit", "--weights", "random", "--preset", "tiny", *SETTINGS, *own, "--device", "cpu"]
    fitted = runner.invoke(app, [*fit, "--data", str(films), "--out", str(model)])
    assert fitted.exit_code == 0, fitted.output
    assert "> gaussian" in fitted.stdout and "threshold" in fitted.stdout and DISCLAIMER in fitted.stdout
    assert "asked for" in (model / "choice.md").read_text()
    tested = runner.invoke(
        app, ["detect", "eval", "--model", str(model), "--data", str(films), "--out", str(out), "--bootstrap", "20"]
    )
    assert tested.exit_code == 0, tested.output
    for word in ("chosen score", "blur", "pca mahalanobis", "oracle", "trivial detector", DISCLAIMER):
        assert word in tested.stdout, word
    assert {"detect.md", "detect.json", "result.json", "predictions.parquet", "roc.png", "scores.png"} <= {
        path.name for path in out.iterdir()
    }


def test_the_papers_procedure(films: Path, tmp_path: Path) -> None:
    runner, run, model = CliRunner(), tmp_path / "run", tmp_path / "model"
    more = ["--set", "losses.lesion=1", "--set", "lesions.views=2", "--set", "lesions.haze=0.5"]
    words = ["pretrain", "--data", str(films), "--preset", "tiny", *SETTINGS, *more, "--device", "cpu"]
    assert runner.invoke(app, [*words, "--out", str(run)]).exit_code == 0
    own = ["--procedure", "paper", "--set", "held_out=0.4", "--set", "false_alarms=0.2", "--set", "adapt.epochs=1"]
    fit = ["detect", "fit", "--weights", str(run), "--data", str(films), *own, "--device", "cpu"]
    done = runner.invoke(app, [*fit, "--out", str(model)])
    assert done.exit_code == 0, done.output
    assert "> restoration" in done.stdout and "the paper's procedure" in done.stdout
    adapt = load_config(file=model / "adapt" / "config.yaml")
    assert adapt.lesions == LesionConfig(views=2), "SLM as the paper draws it, as often as in pre-training"
    assert adapt.losses.lesion == 0 and adapt.training.weight_decay == 0
    detector = load_detector(model)
    assert detector.choice.name == "restoration" and detector.origin["procedure"] == "paper"
    assert "lesion" not in detector.choice.table, "no classifier"
    for contradiction in (["--score", "gaussian"], ["--set", "adapt.lesion=1"], ["--set", "adapt.lesions.haze=0.5"]):
        done = runner.invoke(app, [*fit, *contradiction, "--out", str(tmp_path / "other")])
        assert isinstance(done.exception, UserError) and "leave out" in str(done.exception)
    assert not (tmp_path / "other").exists()


def test_patchcore_from_fit_to_report_and_export(films: Path, tmp_path: Path) -> None:
    """A detector that has nothing of AFiRe's goes the same way."""
    runner, model, run = CliRunner(), tmp_path / "model", tmp_path / "run"
    words = ["pretrain", "--data", str(films), "--preset", "tiny", *SETTINGS, "--out", str(run), "--device", "cpu"]
    own = ["--set", "held_out=0.4", "--set", "false_alarms=0.2", "--set", "patchcore.share=0.2"]
    fit = ["detect", "fit", "--method", "patchcore", "--weights", str(run), *own, "--device", "cpu"]
    commands = [
        words,
        [*fit, "--data", str(films), "--out", str(model)],
        ["detect", "eval", "--model", str(model), "--data", str(films), "--out", str(tmp_path / "result")],
        ["detect", "run", str(films.parent / "films"), "--model", str(model), "--out", str(tmp_path / "report")],
        ["export", str(run), "--detector", str(model), "--out", str(tmp_path / "bundle")],
    ]
    outputs = []
    for command in commands:
        done = runner.invoke(app, command)
        assert done.exit_code == 0, done.output
        outputs.append(done.stdout)
    assert "> patchcore" in outputs[1] and "GFLOP to score a film (patchcore)" in outputs[1]
    assert "| detector | patchcore" in (tmp_path / "result" / "detect.md").read_text()
    page = (tmp_path / "report" / "report.html").read_text()
    assert "patchcore" in page and "what the decoder draws" not in page, "nothing is restored"
    opened = afire.load(tmp_path / "bundle", device="cpu")
    scores = opened.detect(opened.read(films.parent / "films" / "film000.png"))
    alone = load_detector(model).score(opened.read(films.parent / "films" / "film000.png"))
    assert scores.score == pytest.approx(alone.score) and scores.restored is None
    by_itself = afire.load(model, device="cpu")
    assert by_itself.detect(opened.read(films.parent / "films" / "film000.png")).score == pytest.approx(alone.score)
    assert "a detector inside" in repr(by_itself)
    with pytest.raises(UserError, match="restores nothing"):
        by_itself.restore(opened.read(films.parent / "films" / "film000.png"))
    assert open_weights(model).hash == open_weights(run).hash, "its encoder is that of the run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--model", "gone", "--data", "PACK", "--out", "OUT"], "gone holds no detector"),
        (["fit", "--weights", "random", "--data", "PACK", "--out", "OUT"], "add --preset"),
        ([*PAPER, "--method", "patchcore"], "is of the detector afire"),
        ([*PAPER, "--set", "losses.restoration=0"], "no such decoder"),
        (
            ["fit", "--method", "autoencoder", "--weights", "random", "--data", "PACK", "--out", "OUT"],
            "there is no detector",
        ),
        (RANDOM, "the films are 32 px"),
        (
            ["eval", "--model", "gone", "--data", "PACK", "--out", "OUT", "--labels", "gone.csv"],
            "the file of marks gone.csv does not exist",
        ),
    ],
)
def test_mistakes_are_one_message(films: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {"PACK": str(films), "OUT": str(tmp_path / "out")}
    done = CliRunner().invoke(app, ["detect", *(places.get(word, word) for word in arguments)])
    assert isinstance(done.exception, UserError) and message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_exit_code(tmp_path: Path) -> None:
    words = ["detect", "eval", "--model", "gone", "--data", "gone", "--out", "out"]
    assert "gone" in commands.run(*words, folder=tmp_path, expect=2).stderr
