"""A whole audit: what it finds, what it writes, and the real sets when they are there."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.audit.checks import judge_polarity
from afire.data.audit.collect import default_workers, measure_manifest
from afire.data.audit.copies import exact_groups
from afire.data.audit.run import _rank_array, audit_manifest, write_audit
from afire.data.manifest import Manifest, make_manifest
from afire.data.sources import build
from tests.data.audit.drawing import draw_chest, draw_set, save


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Sixty films, two splits, one label, and one of each trouble."""
    root = tmp_path_factory.mktemp("spoiled")
    rng = np.random.default_rng(1)
    label = (np.arange(60) % 4 < 2).astype(float)  # by patient
    films = [draw_chest(rng, 80 if positive else 120, 100) for positive in label]  # the size gives the label away
    films[50] = films[0]  # train -> test, another patient
    films[51] = films[4] ** 1.5  # a copy with another gamma, train -> test
    films[11] = 1 - films[11]
    films[12] = np.full((90, 90), 0.4, np.float32)
    films[13] = draw_chest(rng, 40, 40)
    for number, film in enumerate(films):
        save(film, root / f"{number:02d}.png")
    (root / "20.png").write_bytes(b"truncated")
    patient = [f"p{number // 2}" for number in range(60)]
    patient[59] = "p1"
    table = {
        "image": [f"{number:02d}.png" for number in range(60)],
        "split": np.where(np.arange(60) < 36, "train", "test"),
        "patient": patient,
        "view": np.where(np.arange(60) % 3 < 1, "AP", "PA"),
        "label:A": label,
        "label:B": 0.0,
    }
    return make_manifest(pd.DataFrame(table), root)


def test_every_trouble_is_found(spoiled: Manifest) -> None:
    audit = audit_manifest(spoiled, workers=1)
    found = {finding.kind: finding for finding in audit.findings}
    assert found["unreadable"].films == [20]
    assert (2, 3, 59) in found["patients-across-splits"].groups
    assert found["copies-across-splits"].groups == ((0, 50),)
    assert found["near-copies-across-splits"].groups == ((4, 51),)
    assert found["polarity"].films == [11]
    assert found["blank"].films == [12]
    assert 13 in found["tiny"].films
    assert "Label B is" in found["constant-labels"].message
    assert found["views-mixed"].numbers == {"PA": 40, "AP": 20}
    (severe,) = [one for one in audit.findings if one.kind == "shortcut" and one.level == "error"]
    assert "height" in severe.message
    assert audit.invalid
    levels = [finding.level for finding in audit.findings]
    assert levels == sorted(levels, key=["error", "warning", "notice"].index)


def test_a_clean_set_is_clean(tmp_path: Path) -> None:
    label = (np.arange(80) // 2 % 2).astype(float)
    manifest = draw_set(tmp_path, 80, split=np.where(np.arange(80) < 48, "train", "test"), **{"label:A": label})
    audit = audit_manifest(manifest, workers=1)
    assert audit.findings == []
    assert not audit.invalid
    assert audit.verdict == "Nothing was found that invalidates results."
    assert max(one.auc for one in audit.shortcuts) < 0.8


def test_the_files_say_what_was_found(spoiled: Manifest, tmp_path: Path) -> None:
    audit = audit_manifest(spoiled, tmp_path, workers=1)
    write_audit(audit, tmp_path)
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["schema"] == 2
    assert report["manifest"] == spoiled.hash
    assert report["invalid"] is True
    assert report["counts"]["films"] == 60
    assert report["counts"]["readable"] == 59
    assert {one["feature"] for one in report["shortcuts"]} >= {"height", "brightness", "view"}
    lines = list(csv.DictReader((tmp_path / "offenders.csv").open()))
    assert len(lines) == sum(len(group) for finding in audit.findings for group in finding.groups)
    copies = [line["image"] for line in lines if line["kind"] == "copies-across-splits"]
    assert copies == ["00.png", "50.png"]
    assert (tmp_path / "measurements.parquet").is_file()


def test_the_report_lists_fifty_films_and_counts_all(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(70)]
    audit = audit_manifest(make_manifest(pd.DataFrame({"image": names}), tmp_path), workers=1)
    write_audit(audit, tmp_path / "out")
    finding = json.loads((tmp_path / "out" / "audit.json").read_text())["findings"][0]
    assert (finding["kind"], finding["film_count"], len(finding["films"])) == ("unreadable", 70, 50)
    assert len((tmp_path / "out" / "offenders.csv").read_text().splitlines()) == 71


def test_the_same_seed_gives_the_same_audit(spoiled: Manifest, tmp_path: Path) -> None:
    first, second = (audit_manifest(spoiled, tmp_path, workers=1) for _ in range(2))
    assert first.shortcuts == second.shortcuts
    assert first.findings == second.findings


@pytest.mark.realdata
@pytest.mark.slow
def test_childcxr_gives_itself_away(real_data: Path) -> None:
    manifest = build("childcxr", real_data / "childcxr")
    audit = audit_manifest(manifest)
    auc = {one.feature: (one.train_auc, one.auc) for one in audit.shortcuts if one.label == "Pneumonia"}
    assert auc["original area"] == pytest.approx((0.908, 0.939), abs=0.001)
    assert auc["original height"] == pytest.approx((0.917, 0.920), abs=0.001)
    assert auc["original aspect"] == pytest.approx((0.866, 0.704), abs=0.001)
    assert audit.invalid
    lines = (real_data / "childcxr" / "exact_duplicates.txt").read_text().splitlines()
    images = manifest.table["image"].tolist()
    found = {frozenset(images[row] for row in group) for group in exact_groups(audit.measured["pixels"].tolist())}
    assert found == {frozenset(line.split()) for line in lines if line.strip()}
    assert not any(finding.kind == "near-copies-across-splits" for finding in audit.findings)


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nih", "shenzhen"])
def test_negatives_among_real_films_are_found(real_data: Path, name: str) -> None:
    manifest = build(name, real_data / name)
    ranks = _rank_array(measure_manifest(manifest, None, default_workers()))
    flipped = np.random.default_rng(0).random(len(manifest)) < 0.05
    suspects = np.zeros(len(manifest), bool)
    views = manifest.table["view"].tolist()
    suspects[judge_polarity(np.where(flipped[:, None], 255 - ranks, ranks), views).suspects] = True
    assert suspects[flipped].mean() > 0.99
    assert (suspects & ~flipped).sum() <= 1
