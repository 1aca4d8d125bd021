"""The loop in one process: what it writes, what it refuses, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from afire.cli import app
from afire.config import Config
from afire.data.pack import DecodedFilms, PackedFilms, open_films
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.methods.health import Health
from afire.report.sheets import EpochPictures
from afire.settings import load_config
from afire.training.batches import normal_training_rows
from afire.training.engine import make_optimizer
from afire.training.online import OnlineProbe
from afire.training.pretrain import pretrain
from afire.weights import start_from
from tests.training.conftest import SMALLEST

MakeConfig = Callable[..., Config]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model.safetensors")


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_folder_explains_itself(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    config = smallest("run.picture_epochs=2")
    films = PackedFilms(packed)
    rows, sentence = normal_training_rows(films.manifest)
    assert sentence == "using 24 normal films of 32 training films (8 of other parts left alone)"
    result = pretrain(config, films, tmp_path / "run", rows, observers=[EpochPictures(2, config.training.epochs)])
    assert result.status == "finished" and result.step == result.steps == 9
    run = tmp_path / "run"
    assert load_config(file=run / "config.yaml") == config
    assert json.loads((run / "data.json").read_text())["used"] == 24
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and 0 <= summary["data_wait"] < 1 and summary["images_per_second"] > 0
    assert "not a medical device" in (run / "README.md").read_text()
    assert {path.name for path in (run / "pictures").iterdir()} == {
        f"{kind}-000{epoch}.png" for kind in ("restorations", "prototypes") for epoch in (2, 3)
    }
    steps = [record for record in metrics(run) if "total" in record]
    assert [record["step"] for record in steps] == list(range(1, 10))
    assert steps[0]["learning_rate"] == pytest.approx(4e-3 * 8 / 256 / 3)
    epochs = [record for record in metrics(run) if "epoch" in record]
    assert len(epochs) == 3 and epochs[0]["health"] in ("green", "amber", "red") and epochs[0]["health_reason"]
    assert list((run / "tensorboard").iterdir())


def test_the_teacher_follows_and_the_last_layer_waits(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    config = smallest("training.epochs=1", "training.weight_decay=0", "training.weight_decay_end=0")
    pretrain(config, PackedFilms(packed), tmp_path / "run")
    start, end = AFiRe(config).state_dict(), weights(tmp_path / "run")
    assert torch.equal(start["student.head.last_layer.weight"], end["student.head.last_layer.weight"])
    assert not torch.equal(start["student.encoder.norm.weight"], end["student.encoder.norm.weight"])
    assert not torch.equal(start["teacher.encoder.norm.weight"], end["teacher.encoder.norm.weight"])
    again = smallest("training.epochs=1", "training.freeze_last_layer_epochs=0")
    pretrain(again, PackedFilms(packed), tmp_path / "free")
    freed = weights(tmp_path / "free")["student.head.last_layer.weight"]
    assert not torch.equal(start["student.head.last_layer.weight"], freed)


def test_the_same_seed_gives_the_same_weights(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(smallest(f"seed={seed}", "training.epochs=1"), PackedFilms(packed), tmp_path / name)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


@pytest.mark.parametrize("settings", [(), ("lesions.views=2", "encoder.drop_path=0.2"), ("losses.contrast=feature",)])
def test_accumulating_is_the_large_batch(
    packed: Path, smallest: MakeConfig, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Prototypes, Sinkhorn and the category loss see the whole batch, in however many pieces it is worked through."""
    for pieces in (1, 4):
        config = smallest("training.epochs=1", f"training.accumulate={pieces}", *settings)
        pretrain(config, PackedFilms(packed), tmp_path / str(pieces))
    whole, in_pieces = ([record for record in metrics(tmp_path / name) if "total" in record] for name in ("1", "4"))
    for one, other in zip(whole, in_pieces, strict=True):
        for name in ("structure", "category", "restoration", "total", "gradient_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-3), (one["step"], name)
    assert whole[0]["category"] > 0
    one, other = weights(tmp_path / "1"), weights(tmp_path / "4")
    torch.testing.assert_close(other["bank.prototypes"], one["bank.prototypes"], rtol=2e-3, atol=2e-4)
    assert torch.equal(other["bank.steps"], one["bank.steps"])


def test_a_step_means_the_same_films_after_a_resume(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films = PackedFilms(packed)
    pretrain(smallest("training.epochs=1"), films, tmp_path / "run")
    other = smallest("training.epochs=2", "training.batch_size=4")
    with pytest.raises(UserError, match=r"counts 5 steps in an epoch.*training\.batch_size from 7 to 8"):
        pretrain(other, films, tmp_path / "run", resume=True, force=True)
    assert load_config(file=tmp_path / "run/config.yaml") == smallest("training.epochs=1")
    with pytest.raises(UserError, match="cannot be shared by 1 processes in 3 pieces"):
        pretrain(smallest("training.accumulate=3"), films, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_that_its_weights_no_longer_fit_is_left_as_it_is(
    packed: Path, smallest: MakeConfig, tmp_path: Path
) -> None:
    films, run = PackedFilms(packed), tmp_path / "run"
    begun = smallest("training.epochs=1", "losses.lesion=1", "losses.lesion_finer=2")
    pretrain(begun, films, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = smallest("training.epochs=1", "losses.lesion=1", "losses.lesion_finer=4")
    with pytest.raises(UserError, match=r"does not fit this model: size mismatch for lesion_classifier"):
        pretrain(other, films, run, resume=True, force=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert pretrain(begun, films, run, resume=True).status == "finished"


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.precision=bf16"],
        ["training.accumulate=2"],
        ["lesions.views=2"],
        ["encoder.drop_path=0.2", "encoder.gradient_checkpointing=true"],
        ["losses.structure=0", "losses.category=0"],
        ["losses.restoration=0", "losses.lesion=1"],
        ["losses.contrast=feature"],
        ["prototypes.enabled=false"],
        ["head.form=per_position"],
        ["training.clip=0"],
        ["image.channels=3", "image.normalise=imagenet"],
    ],
    ids=" ".join,
)
def test_every_kind_of_run_runs(packed: Path, smallest: MakeConfig, tmp_path: Path, overrides: list[str]) -> None:
    config = smallest("training.epochs=1", "run.picture_epochs=1", *overrides)
    result = pretrain(config, PackedFilms(packed), tmp_path / "run", observers=[EpochPictures(1, 1)])
    assert result.status == "finished" and np.isfinite(result.losses["total"])


def test_films_are_decoded_where_there_is_no_pack(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    folder = PackedFilms(packed).manifest.root
    films = open_films(folder, size=32)
    result = pretrain(smallest("training.epochs=1"), films, tmp_path / "run")
    assert result.status == "finished"


def test_an_existing_run_is_not_overwritten(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    config, films = smallest("training.epochs=1"), PackedFilms(packed)
    pretrain(config, films, tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        pretrain(config, films, tmp_path / "run")
    with pytest.raises(UserError, match="holds no run to resume"):
        pretrain(config, films, tmp_path / "other", resume=True)


def test_resuming_with_other_settings_names_them(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films = PackedFilms(packed)
    pretrain(smallest("training.epochs=1"), films, tmp_path / "run")
    longer = smallest("training.epochs=2", "run.keep_checkpoints=5")
    with pytest.raises(UserError, match=r"training\.epochs was 1, is 2\); add --force"):
        pretrain(longer, films, tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="the data's hash was"):
        pretrain(smallest("training.epochs=1"), films, tmp_path / "run", np.arange(30), resume=True)
    result = pretrain(longer, films, tmp_path / "run", resume=True, force=True)
    assert result.step == 10


def test_resuming_on_changed_films_names_them(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    """Of loose films, whose list does not tell what is in them."""
    root = PackedFilms(packed).manifest.root
    films, run = open_films(root, size=32), tmp_path / "run"
    pretrain(smallest("training.epochs=1"), films, run)
    record = (run / "films.txt").read_text()
    old = (root / "film003.png").read_bytes()
    (root / "film003.png").write_bytes((root / "film004.png").read_bytes())
    (root / "film004.png").write_bytes(old)
    with pytest.raises(UserError, match=r"other settings or films \(films whose .*: film003\.png, film004\.png\); add"):
        pretrain(smallest("training.epochs=1"), films, run, resume=True)
    for name in ("film005.png", "film006.png", "film007.png"):
        (root / name).write_bytes((root / name).read_bytes() + b"1")
    with pytest.raises(UserError, match=r"film003\.png, film004\.png, film005\.png and 2 more"):
        pretrain(smallest("training.epochs=1"), films, run, resume=True)
    assert (run / "films.txt").read_text() == record
    pretrain(smallest("training.epochs=1"), films, run, resume=True, force=True)
    lines = (run / "films.txt").read_text().splitlines()
    assert lines[:40] == record.splitlines() and len(lines) == 43, "it has seen the films of before and of now"
    pretrain(smallest("training.epochs=1"), films, run, resume=True)  # what was forced once is known
    (root / "film009.png").unlink()
    with pytest.raises(UserError, match=r"not those of before: film009\.png\)"):
        pretrain(smallest("training.epochs=1"), films, run, resume=True)


def test_a_film_that_was_never_there_is_no_change(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    manifest = PackedFilms(packed).manifest
    (manifest.root / "film011.png").unlink()
    films = DecodedFilms(manifest, 32)  # its column of what was packed is of an earlier time
    pretrain(smallest("training.epochs=1"), films, tmp_path / "run")
    pretrain(smallest("training.epochs=1"), films, tmp_path / "run", resume=True)
    (manifest.root / "film012.png").write_bytes((manifest.root / "film013.png").read_bytes())
    with pytest.raises(UserError, match=r"not those of before: film012\.png\)"):
        pretrain(smallest("training.epochs=1"), films, tmp_path / "run", resume=True)


def test_resuming_a_finished_run_changes_nothing(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    config, films = smallest("training.epochs=1"), PackedFilms(packed)
    pretrain(config, films, tmp_path / "run")
    run = tmp_path / "run"
    before, told = weights(run), json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()  # as if it had been killed after its last checkpoint
    litter = [run / ".part-x.json", run / "checkpoints/.part-step-00000004/model.safetensors", run / "pictures/.part-y"]
    for left in litter:
        left.parent.mkdir(exist_ok=True)
        left.touch()
    result = pretrain(config, films, run, resume=True)
    assert result.status == "finished" and result.step == result.steps
    assert all(torch.equal(before[key], value) for key, value in weights(run).items())
    again = json.loads((run / "summary.json").read_text())
    assert again["losses"] == told["losses"] and told["losses"] and again["health"] == told["health"]
    assert not list(run.rglob(".part-*")), "what a kill left half-written is gone"


def test_a_loss_that_is_not_finite_stops_before_the_update(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    config = smallest("training.learning_rate=1e38", "training.clip=0", "training.warmup_epochs=0")
    with pytest.raises(UserError, match=r"not finite at step \d+ \(rows \["):
        pretrain(config, PackedFilms(packed), tmp_path / "run")
    report = json.loads((tmp_path / "run/failure/rank-0.json").read_text())
    assert len(report["rows"]) == 8 and report["images"][0].startswith("film") and report["step"] >= 1
    state = json.loads((tmp_path / "run/failure/state/state.json").read_text())
    assert state["step"] == report["step"]
    saved = load_file(tmp_path / "run/failure/state/model.safetensors")
    assert torch.isfinite(saved["bank.prototypes"]).all()  # as it was before the bad step


def test_a_failed_step_can_be_replayed(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    """The saved state and rows give the same not-finite loss again."""
    from afire.lesions.synthesis import synthesize_keyed

    config = smallest("training.learning_rate=1e38", "training.clip=0", "training.warmup_epochs=0")
    films = PackedFilms(packed)
    with pytest.raises(UserError):
        pretrain(config, films, tmp_path / "run")
    report = json.loads((tmp_path / "run/failure/rank-0.json").read_text())
    model = AFiRe(config)
    model.load_state_dict(load_file(tmp_path / "run/failure/state/model.safetensors"))
    images = films.batch(report["rows"])
    lesioned, mask = synthesize_keyed(
        images, seed=config.seed, epoch=report["epoch"], indices=report["rows"], config=config.lesions
    )
    losses = model.train().losses(model({"images": images, "lesioned": lesioned, "mask": mask}))
    losses.total.backward()
    finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    assert not (torch.isfinite(losses.total) and finite)


def test_stop_on_collapse(packed: Path, smallest: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AFiRe, "health", lambda *_: Health({}, "red", "collapse"))
    films = PackedFilms(packed)
    result = pretrain(smallest("training.epochs=5", "run.stop_on_collapse=true"), films, tmp_path / "a")
    assert result.status == "collapsed" and result.step == 10  # two epochs of five steps
    assert pretrain(smallest("training.epochs=3"), films, tmp_path / "b").status == "finished"


def test_online_probe_reports_validation_auc(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films = PackedFilms(packed)
    probe = OnlineProbe(films, None, every=1, most=100, seed=0)
    test_rows = np.flatnonzero(films.manifest.table["split"] == "test")
    assert not set(test_rows) & (set(probe.train) | set(probe.val)) and not set(probe.train) & set(probe.val)
    pretrain(smallest("training.epochs=1"), films, tmp_path / "run", observers=[probe])
    epoch = next(record for record in metrics(tmp_path / "run") if "epoch" in record)
    assert 0 <= epoch["online/linear_auc"] <= 1 and 0 <= epoch["online/knn_auc"] <= 1  # type: ignore[operator]


def test_wrong_size_of_films_is_a_sentence(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the films are 32 px, but image\.size is 64"):
        pretrain(smallest("image.size=64"), PackedFilms(packed), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_start_from_another_run(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:
    films = PackedFilms(packed)
    pretrain(smallest("training.epochs=2"), films, tmp_path / "first")
    config = smallest("training.epochs=1", "training.learning_rate=1e-30", "training.learning_rate_end=0")
    pretrain(config, films, tmp_path / "second", start=start_from(tmp_path / "first"))
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert torch.equal(
        first["teacher.encoder.blocks.0.attn.qkv.weight"], second["student.encoder.blocks.0.attn.qkv.weight"]
    )


def test_no_weight_decay_on_biases_norms_tokens_and_positions(smallest: MakeConfig) -> None:
    model = AFiRe(smallest("encoder.positions=learned"))
    groups = make_optimizer(model.parameters_of("all"), model.config.training).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain = {names[id(p)] for group in groups if not group["decays"] for p in group["params"]}
    decayed = {names[id(p)] for group in groups if group["decays"] for p in group["params"]}
    assert {"student.encoder.cls_token", "student.encoder.pos_embed", "student.encoder.norm.weight"} <= plain
    assert not any(name.endswith("bias") for name in decayed) and "student.encoder.blocks.0.mlp.fc1.weight" in decayed
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert plain | decayed == trainable and not any(name.startswith("teacher") for name in trainable)


def test_selection_without_labels_and_without_normals(packed: Path) -> None:
    manifest = PackedFilms(packed).manifest
    unknown = manifest.where(manifest.table["split"] == "train")
    unknown.table["normal"] = np.nan
    assert "no labels say which are normal" in normal_training_rows(unknown)[1]
    unknown.table["normal"] = 0.0
    with pytest.raises(UserError, match="none of the 32"):
        normal_training_rows(unknown)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--device", "cuda"], "--device cuda: torch sees no CUDA device"),
        (["--init", "no.pth"], "weights no.pth do not exist"),
        (["--split", "no.json"], "no.json does not exist"),
        (["--set", "run.probe_epochs=1"], "online probe needs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_inputs_of_the_command_are_sentences(
    packed: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("this machine has a GPU")
    # The bare folder has no labels, so there is nothing for the online probe to learn.
    data = PackedFilms(packed).manifest.root if "online" in sentence else packed
    settings = [word for setting in SMALLEST for word in ("--set", setting)]
    command = ["pretrain", "--data", str(data), "--out", str(tmp_path / "run"), *settings, *arguments]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError) and sentence in str(result.exception)
    assert not (tmp_path / "run/checkpoints").exists()
