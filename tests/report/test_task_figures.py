from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.metrics import roc_curve

from afire.report.style import panels, save_figure, style
from afire.report.task_figures import label_figure, reliability, roc_curves, write_figures
from afire.tasks.results import Estimate, Result, RunResult

LABELS = ["Mass", "Pleural_Thickening", "Hernia"]


def drawn(labels: list[str], runs: int = 2, films: int = 60) -> tuple[Result, pd.DataFrame]:
    """A result with scores of two runs; no film has the last label of several."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, (films, len(labels))).astype(float)
    if len(labels) > 1:
        truth[:, -1] = 0
    frames = []
    for run in range(runs):
        columns: dict[str, object] = {"run": f"seed-{run}", "part": "test", "image": np.arange(films).astype(str)}
        columns["patient"] = (np.arange(films) // 2).astype(str)
        for c, label in enumerate(labels):
            columns[f"truth:{label}"] = truth[:, c]
            columns[f"score:{label}"] = np.clip(0.4 * truth[:, c] + 0.6 * rng.random(films), 0, 1)
        frames.append(pd.DataFrame(columns))
    metrics = {"auc": Estimate(0.8, 0.01, 0.7, 0.9, [0.8] * runs)}
    nothing = {"auc": Estimate(*[math.nan] * 4, [math.nan] * runs)}
    per_label = {label: nothing if label == "Hernia" else metrics for label in labels}
    run_results = [RunResult(f"seed-{i}", i, None, "s", "w", {"test": films}, {}, {"auc": 0.8}) for i in range(runs)]
    result = Result(
        "probe", "linear", "drawn", {}, "s", "t", {}, labels, 1.0, {}, run_results, metrics, per_label, {}, ["afire"]
    )
    return result, pd.concat(frames, ignore_index=True)


def test_figures_are_pictures_and_pdfs_with_something_on_them(tmp_path: Path) -> None:
    paths = write_figures(tmp_path, *drawn(LABELS))
    names = {"roc.png", "roc.pdf", "calibration.png", "calibration.pdf", "labels.png", "labels.pdf"}
    assert {path.name for path in paths} == names == {path.name for path in tmp_path.iterdir()}
    for path in paths:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert np.asarray(picture.convert("L")).std() > 5, path
        else:
            assert path.read_bytes().startswith(b"%PDF")


def test_one_label_needs_no_figure_of_labels(tmp_path: Path) -> None:
    paths = write_figures(tmp_path, *drawn(["Mass"], runs=1))
    assert {path.stem for path in paths} == {"roc", "calibration"}


def test_results_without_scores_have_no_curves(tmp_path: Path) -> None:
    result, frame = drawn(["lungs"])
    values = frame[["run", "part", "image", "patient"]].assign(**{"value:dice": 0.9})
    assert write_figures(tmp_path, result, values) == []


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with style():
            save_figure(label_figure([drawn(LABELS)[0]]), tmp_path / name)
    for kind in ("png", "pdf"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_several_results_stand_side_by_side() -> None:
    result, _ = drawn(LABELS)
    with style():
        figure = label_figure([result, result], names=["first", "second"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert ticks == ["mean of labels", "Mass", "Pleural Thickening", "Hernia"]


def test_roc_equals_scikit_learns_also_with_weights() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 8, 50) / 8, rng.integers(0, 2, 50).astype(float)
    weights = rng.integers(0, 3, (2, 50)).astype(float)
    curves = roc_curves(scores, truth, np.vstack([np.ones(50), weights, truth]))
    for curve, weight in zip(curves[:3], np.vstack([np.ones(50), weights]), strict=True):
        alarms, hits, _ = roc_curve(truth, scores, sample_weight=weight, drop_intermediate=False)
        inner = np.linspace(0, 1, 101) > 0  # at exactly 0 the curve is a vertical line
        np.testing.assert_allclose(curve[inner], np.interp(np.linspace(0, 1, 101), alarms, hits)[inner])
    assert np.isnan(curves[3]).all()  # only positives weigh anything


def test_reliability_counts_films_in_equal_bins() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(5000)
    truth = (rng.random(5000) < scores).astype(float)
    predicted, observed, low, high, gap = reliability(scores, truth)
    assert len(predicted) == 10 and gap < 0.03
    assert ((low <= observed) & (observed <= high)).all() and (
        (low - 0.02 <= predicted) & (predicted <= high + 0.02)
    ).all()
    assert reliability(scores, np.ones(5000))[4] == pytest.approx(1 - scores.mean(), abs=1e-6)
    narrow, wide = reliability(scores, truth), reliability(scores, truth, runs=4)
    assert (wide[3] - wide[2] > 1.5 * (narrow[3] - narrow[2])).all()


def test_reliability_of_repeated_and_of_no_scores() -> None:
    predicted, observed, *_ = reliability(np.full(20, 0.3), np.r_[np.ones(5), np.zeros(15)])
    assert (predicted.tolist(), observed.tolist()) == ([pytest.approx(0.3)], [0.25])
    assert math.isnan(reliability(np.empty(0), np.empty(0))[4])


def test_panels_hide_what_is_too_many() -> None:
    with style():
        figure, axes = panels(7)
    assert len(axes) == 7 and sum(axis.get_visible() for axis in figure.axes) == 7
