"""Fine-tuning in one process: the loss, what is learnt, what is written, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import write_manifest
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.files import folder_lock
from afire.tasks import metrics as m
from afire.tasks.finetune import Classifier, LabelObjective, positive_weights, run_finetune
from afire.tasks.results import read_result
from afire.tasks.settings import FinetuneConfig, load_task_config
from afire.training.run_folder import RunFolder
from afire.weights import open_weights
from tests.tasks.drawn import MODEL, QUICK, draw_spots, experiment, smallest_model


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("spots"))


def settings(*overrides: str) -> FinetuneConfig:
    return load_task_config("finetune", overrides=[*QUICK, *overrides])


def epochs(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "epoch" in record]


TRUTH = np.array([[1, np.nan, 0], [0, 1, 0], [np.nan, np.nan, np.nan], [1, 0, 0]])


def test_the_loss_is_the_mean_over_known_labels() -> None:
    config = FinetuneConfig(class_weights="balanced")
    objective = LabelObjective(TRUTH, np.arange(4), config)
    outputs = torch.tensor([[0.5, 9.0, -1.0], [2.0, 0.1, 0.3], [7.0, 7.0, 7.0], [-0.5, 1.0, 0.0]], requires_grad=True)
    targets = objective.targets(np.arange(4))
    total = objective.loss(outputs, targets)["cross_entropy"] / objective.terms(targets)
    slow, terms = 0.0, 0
    for film, label in np.ndindex(4, 3):
        if not math.isnan(TRUTH[film, label]):
            chance = 1 / (1 + math.exp(-outputs[film, label].item()))
            weight = [0.5, 1.0, 1.0][label]  # 1 negative to 2 positives; 1 to 1; no positive at all
            y = TRUTH[film, label]
            slow -= weight * y * math.log(chance) + (1 - y) * math.log(1 - chance)
            terms += 1
    assert objective.terms(targets) == terms == 8
    assert total.item() == pytest.approx(slow / terms, rel=1e-5)
    total.backward()
    assert outputs.grad is not None and torch.equal(outputs.grad == 0, torch.from_numpy(np.isnan(TRUTH)))


def test_weights_of_positives_and_the_prior() -> None:
    truth = np.array([[1.0, 1.0]] + [[0.0, np.nan]] * 99)
    assert positive_weights(truth, FinetuneConfig()).tolist() == [1, 1]
    assert positive_weights(truth, FinetuneConfig(class_weights="balanced")).tolist() == [20, 1]
    limit = FinetuneConfig(class_weights="balanced", class_weight_limit=200)
    assert positive_weights(truth, limit).tolist() == [99, 1]
    assert LabelObjective(truth, np.arange(100), FinetuneConfig()).prior(np.arange(100))[0] == pytest.approx(0.01)
    assert LabelObjective(truth, np.arange(100), limit).prior(np.arange(100)) == pytest.approx([0.5, 1.0])


def test_validation_is_the_mean_auc_of_labels_with_both_classes() -> None:
    objective = LabelObjective(TRUTH, np.arange(4), FinetuneConfig())
    kept = np.array([[0.2, 0.5, 0.1], [0.8, 0.6, 0.2], [0.5, 0.1, 0.3], [0.9, 0.7, 0.4]], np.float32)
    first, second = m.auc(kept[:, 0].astype(float), TRUTH[:, 0]), m.auc(kept[:, 1].astype(float), TRUTH[:, 1])
    assert (first, second) == (0.5, 0.0)
    assert objective.score(kept, np.arange(4)) == pytest.approx(0.25)


def test_a_classifier_starts_at_the_prior_and_every_parameter_learns() -> None:
    backbone = open_weights("random", smallest_model())
    model = Classifier(backbone.trunk, backbone.normalise, np.array([0.1, 0.5, 0.0]), torch.Generator().manual_seed(0))
    chances = model(torch.rand(6, 1, 32, 32)).sigmoid()
    torch.testing.assert_close(chances.mean(0), torch.tensor([0.1, 0.5, 0.001]), atol=0.05, rtol=0)
    chances.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_it_learns_and_leaves_what_it_promises(packed: Path, tmp_path: Path) -> None:
    config = settings("labels=[Spot]", "training.epochs=12", "training.learning_rate=3e-3", "augment.crop_min=0.9")
    [(fraction, result, predictions)] = list(run_finetune(experiment(packed, tmp_path), config))
    assert fraction == 1 and result.task == "finetune" and result.metrics["auc"].mean > 0.9
    assert set(predictions["part"]) == {"val", "test"} and (predictions["part"] == "test").sum() == 12
    run = tmp_path / "seed-0"
    left = {"config.yaml", "data.json", "environment.json", "metrics.jsonl"}
    assert {path.name for path in run.iterdir()} == left | {"model.safetensors", "answers.npz", "summary.json"}
    values = [record["val/auc"] for record in epochs(run)]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val_auc"] == max(values) and summary["chosen"]["epoch"] == values.index(max(values)) + 1
    val = predictions[predictions["part"] == "val"]  # the weights that are kept are those of the best epoch
    value = m.auc(val["score:Spot"].to_numpy(float), val["truth:Spot"].to_numpy(float))
    assert value == pytest.approx(max(values))
    assert result.runs[0].chosen["epoch"] == summary["chosen"]["epoch"]


def test_the_fine_tuned_encoder_is_weights_for_another_task(packed: Path, tmp_path: Path) -> None:
    list(run_finetune(experiment(packed, tmp_path), settings("training.epochs=1")))
    file = tmp_path / "seed-0/model.safetensors"
    backbone = open_weights(str(file), smallest_model())
    stored = load_file(file)
    assert torch.equal(backbone.trunk.norm.weight, stored["encoder.norm.weight"])
    assert backbone.hash != open_weights("random", smallest_model()).hash


def test_patience_ends_a_run(packed: Path, tmp_path: Path) -> None:
    config = settings("training.learning_rate=1e-12", "training.epochs=50", "training.patience=3")
    list(run_finetune(experiment(packed, tmp_path), config))
    assert [record["stale"] for record in epochs(tmp_path / "seed-0")] == [0, 1, 2, 3]


def test_seeds_fractions_and_folds_are_runs(packed: Path, tmp_path: Path) -> None:
    folders = {0.5: tmp_path / "50pct", 1.0: tmp_path / "100pct"}
    config = settings("training.epochs=1", "training.min_epoch_steps=2")
    plan = experiment(packed, tmp_path, seeds=[0, 1], folders=folders)
    half, whole = (result for _, result, _ in run_finetune(plan, config))
    assert [run.name for run in half.runs] == ["seed-0", "seed-1"] and (half.fraction, whole.fraction) == (0.5, 1)
    assert half.runs[0].films["train"] < whole.runs[0].films["train"]
    assert half.runs[0].weights_hash != half.runs[1].weights_hash  # random weights are drawn anew
    [(_, folds, _)] = list(run_finetune(experiment(packed, tmp_path / "folds", folds=2), config))
    assert [run.name for run in folds.runs] == ["seed-0-fold-0", "seed-0-fold-1"]
    assert sum(run.films["test"] for run in folds.runs) == 60


def test_resume_keeps_finished_runs_and_starts_missing_ones(packed: Path, tmp_path: Path) -> None:
    config = settings("training.epochs=1")
    [(_, one, _)] = list(run_finetune(experiment(packed, tmp_path), config))
    file = tmp_path / "seed-0/model.safetensors"
    before = file.stat().st_mtime_ns
    with pytest.raises(UserError, match="already holds runs; add --resume"):
        list(run_finetune(experiment(packed, tmp_path), config))
    [(_, two, _)] = list(run_finetune(experiment(packed, tmp_path, seeds=[0, 1], resume=True), config))
    assert file.stat().st_mtime_ns == before and two.runs[0] == one.runs[0] and len(two.runs) == 2
    other = settings("training.epochs=2", "run.keep_checkpoints=7")
    with pytest.raises(UserError, match=r"training\.epochs was 1, is 2\); add --force to run it"):
        list(run_finetune(experiment(packed, tmp_path, resume=True), other))
    list(run_finetune(experiment(packed, tmp_path, resume=True, force=True), other))
    assert file.stat().st_mtime_ns != before and len(epochs(tmp_path / "seed-0")) == 2
    list(run_finetune(experiment(packed, tmp_path, force=True), config))  # by force alone: from the start
    assert len(epochs(tmp_path / "seed-0")) == 1


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"force": True}])
def test_folders_in_use_are_left_alone(packed: Path, tmp_path: Path, how: dict[str, bool]) -> None:
    config = settings("training.epochs=1")
    list(run_finetune(experiment(packed, tmp_path), config))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with folder_lock(tmp_path, "it"), pytest.raises(UserError, match="another process is writing the runs in"):
        list(run_finetune(experiment(packed, tmp_path, **how), config))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_loose_film_that_changed_is_not_a_resume(packed: Path, tmp_path: Path) -> None:
    root = shutil.copytree(PackedFilms(packed).manifest.root, tmp_path / "films")
    loose = replace(PackedFilms(packed).manifest, root=root)
    write_manifest(loose, tmp_path / "films.parquet")
    config, out = settings("training.epochs=1"), tmp_path / "out"
    list(run_finetune(experiment(tmp_path / "films.parquet", out), config))
    film = root / str(loose.table["image"].iloc[0])
    film.write_bytes(film.read_bytes() + b"1")
    with pytest.raises(UserError, match="the data's hash was"):
        list(run_finetune(experiment(tmp_path / "films.parquet", out, resume=True), config))


def test_other_weights_are_not_a_resume(packed: Path, tmp_path: Path) -> None:
    config = settings("training.epochs=1")
    list(run_finetune(experiment(packed, tmp_path), config))
    wider = experiment(packed, tmp_path, resume=True, model=smallest_model(["encoder.width=32"]))
    with pytest.raises(UserError, match="the weights' hash was"):
        list(run_finetune(wider, config))


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.precision=bf16"],
        ["training.accumulate=2", "training.layer_decay=0.7", "training.drop_path=0.2", "training.clip=0"],
        ["class_weights=balanced", "training.batch_size=512"],
    ],
    ids=" ".join,
)
def test_every_kind_of_run_runs(packed: Path, tmp_path: Path, overrides: list[str]) -> None:
    [(_, result, _)] = list(run_finetune(experiment(packed, tmp_path), settings("training.epochs=1", *overrides)))
    assert 0 <= result.metrics["auc"].mean <= 1


def test_accumulated_pieces_are_one_batch(packed: Path, tmp_path: Path) -> None:
    """Also with unknown labels, of which the pieces of a batch have different numbers."""
    for name, pieces in (("one", 1), ("four", 4)):
        config = settings("training.epochs=1", "augment.flip=0", f"training.accumulate={pieces}")
        list(run_finetune(experiment(packed, tmp_path / name), config))
    one, four = (load_file(tmp_path / name / "seed-0/model.safetensors") for name in ("one", "four"))
    for key in ("head.weight", "head.bias", "encoder.blocks.0.mlp.fc1.weight"):
        torch.testing.assert_close(one[key], four[key], rtol=1e-3, atol=1e-6)


def test_small_sets_are_passed_several_times(packed: Path, tmp_path: Path) -> None:
    list(run_finetune(experiment(packed, tmp_path), settings("training.epochs=2", "training.min_epoch_steps=9")))
    # 43 films give 2 updates of 16; in 4 passes they give 10.
    assert [record["step"] for record in epochs(tmp_path / "seed-0")] == [10, 20]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["labels=[Spto]"], "did you mean Spot?"),
        (["training.learning_rate=1e30", "training.clip=0"], "not finite at step"),
        (["training.batch_size=15", "training.accumulate=2"], "choose a multiple of 2"),
    ],
)
def test_mistakes_are_messages(packed: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        list(run_finetune(experiment(packed, tmp_path), settings(*overrides)))
    assert message in str(error.value)


def test_one_class_only_is_a_message(packed: Path, tmp_path: Path) -> None:
    from afire.data.splits import make_split

    manifest = PackedFilms(packed).manifest
    table = manifest.table
    well = sorted(table["patient"][table["normal"] == 1])
    rest = sorted(set(table["patient"]) - set(well))
    split = make_split(manifest, {"train": well[:20], "val": rest[:5], "test": rest[5:] + well[20:]}, "all", {})
    with pytest.raises(UserError, match=r"label Spot has 0 positive and 20 negative films in train"):
        list(run_finetune(experiment(packed, tmp_path, split=split), settings("labels=[Spot]")))
    assert not RunFolder(tmp_path / "seed-0").exists


def test_films_of_another_size_and_weights_of_another_architecture(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="films of 32 px are not whole patches of 24 px"):
        model = smallest_model(["encoder.patch_size=24", "image.size=48"])
        list(run_finetune(experiment(packed, tmp_path, model=model), settings()))
    list(run_finetune(experiment(packed, tmp_path / "a"), settings("training.epochs=1")))
    weights = str(tmp_path / "a/seed-0/model.safetensors")
    with pytest.raises(UserError, match="has another architecture"):
        model = smallest_model(["encoder.width=32"])
        list(run_finetune(experiment(packed, tmp_path / "b", weights=weights, model=model), settings()))


def test_the_command_writes_the_result(packed: Path, tmp_path: Path) -> None:
    words = ["finetune", "--weights", "random", "--data", str(packed), "--out", str(tmp_path / "out"), "--seeds", "0,1"]
    words += ["--preset", "tiny", "--labels", "Spot,Doubt", "--device", "cpu"]
    words += [word for setting in [*MODEL, *QUICK] for word in ("--set", setting)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = read_result(tmp_path / "out")
    assert result.labels == ["Spot", "Doubt"] and result.config["training"]["epochs"] == 3 and len(result.runs) == 2
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"result.json", "result.md", "predictions.parquet", "roc.png", "calibration.png", "labels.png"} <= files
    assert "not a medical device" in (tmp_path / "out/result.md").read_text()
