"""A residual network taught by phantoms, through the command line: killed, resumed, on two processes, and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.detect.base import load_detector
from afire.errors import UserError
from afire.nn.residual import ResidualTrunk
from afire.weights import open_weights
from tests import commands
from tests.tasks.conftest import draw_films
from tests.tasks.drawn import draw_spots

pytestmark = pytest.mark.slow

SETTINGS = [
    *("image.size=32", "encoder.width=56", "options.films=24"),
    *("training.batch_size=8", "training.epochs=3", "training.warmup_epochs=1"),
    *("run.keep_checkpoints=100", "run.checkpoint_minutes=1e-9"),  # after every step: a kill lands anywhere
]
PRETRAIN = ["pretrain", "--preset", "residual", *(word for text in SETTINGS for word in ("--set", text))]
QUICK = ("training.epochs=1", "training.batch_size=16", "training.min_epoch_steps=1", "bootstrap=20")
TASK = [*("--device", "cpu", "--quiet", "--seeds", "0"), *(word for text in QUICK for word in ("--set", text))]


def run_here(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("residual")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return draw_spots(folder / "data")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    commands.run(*PRETRAIN, "--out", folder / "run")
    return folder / "run"


def weights_of(run: Path) -> dict[str, Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    return load_file(newest / "model.safetensors")


def test_a_killed_run_ends_bit_identical(run: Path, folder: Path) -> None:
    out = folder / "killed"
    process = commands.start(*PRETRAIN, "--out", out)
    process.wait_until(lambda: len(list(out.glob("checkpoints/step-*"))) >= 4)
    assert process.kill().code == -9
    commands.run(*PRETRAIN, "--out", out, "--resume")
    whole, resumed = weights_of(run), weights_of(out)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_two_processes_equal_one(run: Path, folder: Path, shard: str) -> None:
    commands.run_processes(2, *PRETRAIN, "--set", f"training.shard={shard}", "--out", folder / shard)
    one, two = weights_of(run), weights_of(folder / shard)
    for name in one:
        if not name.endswith(".0.bias"):  # before the norm of a channel alone: its gradient is rounding noise
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=5e-5)


def test_its_bundle_is_whole_and_equal(run: Path, folder: Path) -> None:
    run_here("export", run, "--out", folder / "bundle", "--licence", "mit")
    assert run_here("verify", folder / "bundle").splitlines()[-1] == "equal"
    card = (folder / "bundle" / "README.md").read_text()
    assert "A residual network for radiographs" in card and "timm" not in card and "--format" not in card
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ours, exported = (afire.load(folder / name, "cpu") for name in ("run", "bundle"))
    assert ours.encode(images).shape == (2, 16, 56) and torch.equal(ours.encode(images), exported.encode(images))
    theirs, ours_too = (open_weights(folder / name).method.readouts(images) for name in ("bundle", "run"))
    assert torch.equal(theirs["anatomy"], ours_too["anatomy"])


@pytest.mark.parametrize("form", ["timm", "hf", "onnx", "torch"])
def test_other_libraries_do_not_know_it(run: Path, folder: Path, form: str) -> None:
    done = CliRunner().invoke(app, ["export", str(run), "--format", form, "--out", str(folder / form)])
    assert isinstance(done.exception, UserError) and "run holds a residual network, and a ViT is needed" in str(
        done.exception
    )
    assert not (folder / form).exists()


def test_tasks_and_figures_take_it(run: Path, data: Path, folder: Path) -> None:
    run_here("embed", "--weights", run, "--data", data, "--out", folder / "f.npz", "--quiet")
    words = ("--weights", run, "--data", data)
    run_here("probe", *words, "--no-cache", "--seeds", "0", "--labels", "Spot", "--quiet", "--out", folder / "probe")
    result = json.loads((folder / "probe/result.json").read_text())
    assert result["config"]["encoder"]["kind"] == "residual" and result["seen"]["pretraining"]["answer"] == "none"
    run_here("finetune", *words, *TASK, "--out", folder / "finetune")
    run_here("segment", *words, *TASK, "--set", "decoder.finest=4", "--out", folder / "segment")
    run_here("figure", "landmarks", *words, "--device", "cpu", "--out", folder / "landmarks", "--quiet")
    assert (folder / "landmarks.json").exists()


def test_patchcore_looks_through_it(run: Path, folder: Path) -> None:
    table = draw_films(folder / "films", 120, size=32)
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=32), workers=1)
    words = ("detect", "fit", "--method", "patchcore", "--weights", run, "--data", folder / "pack")
    words = (*words, "--out", folder / "patchcore")
    run_here(*words, "--set", "false_alarms=0.3", "--device", "cpu", "--quiet")
    assert load_detector(folder / "patchcore").config.encoder.kind == "residual"


def test_a_run_starts_another(run: Path, folder: Path) -> None:
    settings = ("image.size=32", "options.films=8", "training.batch_size=8", "training.epochs=1")
    words = [word for text in settings for word in ("--set", text)]
    run_here("pretrain", "--method", "phantom", "--init", run, *words, "--out", folder / "second", "--quiet")
    trunk = open_weights(folder / "second").trunk
    assert isinstance(trunk, ResidualTrunk) and trunk.width == 56, "the architecture is that of the start"
