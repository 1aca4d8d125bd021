"""Detectors that train networks of their own: they tell bright squares from normal films, and survive disk and kill.

A new detector adds a line to ``QUICK``; what is special about it is tested in a file of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from afire.cli import app
from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.data.phantom import Style, draw_batch
from afire.detect import DETECTORS
from afire.detect.base import SETTINGS, FitTask, load_detector
from afire.detect.fit import detect_settings, fit_detector, networks_for
from afire.detect.learned import Examined, LearnedDetector
from afire.errors import UserError
from afire.export.formats import run_detector_graph
from afire.export.write import export_bundle
from afire.files import read_json
from afire.nn.vit import Normalise
from afire.settings import load_config
from afire.weights import open_weights
from afire.weights.files import write_tensors
from tests.detect.conftest import killed_after_a_checkpoint

SIZE, FIT, TEST = 32, 96, 24
# The settings below were tuned on phantoms of seed 5, those on a trunk on 5 to 8: others have to show that they work.
PHANTOMS, TEACHING = 2026, 900
OFTEN = ["train.epochs=30", "train.batch_size=8", "train.learning_rate=3e-3"]
QUICK: dict[str, list[str]] = {
    "aeu": ["train.epochs=40", "train.batch_size=16", "train.learning_rate=3e-3", "aeu.width=8"],
    "fae": ["train.epochs=25", "train.batch_size=16", "train.learning_rate=3e-3", "fae.widths=[24,32]"],
    "mkd": ["train.epochs=40", "train.batch_size=16", "train.learning_rate=1e-2"],
    "panda": ["train.epochs=4", "train.batch_size=16", "panda.fisher_films=16"],
    "fanogan": [
        *("train.epochs=50", "train.batch_size=16", "train.learning_rate=2e-3", "train.learning_rate_end=1e-4"),
        *("fanogan.width=16", "fanogan.latent=16", "fanogan.gan_share=0.6", "fanogan.critic_steps=1"),
        "fanogan.kappa=5",
    ],
    "memae": ["train.epochs=60", "train.batch_size=8", "train.learning_rate=1e-2", "memae.width=8", "memae.items=100"],
    "salad": [
        *("train.epochs=36", "train.batch_size=12", "train.learning_rate=5e-3", "salad.width=8", "salad.latent=32"),
        *("salad.cell=4", "salad.shuffled=0.05", "salad.blanked=0.05", "salad.structure=0.02"),
        *("salad.consistency=0.01", "salad.adversarial=1e-4"),
    ],
    # Its discriminator takes longer than a test to rate drawings: the score is tested in test_squid.py.
    "squid": [
        *("train.epochs=32", "train.batch_size=12", "train.learning_rate=5e-3", "train.clip=1", "squid.width=8"),
        *("squid.items=64", "squid.critic_steps=1", "squid.adversarial=5e-4", "score=error"),
    ],
    "anatpaste": [*OFTEN, "anatpaste.width=8", "anatpaste.opacity_min=1"],
    "cutpaste": [*OFTEN, "cutpaste.width=8", "cutpaste.blocks=1"],
    "nsa": [*OFTEN, "nsa.width=16", "nsa.blocks=1", "nsa.clean=0.2", "nsa.haze=0", "nsa.blend=none"],
    "taught": [
        *(*OFTEN, "train.epochs=40", "taught.start=nothing", "taught.films=256"),
        *("taught.width=8", "taught.blocks=1", "taught.pasted=0.9"),
        *("score=peak", "taught.augment.shading=0", "taught.augment.unsharp=0"),
    ],
}
"""Settings with which a detector of each kind learns in seconds."""
LEARNED = [name for name in DETECTORS if issubclass(DETECTORS[name], LearnedDetector)]
TRUNK = ["image.size=32", "encoder.width=32", "encoder.depth=2", "encoder.heads=2", "encoder.patch_size=8"]
SIDES = {"panda": 22}  # of the squares: it says one thing of a whole film, so that they must be large
LESSONS = 400


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> PackedFilms:
    """Normal phantom films of one scanner; those from ``FIT`` on are for testing."""
    folder = tmp_path_factory.mktemp("phantoms")
    names = [f"{number:03d}.png" for number in range(FIT + TEST)]
    for name, image in zip(
        names, draw_batch(PHANTOMS, range(FIT + TEST), 64, diseases=(), style=Style()).images, strict=True
    ):
        Image.fromarray((255 * image[0]).round().astype(np.uint8)).save(folder / name)
    split = np.where(np.arange(FIT + TEST) < FIT, "train", "test")
    table = pd.DataFrame({"image": names, "patient": names, "normal": 1.0, "split": split})
    pack(make_manifest(table, folder), folder / "pack", PackSettings(size=SIZE), workers=1)
    return PackedFilms(folder / "pack")


def task_of(
    method: str, films: PackedFilms, out: Path, *settings: str, resume: bool = False, trunk: str = "random"
) -> FitTask:
    takes_trunk = DETECTORS[method].takes == "trunk"
    networks = networks_for(
        method,
        trunk if takes_trunk else None,
        films.folder,
        "tiny" if takes_trunk else None,
        overrides=TRUNK if takes_trunk else [f"image.size={SIZE}"],
    )
    chosen = detect_settings(["held_out=0.3", "false_alarms=0.2", *QUICK[method], *settings], method)
    given = {"source": "phantom", "device": "cpu", "method": method, "resume": resume, "init": networks.init}
    return FitTask(networks.config, chosen, films, out, **given)


@pytest.fixture(scope="session")
def taught_trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk that has learned where organs and findings of other phantoms lie, in place of one from ImageNet.

    A random one sees too little to tell one film from another. It has never seen a square.
    """
    drawn = draw_batch(TEACHING, range(384), 64, style=Style())
    images = F.avg_pool2d(torch.from_numpy(drawn.images), 2)
    config = load_config("tiny", overrides=TRUNK)
    trunk, normalise = open_weights("random", config, seed=0).trunk.train(), Normalise(config.image)
    maps = torch.from_numpy(np.concatenate([drawn.anatomy, drawn.findings], axis=1)).float()
    shares = F.adaptive_avg_pool2d(maps, SIZE // config.encoder.patch_size).flatten(2).transpose(1, 2)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(0.1 * torch.randn(shares.shape[-1], trunk.width, generator=generator))
    optimiser = torch.optim.AdamW([*trunk.parameters(), weight], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, LESSONS)
    for _ in range(LESSONS):
        rows = torch.randint(len(images), (64,), generator=generator)
        tokens = trunk.norm(trunk.levels(normalise(images[rows]), [len(trunk.blocks)])[0][:, 1:])
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(F.linear(tokens, weight), shares[rows]).backward()
        optimiser.step()
        schedule.step()
    path: Path = tmp_path_factory.mktemp("trunk") / "vit.safetensors"
    write_tensors(path, trunk.state_dict())
    return path


@pytest.fixture(scope="module", params=LEARNED)
def folder(request: pytest.FixtureRequest, phantoms: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fitted detector of each kind."""
    out: Path = tmp_path_factory.mktemp(request.param) / "model"
    on_trunk = DETECTORS[request.param].takes == "trunk"
    trunk = str(request.getfixturevalue("taught_trunk")) if on_trunk else "random"
    fit_detector(task_of(request.param, phantoms, out, trunk=trunk))
    return out


def with_square(images: Tensor, brightness: float, side: int = 10) -> Tensor:
    """A bright square in one of the lungs of each film, where it is dark; not always at the same place."""
    squared = images.clone()
    for number, film in enumerate(squared):
        top, left = 8 + number % 5, (4 if number % 2 else 18) + number % 3
        square = film[0, top : top + side, left : left + side]
        square += brightness * (1 - square)
    return squared


def test_every_detector_is_tested() -> None:
    assert set(QUICK) == set(LEARNED) and len(LEARNED) >= 2


def test_bright_squares_stand_out_the_more_the_brighter(folder: Path, phantoms: PackedFilms) -> None:
    detector = load_detector(folder)
    images = phantoms.batch(range(FIT, FIT + TEST))
    side = SIDES.get(detector.method, 10)
    normal, faint, bright = (detector.score(with_square(images, level, side)).score for level in (0.0, 0.45, 0.9))
    if detector.method == "taught":
        # From nothing, in seconds, it learns what a square adds to a film (0.94 on tuning phantoms, 0.71 on these).
        assert (bright > normal).sum() >= 18, "which chance gives once in ninety times"
    else:
        assert roc_auc_score(np.r_[np.zeros(TEST), np.ones(TEST)], np.r_[normal, bright]) > 0.9
    assert normal.mean() < faint.mean() < bright.mean()


def test_the_heat_lies_on_the_square(folder: Path, phantoms: PackedFilms) -> None:
    """Not for every film, but on average it adds more heat where it lies than beside it."""
    detector = load_detector(folder)
    if detector.method == "anatpaste":
        pytest.skip("its scores know the square, its class activation map does not: docs/detectors.md says so")
    images = phantoms.batch(range(FIT, FIT + TEST))
    squares = with_square(images, 0.9)
    added = torch.from_numpy(detector.score(squares).heat - detector.score(images).heat)
    where = F.adaptive_avg_pool2d((squares - images).abs(), tuple(added.shape[1:]))[:, 0]
    assert added[where > 0.5 * where.max()].mean() > added[where == 0].mean()


def test_it_survives_the_disk(folder: Path, phantoms: PackedFilms, tmp_path: Path) -> None:
    first, images = load_detector(folder), phantoms.batch([0, FIT, FIT + 1])
    first.save(tmp_path / "again")
    again = load_detector(tmp_path / "again")
    before, after = (each.score(images, all_scores=True) for each in (first, again))
    assert np.array_equal(before.score, after.score) and np.array_equal(before.heat, after.heat)
    assert all(np.array_equal(before.scores[name], after.scores[name]) for name in before.scores)
    assert set(before.scores) == set(first.meanings)
    alone = again.score(images[1:2])
    np.testing.assert_allclose(alone.score, before.score[1:2], rtol=1e-3, atol=1e-5)
    if before.restored is not None:
        assert before.restored.shape == (3, SIZE, SIZE) and 0 <= before.restored.min() <= before.restored.max() <= 1


def test_the_default_score_is_the_published_one_and_nothing_chose_it(folder: Path) -> None:
    detector = load_detector(folder)
    if detector.method != "taught":  # ours: its scores are weighed
        assert type(detector).Settings().score == next(iter(detector.meanings))
    assert detector.choice.asked


@pytest.mark.parametrize("method", LEARNED)
def test_what_was_killed_is_resumed_to_the_same_scores(method: str, phantoms: PackedFilms, tmp_path: Path) -> None:
    short = ["train.epochs=3", *(["taught.films=32"] if method == "taught" else [])]  # drawn anew by each of the fits
    whole = fit_detector(task_of(method, phantoms, tmp_path / "whole", *short))

    with killed_after_a_checkpoint():
        fit_detector(task_of(method, phantoms, tmp_path / "resumed", *short))
    assert not (tmp_path / "resumed" / SETTINGS).exists()
    resumed = fit_detector(task_of(method, phantoms, tmp_path / "resumed", *short, resume=True))
    images = phantoms.batch(range(FIT, FIT + 4))
    assert np.array_equal(whole.score(images).score, resumed.score(images).score)


@pytest.mark.parametrize("method", LEARNED)
def test_the_seed_decides_the_weights(method: str, phantoms: PackedFilms) -> None:
    def weights(seed: int) -> Tensor:
        task = task_of(method, phantoms, Path("nowhere"), f"seed={seed}")
        learner = DETECTORS[method].Networks(DETECTORS[method].config_of(task.config, task.settings, 64))
        return torch.cat([parameter.detach().flatten() for parameter in learner.parameters()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(first, weights(0)), "the global generator is not asked"
    assert not torch.equal(first, weights(1))


@pytest.mark.parametrize("method", LEARNED)
def test_every_parameter_that_is_trained_gets_a_gradient(method: str, phantoms: PackedFilms) -> None:
    from afire.methods.base import Keys

    task = task_of(method, phantoms, Path("nowhere"))
    learner = DETECTORS[method].Networks(DETECTORS[method].config_of(task.config, task.settings, 64))
    rows = torch.arange(4)
    reached: set[str] = set()
    for turn in learner.turns:
        learner.zero_grad()
        outputs = learner(learner.views(phantoms.batch(rows.numpy()), Keys(0, 0, 0, rows)))
        assert all(len(value) % 4 == 0 for value in outputs.values()), "films come first"
        learner.losses(outputs, turn).total.backward()
        trained = {name for name, _ in learner.parameters_of(turn)}
        reached |= {name for name, weight in learner.named_parameters() if weight.grad is not None and name in trained}
    assert reached == {name for turn in learner.turns for name, _ in learner.parameters_of(turn)}
    assert learner.flops() > 0


def test_weights_are_refused_or_asked_for(phantoms: PackedFilms) -> None:
    with pytest.raises(UserError, match="aeu trains networks of its own; leave out --weights"):
        networks_for("aeu", "random", phantoms.folder)
    with pytest.raises(UserError, match="patchcore needs --weights"):
        networks_for("patchcore", None, phantoms.folder)
    assert networks_for("aeu", None, phantoms.folder).config.image.size == SIZE


def test_a_side_that_cannot_be_halved_is_refused() -> None:
    config = Config(options={"side": 40})
    with pytest.raises(UserError, match="aeu halves a film 4 times, which 40 px do not allow"):
        DETECTORS["aeu"].Networks(config)


def test_a_detector_says_how_it_was_trained(folder: Path) -> None:
    about = read_json(folder / SETTINGS)
    assert about["method"] in LEARNED and about["settings"]["train"]["epochs"] > 0 and about["flops"] > 0
    assert (folder / "adapt" / "summary.json").exists() and not (folder / "adapt" / "checkpoints").exists()


def test_what_is_examined_is_what_is_looked_at(folder: Path, phantoms: PackedFilms) -> None:
    detector = load_detector(folder)
    assert isinstance(detector, LearnedDetector)
    with torch.inference_mode():
        examined = detector.examine(detector.prepared(phantoms.batch([3])), restore=True)
    assert isinstance(examined, Examined) and examined.map.shape == (1, detector.grid[0] * detector.grid[1])
    assert torch.isfinite(examined.map).all()


@pytest.mark.slow
def test_its_bundle_becomes_a_graph_with_a_free_batch_size(folder: Path, phantoms: PackedFilms, tmp_path: Path) -> None:
    """Translating a detector takes seconds, so that its kind is translated once for all that is said of the graph."""
    pytest.importorskip("onnxruntime")
    bundle, out = export_bundle(folder, tmp_path / "bundle").folder, tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(bundle), "--format", "onnx", "--out", str(out)])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "score of onnxruntime: largest difference" in done.output and (out / "detector.onnx").is_file()
    detector, images = load_detector(folder), phantoms.batch([3, FIT, FIT + 1])
    found, theirs = detector.score(images), run_detector_graph(out, images)
    tolerance = 1e-3 if DETECTORS[detector.method].takes == "trunk" else 1e-2
    np.testing.assert_allclose(theirs["score"].numpy(), found.score, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(theirs["heatmap"].numpy(), found.heat, rtol=tolerance, atol=tolerance)
