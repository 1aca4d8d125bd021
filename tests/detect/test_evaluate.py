"""Evaluation: all rows on the same films, thresholds from normals, a flipped sign is said and never flipped back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score

from afire.data.manifest import Manifest
from afire.data.pack import DIGEST, FILE_DIGEST, DecodedFilms, PackedFilms
from afire.data.pack import ROW as ROW_IN_PACK
from afire.detect.base import AnomalyDetector
from afire.detect.evaluate import ROW, EvalTask, Evaluated, Line, evaluate_detectors, oracle, verdicts
from afire.detect.localise import CHOSEN
from afire.errors import UserError
from afire.report.detect_pictures import write_detection_figures
from afire.report.detect_tables import choice_page, detection_page, write_detection
from afire.report.table import DISCLAIMER
from afire.tasks.compare import compare
from afire.tasks.metrics import Difference
from afire.tasks.results import estimate, read_result, write_result
from tests.detect.conftest import fit_smallest


@pytest.fixture(scope="module")
def second(films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("second") / "model"
    fit_smallest(films, folder, 1)
    return folder


@pytest.fixture(scope="module")
def found(films: PackedFilms, model: Path, second: Path) -> Evaluated:
    return evaluate_detectors(EvalTask([model, second], films, "drawn", device="cpu", draws=50))


def test_rows_like_scikit_learn(found: Evaluated, films: PackedFilms) -> None:
    names = [line.name for line in found.lines]
    assert names[0] == CHOSEN and {"restoration", "paper", "gaussian", "blur", "area", "pca residual"} <= set(names)
    for line in found.lines[1:]:
        values = [
            roc_auc_score(run["truth:abnormal"], run[ROW + line.name]) for _, run in found.predictions.groupby("run")
        ]
        assert line.metrics["auc"].values == pytest.approx(values)
    first = found.predictions[found.predictions["run"] == "seed-0"]
    truth, scores = first["truth:abnormal"], first["score:abnormal"]
    metrics = found.lines[0].metrics
    assert metrics["average_precision"].values[0] == pytest.approx(average_precision_score(truth, scores))
    alarms = scores >= found.thresholds[0]
    assert metrics["accuracy"].values[0] == pytest.approx(accuracy_score(truth, alarms))
    assert metrics["f1"].values[0] == pytest.approx(f1_score(truth, alarms))
    assert len(first) == 30 and found.counts == {"normal": 14, "abnormal": 16}


def test_every_row_is_calibrated_on_the_same_normals(found: Evaluated) -> None:
    for line in found.lines:
        assert not np.isnan(line.metrics["accuracy"].mean), line.name
        assert line.metrics["oracle_f1"].mean >= line.metrics["f1"].mean
        assert (line.against is None) == (line.kind == "trivial")
    assert not any("calibrated threshold" in note for note in found.result.notes)


def test_paper_is_restoration_sign_flipped(found: Evaluated) -> None:
    by_name = {line.name: line.metrics["auc"].values for line in found.lines}
    assert np.add(by_name["paper"], by_name["restoration"]) == pytest.approx(1)


def test_oracle_is_the_best_of_all_thresholds() -> None:
    rng = np.random.default_rng(0)
    scores, truth = np.round(rng.normal(size=40), 1), (rng.random(40) < 0.3).astype(float)
    thresholds = [*np.unique(scores), np.inf]
    best = [max(metric(truth, scores >= t) for t in thresholds) for metric in (accuracy_score, f1_score)]
    assert oracle(scores, truth) == pytest.approx(best)


def test_findings_stand_against_normals(found: Evaluated) -> None:
    assert set(found.findings) == {"Blob"}, "Rare has too few films"
    assert found.findings["Blob"]["auc"].values == pytest.approx(found.lines[0].metrics["auc"].values)


def test_pages_and_results(found: Evaluated, tmp_path: Path) -> None:
    figures = write_detection_figures(tmp_path / "a", found)
    write_detection(tmp_path / "a", found, [path.name for path in figures if path.suffix == ".png"])
    write_result(tmp_path / "a", found.result, found.predictions)
    write_result(tmp_path / "b", found.result, found.predictions)
    page = (tmp_path / "a" / "detect.md").read_text()
    assert DISCLAIMER in page and "oracle" in page.lower() and "![roc](roc.png)" in page and "*blur*" in page
    numbers = json.loads((tmp_path / "a" / "detect.json").read_text())
    assert numbers["rows"][0]["metrics"]["auc"]["mean"] == pytest.approx(found.lines[0].metrics["auc"].mean)
    assert read_result(tmp_path / "a").task == "detect"
    comparison = compare([tmp_path / "a", tmp_path / "b"])[0]
    assert comparison.pairs[0].difference == 0 and comparison.pairs[0].paired is not None
    assert {path.name for path in figures} == {"roc.png", "roc.pdf", "scores.png", "scores.pdf"}


def test_the_choice_is_written_down(detector: AnomalyDetector) -> None:
    page = choice_page(detector)
    assert DISCLAIMER in page and f"# Score: {detector.choice.name}" in page and "pasted patch" in page
    assert "never chosen" in page and f"{detector.threshold:.4g}" in page


def test_on_other_films_only_the_chosen_score_has_a_threshold(model: Path, packed: Path) -> None:
    films = PackedFilms(packed)
    films.manifest = Manifest(
        films.manifest.table.assign(patient=films.manifest.table["image"]), films.manifest.root, films.manifest.info
    )  # the parts cannot be drawn again
    found = evaluate_detectors(EvalTask([model], films, "drawn", device="cpu", draws=20))
    assert not np.isnan(found.lines[0].metrics["f1"].mean)
    assert all(np.isnan(line.metrics["f1"].mean) for line in found.lines[1:])
    assert any("only the chosen score has a calibrated threshold" in note for note in found.result.notes)
    assert "–" in detection_page(found)


def test_known_test_films_stop_the_evaluation(model: Path, packed: Path) -> None:
    films = PackedFilms(packed)
    films.manifest = Manifest(films.manifest.table.assign(split=""), films.manifest.root, films.manifest.info)
    with pytest.raises(UserError, match="test films were used to fit"):
        evaluate_detectors(EvalTask([model], films, "drawn", device="cpu", draws=20))


def as_manifest(packed: Path, **columns: object) -> DecodedFilms:
    """The films of the pack as the manifest that it was made of, with other columns where they are given."""
    manifest = PackedFilms(packed).manifest
    table = manifest.table[[name for name in manifest.table.columns if name not in (ROW_IN_PACK, DIGEST, FILE_DIGEST)]]
    return DecodedFilms(Manifest(table.assign(**columns), manifest.root, manifest.info), 32)


def test_a_detector_of_a_pack_knows_its_films_in_the_manifest(model: Path, packed: Path) -> None:
    with pytest.raises(UserError, match="test films were used to fit"):
        evaluate_detectors(EvalTask([model], as_manifest(packed, split=""), "drawn", device="cpu", draws=20))


def test_a_detector_of_a_pack_knows_its_patients_in_the_manifest(model: Path, packed: Path) -> None:
    everyone = PackedFilms(packed).manifest.table["patient"].to_numpy().copy()
    everyone[-1] = everyone[0]  # the patient of a film that fitted has one in the test
    with pytest.raises(UserError, match="more than one subset"):
        evaluate_detectors(EvalTask([model], as_manifest(packed, patient=everyone), "drawn", device="cpu", draws=20))


def test_films_in_another_form_are_not_called_other_films(model: Path, packed: Path) -> None:
    found = evaluate_detectors(EvalTask([model], as_manifest(packed), "drawn", device="cpu", draws=20))
    notes = " ".join(found.result.notes)
    assert "fitted on films of this set in another form" in notes and "other films" not in notes
    assert [found.result.seen[name]["answer"] for name in ("fit", "pretraining")] == ["none", "none"]


def test_without_a_record_the_result_says_so(model: Path, packed: Path, tmp_path: Path) -> None:
    silent = tmp_path / "model"
    shutil.copytree(model, silent)
    for file in silent.rglob("films.txt"):
        file.unlink()
    found = evaluate_detectors(EvalTask([silent], as_manifest(packed), "drawn", device="cpu", draws=20))
    assert any("were used to fit seed-0 is not known" in note for note in found.result.notes)
    assert any("whether those are films of this set is not known" in note for note in found.result.notes)
    assert found.result.seen["fit"] == {"answer": "unknown", "films": 30, "seen": 0, "unknown": 30}
    write_result(tmp_path / "result", found.result, found.predictions)
    assert read_result(tmp_path / "result").seen == found.result.seen


def test_the_same_model_twice_is_refused(model: Path, films: PackedFilms) -> None:
    with pytest.raises(UserError, match="same folder"):
        evaluate_detectors(EvalTask([model, model], films, "drawn", device="cpu"))


def line(name: str, kind: str, auc: float, low: float = 0.0, high: float = 0.0, drawn: float = 0.7) -> Line:
    against = None if kind == "trivial" else Difference((low + high) / 2, low, high, 0.1)
    return Line(name, kind, f"meaning of {name}", {"auc": estimate([auc])}, against, drawn)  # type: ignore[arg-type]


def test_verdicts() -> None:
    blur = line("blur", "trivial", 0.7)
    assert (
        " beats the best trivial detector, blur" in verdicts([line(CHOSEN, "chosen", 0.8, 0.05, 0.15), blur], "blur")[0]
    )
    assert "does not beat" in verdicts([line(CHOSEN, "chosen", 0.72, -0.05, 0.1), blur], "blur")[0]
    assert "is worse than" in verdicts([line(CHOSEN, "chosen", 0.5, -0.3, -0.1), blur], "blur")[0]
    messages = verdicts(
        [line(CHOSEN, "chosen", 0.4, -0.4, -0.2), line("paper", "single", 0.8, 0.02, 0.2, 0.3), blur], "blur"
    )
    assert any(f"sign-flipped, normal films score higher: {CHOSEN} (0.400)" in message for message in messages)
    assert any("paper reaches 0.800 here only because it is sign-flipped" in message for message in messages)
    assert any("would have beaten blur here" in message for message in messages)
