"""Teaching by phantoms through the command line: without anybody's films, killed, resumed, on two processes."""

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
from afire.errors import UserError
from tests import commands
from tests.tasks.drawn import draw_spots

pytestmark = pytest.mark.slow

SETTINGS = [
    *("image.size=32", "encoder.width=16", "encoder.depth=2", "encoder.heads=2", "encoder.patch_size=8"),
    *("head.hidden=16", "head.bottleneck=8", "head.clusters=8", "decoder.width=16", "decoder.depth=1"),
    *("training.batch_size=8", "training.epochs=3", "training.warmup_epochs=1", "options.films=24"),
    *("run.keep_checkpoints=100", "run.checkpoint_minutes=1e-9"),  # after every step: a kill lands anywhere
]
PRETRAIN = [
    *("pretrain", "--method", "phantom", "--preset", "tiny"),
    *(word for text in SETTINGS for word in ("--set", text)),
]


def run_here(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phantom")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return draw_spots(folder / "data")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A finished pre-training without --data."""
    commands.run(*PRETRAIN, "--out", folder / "run")
    return folder / "run"


def weights_of(run: Path) -> dict[str, Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    return load_file(newest / "model.safetensors")


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["total"] for line in lines if '"total"' in line]


def test_a_killed_run_ends_bit_identical(run: Path, folder: Path) -> None:
    out = folder / "killed"
    process = commands.start(*PRETRAIN, "--out", out)
    process.wait_until(lambda: len(list(out.glob("checkpoints/step-*"))) >= 4)
    assert process.kill().code == -9
    commands.run(*PRETRAIN, "--out", out, "--resume")
    whole, resumed = weights_of(run), weights_of(out)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert {name.split(".")[0] for name in whole} == {"encoder", "head"}
    assert len(losses_of(out)) == 9


def test_a_killed_run_with_renewed_films_ends_bit_identical(folder: Path) -> None:
    words = [*PRETRAIN, "--set", "options.renewed=0.4", "--set", "training.epochs=4"]
    commands.run(*words, "--out", folder / "renewed")
    out = folder / "renewed-killed"
    process = commands.start(*words, "--out", out)
    process.wait_until(lambda: len(list(out.glob("checkpoints/step-*"))) >= 8)  # in the midst of the third epoch
    assert process.kill().code == -9
    commands.run(*words, "--out", out, "--resume")
    whole, resumed = weights_of(folder / "renewed"), weights_of(out)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    commands.run_processes(2, *words, "--out", folder / "renewed-two")
    assert losses_of(folder / "renewed-two") == pytest.approx(losses_of(folder / "renewed"), rel=1e-4)


def test_two_processes_equal_one_with_afire_beside(data: Path, folder: Path) -> None:
    words = [*PRETRAIN, "--data", data, "--set", "options.afire=1", "--set", "training.epochs=2"]
    commands.run(*words, "--out", folder / "both")
    commands.run_processes(2, *words, "--out", folder / "two")
    assert losses_of(folder / "both") == pytest.approx(losses_of(folder / "two"), rel=1e-4)
    first, second = weights_of(folder / "both"), weights_of(folder / "two")
    assert {"encoder", "head", "teacher", "student_head", "decoder", "bank"} == {name.split(".")[0] for name in first}
    for name in first:
        if "qkv.bias" not in name:  # the bias of the keys does nothing; its gradient is rounding noise
            torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=2e-5)


def test_predicted_lungs_are_asked_for_on_shards_of_the_weights(data: Path, folder: Path) -> None:
    places = ("options.afire=1", "prototypes.place=anatomy", "prototypes.lungs=predicted", "training.epochs=1")
    words = [*PRETRAIN, "--data", data, *(word for text in places for word in ("--set", text))]
    commands.run(*words, "--out", folder / "predicted")
    commands.run_processes(2, *words, "--set", "training.shard=fsdp", "--out", folder / "predicted-parts")
    assert losses_of(folder / "predicted") == pytest.approx(losses_of(folder / "predicted-parts"), rel=1e-4)
    figure = ("figure", "landmarks", "--weights", folder / "predicted", "--data", data, "--device", "cpu", "--quiet")
    run_here(*figure, "--out", folder / "landmarks")
    assert (folder / "landmarks.json").exists()


def test_what_it_learnt_is_exported_and_used(run: Path, data: Path, folder: Path) -> None:
    assert (run / "pictures").is_dir()
    run_here("export", run, "--out", folder / "bundle", "--licence", "mit")
    assert run_here("verify", folder / "bundle").splitlines()[-1] == "equal"
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ours, exported = (afire.load(folder / name, "cpu") for name in ("run", "bundle"))
    assert torch.equal(ours.encode(images), exported.encode(images))
    probe = ["probe", "--data", data, "--no-cache", "--seeds", "0", "--labels", "Spot", "--device", "cpu"]
    run_here(*probe, "--weights", run, "--out", folder / "probe")
    result = json.loads((folder / "probe/result.json").read_text())
    assert result["config"]["network"] == "encoder" and result["seen"]["pretraining"]["answer"] == "none"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PRETRAIN, "--set", "options.afire=1"], "while options.afire is above 0; say which with --data"),
        (["pretrain", "--preset", "tiny"], "the method afire learns from films; say which with --data"),
        ([*PRETRAIN, "--split", "s.json"], "--split chooses among the films of --data"),
        ([*PRETRAIN, "--set", "run.probe_epochs=1"], "needs films with labels"),
    ],
)
def test_what_needs_films_says_so(words: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, UserError) and says in str(done.exception)
    assert not (tmp_path / "run").exists()
