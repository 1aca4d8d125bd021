"""From a run to a bundle and back: nothing lost, nothing half written, nothing that tells of the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from afire.errors import UserError
from afire.export import write as writing
from afire.export.verify import read_expected
from afire.export.write import export_bundle, new_folder
from afire.weights import open_weights, tensor_hash
from afire.weights.bundle import open_bundle
from tests.export.conftest import make_run, smallest

COMPONENTS = ["encoder", "student", "head", "decoder", "lesion_classifier", "prototypes"]


def test_a_bundle_holds_the_whole_model(run_folder: Path, bundle_folder: Path) -> None:
    ours, theirs = open_weights(run_folder), open_weights(bundle_folder)
    assert ours.method_hash == theirs.method_hash
    assert theirs.method.teacher_temperature == ours.method.teacher_temperature  # no tensor keeps it
    assert theirs.method.config == ours.method.config
    assert open_bundle(bundle_folder).about["parts"] == COMPONENTS
    for network in ("teacher", "student"):
        assert (
            open_weights(str(bundle_folder), network=network).hash  # type: ignore[arg-type]
            == open_weights(str(run_folder), network=network).hash  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("override", "left_out"),
    [
        ("losses.restoration=0", "decoder"),
        ("losses.lesion=0", "lesion_classifier"),
        ("prototypes.enabled=false", "prototypes"),
        ("losses.contrast=feature", ""),
        ("head.form=per_position", ""),
    ],
)
def test_models_without_a_part(tmp_path: Path, override: str, left_out: str) -> None:
    run = make_run(tmp_path / "run", smallest(override))
    bundle = export_bundle(run, tmp_path / "out")
    assert set(bundle.about["parts"]) == set(COMPONENTS) - {left_out}
    assert open_weights(tmp_path / "out").method_hash == open_weights(run).method_hash


def test_a_bundle_of_another_method(tmp_path: Path) -> None:
    """MAE has one trunk and a decoder; everything else follows from the method itself."""
    run = make_run(tmp_path / "run", smallest("method=mae"))
    bundle = export_bundle(run, tmp_path / "out")
    assert (
        bundle.components == ["encoder", "decoder"]
        and "by MAE and exported" in (tmp_path / "out/README.md").read_text()
    )
    ours, theirs = open_weights(run), open_weights(tmp_path / "out")
    assert ours.method_hash == theirs.method_hash and ours.hash == theirs.hash == tensor_hash(ours.trunk.state_dict())
    assert theirs.network == "encoder" and "tensors of the encoder from the bundle out" in theirs.report
    assert read_expected(tmp_path / "out").keys() == {"input", "tokens", "embedding", "restored"}
    with pytest.raises(UserError, match="MAE has no network 'student'; it has encoder"):
        _ = open_weights(run, network="student").trunk


def test_a_bundle_of_a_bundle_is_the_same_model_with_its_history(bundle_folder: Path, tmp_path: Path) -> None:
    again = export_bundle(bundle_folder, tmp_path / "again", licence="mit")
    first = open_bundle(bundle_folder)
    assert again.about["source"] == first.about["source"] and again.about["weights_hash"] == first.about["weights_hash"]
    assert again.about["licence"] == "mit" and again.hash != first.hash


def test_export_is_the_same_bytes_each_time(run_folder: Path, bundle_folder: Path, tmp_path: Path) -> None:
    assert export_bundle(run_folder, tmp_path / "again").hash == open_bundle(bundle_folder).hash


def test_nothing_tells_of_the_machine(full_bundle: Path) -> None:
    for file in full_bundle.rglob("*"):
        if file.is_file():
            assert b"/home/someone" not in file.read_bytes(), file


def test_a_full_place_is_left_alone(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_bundle(run_folder, out)
    with pytest.raises(UserError, match="--force"):
        export_bundle(run_folder, out)
    export_bundle(run_folder, out, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="did not export"):
        export_bundle(run_folder, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_failed_export_leaves_nothing_and_keeps_the_old_one(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    before = export_bundle(run_folder, out).hash

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(writing, "list_files", fail)
    for target in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="full"):
            export_bundle(run_folder, target, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and open_bundle(out).hash == before


def test_weights_alone_are_no_bundle(bundle_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weights alone"):
        export_bundle(bundle_folder / "encoder.safetensors", tmp_path / "out")


def test_a_detector_of_other_weights_is_refused(detector_folder: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", smallest("seed=7"))
    with pytest.raises(UserError, match="fitted from other weights"):
        export_bundle(other, tmp_path / "out", detector=detector_folder)


def test_a_detectors_folder_brings_its_networks_and_itself(detector_folder: Path, tmp_path: Path) -> None:
    bundle = export_bundle(detector_folder, tmp_path / "out")
    assert bundle.detector is not None and bundle.about["detector"]["calibration_films"] == 20


def test_a_detector_on_an_encoder_alone_goes_with_its_run(
    run_folder: Path, patchcore_folder: Path, tmp_path: Path
) -> None:
    bundle = export_bundle(run_folder, tmp_path / "out", detector=patchcore_folder)
    assert bundle.detector is not None and bundle.about["detector"]["method"] == "patchcore"
    assert {"score", "p_value", "heatmap"} <= read_expected(tmp_path / "out").keys()
    weights = open_weights(patchcore_folder)
    assert weights.hash == open_weights(run_folder).hash and "of the teacher from" in weights.report
    with pytest.raises(UserError, match="and no student"):
        _ = open_weights(patchcore_folder, network="student").trunk


def test_preprocessing_is_said_in_numbers(bundle_folder: Path, tmp_path: Path) -> None:
    assert json.loads((bundle_folder / "preprocessing.json").read_text())["mean"] == "of the film"
    run = make_run(tmp_path / "run", smallest("image.normalise=imagenet", "image.channels=3"))
    export_bundle(run, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert said["size"] == 32 and said["mean"] == pytest.approx([0.485, 0.456, 0.406]) and len(said["std"]) == 3


def test_the_sample_is_read_and_resized(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    from PIL import Image

    with Image.open(bundle_folder / "sample" / "film.png") as picture:
        assert picture.mode.startswith("I;16") and picture.size == (36, 40)
    film = read_expected(bundle_folder)["input"]
    assert film.shape == (1, 1, 32, 32) and film.min() >= 0 and film.max() <= 1 and film.std() > 0.05
    assert torch.isfinite(read_expected(bundle_folder)["restored"]).all()


def test_a_full_disk_is_a_message_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^cannot write .*: No space left; free space or choose another folder\.$"):  # noqa: SIM117
        with new_folder(tmp_path / "out", force=False) as part:
            (part / "half").touch()
            raise SafetensorError("No space left")
    assert not any(tmp_path.iterdir())
