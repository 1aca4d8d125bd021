"""A whole probe on drawn films: that it sees, that seeds do what they say, and that fractions nest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.data.splits import official_split
from afire.errors import UserError
from afire.tasks.probe import ProbeTask, run_probe


@pytest.fixture(scope="module")
def task(packed: Path, smallest: Config) -> ProbeTask:
    return ProbeTask("random", packed, seeds=[0, 1], config=smallest, labels=["Blob"])


def test_a_blob_is_seen_and_chance_is_chance(task: ProbeTask, packed: Path) -> None:
    ((_, (seen, predictions)),) = run_probe(task)
    assert seen.metrics["auc"].mean > 0.8
    assert seen.labels == ["Blob"] and seen.fraction == 1.0
    assert [run.name for run in seen.runs] == ["seed-0", "seed-1"]
    assert set(predictions["part"]) == {"val", "test"}
    ((_, (blind, _)),) = run_probe(dataclasses.replace(task, labels=["Rare"]))
    assert blind.metrics["auc"].mean < 0.8  # drawn without regard to the picture


def test_random_weights_differ_by_seed_and_fixed_ones_do_not(task: ProbeTask, films: PackedFilms) -> None:
    split = official_split(films.manifest, 0.2)
    ((_, (random, _)),) = run_probe(dataclasses.replace(task, split=split))
    assert random.runs[0].weights_hash != random.runs[1].weights_hash
    assert random.split_hash == split.hash and random.notes == []
    ((_, (fixed, _)),) = run_probe(dataclasses.replace(task, split=split, weights="sharpness"))
    assert fixed.runs[0].metrics == fixed.runs[1].metrics
    assert any("the seeds change nothing here" in note for note in fixed.notes)


def test_metadata_sees_the_size_of_the_originals(task: ProbeTask) -> None:
    for kind, name in (("metadata", "metadata only"), ("area", "original area only")):
        ((_, (result, _)),) = run_probe(dataclasses.replace(task, weights=kind))
        assert result.metrics["auc"].mean > 0.85 and result.weights["name"] == name


def test_a_convolutional_network_is_probed_like_any_other(task: ProbeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten())  # stands in for Lite0
    monkeypatch.setattr("afire.tasks.probe.open_lite0", lambda: (network, "a" * 64))
    for method in ("linear", "knn"):
        ((_, (result, _)),) = run_probe(dataclasses.replace(task, weights="lite0", method=method))
        assert result.metrics["auc"].mean > 0.8 and result.weights["name"] == "EfficientNet-Lite0"
        assert {run.weights_hash for run in result.runs} == {"a" * 64}


def test_fractions_use_less_of_train_and_the_same_test(task: ProbeTask) -> None:
    results = {share: result for share, (result, _) in run_probe(task, [0.3, 1.0])}
    assert results[0.3].runs[0].films["train"] == pytest.approx(0.3 * results[1.0].runs[0].films["train"], abs=3)
    assert results[0.3].test_hash == results[1.0].test_hash
    assert results[0.3].split_hash != results[1.0].split_hash


def test_folds_and_knn_and_the_class_token_work(task: ProbeTask) -> None:
    changed = dataclasses.replace(task, folds=3, method="knn", pooling="class", seeds=[0])
    ((_, (result, _)),) = run_probe(changed)
    assert [run.fold for run in result.runs] == [0, 1, 2]
    assert sum(run.films["test"] for run in result.runs) == 120
    assert 0.5 < result.metrics["auc"].mean <= 1


def test_the_cache_changes_nothing(task: ProbeTask, tmp_path: Path) -> None:
    cached = dataclasses.replace(task, cache=tmp_path)
    frames = [predictions for one in (task, cached, cached) for _, (_, predictions) in run_probe(one)]
    assert len(list(tmp_path.iterdir())) == 2  # one for each seed's weights
    scores = [frame["score:Blob"].to_numpy() for frame in frames]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)
    np.testing.assert_array_equal(scores[1], scores[2])


def test_mistakes_end_before_any_feature_is_computed(task: ProbeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("computed features")

    monkeypatch.setattr("afire.tasks.probe.film_features", never)
    with pytest.raises(UserError, match="no label 'Blub'; did you mean Blob"):
        list(run_probe(dataclasses.replace(task, labels=["Blub"])))
    with pytest.raises(UserError, match="films with and without the finding are needed in train, val and test"):
        list(run_probe(dataclasses.replace(task, labels=["Rare"]), [0.02]))
