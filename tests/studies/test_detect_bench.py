"""A bench of detectors: how long each trains, what is run, what is gone on with, and what the table says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.detect import DETECTORS
from afire.errors import UserError
from afire.files import read_json
from afire.report.detect_bench import bench_page, messages, write_bench
from afire.settings import load_config
from afire.studies.detect_bench import (
    Bench,
    BenchSet,
    Fit,
    LongFit,
    facts,
    open_set,
    parse_methods,
    plan_fit,
    plan_long_fits,
    plan_long_steps,
    plan_steps,
    settings_by_method,
)
from afire.studies.detect_bench_table import collect
from afire.studies.recorded import StepFile
from afire.weights import open_weights
from afire.weights.files import write_tensors
from tests import commands
from tests.tasks.conftest import draw_films

AEU = ["aeu.aeu.width=4", "aeu.train.batch_size=8", "aeu.held_out=0.4", "aeu.false_alarms=0.3"]
PATCHCORE = [
    *("patchcore.encoder.width=16", "patchcore.encoder.depth=1", "patchcore.encoder.heads=2"),
    *("patchcore.encoder.patch_size=8", "patchcore.held_out=0.4", "patchcore.false_alarms=0.3"),
]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets: one with lists and two views, one with neither."""
    folder = tmp_path_factory.mktemp("bench")
    table = draw_films(folder / "films", 240)
    listed = table.assign(view=["AP" if row % 2 or row % 12 == 2 else "PA" for row in range(240)])
    for name, films in (("listed", listed), ("plain", table.assign(split=""))):
        pack(make_manifest(films, folder / "films"), folder / name, PackSettings(size=32), workers=1)
    return {name: folder / name for name in ("listed", "plain")}


def test_methods_by_name() -> None:
    assert parse_methods("all") == list(DETECTORS) and parse_methods("aeu, memae,aeu") == ["aeu", "memae"]
    with pytest.raises(UserError, match="there is no detector 'autoencoder'"):
        parse_methods("aeu,autoencoder")
    with pytest.raises(UserError, match="--methods names none"):
        parse_methods(" , ")


def test_settings_are_of_a_method() -> None:
    assert settings_by_method(["aeu.train.epochs=3"], ["aeu"]) == {"aeu": ["train.epochs=3"]}
    with pytest.raises(UserError, match="begin with one of the methods of this bench: aeu"):
        settings_by_method(["train.epochs=3"], ["aeu"])


def test_a_set_without_lists_gets_a_split_of_its_own(packs: dict[str, Path], tmp_path: Path) -> None:
    plain = open_set(f"mine={packs['plain']}", tmp_path)
    assert plain.name == "mine" and plain.split == tmp_path / "mine" / "split.json" and plain.split.exists()
    written = plain.split.read_bytes()
    assert open_set(f"mine={packs['plain']}", tmp_path) == plain and plain.split.read_bytes() == written
    listed = open_set(str(packs["listed"]), tmp_path)
    assert listed.name == "listed" and listed.split is None and listed.size == 32
    with pytest.raises(UserError, match="nowhere does not exist; give a pack or a manifest"):
        open_set(str(tmp_path / "nowhere"), tmp_path)


def test_the_budget_is_counted_and_equal(packs: dict[str, Path], tmp_path: Path) -> None:
    films = open_set(str(packs["listed"]), tmp_path)
    small = Bench(tmp_path, [films], ["aeu", "memae", "afire", "patchcore"], [0], tera_flops=0.05, preset="tiny")
    fits = {method: plan_fit(small, films, method) for method in small.methods}
    assert fits["patchcore"].epochs is None and fits["patchcore"].flops == 0
    for method in ("aeu", "memae"):
        epochs = fits[method].epochs
        assert epochs is not None and epochs > 1
        assert fits[method].flops == pytest.approx(0.05e12, rel=0.5 / epochs + 0.01)
    twice = plan_fit(replace(small, tera_flops=0.1), films, "aeu")
    assert twice.epochs == pytest.approx(2 * (fits["aeu"].epochs or 0), abs=1)
    published = plan_fit(replace(small, length="published"), films, "aeu")
    assert published.epochs == DETECTORS["aeu"].published_epochs


