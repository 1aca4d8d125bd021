"""``afire lesions preview``, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from afire.cli import app
from afire.cli.samples import _in_random_order
from afire.data.manifest import make_manifest
from afire.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    films = tmp_path_factory.mktemp("films")
    generator = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(generator.integers(0, 255, (90, 70), dtype=np.uint8)).save(films / f"{number}.png")
    return films


def preview(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["lesions", "preview", *map(str, arguments)])


def test_draws_a_sheet_that_repeats(folder: Path, tmp_path: Path) -> None:
    arguments = ("--data", folder, "--count", 3, "--preset", "tiny", "--set", "lesions.haze=0.5", "--quiet")
    done = preview(*arguments, "--out", tmp_path / "a.png", "--seed", 1)
    assert done.exit_code == 0, done.output
    assert "3 films" in done.stdout and "% of tokens abnormal" in done.stdout
    preview(*arguments, "--out", tmp_path / "b.png", "--seed", 1)
    preview(*arguments, "--out", tmp_path / "c.png", "--seed", 2)
    first, same, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == same != other


def test_shows_patches_and_opacities(folder: Path, tmp_path: Path) -> None:
    sheets = []
    for count, setting in [(3, "pasted=1"), (3, "opacities=1"), (1, "pasted=1"), (3, "donors=0")]:
        words = ("--data", folder, "--count", count, "--preset", "tiny", "--set", f"lesions.{setting}")
        if setting == "donors=0":
            words = (*words, "--set", "lesions.pasted=1")
        out = tmp_path / f"{len(sheets)}.png"
        assert preview(*words, "--out", out).exit_code == 0
        sheets.append(out.read_bytes())
    assert len(set(sheets)) == 4


def test_normal_films_are_preferred(folder: Path, tmp_path: Path) -> None:
    table = pd.DataFrame({"image": [f"{number}.png" for number in range(5)], "normal": [0.0, 1.0, 0.0, None, 1.0]})
    manifest = make_manifest(table, folder)
    assert {tuple(sorted(_in_random_order(manifest, seed))) for seed in range(5)} == {(1, 4)}
    unknown = make_manifest(table.drop(columns="normal"), folder)
    assert {_in_random_order(unknown, seed)[0] for seed in range(60)} == {0, 1, 2, 3, 4}


def test_a_broken_film_is_left_out(tmp_path: Path) -> None:
    films, out = tmp_path / "films", tmp_path / "out" / "sheet.png"
    films.mkdir()
    Image.fromarray(np.eye(64, dtype=np.uint8) * 200).save(films / "whole.png")
    whole = (films / "whole.png").read_bytes()
    (films / "broken.png").write_bytes(whole[: len(whole) // 2])
    done = preview("--data", films, "--out", out, "--preset", "tiny", "--count", 3)
    assert done.exit_code == 0, done.exception
    assert "1 film," in done.stdout and "broken.png" in done.output
    (films / "whole.png").unlink()
    out.unlink()
    done = preview("--data", films, "--out", out, "--preset", "tiny", "--count", 3)
    assert isinstance(done.exception, UserError) and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "does not exist"),
        (["--size", "225"], "not a multiple of encoder.patch_size"),
        (["--out", "sheet.gif"], "does not end in .png"),
        (["--set", "lesions.hazee=1"], "did you mean lesions.haze"),
        (["--set", "lesions.size_min=100"], "size_min 100.0 is larger than size_max 64"),
        (["--set", "lesions.pasted=0.7", "--set", "lesions.opacities=0.5"], "are more than all views together"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = preview("--data", folder, "--out", tmp_path / "sheet.png", *arguments)
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())
