"""Methods side by side: a counted budget, test films last and none of them in a search, and what the table says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afire.data.pack import PackedFilms
from afire.data.splits import read_split
from afire.errors import UserError
from afire.files import read_json
from afire.methods import METHODS
from afire.report.baselines import (
    baselines_page,
    differences_table,
    messages,
    rows_table,
    search_table,
    write_baselines,
)
from afire.studies.baselines import (
    BESIDE,
    TASKS,
    Baselines,
    Length,
    method_config,
    parse_names,
    plan_steps,
    plan_training,
    possible_methods,
    possible_tasks,
)
from afire.studies.baselines_search import OWN, RATES, choose, development, plan_choices, search_steps
from afire.studies.baselines_sets import open_further_sets, open_study_set
from afire.studies.baselines_table import collect, facts, paper_numbers, paper_protocol, traps
from afire.studies.recorded import StepFile, done_steps, step_hashes
from tests import commands
from tests.studies.conftest import SMALLEST, draw_pack
from tests.tasks.test_compare import write_scored

SMALL = [text for text in SMALLEST if not text.startswith(("image.size", "training.epochs"))]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pack(tmp_path_factory.mktemp("baselines"), 120, builder="childcxr")


@pytest.fixture
def study(packed: Path, tmp_path: Path) -> Baselines:
    return Baselines(
        out=tmp_path / "study",
        films=open_study_set(packed, tmp_path / "study"),
        methods=["afire", "mae", "genesis"],
        seeds=[0, 1],
        lengths=[Length("flops", 0.002), Length("epochs", 2)],
        tasks=["probe", "knn"],
        preset="tiny",
        settings={"pretrain": SMALL},
    )


def test_names_and_what_is_left_out(study: Baselines) -> None:
    assert parse_names("all", TASKS, "--tasks") == list(TASKS) and parse_names("knn, probe,knn", TASKS, "-t") == [
        "knn",
        "probe",
    ]
    with pytest.raises(UserError, match=r"--tasks knows no 'prob'; it takes all, or some of probe, knn"):
        parse_names("prob", TASKS, "--tasks")
    names, told = possible_methods("all", None)
    assert "imagenet" not in names and set(names) | {"imagenet"} == set(METHODS) and "--init FILE" in told[0]
    assert possible_methods("all", "vit.pth") == (list(METHODS), [])
    with pytest.raises(UserError, match="the row imagenet learns nothing by itself"):
        possible_methods("afire,imagenet", None)
    tasks, told = possible_tasks(TASKS, study.films)
    assert "segment" not in tasks and told == ["segment is left out: the films have no masks"]
    with pytest.raises(UserError, match="nowhere does not exist"):
        open_study_set(study.out / "nowhere", study.out)


def test_the_budget_is_counted_and_equal(study: Baselines) -> None:
    flops, epochs = study.lengths
    trainings = {method: plan_training(study, method, flops) for method in study.methods}
    for training in trainings.values():
        assert training.flops == pytest.approx(0.002e12, rel=0.6 / training.epochs) and training.epochs > 1
        assert training.films == study.films.normals and training.parameters > 0
    assert trainings["mae"].epochs > trainings["genesis"].epochs, "it sees a quarter of the patches"
    assert {plan_training(study, method, epochs).epochs for method in study.methods} == {2}
    warm = next(word for word in trainings["mae"].words if word.startswith("training.warmup_epochs="))
    assert float(warm.partition("=")[2]) == pytest.approx(trainings["mae"].epochs / 3, abs=0.01), "as in the preset"
    supervised = plan_training(replace(study, methods=["supervised"]), "supervised", flops)
    assert supervised.films == study.films.labelled > study.films.normals
    assert "options.labels=[abnormal]" in supervised.words
    assert plan_training(study, "imagenet", flops).flops == 0


def test_test_films_come_after_all_pretrainings(study: Baselines) -> None:
    study = replace(study, tasks=list(TASKS), settings={**study.settings, "finetune": ["training.epochs=1"]})
    trainings = {
        (length.by, method): plan_training(study, method, length)
        for length in study.lengths
        for method in study.methods
    }
    steps = plan_steps(study, trainings, ("--device", "cpu"))
    kinds = [step.arguments[0] for step in steps]
    assert kinds[:12] == ["pretrain"] * 12 and "pretrain" not in kinds[12:]
    names = [step.name for step in steps]
    assert names[:4] == ["flops-afire-0", "flops-mae-0", "flops-genesis-0", "epochs-afire-0"]
    assert {f"beside-{name}-0-1" for name in ("random-probe", "area-probe", "sharpness-probe", "random-knn")} <= {
        *names
    }
    by_name = {step.name: step for step in steps}
    probe = by_name["flops-mae-probe-0-1"]
    assert probe.needs == ("flops-mae-0", "flops-mae-1")
    assert "seed-{seed}" in probe.command and "--fraction 1,10,100" in probe.command
    assert by_name["flops-mae-gaussian-1"].needs == ("flops-mae-1",)
    assert "--set score=gaussian --set adapt.epochs=0" in by_name["flops-mae-gaussian-1"].command
    assert "--set training.epochs=1" in by_name["epochs-mae-finetune-0-1"].command
    assert "head.hidden" not in by_name["flops-mae-0"].command and "head.hidden" in by_name["flops-afire-0"].command


def test_a_method_is_probed_on_the_vector_that_its_loss_reads(study: Baselines) -> None:
    """DINO's is the class token; the tokens beside it are left to themselves in its last block."""
    study = replace(study, methods=["mae", "moco", "dino", "adam2"], lengths=study.lengths[1:])
    trainings = {("epochs", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    steps = [step for step in plan_steps(study, trainings) if step.arguments[0] == "probe"]  # type: ignore[arg-type]
    assert {step.name for step in steps if "--pool class" in step.command} == {
        "epochs-dino-probe-0-1",
        "epochs-dino-knn-0-1",
    }
    meant = replace(study, own={"dino": ["options.pool=mean"]})
    assert not any("--pool" in step.command for step in plan_steps(meant, trainings))  # type: ignore[arg-type]


def test_in_turn_a_method_is_finished_before_the_next(study: Baselines) -> None:
    study = replace(study, in_turn=True, lengths=study.lengths[:1], tasks=["probe", "gaussian"])
    trainings = {("flops", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    steps = plan_steps(study, trainings)  # type: ignore[arg-type]
    kinds = [
        f"{step.arguments[0]} {step.arguments[1]}" if step.arguments[0] == "detect" else step.arguments[0]
        for step in steps
    ]
    row = ["probe", "detect fit", "detect fit", "detect eval"]
    trivial = ["probe"] * 5  # random weights, the built-in network, area, sharpness, edge
    assert kinds == ["pretrain"] * 2 + trivial + row + (["pretrain"] * 2 + row) * 2
    assert len({step.name for step in steps}) == len(steps)
    plain = plan_steps(replace(study, in_turn=False), trainings)  # type: ignore[arg-type]
    assert {step.name: step.arguments for step in plain} == {step.name: step.arguments for step in steps}


def test_the_same_weights_are_measured_on_further_sets(study: Baselines, packed: Path, tmp_path: Path) -> None:
    """Every set has its tasks, its rows beside and its table; nothing is trained for it, and no other step changes."""
    other = draw_pack(tmp_path / "other")
    first = replace(study, lengths=study.lengths[:1], tasks=["probe", "knn", "gaussian"], fractions=[50, 100])
    further = replace(first, also=open_further_sets([f"nih={other}"], first.out, first.films))
    trainings = {("flops", method): plan_training(first, method, first.lengths[0]) for method in first.methods}
    alone, both = plan_steps(first, trainings), plan_steps(further, trainings)  # type: ignore[arg-type]
    names = {step.name for step in alone}
    assert [step for step in both if step.name in names] == alone
    added = {step.name: step for step in both if step.name not in names}
    assert "pretrain" not in {step.arguments[0] for step in added.values()}
    probe = added["flops-mae-also-nih-probe-0-1"]
    assert probe.needs == ("flops-mae-0", "flops-mae-1") and f"--data {other}" in probe.command
    assert f"--weights '{first.out}/flops/mae/seed-{{seed}}'" in probe.command
    assert f"--weights {first.out}/flops/mae/seed-1" in added["flops-mae-also-nih-gaussian-1"].command
    assert {"beside-random-also-nih-probe-0-1", "beside-sharpness-also-nih-probe-0-1"} <= set(added)
    assert "beside-area-also-nih-probe-0-1" in added, "the sizes of these films are known"

    fill(first, packed, {"afire": 0.6, "mae": 3.0, "random": 2.0})
    films = PackedFilms(other)
    for stream, (method, noise) in enumerate({"afire": 3.0, "mae": 0.3}.items()):
        for percent in first.fractions:
            out = first.out / "flops" / method / "also" / "nih" / "probe" / f"{percent}pct"
            write_scored(out, films, noise, [0, 1], percent / 100, stream=stream)
    tables = collect(further, trainings)  # type: ignore[arg-type]
    assert [(table.name, table.rows[0].name) for table in tables] == [("flops", "afire"), ("flops-nih", "mae")]
    page = write_baselines(tmp_path / "page", tables, facts(further), traps(further, tables)).read_text()
    assert "## Equal compute: 0.002 TFLOP each, on nih" in page and "| also tested on | nih |" in page
    assert (tmp_path / "page" / "baselines-flops-nih.csv").exists()
    assert (tmp_path / "page" / "p-values-flops-nih.png").exists()


def test_a_further_set_that_cannot_be_measured_is_refused(study: Baselines, packed: Path, tmp_path: Path) -> None:
    other = draw_pack(tmp_path / "other", size=2 * study.films.size)
    for text, problem in {
        "nih=nowhere": "--also nowhere does not exist; give a pack or a manifest",
        f"../nih={other}": "name the set with letters, digits",
        f"nih={other}": f"holds films of {2 * study.films.size} px, but --data of {study.films.size} px",
        f"same={packed}": "this set is in the study already",
    }.items():
        with pytest.raises(UserError, match=problem):
            open_further_sets([text], study.out, study.films)
    assert not (study.out / "also").exists()


def test_a_study_goes_on_from_its_records(study: Baselines) -> None:
    """Where the results of a method are there, its weights need not be; what is left to do still gets them."""
    study = replace(study, methods=["mae"], seeds=[0], lengths=study.lengths[:1], tasks=["probe", "knn"])
    trainings = {("flops", "mae"): plan_training(study, "mae", study.lengths[0])}
    steps = plan_steps(study, trainings)  # type: ignore[arg-type]
    hashes = step_hashes(steps, study.out)
    for step in steps:
        StepFile("done", hashes[step.name], step.command, 1.0).write(study.out, step.name)
        if step.makes is not None and step.arguments[0] == "probe":
            step.makes.parent.mkdir(parents=True, exist_ok=True)
            step.makes.touch()
    assert done_steps(steps, study.out, hashes) == {step.name for step in steps}
    (study.out / "flops" / "mae" / "knn" / "result.json").unlink()
    left = {step.name for step in steps} - done_steps(steps, study.out, hashes)
    assert left == {"flops-mae-0", "flops-mae-knn-0"}


def test_another_split_is_another_study(study: Baselines, tmp_path: Path) -> None:
    given = tmp_path / "split.json"
    given.write_text("{}")
    study = replace(study, methods=["mae"], lengths=study.lengths[:1], films=replace(study.films, split=given))
    trainings = {("flops", "mae"): plan_training(study, "mae", study.lengths[0])}
    before = step_hashes(plan_steps(study, trainings), study.out)  # type: ignore[arg-type]
    moved = replace(study, films=replace(study.films, split=given.rename(tmp_path / "moved.json")))
    assert step_hashes(plan_steps(moved, trainings), study.out) == before, "where it lies says nothing"  # type: ignore[arg-type]
    (tmp_path / "moved.json").write_text("{ }")
    after = step_hashes(plan_steps(moved, trainings), study.out)  # type: ignore[arg-type]
    assert not set(before.values()) & set(after.values())


def test_all_methods_start_from_one_file(study: Baselines, packed: Path, tmp_path: Path) -> None:
    said = {"encoder": {"size": None, "width": 24, "depth": 2, "heads": 2}, "image": {"size": 64, "channels": 3}}
    plain = [word for word in SMALL if not word.startswith("encoder.")]
    start = tmp_path / "vit.safetensors"
    start.write_bytes(b"weights")
    study = replace(
        study,
        methods=["imagenet", "mae"],
        lengths=study.lengths[1:],
        settings={"pretrain": plain},
        start=str(start),
        start_all=True,
        weights_settings=said,
    )
    frozen = replace(study, settings={"pretrain": [*plain, "training.frozen_blocks=1"]})
    free, held = (plan_training(each, "mae", study.lengths[0]) for each in (study, frozen))
    assert held.parameters < free.parameters and held.flops < free.flops, "what is frozen costs no backward"
    assert method_config(study, "mae", free.words).encoder.width == 24
    assert method_config(replace(study, start_all=False), "mae", free.words).encoder.width != 24
    trainings = {("epochs", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    steps = {step.name: step for step in plan_steps(study, trainings)}  # type: ignore[arg-type]
    assert f"--init {start}" in steps["epochs-mae-0"].command and start in steps["epochs-mae-0"].inputs
    random = steps["beside-random-probe-0-1"].command
    assert "--set encoder.width=24" in random and "--set encoder.size=null" in random and "image.size=64" not in random
    alone = {step.name: step for step in plan_steps(replace(study, start_all=False), trainings)}  # type: ignore[arg-type]
    assert "--init" in alone["epochs-imagenet-0"].arguments and "--init" not in alone["epochs-mae-0"].arguments
    study = replace(study, fractions=[50, 100])
    for method in study.methods:
        for percent in study.fractions:
            out = study.out / "epochs" / method / "probe" / f"{percent:g}pct"
            write_scored(out, PackedFilms(packed), 1.0, [0, 1], percent / 100)
    [table] = collect(study, trainings)  # type: ignore[arg-type]
    assert table.reference == "imagenet" and facts(study)["start"] == "all methods from vit.safetensors"


def test_a_search_is_equal_and_sees_no_test_film(study: Baselines, packed: Path) -> None:
    on_development = development(study)
    manifest = PackedFilms(packed).manifest
    split = read_split(study.out / "search" / "split.json")
    seen = np.concatenate(list(split.rows(manifest).values()))
    assert set(manifest.table["split"].iloc[seen]) == {"train"}
    assert on_development.films.split == study.out / "search" / "split.json"
    assert on_development.films.normals < study.films.normals
    for method in study.methods:
        choices = plan_choices(on_development, method)
        assert len(choices) == len(RATES) * 2 and len({choice.words for choice in choices}) == 6
        assert {choice.words[1].partition("=")[0] for choice in choices} == {OWN[method][0]}
    steps = search_steps(on_development, Length("flops", 0.0005))
    assert len(steps) == 3 * 6 * 2 and all(
        f"--split {split_path}" in step.command for step in steps for split_path in [study.out / "search/split.json"]
    )


def test_every_method_that_learns_has_a_setting_to_search() -> None:
    assert {name for name, kind in METHODS.items() if kind.trains} == OWN.keys()


def test_the_best_on_development_films_is_chosen_and_recorded(study: Baselines, packed: Path) -> None:
    films, study = PackedFilms(packed), replace(study, methods=["mae"])
    for number, choice in enumerate(plan_choices(study, "mae")[:4]):
        write_scored(study.out / "search" / "mae" / choice.name / "probe", films, 3.0 if number != 2 else 0.1, [0])
    chosen, tried = choose(study, Length("flops", 0.0005))
    assert (
        chosen["mae"] == plan_choices(study, "mae")[2].words
        and [trial.auc is None for trial in tried] == [False] * 4 + [True] * 2
    )
    record = read_json(study.out / "search.json")
    assert record["chosen"] == {"mae": list(chosen["mae"])} and "no test film" in record["films"]
    assert chosen["mae"][0] in plan_training(replace(study, chosen=chosen), "mae", study.lengths[0]).words
    assert [row.cells[3] for row in search_table(tried).rows] == ["", "", "chosen", "", "", ""]
    with pytest.raises(UserError, match="no trial of the search for genesis has finished"):
        choose(replace(study, methods=["genesis"]), study.lengths[0])


def fill(study: Baselines, packed: Path, noises: dict[str, float]) -> None:
    """Results whose scores are the truth with noise, as the tasks would have written them."""
    films = PackedFilms(packed)
    for stream, (method, noise) in enumerate(noises.items()):
        folder = study.out / ("beside" if method in ("random", "area") else "flops") / method
        for percent in study.fractions:
            write_scored(folder / "probe" / f"{percent:g}pct", films, noise, [0, 1], percent / 100, stream=stream)
        if method != "area":
            write_scored(folder / "knn", films, noise, [0, 1], stream=10 + stream)


def test_the_table_its_words_and_its_files(study: Baselines, packed: Path, tmp_path: Path) -> None:
    study = replace(study, lengths=study.lengths[:1], fractions=[50, 100])
    fill(study, packed, {"afire": 0.6, "mae": 3.0, "genesis": 0.7, "random": 2.0, "area": 0.1})
    trainings = {("flops", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    [table] = collect(study, trainings)  # type: ignore[arg-type]
    assert table.reference == "afire" and list(table.measures) == ["probe-100", "probe-50", "knn"]
    names = [row.name for row in table.rows]
    assert set(names[:2]) == {"afire", "genesis"} and names[2:] == ["mae", "random weights", "original area only"]
    mae = table.rows[2]
    assert mae.against["probe-100"].value < 0 and mae.against["probe-100"].p_patients < 0.05
    afire = next(row for row in table.rows if row.name == "afire")
    assert mae.training is not None and afire.paper == pytest.approx({"probe-100": 0.894, "gaussian": 0.908})
    assert table.pairs is not None and len(table.pairs.names) == 3
    np.testing.assert_allclose(table.pairs.difference, -table.pairs.difference.T)
    told = messages(table)
    assert told[0].startswith("by probe 100 %: ") and any(
        line.startswith("below afire") and "mae" in line for line in told
    )
    warned = traps(study, [table])
    assert any("too few to rank" in line for line in warned) and any("ChildCXR" in line for line in warned)
    assert any("not above original area only" in line and "mae" in line for line in warned)
    page = write_baselines(tmp_path / "page", [table], facts(study), warned)
    text = page.read_text()
    assert (
        "## Equal compute: 0.002 TFLOP each" in text
        and "| *random weights* |" in text
        and "## The paper's numbers" in text
    )
    for name in ("baselines.png", "p-values-flops.png", "baselines.tex", "baselines-flops.csv", "baselines.json"):
        assert (tmp_path / "page" / name).stat().st_size > 0
    first = (tmp_path / "page" / "baselines-flops.csv").read_text().splitlines()[0]
    assert first.startswith("method,probe-100,probe-50,knn,interval,against,p_patients,p_seeds,epochs,films,tera_flops")
    record = read_json(tmp_path / "page" / "baselines.json")["tables"][0]
    assert len(record["pairs"]["p_patients"]) == 3 and record["pairs"]["p_patients"][0][0] is None
    assert len(rows_table(table).rows) == 5 and "Traps" not in baselines_page([table], {}, [])
    every = differences_table(table)
    assert every is not None and {row.cells[0] for row in every.rows} == {*names} - {"afire"}
    [line] = [line for line in text.splitlines() if line.startswith("| mae | −") and " / " in line]
    assert line.count(" / ") == 3, "a difference with both p-values in each of the three measures"


def test_what_is_not_there_has_no_row(study: Baselines, packed: Path) -> None:
    study = replace(study, lengths=study.lengths[:1], fractions=[50, 100])
    trainings = {("flops", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    assert collect(study, trainings) == []  # type: ignore[arg-type]
    fill(study, packed, {"mae": 0.5})
    [table] = collect(study, trainings)  # type: ignore[arg-type]
    assert [row.name for row in table.rows] == ["mae"] and table.reference == "mae" and table.pairs is None


def test_rows_that_rest_on_records_say_so(study: Baselines, packed: Path) -> None:
    study = replace(study, lengths=study.lengths[:1], fractions=[50, 100], methods=["afire", "mae"])
    trainings = {("flops", method): plan_training(study, method, study.lengths[0]) for method in study.methods}
    fill(study, packed, {"afire": 0.6, "mae": 3.0})
    for seed in study.seeds:
        (study.out / "flops" / "afire" / f"seed-{seed}" / "checkpoints").mkdir(parents=True)
    [table] = collect(study, trainings)  # type: ignore[arg-type]
    told = traps(study, [table])
    assert any(line.endswith("from the records of an earlier sitting, their weights are gone: mae") for line in told)
    assert not any("without predictions" in line for line in told)
    for file in (study.out / "flops" / "mae").rglob("predictions.parquet"):
        file.unlink()
    [table] = collect(study, trainings)  # type: ignore[arg-type]
    mae = table.rows[1]
    assert mae.name == "mae" and np.isnan(mae.against["probe-100"].p_patients) and mae.against["probe-100"].p_seeds < 1
    assert table.pairs is not None and np.isnan(table.pairs.p_patients).all()
    assert any("not every difference has a test over patients: mae" in line for line in traps(study, [table]))
    assert "nan" not in rows_table(table).markdown()


def test_the_papers_numbers_stand_beside_the_nearest_measure() -> None:
    assert paper_numbers("nih", "dira") == pytest.approx({"finetune": 0.827})
    assert paper_numbers("siim", "pcrl") == pytest.approx({"segment": 0.813})
    assert (
        paper_numbers("nih", "genesis") == pytest.approx({"finetune": 0.808}) and paper_numbers("siim", "genesis") == {}
    )
    assert paper_protocol("nih") == "112,120 films of 30,805 patients, official parts" and paper_protocol("") == ""
    assert paper_protocol("childcxr").startswith("1,349 normal films to train on")
    assert paper_numbers("childcxr", "mae") == {} and paper_numbers("nih", "supervised") == {} == paper_numbers(
        "", "mae"
    )


@pytest.mark.slow
def test_a_study_is_killed_goes_on_and_ends_in_a_table(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = [
        *("baselines", "--methods", "mae,genesis", "--seeds", "0", "--budget", "0.0005", "--preset", "tiny"),
        *("--data", packed, "--out", out, "--tasks", "probe", "--fraction", "100", "--device", "cpu", "--jobs", "2"),
        *(word for setting in SMALL for word in ("--set", setting)),
    ]
    first = commands.start(*words)
    first.wait_until(lambda: (out / "steps" / "flops-mae-0.json").exists())
    first.kill()
    shown = commands.run(*words)
    assert "by probe 100 %: " in shown.stdout and "too few to rank" in shown.stdout
    table = read_json(out / "baselines.json")["tables"][0]
    rows = {row["name"]: row for row in table["rows"]}
    assert set(rows) == {
        "mae",
        "genesis",
        *(BESIDE[name] for name in ("random", "builtin", "area", "sharpness", "edge")),
    }
    assert rows["mae"]["core_minutes"] > 0 and rows["mae"]["health"] and rows["mae"]["training"]["epochs"] >= 1
    for folder in (out / "flops").glob("*/seed-*/checkpoints"):
        shutil.rmtree(folder)
    again = commands.run(*words)
    assert "their weights are gone: mae, genesis" in " ".join(again.stdout.split())
    assert not list((out / "flops").glob("*/seed-*/checkpoints"))
    other = commands.run(*[word if word != "0.0005" else "0.05" for word in words], expect=2)
    assert "repeat the earlier settings, or choose another --out" in other.stderr
