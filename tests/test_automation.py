"""The container, the workflow and the hooks speak of what exists; neither Docker nor GitHub is needed to say so."""

from __future__ import annotations

import os
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

from afire.cli import app

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def reaches_the_image(name: str) -> bool:
    """By .dockerignore, where the last pattern that fits decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!").removeprefix("**/")
        if pattern and not line.startswith("#") and (fnmatch(name, pattern) or name.startswith(f"{pattern}/")):
            kept = line.startswith("!")
    return kept


def checked_command(words: list[str]) -> None:
    """A command of afire as the command line knows it, options included."""
    command: Any = get_command(app)
    while words and (below := getattr(command, "commands", None)) is not None:
        command, words = below[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_dockerfile_uses_what_it_declares_and_copies_what_exists() -> None:
    found = instructions()
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    declared = {words.partition("=")[0] for name, words in found if name == "ARG"}
    used = {variable for _, words in found for variable in re.findall(r"\$\{?([A-Z_]+)", words)}
    assert declared == used
    copied = [source for name, words in found if name == "COPY" for source in words.split()[:-1]]
    assert all((ROOT / source).exists() and reaches_the_image(source) for source in copied)
    assert reaches_the_image("afire/config.py") and reaches_the_image("afire/presets/tiny.yaml")
    needed = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml", "afire"}
    assert needed <= {*copied}, "setuptools reads these"
    for private in (".git/config", ".venv/bin/python", "runs/first/config.yaml", "films/film.dcm"):
        assert not reaches_the_image(private)


def test_the_container_runs_afire_and_not_as_root() -> None:
    last = dict(instructions())
    assert yaml.safe_load(last["ENTRYPOINT"]) == [*PROJECT["project"]["scripts"]] == ["afire"]
    assert last["USER"] != "root" and last["WORKDIR"] == "/films"
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^#   docker run .* afire (.+)$", text, re.MULTILINE):
        checked_command(shlex.split(line))
    [extras] = re.findall(r"EXTRAS=\[(.+)\]", text)
    assert {*extras.split(",")} <= EXTRAS.keys()
    python = re.search(r"^ARG PYTHON=(.+)$", text, re.MULTILINE)
    assert python is not None and python[1] in PROJECT_PYTHONS


PROJECT_PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def test_the_workflow_runs_what_guards_main() -> None:
    workflow = read_yaml(".github/workflows/ci.yml")
    assert workflow.keys() >= {"name", "jobs", True}  # YAML 1.1 reads the key `on` as a truth value
    assert workflow["permissions"] == {"contents": "read"}
    steps = workflow["jobs"]["tests"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    assert runs[0] == ".ci/run" and os.access(ROOT / ".ci/run", os.X_OK)
    pythons = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert all(isinstance(python, str) and python in PROJECT_PYTHONS for python in pythons), "3.10 is not 3.1"
    assert f">={pythons[0]}" == PROJECT["project"]["requires-python"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(run.split()[1] in targets for run in runs if run.startswith("make "))
    for step in workflow["jobs"]["image"]["steps"]:
        if step.get("run", "").startswith("docker run"):
            checked_command(shlex.split(step["run"].partition(" afire ")[2]))


def test_the_hooks_are_the_projects_own_tools() -> None:
    [repository] = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("lint:")[2].partition("\n\n")[0]
    ours = {Requirement(line).name for line in EXTRAS["dev"]}
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        tool = program.removeprefix(".venv/bin/")
        assert tool in ours and f"$(BIN)/{tool}{f' {words[0]}' if words else ''}" in lint
        assert hook["language"] == "system"
