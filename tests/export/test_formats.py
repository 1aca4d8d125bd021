"""Other libraries say what ours says: parity on the CPU, printed and bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.data.decode import fit_square
from afire.detect.base import AnomalyDetector, Subsets, load_detector
from afire.detect.calibrate import calibrate
from afire.detect.patchcore import MemoryConfig, PatchCore, PatchCoreConfig
from afire.errors import UserError
from afire.export.formats import (
    FORMATS,
    DetectorGraph,
    run_detector_graph,
    run_onnx,
    write_detector_graph,
    write_onnx,
)
from afire.export.verify import read_expected, read_whole
from afire.export.write import Conversion, convert, export_bundle
from afire.settings import load_config
from afire.weights import Weights, open_weights
from tests.export.conftest import make_run, smallest

BOUND = 1e-5


def random_backbone(*overrides: str) -> Weights:
    return open_weights("random", smallest("encoder.depth=2", *overrides), seed=3)


def ours(backbone: Weights, films: Tensor) -> Tensor:
    with torch.no_grad():
        tokens: Tensor = backbone.trunk(backbone.normalise(films))[:, 1:]
    return tokens


def films_of(count: int, size: int = 32) -> Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(5))


def assert_close(backend: str, found: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    difference = float((found.detach() - expected).abs().max())
    print(f"{backend}: largest difference {difference:.1e}, allowed {bound:.0e}")  # noqa: T201
    assert found.shape == expected.shape and difference < bound


@pytest.mark.parametrize(
    "overrides",
    [(), ("image.normalise=imagenet", "image.channels=3"), ("encoder.positions=learned", "image.normalise=none")],
)
def test_transformers_loads_a_plain_vit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    backbone = random_backbone(*overrides)
    done = convert(backbone, tmp_path / "out", FORMATS["hf"])
    assert all(one.largest < BOUND for one in done.differences) and not done.note
    network, report = transformers.ViTModel.from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    films = films_of(3)
    with torch.no_grad():
        found = network.eval()(pixel_values=backbone.normalise(films)).last_hidden_state[:, 1:]
    assert_close("transformers", found, ours(backbone, films))


def test_a_convolutional_stem_goes_into_graphs_and_bundles_but_not_into_other_libraries(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", smallest("encoder.stem=conv"))
    backbone = open_weights(run)
    pytest.importorskip("onnxruntime")
    for form in ("torch", "onnx"):
        done = convert(backbone, tmp_path / form, FORMATS[form])
        assert done.differences and all(difference.largest < 5e-5 for difference in done.differences)
    for form in ("timm", "hf"):
        with pytest.raises(UserError, match=f"no encoder with a convolutional stem .* --format {form} cannot hold run"):
            convert(backbone, tmp_path / form, FORMATS[form])
        assert not (tmp_path / form).exists()
    bundle = export_bundle(run, tmp_path / "bundle").folder
    assert open_weights(bundle).hash == backbone.hash
    assert "timm's names but for its convolutional stem" in (bundle / "README.md").read_text()


def test_any_methods_trunk_goes_to_other_libraries(tmp_path: Path) -> None:
    backbone = open_weights(make_run(tmp_path / "run", smallest("method=mae")))
    done = convert(backbone, tmp_path / "out", FORMATS["torch"])
    assert all(difference.largest < 5e-5 for difference in done.differences)
    tokens = backbone.method.encode(read_expected(tmp_path / "out")["input"])
    assert_close("MAE through torch.export", tokens, read_expected(tmp_path / "out")["tokens"])


def test_transformers_weights_come_back(tmp_path: Path) -> None:
    backbone = random_backbone()
    convert(backbone, tmp_path / "out", FORMATS["hf"])
    assert open_weights(str(tmp_path / "out"), backbone.config).hash == backbone.hash


def processed(config: Config, folder: Path, pixels: np.ndarray) -> Tensor:
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    found: Tensor = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    return found


@pytest.mark.parametrize("channels", [1, 3])
def test_the_image_processor_does_what_ours_does(tmp_path: Path, channels: int) -> None:
    backbone = random_backbone("image.normalise=imagenet", f"image.channels={channels}")
    convert(backbone, tmp_path / "out", FORMATS["hf"])
    smooth = np.outer(np.linspace(0, 1, 60), np.linspace(0.2, 1, 40))
    pixels = (smooth * 255).astype(np.uint8)
    film = torch.from_numpy(fit_square((pixels / np.float32(255)), 32))[None, None]
    found = processed(backbone.config, tmp_path / "out", pixels)
    # It rounds to 8 bits after resizing along each side: half a grey level twice, divided by the std.
    assert_close("image processor", found, backbone.normalise(film), bound=1.01 / 255 / 0.22)


def test_the_page_says_what_the_format_cannot(tmp_path: Path) -> None:
    convert(random_backbone("image.fit=letterbox"), tmp_path / "film", FORMATS["hf"])
    text = (tmp_path / "film" / "README.md").read_text()
    assert "cannot say that each film is normalised by itself" in text and "square by letterbox" in text
    assert json.loads((tmp_path / "film" / "preprocessor_config.json").read_text())["do_normalize"] is False
    assert "Research software, not a medical device." in text


def test_timm_state_dict_is_strict(tmp_path: Path) -> None:
    """Names and shapes as timm's VisionTransformer has them; run against timm itself where it is installed."""
    backbone = random_backbone()
    done = convert(backbone, tmp_path / "out", FORMATS["timm"])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["model_args"] == {
        **{"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1}
    }
    if done.note:
        assert done.note.startswith("not compared, not installed: ")
        pytest.skip(done.note)
    assert all(one.largest < BOUND for one in done.differences)


def quick_detector(folder: Path) -> AnomalyDetector:
    """Two of the maps: translating all of them into ONNX takes half a minute."""
    detector = load_detector(folder)
    kept = [one for one in detector.choice.components if one.name in ("surprise_peak", "gaussian_peak")]
    detector.choice = replace(detector.choice, components=tuple(kept))
    return detector


@pytest.fixture(scope="module")
def onnx_folder(tmp_path_factory: pytest.TempPathFactory, detector_folder: Path) -> tuple[Path, Weights, Conversion]:
    """Encoder and detector as graphs that take films of any size."""
    pytest.importorskip("onnxruntime")
    backbone = open_weights(str(detector_folder))
    out = tmp_path_factory.mktemp("onnx") / "out"
    done = convert(backbone, out, FORMATS["onnx"], detector=quick_detector(detector_folder), preprocess="resize")
    return out, backbone, done


@pytest.mark.slow
def test_onnxruntime_encodes_any_batch_and_any_size(onnx_folder: tuple[Path, Weights, Conversion]) -> None:
    folder, backbone, done = onnx_folder
    assert {one.output for one in done.differences} == {"tokens", "embedding", "score", "p_value", "heatmap"}
    for count, height, width in ((1, 32, 32), (3, 50, 41)):
        films = torch.rand(count, 1, height, width, generator=torch.Generator().manual_seed(count))
        square = torch.from_numpy(np.stack([fit_square(film[0].numpy(), 32) for film in films])[:, None])
        found = run_onnx(folder, backbone, films)
        expected = ours(backbone, square)
        assert_close("onnxruntime, tokens", found["tokens"], expected, 5e-5)
        assert_close("onnxruntime, embedding", found["embedding"], expected.mean(dim=1), 5e-5)


@pytest.mark.slow
def test_onnxruntime_detects(onnx_folder: tuple[Path, Weights, Conversion], detector_folder: Path) -> None:
    folder, _, _ = onnx_folder
    detector = quick_detector(detector_folder)
    films = films_of(4)
    expected, found = detector.score(films, restore=False), run_detector_graph(folder, films)
    size = max(1.0, float(np.abs(expected.heat).max()))
    assert_close("onnxruntime, score", found["score"], torch.from_numpy(expected.score).float(), 1e-4 * size)
    assert_close("onnxruntime, heatmap", found["heatmap"], torch.from_numpy(expected.heat), 1e-4 * size)
    p_values = torch.from_numpy(detector.calibration.p_values(expected.score)).float()
    assert_close("onnxruntime, p-value", found["p_value"], p_values)
    page = (folder / "README.md").read_text()
    assert "detector.onnx" in page and "Research software, not a medical device." in page


def test_the_detectors_graph_reads_every_map(detector_folder: Path) -> None:
    """What is translated, before it is: the same numbers from a module without numpy."""
    detector = load_detector(detector_folder)
    films = films_of(3)
    with torch.no_grad():
        score, p_value, heat = DetectorGraph(detector).eval()(films)
    expected = detector.score(films, restore=False)
    np.testing.assert_allclose(score.numpy(), expected.score, rtol=1e-5)
    np.testing.assert_allclose(p_value.numpy(), detector.calibration.p_values(expected.score), rtol=1e-6)
    np.testing.assert_allclose(heat.numpy(), expected.heat, rtol=1e-5)


@pytest.fixture
def patchcore() -> PatchCore:
    """A memory of noise: what is compared is arithmetic."""
    config = load_config("tiny", overrides=["image.size=32", "encoder.patch_size=8"])
    settings = PatchCoreConfig(patchcore=MemoryConfig(share=0.5, neighbours=4))
    detector = PatchCore(open_weights("random", config).trunk, config, settings)
    normals = Subsets(np.arange(12), np.arange(12, 16), np.arange(16, 24), "drawn")
    calibrate(detector, Drawn(films_of(24)), normals)  # type: ignore[arg-type]
    return detector


class Drawn:
    """Images in memory, as a fit reads them."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def batch(self, rows: np.ndarray) -> torch.Tensor:
        return self.images[rows]


def test_the_graph_of_a_detector_without_maps(patchcore: PatchCore) -> None:
    films = films_of(3)
    with torch.no_grad():
        score, p_value, heat = DetectorGraph(patchcore).eval()(films)
    expected = patchcore.score(films)
    np.testing.assert_allclose(score.numpy(), expected.score, rtol=1e-5)
    np.testing.assert_allclose(p_value.numpy(), patchcore.calibration.p_values(expected.score), rtol=1e-6)
    np.testing.assert_allclose(heat.numpy(), expected.heat, rtol=1e-5)


@pytest.mark.slow
def test_onnxruntime_detects_with_a_memory(patchcore: PatchCore, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_detector_graph(tmp_path, patchcore)
    films = films_of(4)
    expected, given = patchcore.score(films), run_detector_graph(tmp_path, films)
    size = max(1.0, float(np.abs(expected.heat).max()))
    assert_close("onnxruntime, score", given["score"], torch.from_numpy(expected.score).float(), 1e-4 * size)
    assert_close("onnxruntime, heatmap", given["heatmap"], torch.from_numpy(expected.heat), 1e-4 * size)


def test_a_detector_that_is_no_graph_is_refused(
    patchcore: PatchCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = PatchCore.look

    def depends_on_values(self: PatchCore, images: torch.Tensor, *others: object) -> object:
        return look(self, images if images.sum() > 0 else -images, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(PatchCore, "look", depends_on_values)
    with pytest.raises(UserError, match=r"patchcore cannot be written as a graph .* export it in a bundle"):
        write_detector_graph(tmp_path, patchcore)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_graphs_have_names_for_what_is_free(onnx_folder: tuple[Path, Weights, Conversion]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(onnx_folder[0] / "encoder.onnx")
    assert session.get_inputs()[0].shape == ["batch", 1, "height", "width"]
    assert [output.shape for output in session.get_outputs()] == [["batch", 16, 16], ["batch", 16]]


@pytest.mark.parametrize("preprocess", ["none", "normalise", "resize"])
def test_torch_export(tmp_path: Path, preprocess: str) -> None:
    backbone = random_backbone("encoder.depth=1", "image.normalise=imagenet", "image.channels=3")
    done = convert(backbone, tmp_path / "out", FORMATS["torch"], preprocess=preprocess)  # type: ignore[arg-type]
    assert all(one.largest < 5e-5 for one in done.differences)
    graph = torch.export.load(tmp_path / "out" / "encoder.pt2").module()
    expected = read_expected(tmp_path / "out")
    film = expected["input"]
    if preprocess == "none":
        film = backbone.normalise(film)
    if preprocess == "resize":
        film = read_whole(tmp_path / "out" / "sample" / "film.png")
    assert_close("torch.export", graph(film.expand(3, -1, -1, -1))[0][2:], expected["tokens"], 5e-5)


def test_what_a_format_has_no_place_for_is_refused(tmp_path: Path, detector_folder: Path) -> None:
    backbone = random_backbone("image.fit=crop")
    with pytest.raises(UserError, match=r"only squash films.*want crop"):
        convert(backbone, tmp_path / "out", FORMATS["torch"], preprocess="resize")
    with pytest.raises(UserError, match="--preprocess is for --format onnx and torch"):
        convert(backbone, tmp_path / "out", FORMATS["hf"], preprocess="none")
    with pytest.raises(UserError, match="hf has no place"):
        convert(backbone, tmp_path / "out", FORMATS["hf"], detector=load_detector(detector_folder))
    with pytest.raises(UserError, match="normalises films itself"):
        DetectorGraph(load_detector(detector_folder), "none")
    assert not any(tmp_path.iterdir())


def test_outputs_that_are_not_ours_are_not_handed_over(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    backbone = random_backbone()
    other = random_backbone("encoder.heads=4")  # the same weights, read differently
    broken = FORMATS["hf"].__class__(
        "hf", "transformers", lambda folder, _: FORMATS["hf"].write(folder, other), FORMATS["hf"].run
    )
    with pytest.raises(UserError, match="transformers gives other tokens than afire"):
        convert(backbone, tmp_path / "out", broken)
    assert not any(tmp_path.iterdir())


def test_a_writer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    absent = FORMATS["onnx"].__class__(
        "onnx", "onnxruntime", write_onnx, run_onnx, needs_to_write=("no_such_module",), extra="onnx"
    )
    with pytest.raises(UserError, match=r"needs no_such_module.*afire\[onnx\]"):
        convert(random_backbone(), tmp_path / "out", absent)
