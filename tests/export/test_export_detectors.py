"""Detectors of every kind leave in every form: bundle, ONNX, Python, hub; and say what they do not hold.

A detector may hold a whole method, the encoder that it looks through (PatchCore), or networks of its own (AE-U).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.data.pack import PackedFilms
from afire.detect import DETECTORS
from afire.detect.base import load_detector
from afire.errors import UserError
from afire.export import verify as verifying
from afire.export.formats import FORMATS, DetectorGraph, run_detector_graph
from afire.export.verify import read_expected, verify_bundle
from afire.export.write import convert, export_bundle
from afire.files import read_json, write_json
from afire.weights import open_weights, start_from
from afire.weights.bundle import CONFIG, MANIFEST, list_files, open_bundle
from tests import commands
from tests.detect.test_learned import LEARNED, QUICK
from tests.export.conftest import learned_folder
from tests.export.test_card import make_result

FILES = {"README.md", "config.json", "preprocessing.json", "manifest.json", "sample", "detector"}


def images_of(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 32, 32, generator=torch.Generator().manual_seed(5))


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


@pytest.fixture(params=["aeu", "patchcore"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, request: pytest.FixtureRequest) -> Path:
    """Of a fitted detector."""
    found: Path = request.getfixturevalue(f"{kind}_folder")
    return found


@pytest.fixture
def bundle(kind: str, request: pytest.FixtureRequest) -> Path:
    """Made of that folder alone."""
    found: Path = request.getfixturevalue(f"{kind}_bundle")
    return found


def test_a_bundle_holds_the_detector_and_no_method(kind: str, bundle: Path, folder: Path) -> None:
    opened = open_bundle(bundle)
    encoder = ["encoder"] if kind == "patchcore" else []
    assert opened.components == encoder and opened.holds == ("encoder" if encoder else "detector")
    assert {path.name for path in bundle.iterdir()} == FILES | {f"{name}.safetensors" for name in encoder}
    assert opened.about["weights_hash"] == load_detector(folder).weights_hash
    assert opened.about["detector"]["method"] == kind and opened.about["name"] == kind
    listed = set(read_json(bundle / MANIFEST)["files"])
    assert {"detector/model.safetensors", "detector/detector.safetensors", "sample/expected.safetensors"} <= listed
    assert read_expected(bundle).keys() == {
        *("input", "score", "p_value", "heatmap", *(["tokens", "embedding"] if encoder else []))
    }


def test_preprocessing_ends_where_the_detector_begins(aeu_bundle: Path, patchcore_bundle: Path) -> None:
    """Networks of its own normalise as they like; an encoder takes what `image.normalise` says."""
    alone, encoder = (read_json(folder / "preprocessing.json") for folder in (aeu_bundle, patchcore_bundle))
    assert open_bundle(aeu_bundle).config.image.normalise == "imagenet", "which AE-U does not read"
    assert alone["normalise"] == "none" and (alone["mean"], alone["std"]) == ([0.0], [1.0]) and alone["size"] == 32
    assert encoder["normalise"] == "film"


def test_a_bundle_scores_as_the_folder_does(folder: Path, bundle: Path) -> None:
    first, second = (afire.load(path, device="cpu").detect(images_of(3)) for path in (folder, bundle))
    for name in ("score", "p_value", "alarm", "heatmap"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)
    assert first.score.shape == (3,) and len(np.unique(first.score)) == 3


def test_a_bundle_of_a_bundle_is_the_same_detector(bundle: Path, tmp_path: Path) -> None:
    again, first = export_bundle(bundle, tmp_path / "again", licence="cc-by-4.0"), open_bundle(bundle)
    assert again.about["weights_hash"] == first.about["weights_hash"] and again.holds == first.holds
    assert again.about["source"] == first.about["source"] and again.about["licence"] == "cc-by-4.0"
    assert export_bundle(bundle, tmp_path / "third", licence="cc-by-4.0", name=again.about["name"]).hash == again.hash


def test_verify_computes_again(kind: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FORMATS", {name: FORMATS[name] for name in ("hf", "timm")})
    checks = {check.backend: check for check in verify_bundle(open_bundle(bundle))}
    outputs = {one.output for one in checks["torch cpu"].differences}
    encoder = {"tokens", "embedding"} if kind == "patchcore" else set()
    assert checks["torch cpu"].equal and outputs == {"score", "p_value", "heatmap", *encoder}
    assert ("transformers" in checks) == bool(encoder), "a library of encoders is not asked about a detector alone"


@pytest.mark.slow
def test_verify_with_onnxruntime(bundle: Path) -> None:
    pytest.importorskip("onnxruntime")
    said = invoke("verify", bundle)
    assert "torch cpu: equal" in said and "onnxruntime: equal" in said and said.splitlines()[-1] == "equal"


@pytest.mark.slow
def test_export_to_onnx(kind: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "out"
    said = invoke("export", folder, "--format", "onnx", "--preprocess", "resize", "--out", out)
    assert "score of onnxruntime: largest difference" in said and "heatmap of onnxruntime" in said
    assert (out / "encoder.onnx").exists() == (kind == "patchcore") and (out / "detector.onnx").is_file()
    assert {"README.md", "preprocessing.json", "sample"} <= {path.name for path in out.iterdir()}
    page = (out / "README.md").read_text()
    assert ("encoder.onnx" in page) == (kind == "patchcore") and f"The detector `{kind}`" in page
    detector, images = load_detector(folder), images_of(3)
    expected, given = detector.score(images, restore=False), run_detector_graph(out, images)
    size = max(1.0, float(np.abs(expected.heat).max()))
    np.testing.assert_allclose(given["score"].numpy(), expected.score, atol=1e-4 * size)
    np.testing.assert_allclose(given["heatmap"].numpy(), expected.heat, atol=1e-4 * size)


@pytest.mark.parametrize("form", ["timm", "hf", "torch"])
def test_libraries_of_encoders_have_no_place_for_a_detector_alone(
    aeu_folder: Path, aeu_bundle: Path, tmp_path: Path, form: str
) -> None:
    for source in (aeu_folder, aeu_bundle):
        said = refused("export", source, "--format", form, "--out", tmp_path / "out")
        assert said == (
            f"aeu holds the detector aeu alone, and --format {form} takes an encoder; use --format onnx, or export a "
            "bundle."
        )
    assert not any(tmp_path.iterdir())


def test_the_encoder_of_a_detector_goes_to_other_libraries(patchcore_bundle: Path, tmp_path: Path) -> None:
    convert(open_weights(patchcore_bundle), tmp_path / "out", FORMATS["torch"])
    encoded = afire.load(patchcore_bundle, device="cpu").encode(read_expected(tmp_path / "out")["input"])
    torch.testing.assert_close(encoded, read_expected(tmp_path / "out")["tokens"])


def test_what_a_graph_of_a_detector_cannot_be_is_refused(aeu_folder: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    onnx = ("export", aeu_folder, "--format", "onnx", *out)
    assert "use --preprocess normalise or resize" in refused(*onnx, "--preprocess", "none")
    assert "holds the detector aeu alone" in refused(*onnx, "--network", "student")
    assert "is a detector itself" in refused(*onnx, "--detector", aeu_folder)
    assert "is a detector itself" in refused("export", aeu_folder, "--detector", aeu_folder, *out)
    assert not any(tmp_path.iterdir())


def test_a_detector_alone_from_python(aeu_folder: Path, aeu_bundle: Path) -> None:
    for path in (aeu_folder, aeu_bundle):
        model = afire.load(path, device="cpu")
        assert repr(model) == "<afire.Model aeu: the detector aeu alone, 32 px>"
        assert model.method is None and model.detector is not None and model.device.type == "cpu" and model.size == 32
        found = model.to("cpu").detect(images_of(2))
        assert found.restored is not None and found.restored.shape == (2, 32, 32) and found.heatmap.shape == (2, 4, 4)
        for ask in (model.encode, model.embed, model.restore):
            with pytest.raises(UserError, match="aeu holds the detector aeu alone; it detects, and neither encodes"):
                ask(images_of(1))


def test_a_bundle_of_a_detector_and_its_encoder_from_python(patchcore_bundle: Path, run_folder: Path) -> None:
    model = afire.load(patchcore_bundle, device="cpu")
    torch.testing.assert_close(model.encode(images_of(2)), afire.load(run_folder, device="cpu").encode(images_of(2)))
    assert "a detector inside" in repr(model) and model.method is None
    with pytest.raises(UserError, match="restores nothing"):
        model.restore(images_of(1))
    assert open_weights(patchcore_bundle).hash == open_weights(run_folder).hash
    with pytest.raises(UserError, match="and no student"):
        open_weights(patchcore_bundle, network="student")


@pytest.mark.parametrize("source", ["aeu_folder", "aeu_bundle"])
def test_where_an_encoder_is_expected_one_sentence_says_what_it_is(
    source: str, normal_films: PackedFilms, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, data, out = request.getfixturevalue(source), normal_films.folder, tmp_path / "out"
    message = (
        f"{path} holds the detector aeu alone, whose networks are its own; give a pre-training run, a bundle of one, "
        "or a file of a ViT."
    )
    fit = ("detect", "fit", "--data", data, "--out", out, "--weights", path)
    for words in (
        ("probe", "--weights", path, "--data", data, "--labels", "Blob", "--out", out),
        ("finetune", "--weights", path, "--data", data, "--labels", "Blob", "--out", out),
        ("embed", "--weights", path, "--data", data, "--out", out.with_suffix(".npz")),
        ("pretrain", "--init", path, "--data", data, "--preset", "tiny", "--out", out),
        fit,
        (*fit, "--method", "patchcore"),
    ):
        assert refused(*words) == message, words
    with pytest.raises(UserError, match="whose networks are its own"):
        start_from(path)
    assert not any(tmp_path.iterdir()), "nothing half written"


def test_exit_codes(aeu_folder: Path, tmp_path: Path) -> None:
    ended = commands.run("export", aeu_folder, "--format", "hf", "--out", tmp_path / "out", expect=2)
    assert "takes an encoder" in ended.stderr and ended.stderr.count("\n") == 1
    ended = commands.run("pretrain", "--init", aeu_folder, "--data", "gone", "--out", tmp_path / "out", expect=2)
    assert ended.stderr.count("\n") == 1 and not any(tmp_path.iterdir())


def test_a_detector_on_an_encoder_alone_starts_another(
    patchcore_bundle: Path, normal_films: PackedFilms, tmp_path: Path
) -> None:
    """Its encoder is as good as any other: for a memory, but not for a detector that needs a whole method."""
    fit = ("detect", "fit", "--data", normal_films.folder, "--weights", patchcore_bundle, "--out", tmp_path / "out")
    small = [word for text in ("held_out=0.4", "false_alarms=0.3") for word in ("--set", text)]
    assert "and no decoder or prototypes; give the folder of a pre-training run" in refused(*fit, *small)
    invoke(*fit, *small, "--method", "patchcore", "--set", "patchcore.share=0.5", "--quiet")
    first, second = (load_detector(path) for path in (patchcore_bundle / "detector", tmp_path / "out"))
    assert first.weights_hash == second.weights_hash


def test_the_card_speaks_of_a_detector(kind: str, bundle: Path) -> None:
    text = (bundle / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert "anomaly-detection" in yaml.safe_load(front)["tags"]
    assert f"A detector of abnormal radiographs, `{kind}`, fitted on normal films alone" in body
    assert "pre-trained on normal films by" not in body and "model.detect(images)" in body
    assert "## Detector" in body and body.count("Research software, not a medical device.") == 2
    if kind == "aeu":
        assert yaml.safe_load(front)["license"] == "mit" and "vision-transformer" not in front
        assert "| aeu | side 64, latent 16, width 4 |" in body and "| train | epochs 1, film_views_min 0" in body
        assert "Its networks started from random weights." in body and "32 x 32 px, grey in [0, 1], squash" in body
        assert "patch" not in body and "encode" not in body, "it has no trunk"
    else:
        assert "Its encoder is that of `smallest`" in body and "width 16, depth 1" in body
        assert "share 0.5" in body and "epochs" not in body, "the recipe of the encoder is not the detector's"


def test_the_card_quotes_results_of_this_detector(folder: Path, tmp_path: Path) -> None:
    own = make_result(tmp_path / "own", load_detector(folder).weights_hash)
    assert len(export_bundle(folder, tmp_path / "out", results=[own]).about["results"]) == 1
    with pytest.raises(UserError, match="measured with other weights"):
        export_bundle(folder, tmp_path / "no", results=[make_result(tmp_path / "other", "f" * 64)])


def test_nothing_tells_of_the_machine(bundle: Path) -> None:
    for file in bundle.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"/home/someone" not in content and str(bundle.parent).encode() not in content, file
            assert b"command" not in content, file


def test_push_and_open_from_the_cache(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    invoke("push", bundle, "hf://owner/name", "--cache")
    assert afire.load("hf://owner/name", device="cpu").detect(images_of(1)).score.shape == (1,)
    said = invoke("detect", "run", bundle / "sample", "--model", "hf://owner/name", "--out", tmp_path / "out")
    assert "1 films" in said and read_json(tmp_path / "out" / "results.json")["model"]["name"] == "name"


def test_commands_take_a_bundle_for_a_detector(
    folder: Path, bundle: Path, normal_films: PackedFilms, tmp_path: Path
) -> None:
    films = ("--data", normal_films.folder, "--bootstrap", "10")
    results = []
    for number, model in enumerate((folder, bundle)):
        run, evaluation = tmp_path / f"run{number}", tmp_path / f"eval{number}"
        invoke("detect", "run", bundle / "sample", "--model", model, "--out", run, "--no-pictures")
        invoke("detect", "eval", "--model", model, *films, "--out", evaluation)
        scores = [{**film, "model": "the same"} for film in read_json(run / "results.json")["films"]]
        result = read_json(evaluation / "result.json")
        results.append((scores, {name: value["mean"] for name, value in result["metrics"].items()}))
        assert result["name"] == model.name
    assert json.dumps(results[0]) == json.dumps(results[1])


def test_a_bundle_without_a_detector_detects_nothing(bundle_folder: Path, tmp_path: Path) -> None:
    for words in (("run", bundle_folder / "sample"), ("eval", "--data", tmp_path)):
        said = refused("detect", *words, "--model", bundle_folder, "--out", tmp_path / "out")
        assert "holds no detector; export one with `afire export RUN --detector DETECTOR`" in said


@pytest.mark.parametrize("file", ["model.safetensors", "detector.safetensors", "detector.json", "config.yaml"])
def test_an_altered_detector_is_not_used(bundle: Path, copy_of: Callable[[Path], Path], file: str) -> None:
    spoilt = copy_of(bundle)
    content = bytearray((spoilt / "detector" / file).read_bytes())
    content[-2] ^= 1
    (spoilt / "detector" / file).write_bytes(content)
    out = ("--out", spoilt.parent / "out")
    for words in (
        ("verify", spoilt),
        ("export", spoilt, *out),
        ("push", spoilt, "hf://owner/name", "--cache"),
        ("detect", "run", spoilt / "sample", "--model", spoilt, *out),
        ("detect", "eval", "--data", "gone", "--model", spoilt, *out),
    ):
        assert f"{file} is not what was exported" in refused(*words)
    with pytest.raises(UserError, match="is not what was exported"):
        afire.load(spoilt)


def test_a_missing_detector_is_named(bundle: Path, copy_of: Callable[[Path], Path]) -> None:
    spoilt = copy_of(bundle)
    (spoilt / "detector" / "detector.json").unlink()
    assert "lacks detector/detector.json; the bundle is not whole" in refused("verify", spoilt)
    write_json(spoilt / MANIFEST, list_files(spoilt))  # somebody who hides it
    assert "does not list detector/detector.json" in refused("verify", spoilt)


def test_tensors_of_the_detector_that_are_gone(bundle: Path, copy_of: Callable[[Path], Path]) -> None:
    spoilt = copy_of(bundle)
    (spoilt / "detector" / "model.safetensors").unlink()
    write_json(spoilt / MANIFEST, list_files(spoilt))
    for words in (("verify", spoilt), ("export", spoilt, "--out", spoilt.parent / "out")):
        assert "model.safetensors" in refused(*words)


@pytest.mark.parametrize(
    ("holds", "message"),
    [
        ("poem", "says that it holds 'poem', which afire"),
        (["method"], "which afire"),
        ("method", "there is no method 'aeu'"),
        ("encoder", "there is no method 'aeu'"),
    ],
)
def test_a_bundle_that_lies_about_what_it_holds(
    aeu_bundle: Path, copy_of: Callable[[Path], Path], holds: object, message: str
) -> None:
    spoilt = copy_of(aeu_bundle)
    write_json(spoilt / CONFIG, {**read_json(spoilt / CONFIG), "holds": holds})
    write_json(spoilt / MANIFEST, list_files(spoilt))
    assert message in refused("verify", spoilt)


@pytest.fixture(scope="module", params=LEARNED)
def any_bundle(
    request: pytest.FixtureRequest, normal_films: PackedFilms, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of a detector of each kind with networks of its own."""
    place = tmp_path_factory.mktemp(request.param)
    folder = learned_folder(request.param, QUICK[request.param], normal_films, place / "detector")
    return export_bundle(folder, place / "bundle").folder


def test_every_kind_of_detector_leaves_and_comes_back(any_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, model = open_bundle(any_bundle), afire.load(any_bundle, device="cpu")
    method = opened.about["detector"]["method"]
    assert opened.holds == "detector" and method in DETECTORS
    # The network of `taught` serves as an encoder, also from a bundle; those of others do not.
    assert ("a detector inside" if method == "taught" else f"the detector {method} alone") in repr(model)
    monkeypatch.setattr(verifying, "FORMATS", {})
    assert all(check.equal for check in verify_bundle(opened))
    assert model.detector is not None
    expected = model.detect(images_of(3))
    with torch.no_grad():
        score, p_value, heat = DetectorGraph(model.detector).eval()(images_of(3))
    np.testing.assert_allclose(score.numpy(), expected.score, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(p_value.numpy(), expected.p_value, rtol=1e-5)
    np.testing.assert_allclose(heat.numpy(), expected.heatmap, rtol=1e-4, atol=1e-4)
