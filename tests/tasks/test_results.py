from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.errors import UserError
from afire.tasks.results import (
    Estimate,
    Result,
    RunResult,
    check_out,
    estimate,
    find_results,
    read_predictions,
    read_result,
    write_result,
)


def example(**changes: object) -> Result:
    run = RunResult("seed-0", 0, None, "s0", "w0", {"train": 3, "val": 1, "test": 2}, {"C": 0.1}, {"auc": math.nan})
    result = Result(
        task="probe",
        method="linear",
        name="random weights",
        data={"name": "pack", "hash": "d"},
        split_hash="s",
        test_hash="t",
        weights={"name": "random", "hash": "w", "report": "drawn"},
        labels=["Mass"],
        fraction=1.0,
        config={"C": [np.float64(0.1), 1.0], "path": Path("a/b")},
        runs=[run],
        metrics={"auc": Estimate(0.8, math.nan, 0.7, 0.9, [0.8, math.nan])},
        per_label={"Mass": {"auc": Estimate(0.8, math.nan, 0.7, 0.9, [0.8, math.nan])}},
        environment={"afire": "0"},
        command=["afire", "probe"],
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def test_a_result_survives_the_file_with_nan_as_null(tmp_path: Path) -> None:
    frame = pd.DataFrame({"run": ["seed-0"], "part": ["test"], "score:Mass": [0.4]})
    write_result(tmp_path, example(), frame)
    raw = json.loads((tmp_path / "result.json").read_text())
    assert raw["metrics"]["auc"]["sd"] is None and raw["config"]["path"] == "a/b"
    back = read_result(tmp_path)
    assert back.labels == read_result(tmp_path / "result.json").labels == ["Mass"]
    assert math.isnan(back.metrics["auc"].sd) and math.isnan(back.metrics["auc"].values[1])
    assert math.isnan(back.runs[0].metrics["auc"]) and back.runs[0].chosen == {"C": 0.1}
    assert back.per_label["Mass"]["auc"].high == 0.9
    pd.testing.assert_frame_equal(read_predictions(tmp_path), frame)


def test_estimate_leaves_out_runs_without_a_value() -> None:
    summary = estimate([0.8, 0.9, math.nan], np.array([0.7, 0.8, 0.9, math.nan]))
    assert summary.mean == pytest.approx(0.85) and summary.sd == pytest.approx(np.std([0.8, 0.9], ddof=1))
    assert 0.7 <= summary.low < summary.high <= 0.9
    single = estimate([0.8])
    assert single.mean == 0.8 and math.isnan(single.sd) and math.isnan(single.low)
    assert math.isnan(estimate([math.nan]).mean)


def test_a_result_is_not_written_over_unless_asked(tmp_path: Path) -> None:
    check_out(tmp_path, force=False)
    write_result(tmp_path, example(), pd.DataFrame({"run": []}))
    with pytest.raises(UserError, match="already holds a result; add --force"):
        check_out(tmp_path, force=False)
    check_out(tmp_path, force=True)
    with pytest.raises(UserError, match="is a file"):
        check_out(tmp_path / "result.json", force=True)


def test_what_is_not_a_result_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no result\.json"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text('{"format": 1, "task": "probe"}')
    with pytest.raises(UserError, match="truncated or not written by afire"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="not a result of format 1"):
        read_result(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_predictions(tmp_path)
    pd.DataFrame({"image": ["20f6d8b8"]}).to_parquet(tmp_path / "predictions.parquet", compression=None)
    data = (tmp_path / "predictions.parquet").read_bytes()
    (tmp_path / "predictions.parquet").write_bytes(data.replace(b"20f6d8b8", b"20f6\xe48b8"))  # no longer UTF-8
    with pytest.raises(UserError, match="cannot be read"):
        read_predictions(tmp_path)


def test_results_are_found_in_their_folder_and_below(tmp_path: Path) -> None:
    for name in ("1pct", "10pct"):
        write_result(tmp_path / name, example(), pd.DataFrame({"run": []}))
    assert [folder.name for folder in find_results(tmp_path)] == ["10pct", "1pct"]
    assert find_results(tmp_path / "1pct" / "result.json") == [tmp_path / "1pct"]
    with pytest.raises(UserError, match="holds no result"):
        find_results(tmp_path / "nothing")


def test_a_result_leaves_other_folders_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/data.json").touch()
    with pytest.raises(UserError, match="already holds a run"):
        check_out(tmp_path / "run", force=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/.part-x.parquet").touch()
    write_result(tmp_path / "killed", example(), pd.DataFrame({"run": ["seed-0"]}))
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["predictions.parquet", "result.json"]
