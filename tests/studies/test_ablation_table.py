"""The numbers of the table against computation by hand: mean, sd, Welch's t-test, paired bootstrap over patients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind

from afire.config import Config
from afire.files import read_json, write_json
from afire.report.ablation import ablation_latex, ablation_markdown
from afire.studies.ablation_grid import TRIAL, Study, Trial, choose_rows, open_study, plan_trials
from afire.studies.ablation_table import AblationTable, TableRow, make_table
from tests.studies.conftest import draw_pack
from tests.studies.trials import area, finish, scores, truth

Settings = Callable[..., Config]
SIGNAL = {"full": 1.0, "no-category": 0.75, "no-contrast": 0.4}
ROWS = "no-category,no-contrast,head-shared"
SEEDS = [0, 1, 2]


class Drawn:
    """A study with three rows and three seeds, and the scores behind it."""

    def __init__(self, study: Study, leave_out: tuple[str, int] | None = None) -> None:
        rng = np.random.default_rng(5)
        self.study, self.rows = study, choose_rows(ROWS)
        self.trials = plan_trials(study, self.rows, SEEDS)
        self.probe: dict[tuple[str, int], np.ndarray] = {}
        self.detection: dict[tuple[str, int], np.ndarray] = {}
        for trial in self.trials:
            key = (trial.rows[0], trial.seed)
            self.probe[key], self.detection[key] = scores(rng, SIGNAL[key[0]]), scores(rng, SIGNAL[key[0]] / 2)
            if key != leave_out:
                finish(trial, self.probe[key], self.detection[key], self.metrics(key), 60 + 60 * trial.seed)

    def metrics(self, key: tuple[str, int]) -> dict[str, float]:
        called, abnormal = self.probe[key] >= 0.5, truth() == 1
        hits = float((called & abnormal).sum())
        f1 = 2 * hits / float(called.sum() + abnormal.sum())
        return {"auc": area(self.probe[key], truth()), "accuracy": float((called == abnormal).mean()), "f1": f1}

    def table(self) -> AblationTable:
        table = make_table(self.study, self.rows, self.trials)
        assert table is not None
        return table


@pytest.fixture
def drawn(packed: Path, smallest: Settings, tmp_path: Path) -> Drawn:
    return Drawn(open_study(packed, tmp_path / "out", smallest()))


def named(table: AblationTable, name: str) -> TableRow:
    return next(row for row in table.rows if row.row.name == name)


@pytest.mark.parametrize("name", ["full", "no-category", "no-contrast"])
def test_means_and_spreads(drawn: Drawn, name: str) -> None:
    row = named(drawn.table(), name)
    expected = [drawn.metrics((name, seed)) for seed in SEEDS]
    for metric in ("auc", "accuracy", "f1"):
        values = [metrics[metric] for metrics in expected]
        assert row.measures[metric].mean == pytest.approx(sum(values) / 3)
        spread = (sum((value - sum(values) / 3) ** 2 for value in values) / 2) ** 0.5
        assert row.measures[metric].sd == pytest.approx(spread)
    detection = [area(drawn.detection[name, seed], truth()) for seed in SEEDS]
    assert row.measures["detection"].values == pytest.approx(detection)
    assert row.minutes == pytest.approx(2.0)  # of 1, 2 and 3


@pytest.mark.parametrize("measure", ["auc", "detection"])
def test_tests_against_the_full_method(drawn: Drawn, measure: str) -> None:
    scored = drawn.probe if measure == "auc" else drawn.detection
    row = named(drawn.table(), "no-category").against[measure]
    ours, full = ([area(scored[name, seed], truth()) for seed in SEEDS] for name in ("no-category", "full"))
    assert row.difference == pytest.approx(np.mean(ours) - np.mean(full))
    assert row.p_seeds == pytest.approx(ttest_ind(ours, full, equal_var=False).pvalue)

    rng, abnormal = np.random.default_rng(11), truth()
    differences = []
    for _ in range(1500):
        patients = rng.integers(0, len(abnormal) // 2, len(abnormal) // 2)
        films = np.concatenate([2 * patients, 2 * patients + 1])
        means = [
            np.mean([area(scored[name, seed][films], abnormal[films]) for seed in SEEDS])
            for name in ("no-category", "full")
        ]
        differences.append(means[0] - means[1])
    drawn_differences = np.array(differences)
    assert row.paired.low == pytest.approx(np.percentile(drawn_differences, 2.5), abs=0.012)
    assert row.paired.high == pytest.approx(np.percentile(drawn_differences, 97.5), abs=0.012)
    share = 2 * min((drawn_differences >= 0).mean(), (drawn_differences <= 0).mean())
    assert row.paired.p == pytest.approx(share, abs=0.04)


def test_a_row_with_the_settings_of_the_full_method_is_not_tested_against_it(drawn: Drawn) -> None:
    row = named(drawn.table(), "head-shared")
    assert row.same_as_full and not row.against
    assert row.measures == named(drawn.table(), "full").measures


def test_a_row_that_lacks_a_seed_is_compared_on_the_seeds_it_has(
    packed: Path, smallest: Settings, tmp_path: Path
) -> None:
    drawn = Drawn(open_study(packed, tmp_path / "out", smallest()), leave_out=("no-contrast", 1))
    table = drawn.table()
    row = named(table, "no-contrast")
    assert row.seeds == [0, 2]
    means = [np.mean([area(drawn.probe[name, seed], truth()) for seed in (0, 2)]) for name in ("no-contrast", "full")]
    assert row.against["auc"].difference == pytest.approx(means[0] - means[1])
    assert "fewer seeds than the others: without both contrastive losses" in table.notes


def measured_before(trials: list[Trial]) -> None:
    """As an earlier version left them: with scores that were not those of the detector, and without saying so."""
    for trial in trials:
        record = read_json(trial.folder / TRIAL)
        del record["detected_by"]
        write_json(trial.folder / TRIAL, record)


def test_detection_of_two_definitions_does_not_stand_in_one_column(drawn: Drawn) -> None:
    measured_before([trial for trial in drawn.trials if trial.rows[0] == "no-category"])
    table = drawn.table()
    old, new = named(table, "no-category"), named(table, "no-contrast")
    assert math.isnan(old.measures["detection"].mean) and not old.scores
    assert math.isnan(old.against["detection"].difference) and math.isnan(old.against["detection"].paired.p)
    assert old.measures["auc"].mean > 0.5 and new.against["detection"].difference < 0
    assert any(note.startswith("detection of 3 trials was measured by an earlier version") for note in table.notes)
    page = ablation_markdown(table)
    assert "earlier version" in page and "nan" not in page
    ablation_latex(table)


def test_a_study_that_is_all_old_keeps_its_column_with_a_note(drawn: Drawn) -> None:
    before = named(drawn.table(), "full").measures["detection"]
    measured_before(drawn.trials)
    table = drawn.table()
    assert named(table, "full").measures["detection"] == before
    assert any("9 trials" in note and "Here they have none" not in note for note in table.notes)


def test_order_against_the_papers(drawn: Drawn) -> None:
    ordering = drawn.table().ordering
    assert ordering is not None
    # The paper: full 89.4, no category 87.7, no contrast 76.9; the signals were drawn in that order.
    assert ordering.rows == 3 and ordering.spearman == pytest.approx(1.0) and ordering.disagree == []


def test_no_table_before_the_full_method_is_there(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    study = open_study(packed, tmp_path / "out", smallest())
    rows = choose_rows("no-category")
    trials: list[Trial] = plan_trials(study, rows, [0])
    assert make_table(study, rows, trials) is None


def test_childcxr_with_the_choices_of_small_carries_a_caution(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    childcxr = draw_pack(tmp_path / "childcxr", builder="childcxr")
    assert "caution" not in Drawn(open_study(packed, tmp_path / "a", smallest())).table().facts
    assert "read on this test part" in Drawn(open_study(childcxr, tmp_path / "b", smallest())).table().facts["caution"]
    other = smallest("losses.temperature=0.1")
    assert "caution" not in Drawn(open_study(childcxr, tmp_path / "c", other)).table().facts
