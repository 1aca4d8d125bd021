"""Recipes: every planned command is one that afire understands, and shared steps come once."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest
from typer.main import get_command

from afire.cli import app
from afire.errors import UserError
from afire.files import write_json
from afire.studies.ablation_grid import known_rows
from afire.studies.recorded import PlannedStep, StepFile, step_hashes
from afire.studies.reproduce_plan import (
    Request,
    check_films,
    config_of,
    is_pretrained_once,
    plan,
    possible_targets,
    with_finished,
)
from afire.studies.reproduce_sets import DATASETS, OURS, PAPER, PHANTOM, QUICK, TARGETS, column, published, scale_for

COMMAND: click.Command = get_command(app)  # made once: it is all of the command line


def request(on: str, out: Path, **changes: object) -> Request:
    targets, _ = possible_targets(TARGETS, DATASETS[on])
    films = {} if on == "phantom" else {"root": out / "films"}
    return Request(out, DATASETS[on], scale_for(on, False), targets, **{**films, **changes})  # type: ignore[arg-type]


def parse(step: PlannedStep) -> click.Context:
    """Read the command as afire would, without running it; what it does not know raises."""
    command, words = COMMAND, shlex.split(step.command)[1:]
    context = click.Context(command, info_name="afire")
    while isinstance(command, click.Group):
        name = words.pop(0)
        below = command.get_command(context, name)
        assert below is not None, f"{step.name}: there is no {name}"
        command = below
    return command.make_context(step.name, words)


@pytest.mark.parametrize("on", list(DATASETS))
@pytest.mark.parametrize("quick", [False, True])
def test_every_planned_command_is_understood(on: str, quick: bool, tmp_path: Path) -> None:
    asked = request(on, tmp_path)
    if quick and on != "phantom":
        asked = replace(asked, scale=QUICK)
    steps = plan(asked)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    for number, step in enumerate(steps):
        assert set(step.needs) <= set(names[:number]), step.name
        parse(step)
        for word in step.resume:
            parse(replace(step, arguments=(*step.arguments, word)))


def test_the_papers_protocol_is_five_folds_three_ratios_three_seeds(tmp_path: Path) -> None:
    steps = {step.name: step for step in plan(request("nih", tmp_path))}
    assert "--fraction 1,10,100 --seeds 0,1,2" in steps["finetune"].command
    assert "--folds 5" in steps["finetune-folds"].command and "--recipe nih14" in steps["finetune"].command
    assert {"detect-0", "detect-1", "detect-2"} <= set(steps["detect-eval"].needs)
    assert "--seeds 0,1,2 --preset paper" in steps["table1"].command
    assert config_of(request("nih", tmp_path)).training.epochs == 800


def test_targets_share_their_steps(tmp_path: Path) -> None:
    asked = request("phantom", tmp_path)
    together = {step.name: step.command for step in plan(asked)}
    apart = [{s.name: s.command for s in plan(replace(asked, targets=(target,)))} for target in asked.targets]
    assert together == {name: command for steps in apart for name, command in steps.items()}
    assert sum("pretrain-0" in steps for steps in apart) == 5 and sum("pretrain-1" in steps for steps in apart) == 3
    for steps in apart:
        assert steps.items() <= together.items()  # alone or together, a step is the same


def test_films_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    pack, run = tmp_path / "pack", tmp_path / "run"
    write_json(pack / "pack.json", {"settings": {"size": 224}})
    run.mkdir()
    asked = request("childcxr", tmp_path / "out", root=None, data=pack, weights=run)
    check_films(asked)
    names = [step.name for step in plan(asked)]
    assert not {"films", "pack", "pretrain-0"} & set(names) and "table1" in names
    write_json(pack / "pack.json", {"settings": {"size": 128}})
    with pytest.raises(UserError, match="128 px, and the preset paper takes 224"):
        check_films(asked)


def test_other_films_to_pretrain_on(tmp_path: Path) -> None:
    manifest = tmp_path / "mimic.parquet"
    manifest.touch()
    steps = {step.name: step for step in plan(request("nih", tmp_path, pretrain_data=manifest))}
    assert f"--data {tmp_path / 'packs' / 'mimic'} " in steps["pretrain-2"].command
    assert steps["pretrain-2"].needs == ("pretrain-pack",) and "pack" in steps["finetune"].needs


def test_every_seed_has_a_pretraining_of_its_own(tmp_path: Path) -> None:
    steps = {step.name: step for step in plan(request("nih", tmp_path))}
    for seed in (0, 1, 2):
        run = tmp_path / f"pretrain-{seed}"
        assert f"--out {run} " in steps[f"pretrain-{seed}"].command
        assert steps[f"pretrain-{seed}"].command.endswith(f"--seed {seed}")
        assert f"--weights {run} " in steps[f"detect-{seed}"].command
        assert steps[f"detect-{seed}"].needs == ("pack", f"pretrain-{seed}")
    assert f"--weights '{tmp_path}/pretrain-{{seed}}'" in steps["finetune"].command
    assert steps["finetune"].needs == ("pack", "pretrain-0", "pretrain-1", "pretrain-2")
    assert steps["finetune-folds"].needs == ("pack", "pretrain-0")  # one seed only
    assert f"--weights AFiRe={tmp_path}/pretrain-0 " in steps["tsne"].command
    assert steps["tsne"].needs == ("pack", "pretrain-0")


def test_weights_may_be_a_run_for_each_seed(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    write_json(pack / "pack.json", {"settings": {"size": 224}})
    asked = request("nih", tmp_path / "out", root=None, data=pack, weights=tmp_path / "run-{seed}")
    for seed in (0, 1):
        (tmp_path / f"run-{seed}").mkdir()
    with pytest.raises(UserError, match=r"--weights .*run-2 does not exist"):
        check_films(asked)
    (tmp_path / "run-2").mkdir()
    check_films(asked)
    steps = {step.name: step for step in plan(asked)}
    assert f"--weights {tmp_path}/run-1 " in steps["detect-1"].command and not is_pretrained_once(asked)
    assert steps["detect-1"].inputs == (pack, *(tmp_path / f"run-{seed}" for seed in (0, 1, 2)))
    assert is_pretrained_once(replace(asked, weights=tmp_path / "run-0"))


# Of `reproduce all --on phantom`, when there was one pre-training for all seeds.
OLD_HASHES = {
    "films": "d7e77a8c06dcc0a8",
    "pretrain": "aa89a4f0575cdde4",
    "finetune": "f6bce2213d4a3667",
    "finetune-folds": "442338781e17e6eb",
    "detect-1": "2afc3a9b973b90cd",
    "detect-eval": "46bfbdce6e078567",
    "table4": "a75dc127c13f152d",
    "restorations": "ce1b5c91eeb10839",
}


def test_what_an_earlier_version_began_goes_on_as_it_began(tmp_path: Path) -> None:
    asked = request("phantom", tmp_path)
    StepFile("begun", OLD_HASHES["pretrain"], "", 1.0).write(tmp_path, "pretrain")
    steps = plan(asked)
    hashes = {name: digest[:16] for name, digest in step_hashes(steps, tmp_path).items()}
    assert OLD_HASHES.items() <= hashes.items() and len(hashes) == 16
    assert is_pretrained_once(asked)


def test_targets_of_earlier_starts_are_told_again(tmp_path: Path) -> None:
    asked = replace(request("phantom", tmp_path), targets=("fig-restore",))
    steps = plan(replace(asked, targets=("table3",)))
    hashes = step_hashes(steps, tmp_path)
    for step in steps[:-1]:
        StepFile("done", hashes[step.name], step.command, 2.0).write(tmp_path, step.name)
    assert with_finished(asked, tmp_path) == (asked, {})
    StepFile("done", hashes[steps[-1].name], steps[-1].command, 2.0).write(tmp_path, steps[-1].name)
    both, seconds = with_finished(asked, tmp_path)
    assert both.targets == ("fig-restore", "table3") and sum(seconds.values()) == 2.0 * len(steps)


@pytest.mark.parametrize("on", [name for name in DATASETS if name != "phantom"])
def test_missing_films_are_named_with_what_to_do(on: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"download .*`afire data build {on} --root FOLDER"):
        check_films(request(on, tmp_path, root=None))
    with pytest.raises(UserError, match="does not exist"):
        check_films(request(on, tmp_path, root=tmp_path / "nowhere"))


def test_what_a_set_lacks_is_said() -> None:
    targets, reasons = possible_targets(TARGETS, DATASETS["siim"])
    assert targets == ("table2", "fig-tsne", "fig-restore") and "boxes" in reasons["fig-cam"]


def test_settings_go_to_the_steps_they_name(tmp_path: Path) -> None:
    settings = {"pretrain": ["training.epochs=2"], "finetune": ["training.epochs=1"], "detect": ["adapt.epochs=0"]}
    scale = PHANTOM.changed(settings=settings)
    steps = {step.name: step.command for step in plan(replace(request("phantom", tmp_path), scale=scale))}
    assert "--set training.epochs=2" in steps["pretrain-0"] and "--set training.epochs=8" in steps["table1"]
    assert "--set training.epochs=1" in steps["finetune"] and "training.epochs=6" not in steps["finetune"]
    assert "--set adapt.epochs=0" in steps["detect-0"]
    assert (
        PAPER.changed(preset="small").preset == "small"
        and PHANTOM.changed(preset="small").set_arguments("pretrain") == ()
    )
    with pytest.raises(UserError, match="quick as it is"):
        scale_for("phantom", quick=True)


def test_published_numbers() -> None:
    nih, childcxr, siim = column("table2", "nih"), column("table3", "childcxr"), column("table2", "siim")
    assert nih is not None and childcxr is not None and siim is not None
    assert nih.rows[OURS] == pytest.approx({"1": 0.632, "10": 0.761, "100": 0.832, "folds": 0.845})
    assert siim.rows[OURS] == pytest.approx({"1": 0.684, "10": 0.763, "100": 0.924, "folds": 0.877})
    assert childcxr.rows["SQUID"] == pytest.approx({"accuracy": 0.803, "auc": 0.876, "f1": 0.847})
    assert column("table2", None) is None
    assert all(row.paper for row in known_rows().values() if {"table1", "table4"} & set(row.tables))
    for table in ("table2", "table3"):
        for part in published()[table].values():
            if isinstance(part, dict):
                assert all(0 < value < 100 for row in part["rows"].values() for value in row.values())
