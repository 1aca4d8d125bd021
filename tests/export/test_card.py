"""The card says what the run wrote, and nothing it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from afire.errors import UserError
from afire.export.write import export_bundle
from afire.tasks.results import Result, RunResult, estimate, write_result
from afire.weights import open_weights


def make_result(folder: Path, weights_hash: str) -> Path:
    import pandas as pd

    run = RunResult("seed 0", 0, None, "s", weights_hash, {"train": 5, "test": 7}, {}, {"auc": 0.75})
    result = Result(
        task="probe", method="linear", name="x", data={"name": "films", "hash": "h"}, split_hash="s", test_hash="t",
        weights={"name": "smallest", "hash": weights_hash}, labels=["Blob"], fraction=0.1, config={}, runs=[run],
        metrics={"auc": estimate([0.75, 0.85])}, per_label={}, environment={}, command=["afire", "/home/someone/x"],
    )  # fmt: skip
    write_result(folder, result, pd.DataFrame({"run": ["seed 0"]}))
    return folder


def test_the_card_of_a_run(bundle_folder: Path) -> None:
    text = (bundle_folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license_name"] == "unspecified: fill in"
    assert "12 normal films** of 20 in `films`" in body and "width 16, depth 1" in body
    assert "None were given" in body and "## Detector" not in body
    assert body.count("Research software, not a medical device.") == 2


def test_licence_and_detector(full_bundle: Path) -> None:
    text = (full_bundle / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "cc-by-4.0"
    assert "calibrated on 20 others" in text and "two_pass" in text


def test_results_of_these_weights_are_quoted_and_others_refused(run_folder: Path, tmp_path: Path) -> None:
    own = make_result(tmp_path / "own", open_weights(str(run_folder)).hash)
    bundle = export_bundle(run_folder, tmp_path / "out", results=[own])
    assert (
        "| probe (linear) | films, 7 test films | Blob | 10 % | auc 0.800 ± 0.071 |"
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert bundle.about["results"][0]["metrics"]["auc"]["mean"] == pytest.approx(0.8)
    assert "/home/someone" not in json.dumps(bundle.about)
    with pytest.raises(UserError, match="measured with other weights"):
        export_bundle(run_folder, tmp_path / "no", results=[make_result(tmp_path / "other", "f" * 64)])
