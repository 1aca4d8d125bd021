"""``afire data build`` and ``afire data stats`` as a user types them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from afire import progress
from afire.cli import app, main
from afire.data.film import hash_patient
from afire.data.manifest import make_manifest, read_manifest, write_manifest

KINDS = ["folder", "classes", "csv", "childcxr", "nih", "chexpert", "mimic", "siim", "lungmasks"]


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """A command points the root logger at its own standard error; later tests want theirs back."""
    root, ours = logging.getLogger(), logging.getLogger("afire")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    progress.configure("off")


Afire = Callable[..., tuple[int, str, str]]


@pytest.fixture
def afire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Afire:
    """Run the command like the shell does: exit code, standard output, standard error."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["afire", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return call


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for film in ("train/NORMAL/a.png", "train/tb/b.png", "test/NORMAL/c.png"):
        (tmp_path / "films" / film).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "films" / film).write_bytes(b"")
    return tmp_path / "films"


@pytest.mark.parametrize("kind", [*KINDS, "shenzhen"])
def test_every_kind_has_help_with_an_example(kind: str) -> None:
    text = " ".join(run("data", "build", kind, "--help").split())
    assert "Example: afire data build" in text
    for option in ("--root", "--out", "--quiet", "--verbose"):
        assert option in text


def test_the_kinds_are_listed() -> None:
    text = run("data", "build", "--help")
    assert all(kind in text for kind in KINDS)


@pytest.mark.parametrize("name", ["m.parquet", "m.csv"])
def test_build_and_read_again(classes: Path, tmp_path: Path, name: str) -> None:
    out = run("data", "build", "classes", "--root", classes, "--out", tmp_path / name)
    assert "3 films, patients unknown, 1 label" in out and "train" in out
    manifest = read_manifest(tmp_path / name)
    assert manifest.labels == ["tb"] and manifest.info["builder"] == "classes" and manifest.path(0).exists()


def test_quiet_is_quiet_and_otherwise_it_says_what_it_did(classes: Path, tmp_path: Path, afire: Afire) -> None:
    csv = tmp_path / "list.csv"
    csv.write_text("image\ntrain/NORMAL/a.png\nmissing.png\n")
    words = ["data", "build", "csv", "--root", classes, "--csv", csv, "--out", tmp_path / "m.csv"]
    code, out, err = afire(*words)
    assert code == 0 and "1 of 2 listed films are in" in err and "wrote" in out
    assert afire(*words, "--quiet") == (0, "", "")


def test_the_flags_of_csv(classes: Path, tmp_path: Path) -> None:
    csv = tmp_path / "list.csv"
    csv.write_text("f,who,part,pos,x y,mass,fine,age\na,7,train,PA,1,0,0,50\nb,8,test,AP,-1,1,,\n")
    (classes / "a.png").touch()
    (classes / "b.png").touch()
    run(
        "data", "build", "csv", "--root", classes, "--csv", csv, "--out", tmp_path / "m.csv", "--image-column", "f",
        "--patient-column", "who", "--split-column", "part", "--view-column", "pos", "--label-columns", "x y, mass",
        "--normal-column", "fine", "--meta-columns", "age", "--path-suffix", ".png", "--uncertain", "ones",
    )  # fmt: skip
    table = read_manifest(tmp_path / "m.csv").table
    assert table["image"].tolist() == ["a.png", "b.png"] and table["patient"].tolist() == [
        hash_patient("7"),
        hash_patient("8"),
    ]
    assert table["label:x y"].tolist() == [1, 1] and table["label:mass"].tolist() == [0, 1]
    assert table["split"].tolist() == ["train", "test"] and table["view"].tolist() == ["PA", "AP"]


def test_chexpert_takes_5_or_14(tmp_path: Path, afire: Afire) -> None:
    code, _, err = afire("data", "build", "chexpert", "--root", tmp_path, "--out", "m.csv", "--labels", "7")
    assert code == 2 and "'7' is not one of" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder", "--root", "{tmp}/nowhere", "--out", "{tmp}/m.csv"], "nowhere does not exist"),
        (["folder", "--root", "{tmp}/films", "--out", "{tmp}/m.xlsx"], "a manifest ends in .parquet or .csv"),
        (["nih", "--root", "{tmp}/films", "--out", "{tmp}/m.csv"], "looked for Data_Entry_2017_v2020.csv"),
        (["mimic", "--root", "{tmp}/films", "--out", "{tmp}/m.csv"], "the split table of MIMIC-CXR-JPG is missing"),
        (
            ["folder", "--root", "{tmp}/films", "--out", "{tmp}/theirs.csv"],
            "exists and is no manifest written by afire",
        ),
        (["folder", "--root", "{tmp}/films", "--out", "{tmp}/theirs.parquet"], "exists and is no manifest"),
    ],
)
def test_mistakes_are_one_sentence(classes: Path, tmp_path: Path, afire: Afire, words: list[str], message: str) -> None:
    (tmp_path / "theirs.csv").write_text("their,table\n1,2\n")
    (tmp_path / "theirs.parquet").write_bytes(b"theirs")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = afire("data", "build", *(word.format(tmp=tmp_path) for word in words))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split()) and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "theirs.csv").read_text() == "their,table\n1,2\n"


def test_our_own_manifest_may_be_replaced(classes: Path, tmp_path: Path) -> None:
    for name in ("m.csv", "m.parquet"):
        for _ in range(2):
            run("data", "build", "folder", "--root", classes, "--out", tmp_path / name)


@pytest.fixture
def many_labels(tmp_path: Path) -> Path:
    table = pd.DataFrame({"image": ["a", "b", "c"], "split": ["train", "train", "test"]})
    for name in ("No Finding", "Edema", "Mass", "Atelectasis", "Support Devices"):
        table[f"label:{name}"] = [1.0, 0.0, 0.0] if name == "No Finding" else [0.0, 0.0, 1.0]
    write_manifest(make_manifest(table, tmp_path), tmp_path / "m.parquet")
    return tmp_path / "m.parquet"


def test_stats_tables(many_labels: Path) -> None:
    text = run("data", "stats", "--data", many_labels)
    assert "films per split" in text and "films with each label" in text
    assert "3 combinations of labels" in text and "S.D." in text
    assert "merged without Support Devices: 3 categories" in text
    without = run("data", "stats", "--data", many_labels, "--no-combinations")
    assert "combinations" not in without


def test_stats_as_json(many_labels: Path) -> None:
    found = json.loads(run("data", "stats", "--data", many_labels, "--json", "--top", "1"))
    assert found["splits"]["all"]["films"] == 3 and len(found["combinations"]) == 1
    assert found["merged_without"] == ["Support Devices"]


def test_stats_of_a_missing_file(tmp_path: Path, afire: Afire) -> None:
    code, _, err = afire("data", "stats", "--data", tmp_path / "none.parquet")
    assert code == 2 and "none.parquet does not exist" in " ".join(err.split())
