"""PatchCore: coreset and score against slow references, and a detector like any other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from afire.data.pack import PackedFilms
from afire.detect import DETECTORS
from afire.detect.base import SETTINGS, FitTask, load_detector
from afire.detect.evaluate import EvalTask, evaluate_detectors
from afire.detect.fit import detect_settings, detection_subsets, fit_detector, open_networks
from afire.detect.patchcore import Memory, MemoryConfig, PatchCore, around, coreset
from afire.errors import UserError
from afire.files import read_json
from tests.detect.conftest import SMALLEST


def fit_patchcore(films: PackedFilms, out: Path, *settings: str) -> PatchCore:
    # Films that are not standardised one by one: a blob would darken the rest of its film.
    networks = open_networks("random", "tiny", None, [*SMALLEST, "image.normalise=imagenet"])
    chosen = detect_settings(["held_out=0.4", "false_alarms=0.2", *settings], "patchcore")
    task = FitTask(networks.config, chosen, films, out, source="drawn", device="cpu", method="patchcore")
    detector = fit_detector(task)
    assert isinstance(detector, PatchCore)
    return detector


@pytest.fixture(scope="module")
def folder(films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("patchcore") / "model"
    fit_patchcore(films, out)
    return out


@pytest.fixture(scope="module")
def patchcore(folder: Path) -> PatchCore:
    detector = load_detector(folder)
    assert isinstance(detector, PatchCore)
    return detector


def points(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3 + 10


def slow_coreset(values: np.ndarray, first: int, count: int) -> list[int]:
    """The definition: again and again the point whose nearest chosen point is farthest."""
    chosen = [first]
    while len(chosen) < count:
        left = [place for place in range(len(values)) if place not in chosen]
        gaps = [min(np.linalg.norm(values[place] - values[other]) for other in chosen) for place in left]
        chosen.append(left[int(np.argmax(gaps))])
    return chosen


@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_coreset_is_the_greedy_one(count: int) -> None:
    values = points(40, 5)
    found = coreset(values, count, torch.Generator().manual_seed(3)).tolist()
    assert found == slow_coreset(values.double().numpy(), found[0], count)
    assert len(set(found)) == count
    assert found == coreset(values, count, torch.Generator().manual_seed(3)).tolist(), "the seed decides"


def test_copies_are_chosen_last_and_none_twice() -> None:
    values = torch.cat([points(6, 4), points(6, 4)])
    found = coreset(values, 12, torch.Generator().manual_seed(0)).tolist()
    assert sorted(found) == list(range(12)) and len({place % 6 for place in found[:6]}) == 6


def filled(features: Tensor, share: float = 1.0, neighbours: int = 4) -> Memory:
    memory = Memory()
    films = torch.arange(len(features)) // 5
    memory.fill(features, films, MemoryConfig(share=share, neighbours=neighbours), seed=0)
    return memory


def slow_score(film: np.ndarray, memory: np.ndarray, b: int) -> tuple[np.ndarray, float]:
    """Distances (L,) and the score as the paper writes it, exp and all."""
    apart = np.linalg.norm(film[:, None] - memory[None], axis=-1)
    distances = apart.min(axis=1)
    patch = int(distances.argmax())
    nearest = int(apart[patch].argmin())
    neighbours = np.linalg.norm(memory - memory[nearest], axis=-1).argsort(kind="stable")[:b]
    weight = 1 - math.exp(apart[patch, nearest]) / sum(math.exp(apart[patch, other]) for other in neighbours)
    return distances, weight * float(distances[patch])


@pytest.mark.parametrize(("share", "chunk"), [(1.0, 2048), (0.4, 2048), (1.0, 16)])
def test_distances_and_the_weighted_score_are_the_papers(
    share: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afire.detect.patchcore._CHUNK", chunk)
    memory, films = filled(points(60, 6), share), points(3 * 8, 6, seed=1).view(3, 8, 6) * 1.3
    stored = (memory.patches + memory.centre).double().numpy()
    assert len(stored) == round(60 * share)
    distances, places = memory(films)
    scores = memory.film_score(films, distances, places)
    for film, row, score in zip(films.double().numpy(), distances, scores, strict=True):
        expected, weighted = slow_score(film, stored, 4)
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-4)
        assert score.item() == pytest.approx(weighted, rel=1e-4)


def test_one_neighbour_is_no_weight_and_far_patches_do_not_overflow() -> None:
    films = points(8, 6, seed=1).view(1, 8, 6)
    plain = filled(points(60, 6), neighbours=1)
    distances, places = plain(films)
    assert torch.equal(plain.film_score(films, distances, places), distances.amax(dim=1))
    weighted = filled(points(60, 6))
    far = films + 1e4
    distances, places = weighted(far)
    score = weighted.film_score(far, distances, places)
    assert torch.isfinite(score).all() and (score >= 0.7 * distances.amax(dim=1)).all(), "exp(1e4) is infinite"


def test_a_film_is_not_compared_with_itself() -> None:
    features = points(60, 6)
    memory = filled(features)
    films = features.view(12, 5, 6)
    np.testing.assert_allclose(memory(films)[0].numpy(), 0, atol=1e-5)
    distances = memory(films, torch.arange(12))[0]
    for number in (0, 7, 11):
        others = torch.cat([films[:number], films[number + 1 :]]).flatten(0, 1)
        torch.testing.assert_close(distances[number], torch.cdist(films[number], others).amin(dim=1), rtol=1e-3, atol=0)


def test_patches_are_averaged_over_those_around_them() -> None:
    tokens = points(6, 2).view(1, 6, 2)
    found = around(tokens, (2, 3), 3)
    torch.testing.assert_close(found[0, 0], tokens[0, [0, 1, 3, 4]].mean(dim=0))
    torch.testing.assert_close(found[0, 4], tokens[0].mean(dim=0))
    assert torch.equal(around(tokens, (2, 3), 1), tokens)


def test_bright_blobs_are_told_from_normals(films: PackedFilms, patchcore: PatchCore, folder: Path) -> None:
    """From normal films alone, with random weights; larger is more abnormal."""
    test = np.flatnonzero(films.manifest.table["split"] == "test")
    abnormal = films.manifest.table["label:Blob"].to_numpy()[test]
    assert roc_auc_score(abnormal, patchcore.score(films.batch(test)).score) > 0.9
    evaluated = evaluate_detectors(EvalTask([folder], films, "drawn", device="cpu", draws=20))
    names = [line.name for line in evaluated.lines]
    assert names[:2] == ["chosen score", "patchcore"] and {"blur", "area", "pca residual"} <= set(names)
    assert evaluated.lines[0].metrics["auc"].mean > 0.9
    assert evaluated.result.config["detector"] == "patchcore" and evaluated.result.config["flops"] == patchcore.cost()


def test_it_survives_the_disk(films: PackedFilms, folder: Path, patchcore: PatchCore, tmp_path: Path) -> None:
    again = fit_patchcore(films, tmp_path / "again")
    images = films.batch([0, 1, 2, 3])
    first, second = patchcore.score(images), again.score(images)
    assert np.array_equal(first.score, second.score) and np.array_equal(first.heat, second.heat)
    assert first.restored is None and first.heat.shape == (4, 4, 4)
    assert again.threshold == patchcore.threshold and again.choice == patchcore.choice
    about = read_json(folder / SETTINGS)
    assert about["method"] == "patchcore" and about["settings"]["patchcore"]["share"] == 0.1
    assert about["flops"] == patchcore.cost() > 0


def test_heat_is_in_sd_of_films_that_did_not_fill_the_memory(films: PackedFilms, patchcore: PatchCore) -> None:
    held_out = detection_subsets(films.manifest, None, 0, 0.4).held_out
    heat = patchcore.score(films.batch(held_out)).heat
    assert abs(float(heat.mean())) < 0.3 and 0.6 < float(heat.std()) < 1.6


def test_more_patches_than_are_wanted_are_drawn_from_every_film(films: PackedFilms, tmp_path: Path) -> None:
    detector = fit_patchcore(films, tmp_path / "few", "patchcore.candidates=60", "patchcore.share=1")
    fit = detection_subsets(films.manifest, None, 0, 0.4).fit
    assert len(detector.memory.patches) == 60 // len(fit) * len(fit)
    assert set(detector.memory.owner.tolist()) == set(range(len(fit)))
    capped = fit_patchcore(films, tmp_path / "capped", "patchcore.most=12")
    assert len(capped.memory.patches) == 12


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("patchcore.blocks=[3]", "blocks 1 to 1"),
        ("patchcore.blocks=[0]", "blocks 1 to 1"),
        ("patchcore.blocks=[1,1]", "name a block twice"),
        ("patchcore.neighbourhood=2", "no middle"),
        ("patchcore.share=0", "greater than 0"),
        ("patchcore.share=0.001", "fewer than patchcore.neighbours"),
        ("patchcore.most=4", "more than the 4 patches"),
        ("patchcore.layers=[1]", "unknown setting patchcore.layers"),
        ("adapt.epochs=1", "unknown setting adapt"),
        ("score=gaussian", "scores are patchcore, or auto"),
    ],
)
def test_hostile_settings_are_one_message(films: PackedFilms, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        fit_patchcore(films, tmp_path / "out", setting)
    assert "\n" not in str(raised.value) and not (tmp_path / "out" / SETTINGS).exists()


def test_kinds_do_not_mix_and_unknown_ones_are_named(films: PackedFilms, folder: Path, model: Path) -> None:
    with pytest.raises(UserError, match="these are of patchcore and afire"):
        evaluate_detectors(EvalTask([folder, model], films, "drawn", device="cpu", draws=20))
    assert {"afire", "patchcore"} <= set(DETECTORS) and "nothing" not in DETECTORS
    with pytest.raises(UserError, match=r"detectors are afire, .*patchcore"):
        DETECTORS["nothing"]


def test_any_trunk_will_do(films: PackedFilms, model: Path, tmp_path: Path) -> None:
    """The networks of a detector of another kind, which is opened like a run."""
    networks = open_networks(str(model))
    settings = detect_settings(["held_out=0.4", "false_alarms=0.2"], "patchcore")
    task = FitTask(
        networks.config, settings, films, tmp_path / "out", networks.pretrained, networks.run, method="patchcore"
    )
    detector = fit_detector(task)
    assert networks.pretrained is not None
    assert torch.equal(
        detector.model.get_parameter("encoder.cls_token"), networks.pretrained.trunk.get_parameter("cls_token")
    )
    assert detector.origin["weights"]["hash"] == networks.pretrained.method_hash


def test_a_memory_of_one_film_still_has_a_standard(films: PackedFilms, tmp_path: Path) -> None:
    detector = fit_patchcore(films, tmp_path / "one", "patchcore.most=1", "patchcore.neighbours=1")
    assert torch.isfinite(detector.standard.mean).all() and len(detector.memory.patches) == 1
    assert np.isfinite(detector.score(films.batch([0])).heat).all()