@pytest.mark.parametrize(
    ("method", "setting"),
    [("aeu", "train.epochs=3"), ("aeu", "train.minutes=3"), ("afire", "training.film_views_min=3")],
)
def test_a_bench_says_itself_how_long_a_method_trains(
    packs: dict[str, Path], tmp_path: Path, method: str, setting: str
) -> None:
    films = open_set(str(packs["listed"]), tmp_path)
    bench = Bench(tmp_path, [films], [method], [0], preset="tiny", settings={method: [setting]})
    with pytest.raises(UserError, match=f"--with {method}.{setting}: a bench says itself"):
        plan_fit(bench, films, method)


def test_weights_without_settings_train_as_in_a_pre_training(packs: dict[str, Path], tmp_path: Path) -> None:
    """As a fit does; those of a run are adapted."""
    films = open_set(str(packs["listed"]), tmp_path)
    config = load_config("tiny", overrides=["image.size=32", "encoder.patch_size=8"])
    write_tensors(tmp_path / "vit.safetensors", open_weights("random", config, seed=0).trunk.state_dict())
    bench = Bench(tmp_path, [films], ["afire"], [0], tera_flops=0.05, weights=str(tmp_path / "vit.safetensors"))
    fit = plan_fit(bench, films, "afire")
    assert fit.setting == "training.epochs"
    [_, step, *_] = plan_steps(bench, {("listed", "afire"): fit})
    assert f"--set training.epochs={fit.epochs}" in step.command


def test_rows_come_seed_by_seed_and_evaluations_last(tmp_path: Path) -> None:
    films = [BenchSet("one", tmp_path / "one"), BenchSet("two", tmp_path / "two", tmp_path / "split", two_views=True)]
    bench = Bench(tmp_path, films, ["aeu", "patchcore"], [3, 4])
    fits = {
        (each.name, method): plan_fit(bench, replace(each, fit_films=100), method)
        for each in films
        for method in ("aeu", "patchcore")
    }
    steps = plan_steps(bench, fits, ("--device", "cpu"))
    names = [step.name for step in steps]
    assert names[:4] == ["one-audit", "two-audit", "one-aeu-3", "one-patchcore-3"]
    assert names[4:7] == ["two-aeu-3", "two-patchcore-3", "one-aeu-4"]
    assert f"--split {tmp_path / 'split'}" in steps[1].command and steps[1].finishes == (0, 1)
    assert names[10:] == [
        *("one-aeu-result-3-4", "one-patchcore-result-3-4", "two-aeu-result-3-4", "two-aeu-balanced-3-4"),
        *("two-patchcore-result-3-4", "two-patchcore-balanced-3-4"),
    ]
    aeu, patchcore = steps[4].command, steps[5].command
    assert "--weights" not in aeu and "--set train.epochs=" in aeu and f"--split {tmp_path / 'split'}" in aeu
    assert "--weights random --preset small" in patchcore and "epochs" not in patchcore
    assert steps[-1].needs == ("two-patchcore-3", "two-patchcore-4") and "--balance view" in steps[-1].command


def test_published_lengths_are_run_where_hours_allow(packs: dict[str, Path], tmp_path: Path) -> None:
    films = open_set(str(packs["listed"]), tmp_path)
    bench = Bench(
        tmp_path, [films], ["aeu", "memae", "patchcore"], [0, 1], tera_flops=0.05, preset="tiny", length="both"
    )
    fits = {("listed", method): plan_fit(bench, films, method) for method in bench.methods}
    assert plan_long_fits(bench, fits) == {}, "nothing is timed yet"
    aeu = plan_fit(replace(bench, length="published"), films, "aeu")
    for seed, seconds in ((0, 6.0), (1, 12.0)):
        StepFile("done", "", "", 1.0, seconds).write(tmp_path, f"listed-aeu-{seed}")
        StepFile("done", "", "", 1.0, 3600.0 * seconds).write(tmp_path, f"listed-memae-{seed}")
    longer = plan_long_fits(bench, fits)
    assert longer["listed", "aeu"].fit == aeu and ("listed", "patchcore") not in longer, "it does not train"
    hours = 12 / 3600 * aeu.flops / fits["listed", "aeu"].flops
    assert longer["listed", "aeu"].core_hours == pytest.approx(hours) and longer["listed", "aeu"].allowed
    assert not longer["listed", "memae"].allowed and longer["listed", "memae"].core_hours > 10
    steps = plan_long_steps(bench, longer)
    assert [step.name for step in steps] == [
        *("listed-aeu-published-0", "listed-aeu-published-1", "listed-aeu-published-0-1")
    ]
    assert f"train.epochs={aeu.epochs}" in steps[0].command and steps[2].needs == (steps[0].name, steps[1].name)
    assert str(tmp_path / "listed" / "aeu" / "published-1") in steps[2].command
    assert "at most 10 core-hours" in facts(bench)["training"]


