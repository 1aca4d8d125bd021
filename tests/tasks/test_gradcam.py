from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.errors import UserError
from afire.tasks.finetune import load_classifier
from afire.tasks.gradcam import TokenMap, box_mask, find_cases, gradcam, meet
from tests.figure_parts import draw_boxed_pack, make_finetuning


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_boxed_pack(tmp_path_factory.mktemp("boxed"))


@pytest.fixture(scope="module")
def result(boxed: Path) -> Path:
    return make_finetuning(boxed.parent / "finetuned", boxed)


@pytest.mark.parametrize("after", [1, 2, None])
def test_the_network_with_a_picture_of_tokens_answers_the_same(boxed: Path, result: Path, after: int | None) -> None:
    model = load_classifier(result).model
    films = PackedFilms(boxed).batch([0, 1, 2])
    assert torch.allclose(TokenMap(model, after)(films), model(films), atol=1e-5)


def test_by_default_a_map_is_each_tokens_share_of_the_logit(boxed: Path, result: Path) -> None:
    model = load_classifier(result).model
    films = PackedFilms(boxed).batch([2, 3])
    tokens = model.encoder(model.normalise(films))[:, 1:]
    shares = (tokens @ model.head.weight[1]).view(2, 1, 4, 4)  # their mean, plus the bias, is the logit
    assert torch.allclose(shares.flatten(1).mean(1) + model.head.bias[1], model(films)[:, 1], atol=1e-5)
    expected = F.interpolate(F.relu(shares), (32, 32), mode="bilinear")[:, 0] / 16  # the mean's gradient is 1/L
    assert np.allclose(gradcam(model, films, 1), expected.detach().numpy(), atol=1e-6)


def test_a_block_that_is_not_there_is_a_message(result: Path) -> None:
    with pytest.raises(UserError, match="blocks 1 to 2"):
        TokenMap(load_classifier(result).model, 3)


def test_meeting_by_hand() -> None:
    values = np.zeros((10, 10), np.float32)
    values[2:4, 2:6] = 0.6
    values[2, 2] = 1.0
    inside = np.zeros((10, 10), bool)
    inside[2:4, 2:4] = True
    meeting = meet(values, inside)
    assert meeting.hit == 1 and meeting.chance_hit == 0.04
    assert meeting.iou_half == pytest.approx(4 / 8)
    assert meeting.iou_share == pytest.approx(4 / 10)  # ten pixels: the eight, and two zeros
    assert meeting.chance_iou_half == pytest.approx(0.08 * 0.04 / (0.08 + 0.04 - 0.08 * 0.04))
    values[9, 9] = 2.0
    assert meet(values, inside).hit == 0


def test_a_map_without_a_positive_place_misses() -> None:
    meeting = meet(np.zeros((8, 8), np.float32), np.ones((8, 8), bool))
    assert (meeting.hit, meeting.iou_half, meeting.iou_share) == (0, 0, 0) and meeting.chance_hit == 1


def test_a_peak_on_every_pixel_once_hits_exactly_as_often_as_chance_says() -> None:
    inside = np.zeros((16, 16), bool)
    inside[4:12, 3:9] = True
    peaks = np.eye(256, dtype=np.float32).reshape(256, 16, 16)
    meetings = [meet(peak, inside) for peak in peaks]
    assert np.mean([meeting.hit for meeting in meetings]) == meetings[0].chance_hit == 48 / 256


def test_blind_maps_overlap_as_much_as_chance_says() -> None:
    rng = np.random.default_rng(0)
    inside = np.zeros((16, 16), bool)
    inside[4:12, 3:9] = True
    meetings = [meet(rng.random((16, 16), np.float32), inside) for _ in range(2000)]
    for name in ("iou_half", "iou_share"):
        measured = np.array([getattr(meeting, name) for meeting in meetings])
        chance = np.mean([getattr(meeting, f"chance_{name}") for meeting in meetings])
        # Chance is a ratio of expectations, the measured a mean of ratios: a little less, by under 3 %.
        assert measured.mean() == pytest.approx(chance, rel=0.03), name


def test_boxes_become_pixels() -> None:
    mask = box_mask([(0.25, 0.5, 0.25, 0.5)], 8)
    assert mask.sum() == 2 * 4 and mask[4:, 2:4].all()
    assert box_mask([(0.51, 0.51, 0.01, 0.01)], 8).sum() == 1  # smaller than a pixel, and yet there


def test_cases_are_the_findings_the_classifier_knows(boxed: Path) -> None:
    films = PackedFilms(boxed)
    cases = find_cases(films, np.arange(8), ["Spot"])
    assert [(case.row, case.label) for case in cases] == [(2, "Spot"), (6, "Spot")]
    assert all(case.mask.sum() == 144 for case in cases)
    bright = films[2][0].numpy()
    assert bright[cases[0].mask].mean() > bright[~cases[0].mask].mean() + 0.3  # the box lies where the spot is


def test_boxes_follow_a_film_that_was_letterboxed(tmp_path: Path) -> None:
    film = np.zeros((20, 40), np.uint8)
    film[5:15, 10:20] = 255
    Image.fromarray(film).save(tmp_path / "a.png")
    boxes = json.dumps([{"label": "Spot", "x": 0.25, "y": 0.25, "w": 0.25, "h": 0.5}])
    table = pd.DataFrame({"image": ["a.png"], "label:Spot": [1.0], "boxes": [boxes]})
    pack(make_manifest(table, tmp_path), tmp_path / "pack", PackSettings(size=40, fit="letterbox"), workers=1)
    films = PackedFilms(tmp_path / "pack")
    case = find_cases(films, np.arange(1), ["Spot"])[0]
    assert np.array_equal(case.mask, films[0][0].numpy() > 0.5)
