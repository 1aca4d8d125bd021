"""A method that is not AFiRe, from films to a report: every command takes what MAE pre-trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.errors import UserError
from tests import commands
from tests.tasks.drawn import SIZE, draw_spots

pytestmark = pytest.mark.slow

SETTINGS = [
    "image.size=32",
    "encoder.width=16",
    "encoder.depth=2",
    "encoder.heads=2",
    "encoder.patch_size=8",
    "decoder.width=16",
    "decoder.heads=2",
    "training.batch_size=8",
    "training.epochs=4",
    "training.warmup_epochs=1",
    "run.keep_checkpoints=100",
    "run.checkpoint_minutes=1e-9",  # after every step, so that a kill lands anywhere in an epoch
]
PRETRAIN = ["pretrain", "--method", "mae", "--preset", "tiny", *(word for text in SETTINGS for word in ("--set", text))]
QUICK = ["training.batch_size=16", "training.epochs=2", "training.min_epoch_steps=1", "bootstrap=20"]
TASK = ["--seeds", "0", *(word for text in QUICK for word in ("--set", text))]


def run_here(*words: object) -> str:
    """A command in this process; its output."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


def refusal(*words: object) -> str:
    """The message a command ends with."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, UserError), done.output + repr(done.exception)
    return str(done.exception)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mae")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return draw_spots(folder / "data")


@pytest.fixture(scope="module")
def run(folder: Path, data: Path) -> Path:
    """A finished pre-training."""
    commands.run(*PRETRAIN, "--data", data, "--out", folder / "run")
    return folder / "run"


def weights_of(run: Path) -> dict[str, Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    return load_file(newest / "model.safetensors")


def test_a_killed_run_ends_bit_identical(data: Path, run: Path, folder: Path) -> None:
    out = folder / "killed"
    words = [*PRETRAIN, "--data", data, "--out", out]
    process = commands.start(*words)
    process.wait_until(lambda: len(list(out.glob("checkpoints/step-*"))) >= 4)
    assert process.kill().code == -9
    commands.run(*words, "--resume")
    whole, resumed = weights_of(run), weights_of(out)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert {name.split(".")[0] for name in whole} == {"encoder", "decoder"}
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "total" in record] == list(range(1, 13))


def test_two_processes_equal_one(data: Path, run: Path, folder: Path) -> None:
    commands.run_processes(2, *PRETRAIN, "--data", data, "--out", folder / "two")
    one, two = (
        [json.loads(line)["total"] for line in (each / "metrics.jsonl").read_text().splitlines() if "total" in line]
        for each in (run, folder / "two")
    )
    assert one == pytest.approx(two, rel=1e-4)
    first, second = weights_of(run), weights_of(folder / "two")
    for name in first:
        if "qkv.bias" not in name:  # the bias of the keys does nothing; its gradient is rounding noise
            torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=2e-5)


def test_features_and_probe(data: Path, run: Path, folder: Path) -> None:
    run_here("embed", "--weights", run, "--data", data, "--out", folder / "features.parquet", "--device", "cpu")
    features = np.stack(pd.read_parquet(folder / "features.parquet")["feature"])
    own = afire.load(run, "cpu").embed(_films(data))
    np.testing.assert_allclose(features[:4], own.numpy(), rtol=1e-4, atol=1e-5)
    probe = ["probe", "--data", data, "--no-cache", "--seeds", "0", "--labels", "Spot", "--device", "cpu"]
    run_here(*probe, "--weights", run, "--out", folder / "probe")
    run_here(*probe, "--weights", "sharpness", "--out", folder / "sharpness")
    result = json.loads((folder / "probe/result.json").read_text())
    assert result["config"]["network"] == "encoder" and result["seen"]["pretraining"]["answer"] == "none"
    assert "sharpness only" in run_here("compare", folder / "probe", folder / "sharpness")


def _films(data: Path) -> Tensor:
    from afire.data.pack import PackedFilms

    return PackedFilms(data).batch(range(4))


def test_fine_tuning_and_its_maps(data: Path, run: Path, folder: Path) -> None:
    out = folder / "finetune"
    run_here("finetune", "--weights", run, "--data", data, "--labels", "Spot", *TASK, "--out", out, "--device", "cpu")
    result = json.loads((out / "result.json").read_text())
    assert result["config"]["network"] == "encoder" and len(result["runs"]) == 1
    run_here("figure", "gradcam", "--weights", out, "--data", data, "--out", folder / "cam", "--show", 2)
    assert json.loads((folder / "cam.json").read_text())["data"]["cases"] == 6


def test_segmentation(data: Path, run: Path, folder: Path) -> None:
    words = ["segment", "--weights", run, "--data", data, *TASK, "--overlays", "0", "--device", "cpu"]
    run_here(*words, "--out", folder / "segment")
    result = json.loads((folder / "segment/result.json").read_text())
    assert set(result["metrics"]) >= {"dice", "iou"} and result["config"]["network"] == "encoder"


def test_maps_of_films_and_tokens(data: Path, run: Path, folder: Path) -> None:
    for figure in ("tsne", "landmarks"):
        words = ["figure", figure, "--weights", run, "--data", data, "--part", "all"]
        words += ["--perplexity", 5, "--neighbours", "2,4", "--out", folder / figure, "--device", "cpu"]
        run_here(*words)
        record = json.loads((folder / f"{figure}.json").read_text())
        assert record["weights"]["run"]["network"] == "encoder" and record["weights"]["run"]["clusters"] is None


def test_restorations_of_lesioned_films(data: Path, run: Path, folder: Path) -> None:
    words = ["figure", "restorations", "--weights", run, "--data", data, "--out", folder / "restorations"]
    assert "nothing hidden" in run_here(*words, "--device", "cpu")
    record = json.loads((folder / "restorations.json").read_text())
    assert record["numbers"]["lesioned"]["z_mask"]["hidden_tokens"]["mean"] > 0
    assert record["weights"]["clusters"] is None


def test_what_mae_does_not_have_is_a_message(data: Path, run: Path, folder: Path) -> None:
    atlas = refusal("figure", "atlas", "--weights", run, "--data", data, "--out", folder / "atlas")
    assert atlas == "run was pre-trained by MAE, which has no prototypes to show."
    for words in (["embed", "--out", folder / "f.npz"], ["probe", "--out", folder / "p"], ["finetune", "--out", "f"]):
        message = refusal(*words, "--weights", run, "--data", data, "--network", "teacher")
        assert message == "MAE has no network 'teacher'; it has encoder."
    done = commands.run(
        *("embed", "--weights", run, "--data", data, "--out", folder / "f.npz", "--network", "student"), expect=2
    )
    assert done.stderr.startswith("error: MAE has no network 'student'")


def test_export_verify_and_load(run: Path, data: Path, folder: Path) -> None:
    run_here("export", run, "--out", folder / "bundle", "--licence", "mit")
    assert run_here("verify", folder / "bundle").splitlines()[-1] == "equal"
    images = _films(data)
    ours, exported = (afire.load(folder / name, "cpu") for name in ("run", "bundle"))
    assert torch.equal(ours.encode(images), exported.encode(images))
    assert torch.equal(ours.restore(images), exported.restore(images))
    assert ours.restore(images).shape == (4, 1, SIZE, SIZE)


@pytest.mark.parametrize("method", ["afire", "patchcore"])
def test_detection(data: Path, run: Path, folder: Path, method: str) -> None:
    model, result, report = (folder / f"{method}-{name}" for name in ("model", "result", "report"))
    own = {"afire": ["adapt.epochs=1", "adapt.batch_size=4"], "patchcore": ["patchcore.neighbours=3"]}[method]
    settings = [word for text in [*own, "held_out=0.5", "false_alarms=0.2"] for word in ("--set", text)]
    fit = ["detect", "fit", "--method", method, "--weights", run, "--data", data, "--out", model, "--device", "cpu"]
    run_here(*fit, *settings)
    run_here("detect", "eval", "--model", model, "--data", data, "--out", result, "--bootstrap", "20")
    assert (result / "detect.md").is_file()
    run_here("detect", "run", data.parent / "films", "--model", model, "--out", report, "--device", "cpu")
    films = json.loads((report / "results.json").read_text())["films"]
    assert len(films) == 60 and (report / "report.html").is_file()
    assert all(0 < film["p_value"] <= 1 for film in films if film["status"] == "scored")
    assert any(film["status"] == "scored" for film in films)
    images = _films(data)
    assert afire.load(model, "cpu").detect(images).heatmap.shape == (4, 4, 4)
