"""The docs speak of what exists: links lead somewhere, commands and settings in them are real."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from afire.cli import app
from afire.config import Config, Section

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


@cache
def cli() -> Any:
    """The tree of commands; making it costs a second on a busy machine."""
    return get_command(app)


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{names(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_of_the_repository_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"`((?:afire|tests|scripts|benchmarks|configs|docs)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), f"{names(page)} speaks of {file}"


@pytest.mark.slow
def test_the_walks_are_those_that_a_film_takes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("trace_script", ROOT / "scripts" / "trace.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    traced = page.partition(script.BEGIN)[2].partition(script.END)[0]
    told = [set(re.findall(r"^\|.*`(.+)` \|", part, re.MULTILINE)) for part in traced.split("**")[2::2]]
    assert told == [set(trace.walk) for trace in script.walks(tmp_path).values()], "run `python scripts/trace.py`"
    assert all(len(files) <= 12 for files in told)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    in_blocks = re.findall(r"^(?:\$ )?(?:torchrun .*-m )?afire ((?:[a-z]+ ?)+)", blocks, re.MULTILINE)
    for line in in_blocks + re.findall(r"`afire ((?:[a-z]+ ?)+)", text):
        command = cli()
        for word in line.split():
            below = getattr(command, "commands", None)
            if below is None:
                break
            assert word in below, f"{names(page)} speaks of `afire {line}`"
            command = below[word]


def settings(section: type[Section], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        found.add(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= settings(field.annotation, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in ("pretraining", "scaling", "deviations")], ids=names
)
def test_settings_exist(page: Path) -> None:
    known = settings(Config)
    groups = "|".join(Config.model_fields)
    for key in re.findall(rf"\b((?:{groups})\.[a-z_]+)=", page.read_text(encoding="utf-8")):
        assert key in known, f"{names(page)} speaks of {key}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_no_number_is_left_to_be_filled_in(page: Path) -> None:
    assert "MEASURED_" not in page.read_text(encoding="utf-8")


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    def walk(command: object, path: str) -> None:
        below = getattr(command, "commands", {})
        if below and path != "afire data build":
            for name, child in below.items():
                walk(child, f"{path} {name}")
        else:
            assert f"`{path}`" in readme, path

    walk(cli(), "afire")


def test_the_two_commands_stand_in_the_first_screen() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30])
    assert "make demo" in first_screen and "make test" in first_screen
