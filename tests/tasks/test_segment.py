"""Segmentation in one process: the losses, what is learnt, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from afire.cli import app
from afire.data.pack import PackedFilms, PackSettings
from afire.data.pack import pack as pack_films
from afire.data.rle import decode_rle, encode_siim
from afire.data.sources.nih import build_siim
from afire.errors import UserError
from afire.report.task_figures import choose_films
from afire.tasks import metrics as m
from afire.tasks.masks import Masks, load_masks, mask_cells, pack
from afire.tasks.results import read_predictions, read_result
from afire.tasks.segment import MaskObjective, run_segment
from afire.tasks.settings import MaskConfig, SegmentConfig, load_task_config
from tests.tasks.drawn import MODEL, QUICK, draw_spots, experiment


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("spots"))


def settings(*overrides: str) -> SegmentConfig:
    return load_task_config("segment", overrides=[*QUICK, "decoder.width=16", *overrides])


def objective(masks: np.ndarray, *overrides: str) -> MaskObjective:
    rows = np.arange(len(masks))
    return MaskObjective(Masks(pack(masks), rows, masks.shape[-1]), settings(*overrides))


def test_losses_are_those_of_a_slow_loop() -> None:
    masks = np.random.default_rng(0).random((3, 8, 8)) > 0.7
    masks[1] = False
    outputs = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    task = objective(masks, "losses.dice=2", "losses.cross_entropy=0.5")
    losses = task.loss(outputs, task.targets(np.arange(3)))
    dice = entropy = 0.0
    for film in range(3):
        p, y = outputs[film, 0].sigmoid().double().numpy(), masks[film]
        dice += 1 - (2 * p[y].sum() + 1) / (p.sum() + y.sum() + 1)
        entropy -= np.where(y, np.log(p), np.log(1 - p)).mean()
    assert losses["dice"].item() == pytest.approx(2 * dice, rel=1e-5)
    assert losses["cross_entropy"].item() == pytest.approx(0.5 * entropy, rel=1e-5)
    assert set(objective(masks, "losses.dice=0").loss(outputs, task.targets(np.arange(3)))) == {"cross_entropy"}


def test_what_validation_keeps_is_what_masks_would_give() -> None:
    masks = np.random.default_rng(1).random((4, 12, 12)) > 0.5
    masks[2] = False
    outputs = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    task = objective(masks, "choice.thresholds=[0.3, 0.7]", "choice.min_areas=[0, 0.3]")
    kept = task.keep(outputs, np.arange(4)).numpy()
    slow = []
    for threshold in (0.3, 0.7):
        cut = outputs.sigmoid()[:, 0].numpy() >= threshold
        for least in (0, 0.3):
            whole = cut & (cut.mean(axis=(1, 2), keepdims=True) >= least)
            dice = m.dice(whole, masks)
            slow.append((dice.mean() + dice[[0, 1, 3]].mean()) / 2)
    assert task.score(kept, np.arange(4)) == pytest.approx(max(slow))
    choice = task.choose_components(task.keep_components(outputs, np.arange(4)).numpy())
    assert 0 < choice.value <= 1 and choice.threshold in (0.3, 0.7)


def test_it_learns_and_leaves_what_it_promises(packed: Path, tmp_path: Path) -> None:
    config = settings("training.epochs=15", "training.learning_rate=1e-2", "augment.crop_min=0.9")
    [(_, result, predictions)] = list(run_segment(experiment(packed, tmp_path), config))
    assert result.labels == ["spots"] and result.metrics["dice"].mean > 0.6
    assert set(result.runs[0].chosen) == {"epoch", "threshold", "min_area"}
    test = predictions[predictions["part"] == "test"]
    films = PackedFilms(packed)
    masks = load_masks(films, np.arange(60), mask_cells(films.manifest, MaskConfig())[1], MaskConfig())
    truth = masks.read(np.arange(48, 60))
    drawn = np.stack([decode_rle(cell) for cell in test["rle"]])
    dice, iou = m.dice(drawn, truth), m.iou(drawn, truth)
    assert result.metrics["dice"].mean == pytest.approx(dice.mean())
    assert result.metrics["iou"].mean == pytest.approx(iou.mean())
    assert result.metrics["dice_positive"].mean == pytest.approx(dice[truth.any(axis=(1, 2))].mean())
    assert test["value:dice_positive"].isna().sum() == 6
    assert 0 <= result.metrics["dice"].low <= result.metrics["dice"].mean <= result.metrics["dice"].high <= 1
    assert not (tmp_path / "seed-0/checkpoints").exists()


def test_films_without_a_mask_are_left_out_and_counted(packed: Path, tmp_path: Path) -> None:
    config = settings("training.epochs=1", "masks.column=lungs")
    [(_, result, _)] = list(run_segment(experiment(packed, tmp_path), config))
    assert result.notes == ["30 of 60 films have no mask and were left out"]
    assert sum(result.runs[0].films.values()) == 30 and result.labels == ["lungs"]


def test_a_miniature_of_siim_from_its_own_table(tmp_path: Path) -> None:
    """Two rows for a film with two spots, masks drawn on twice the size of the films, most films without any."""
    rng = np.random.default_rng(2)
    rows = ["ImageId,EncodedPixels"]
    (tmp_path / "films").mkdir()
    for number in range(40):
        film = rng.integers(40, 90, (32, 32)).astype(np.uint8)
        masks = []
        if number % 4 == 0:
            for corner in ((4, 4), (20, 18)):
                spot = np.zeros((64, 64), bool)
                spot[2 * corner[0] : 2 * corner[0] + 16, 2 * corner[1] : 2 * corner[1] + 16] = True
                film[corner[0] : corner[0] + 8, corner[1] : corner[1] + 8] = 250
                masks.append(encode_siim(spot))
        Image.fromarray(film).save(tmp_path / f"films/1.2.{number}.png")
        rows += [f"1.2.{number},{text}" for text in masks or ["-1"]]
    (tmp_path / "train-rle.csv").write_text("\n".join(rows))
    pack_films(build_siim(tmp_path, size=64), tmp_path / "pack", PackSettings(size=32), workers=1)
    recipe = load_task_config("segment", "siim", overrides=[*QUICK, "training.epochs=1", "decoder.width=16"])
    [(_, result, predictions)] = list(run_segment(experiment(tmp_path / "pack", tmp_path / "out"), recipe))
    assert result.labels == ["Pneumothorax"] and len(predictions) == sum(
        result.runs[0].films[p] for p in ("val", "test")
    )
    films = PackedFilms(tmp_path / "pack")
    masks = load_masks(films, np.arange(40), mask_cells(films.manifest, recipe.masks)[1], recipe.masks)
    drawn = masks.read(np.arange(40)).sum(axis=(1, 2))
    assert sorted(set(drawn.tolist())) == [0, 128] and (drawn > 0).sum() == 10


def test_mistakes_are_messages(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the manifest has no column nothing for masks"):
        list(run_segment(experiment(packed, tmp_path), settings("masks.column=nothing")))
    assert not (tmp_path / "seed-0").exists()


def test_the_command_writes_overlays(packed: Path, tmp_path: Path) -> None:
    words = ["segment", "--weights", "random", "--data", str(packed), "--out", str(tmp_path / "out"), "--seeds", "0"]
    words += ["--preset", "tiny", "--mask-column", "rle", "--overlays", "6", "--fraction", "50,100", "--device", "cpu"]
    words += [word for setting in [*MODEL, *QUICK, "training.epochs=1"] for word in ("--set", setting)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name in ("50pct", "100pct"):
        folder = tmp_path / "out" / name
        assert read_result(folder).task == "segment" and len(read_predictions(folder)) > 0
        assert (folder / "overlays.png").stat().st_size > 10_000 and "overlays.png" in (
            folder / "result.md"
        ).read_text()
        assert json.loads((folder / "seed-0/config.yaml").exists() and (folder / "seed-0/data.json").read_text())


def test_the_picture_shows_both_ends_and_the_middle_and_nothing_empty() -> None:
    rle = ['{"size":[4,4],"runs":[[0,4]]}'] * 40 + ['{"size":[4,4],"runs":[]}'] * 10
    values = [number / 40 for number in range(40)] + [1.0] * 10
    table = pd.DataFrame({"run": "seed-0", "part": "test", "image": [f"{n:02d}" for n in range(50)], "rle": rle})
    table["value:dice"], table["value:dice_positive"] = values, values[:40] + [np.nan] * 10
    chosen = choose_films(table, 9)
    assert chosen["image"].tolist() == ["00", "01", "02", "18", "19", "20", "37", "38", "39"]
    assert chosen["group"].unique().tolist() == ["lowest Dice", "middle", "highest Dice"]
    assert choose_films(table[40:], 9).empty and len(choose_films(table[:5], 9)) == 5
