"""How a pack's films were made square and grey travels with them: to the run, the detector, the bundle and beyond."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.config import Config
from afire.data.manifest import make_manifest, write_manifest
from afire.data.pack import PackedFilms, PackSettings, check_reading, config_for, open_films, pack
from afire.errors import UserError
from afire.settings import load_config
from tests.training.conftest import SMALLEST

SETTINGS = [word for text in [*SMALLEST, "training.epochs=1"] for word in ("--set", text)]
MODEL = [word for text in SMALLEST if text.startswith(("image", "encoder")) for word in ("--set", text)]


def run(*words: object) -> None:
    done = CliRunner().invoke(app, [*map(str, words), "--quiet"])
    assert done.exit_code == 0, done.exception or done.output


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide films with a manifest, and a pack and a run of each of two fits."""
    folder = tmp_path_factory.mktemp("reading")
    (folder / "films").mkdir()
    rng = np.random.default_rng(3)
    names = [f"{number:02d}.png" for number in range(48)]
    for name in names:
        coarse = Image.fromarray(rng.random((5, 5), np.float32)).resize((64, 36), Image.Resampling.BICUBIC)
        Image.fromarray((np.clip(np.asarray(coarse), 0, 1) * 255).astype(np.uint8)).save(folder / "films" / name)
    normal = [float(number % 4 != 0) for number in range(48)]
    split = ["test" if number >= 40 else "val" if number >= 32 else "train" for number in range(48)]
    table = pd.DataFrame({"image": names, "normal": normal, "split": split})
    manifest = make_manifest(table, folder / "films")
    write_manifest(manifest, folder / "films.parquet")
    for fit in ("squash", "letterbox"):
        pack(manifest, folder / fit, PackSettings(size=32, fit=fit), workers=1)  # type: ignore[arg-type]
        run("pretrain", "--data", folder / fit, "--out", folder / f"run-{fit}", "--preset", "tiny", *SETTINGS)
    return folder


def test_the_run_reads_films_as_it_was_trained(home: Path) -> None:
    model = afire.load(home / "run-letterbox", device="cpu")
    assert model.config.image.fit == "letterbox"
    trained = PackedFilms(home / "letterbox")[3]
    assert (model.read(home / "films" / "03.png")[0] - trained).abs().max() <= 0.5 / 255 + 1e-6
    squashed = afire.load(home / "run-squash", device="cpu").read(home / "films" / "03.png")[0]
    assert (squashed - trained).abs().max() > 0.1, "else this test could not fail"


def test_detector_and_bundle_read_films_alike(home: Path, tmp_path: Path) -> None:
    own = ["--set", "held_out=0.5", "--set", "false_alarms=0.2", "--set", "adapt.epochs=1"]
    films = ["--data", home / "letterbox", "--out", tmp_path / "d"]
    run("detect", "fit", "--weights", home / "run-letterbox", *films, *own)
    assert afire.load(tmp_path / "d", device="cpu").config.image.fit == "letterbox"
    run("export", tmp_path / "d", "--out", tmp_path / "bundle")
    told = json.loads((tmp_path / "bundle" / "preprocessing.json").read_text())
    assert told["resize"]["fit"] == "letterbox"
    trained = PackedFilms(home / "letterbox")[3]
    film = afire.load(tmp_path / "bundle", device="cpu").read(home / "films" / "03.png")[0]
    torch.testing.assert_close(film, trained, atol=0.5 / 255 + 1e-6, rtol=0)


def test_weights_without_settings_take_the_packs(home: Path, tmp_path: Path) -> None:
    words = ["probe", "--weights", "random", "--preset", "tiny", *MODEL, "--seeds", "0", "--no-cache"]
    run(*words, "--data", home / "letterbox", "--out", tmp_path / "probe", "--labels", "abnormal")
    assert json.loads((tmp_path / "probe" / "result.json").read_text())["config"]["image"]["fit"] == "letterbox"
    run(
        *["probe", "--weights", "sharpness", "--seeds", "0", "--labels", "abnormal"],
        *["--data", home / "letterbox", "--out", tmp_path / "trivial"],
    )


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "--preset", "tiny", "--set", "image.fit=squash"],
        ["probe", "--weights", "HOME/run-squash", "--labels", "abnormal"],
        ["finetune", "--weights", "HOME/run-squash", "--labels", "abnormal"],
        ["detect", "fit", "--weights", "HOME/run-squash"],
        ["embed", "--weights", "HOME/run-squash"],
        ["probe", "--weights", "random", "--preset", "tiny", *MODEL, "--set", "image.fit=crop", "--labels", "abnormal"],
    ],
)
def test_a_mismatch_is_refused(home: Path, tmp_path: Path, words: list[str]) -> None:
    places = [word.replace("HOME", str(home)) for word in words]
    message = refused(*places, "--data", home / "letterbox", "--out", tmp_path / "out.npz")
    assert "made with fit letterbox" in message and "--fit" in message
    assert list(tmp_path.iterdir()) == []


def test_what_weights_bring_cannot_be_asked_otherwise(home: Path, tmp_path: Path) -> None:
    words = ["--weights", home / "run-squash", "--set", "image.fit=letterbox", *MODEL]
    message = refused("embed", *words, "--data", home / "films.parquet", "--out", tmp_path / "out.npz")
    assert "has image.fit squash, but letterbox was asked for" in message


def test_only_what_was_given_is_held_against_a_pack(home: Path) -> None:
    tiny = load_config("tiny")
    taken = config_for(tiny, home / "letterbox")
    assert taken.image.fit == "letterbox" and config_for(taken, home / "squash").image.fit == "squash"
    assert config_for(tiny, home / "films.parquet") is tiny
    assert taken.model_copy(update={"image": tiny.image}) == tiny, "nothing else changes"
    given = load_config("tiny", overrides=["image.voi=window"])
    with pytest.raises(UserError, match="made with voi auto"):
        config_for(given, home / "squash")
    whole = Config.model_validate(tiny.model_dump())  # as a run's own settings are read
    with pytest.raises(UserError, match="made with fit letterbox"):
        config_for(whole, home / "letterbox")


def test_films_that_were_opened_are_checked_too(home: Path) -> None:
    films = open_films(home / "letterbox")
    assert (films.fit, films.voi) == ("letterbox", "auto")
    with pytest.raises(UserError, match="made with fit letterbox"):
        check_reading(films, load_config("tiny").image)
    assert open_films(home / "films.parquet", size=32, fit="crop").fit == "crop"
