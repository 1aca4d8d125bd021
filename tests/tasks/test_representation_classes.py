from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest
from afire.errors import UserError
from afire.tasks.representation import cluster_quality, film_classes, tsne_map, unit_vectors


def manifest(tmp_path: object, **labels: list[float]) -> Manifest:
    count = len(next(iter(labels.values())))
    table = pd.DataFrame({"image": [f"{i}.png" for i in range(count)]})
    for name, values in labels.items():
        table[name if name == "normal" else f"label:{name}"] = values
    return make_manifest(table, tmp_path)  # type: ignore[arg-type]


def test_a_combination_of_labels_is_a_class_and_the_commonest_stay(tmp_path: object) -> None:
    films = manifest(
        tmp_path,
        normal=[1, 1, 1, 0, 0, 0, 0],
        Mass=[0, 0, 0, 1, 1, 1, np.nan],
        Pleural_Thickening=[0, 0, 0, 1, 1, 0, 1],
    )
    classes = film_classes(films, np.arange(7), None, 2)
    assert classes.names == ["normal", "Mass + Pleural Thickening"]
    assert classes.rows.tolist() == [0, 1, 2, 3, 4] and classes.number.tolist() == [0, 0, 0, 1, 1]
    assert (classes.others, classes.unknown) == (1, 1)


def test_no_finding_is_not_the_same_as_normal(tmp_path: object) -> None:
    films = manifest(tmp_path, normal=[0, 1, 0], Mass=[0, 0, 1])
    assert film_classes(films, np.arange(3), None, 7).names == ["none of these", "Mass"]


def test_one_class_is_a_message(tmp_path: object) -> None:
    with pytest.raises(UserError, match="at least two classes"):
        film_classes(manifest(tmp_path, normal=[1, 1], Mass=[0, 0]), np.arange(2), None, 7)


def slow_purity(unit: np.ndarray, classes: np.ndarray, patients: np.ndarray, k: int) -> float:
    by_class: dict[int, list[float]] = {}
    for i in range(len(unit)):
        others = [j for j in range(len(unit)) if patients[j] != patients[i]]
        others.sort(key=lambda j: -float(unit[i] @ unit[j]))
        by_class.setdefault(int(classes[i]), []).append(float(np.mean([classes[j] == classes[i] for j in others[:k]])))
    return float(np.mean([np.mean(values) for values in by_class.values()]))


def test_purity_equals_a_slow_count_without_the_same_patient() -> None:
    rng = np.random.default_rng(0)
    classes = np.repeat([0, 1, 2], [20, 12, 8])
    unit = unit_vectors((rng.normal(size=(40, 6)) + classes[:, None]).astype(np.float32))
    patients = np.array([f"p{i // 2}" for i in range(40)], dtype=object)
    quality = cluster_quality(unit, classes, patients, [3, 5], np.random.default_rng(0))
    for k in (3, 5):
        assert quality.purity[k].mean == pytest.approx(slow_purity(unit, classes, patients, k))
        assert quality.purity[k].low <= quality.purity[k].mean <= quality.purity[k].high
    assert quality.chance == pytest.approx(slow_purity(unit, classes, patients, 38), abs=0.02)


def test_films_of_one_patient_do_not_make_a_cluster() -> None:
    """Pairs of equal films, each pair a patient and its class random: purity must be that of chance."""
    rng = np.random.default_rng(1)
    unit = unit_vectors(np.repeat(rng.normal(size=(100, 8)), 2, axis=0).astype(np.float32))
    classes = np.repeat(rng.integers(0, 2, 100), 2)
    patients = np.array([f"p{i // 2}" for i in range(200)], dtype=object)
    alone = np.array([f"p{i}" for i in range(200)], dtype=object)
    fair = cluster_quality(unit, classes, patients, [1], np.random.default_rng(0))
    naive = cluster_quality(unit, classes, alone, [1], np.random.default_rng(0))
    assert naive.purity[1].mean == 1.0 and fair.purity[1].mean < 0.65


def test_silhouette_tells_apart_clusters_from_noise() -> None:
    rng = np.random.default_rng(2)
    classes = np.repeat([0, 1], 20)
    patients = np.arange(40).astype(str).astype(object)
    apart = unit_vectors((rng.normal(size=(40, 5)) * 0.05 + 5 * np.eye(2, 5)[classes]).astype(np.float32))
    noise = unit_vectors(rng.normal(size=(40, 5)).astype(np.float32))
    quality = [cluster_quality(one, classes, patients, [5], rng).silhouette for one in (apart, noise)]
    assert quality[0] > 0.5 > 0.2 > abs(quality[1])


def test_too_few_points_are_messages() -> None:
    unit = unit_vectors(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    with pytest.raises(UserError, match=r"perplexity 30 needs at least 91 films, but there are 20.*to 6 or less"):
        tsne_map(unit, 30, 0)
    everyone = np.array(["p"] * 20, dtype=object)
    with pytest.raises(UserError, match="points of other patients"):
        cluster_quality(unit, np.arange(20) % 2, everyone, [5], np.random.default_rng(0))


def test_the_map_follows_from_its_seed() -> None:
    unit = unit_vectors(np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))
    first, again = tsne_map(unit, 5, 3), tsne_map(unit, 5, 3)
    assert first.shape == (40, 2) and np.array_equal(first, again)