@pytest.mark.slow
def test_a_bench_is_killed_goes_on_and_ends_in_a_table(packs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "bench"
    words = [
        *("detect", "bench", "--methods", "aeu,patchcore", "--seeds", "0,1", "--budget", "0.002", "--preset", "tiny"),
        *("--data", packs["listed"], "--data", packs["plain"], "--out", out, "--device", "cpu", "--jobs", "2"),
        *(word for setting in (*AEU, *PATCHCORE) for word in ("--with", setting)),
    ]
    first = commands.start(*words)
    first.wait_until(lambda: (out / "listed" / "aeu" / "seed-0" / "detector.json").exists())
    first.kill()
    kept = (out / "listed" / "aeu" / "seed-0" / "detector.json").stat().st_mtime_ns
    shown = commands.run(*words)
    assert (out / "listed" / "aeu" / "seed-0" / "detector.json").stat().st_mtime_ns == kept, "what is done is done"
    page = (out / "bench.md").read_text()
    assert "## listed: " in page and "## listed, views balanced: " in page and "## plain: " in page
    assert "ranking: " in page and "| *blur* |" in page and "| *view* |" in page and "ranking: " in shown.stdout
    tables = read_json(out / "bench.json")["tables"]
    assert [table["set_name"] for table in tables] == ["listed", "listed", "plain"]
    rows = {row["method"]: row for row in tables[0]["rows"]}
    assert (
        len(rows["aeu"]["auc"]["values"]) == 2 and rows["aeu"]["core_minutes"] > 0 and rows["aeu"]["peak_bytes"] > 1e7
    )
    assert rows["aeu"]["films_per_second"] > 0 and rows["aeu"]["against"]["low"] <= rows["aeu"]["against"]["high"]
    balanced = {row["method"]: row for row in tables[1]["rows"]}
    assert (
        balanced["view"]["auc"]["mean"] == pytest.approx(0.5)
        and tables[1]["films"]["normal"] == tables[1]["films"]["abnormal"]
    )
    assert all(f"- audit: {message}" in page for table in tables for message in table["audit"] or ())
    assert "- audit: " in page and "published length" not in page
    for name in ("bench.png", "bench.tex", "bench-listed.csv", "bench-listed-balanced.csv", "bench-plain.csv"):
        assert (out / name).stat().st_size > 0
    again = commands.run(*words)
    assert "0 to run" in again.stderr or "done before" in again.stderr
    other = commands.run(*[word if word != "0.002" else "0.5" for word in words], expect=2)
    assert "repeat the earlier settings, or choose another --out" in other.stderr
    commands.run(*words, "--length", "both", "--most-hours", "0")
    page = (out / "bench.md").read_text()
    assert "not run: about" in page and "| AUC, published length |" in page
    _what_is_there_is_shown(out, packs, tmp_path)


def _what_is_there_is_shown(out: Path, packs: dict[str, Path], tmp_path: Path) -> None:
    """A bench that lacks a method's result has a table of the others; a page says what it was made with."""
    shutil.rmtree(out / "plain" / "aeu" / "result")
    sets = [open_set(str(packs[name]), out) for name in ("listed", "plain")]
    bench = Bench(out, sets, ["aeu", "patchcore"], [0, 1], tera_flops=0.002, preset="tiny")
    fits = {(films.name, method): plan_fit(bench, films, method) for films in sets for method in bench.methods}
    shutil.copytree(out / "listed" / "aeu" / "result", out / "listed" / "aeu" / "published")
    tables = collect(bench, fits, {("listed", "aeu"): LongFit(Fit(250, 1e12), 1.5, allowed=True)})
    second = {row.method: row.published for row in tables[0].rows}
    assert second["aeu"] is not None and second["aeu"].auc is not None
    assert second["patchcore"] is None and "| 250 |" in bench_page(tables, facts(bench))
    assert "aeu" not in {row.method for row in tables[2].rows} and "patchcore" in {row.method for row in tables[2].rows}
    told = messages(tables[2])
    assert told[0].startswith("ranking: patchcore") and tables[2].best_trivial in told[1]
    assert "0.002 TFLOP each" in bench_page(tables, facts(bench))
    assert write_bench(tmp_path / "again", tables, facts(bench)).exists()
