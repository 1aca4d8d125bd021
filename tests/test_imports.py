"""One direction of imports: a room knows the rooms to its left, nobody knows the command line, and nothing is circular.

Imports inside functions and under ``TYPE_CHECKING`` count too: they are the same dependency, only later.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "afire"
ROOMS = [
    *("cluster", "data", "lesions", "nn", "methods", "training", "weights", "tasks"),
    *("detect", "export", "studies", "report", "pacs"),
]
# Everybody may use these; they use no room.
COMMON = ["config", "settings", "errors", "files", "processes", "progress", "_version"]
FACADES = ["api", "cli", "__main__", "__init__"]  # these may use everything


def modules_of(package: Path) -> dict[str, Path]:
    """Every module by its dotted name; a folder is the module of its ``__init__``."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The dotted names that a statement may mean: (module, module and name)."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, alias.name) for alias in node.names)
    else:
        assert not node.level, "imports are absolute"
        yield from ((str(node.module), f"{node.module}.{alias.name}") for alias in node.names)


def import_graph(package: Path) -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports anywhere in its text."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [pair for node in statements for pair in imported(node) if pair[0].split(".")[0] == package.name]
        graph[name] = {longer if longer in modules else shorter for shorter, longer in names} - {name}
        unknown = graph[name] - modules.keys()
        assert not unknown, f"{name} imports {sorted(unknown)}, which do not exist"
    return graph


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(PACKAGE)


def room_of(module: str) -> str:
    """``data`` for ``afire.data.film``; the package itself is ``__init__``."""
    return [*module.split("."), "__init__"][1]


def may_import(module: str, other: str) -> bool:
    room, other_room = room_of(module), room_of(other)
    if room == other_room:
        return True
    if other_room == "cli":
        return room == "__main__"
    if room in FACADES or other_room in COMMON:
        return True
    return room in ROOMS and other_room in ROOMS and ROOMS.index(other_room) < ROOMS.index(room)


def violations(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    return {(module, other) for module, others in graph.items() for other in others if not may_import(module, other)}


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle of imports in order, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if cycle := visit(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def test_every_module_has_a_room(graph: dict[str, set[str]]) -> None:
    assert {room_of(module) for module in graph} == {*ROOMS, *COMMON, *FACADES}


def test_a_room_imports_only_rooms_to_its_left(graph: dict[str, set[str]]) -> None:
    # Equal, not smaller: an exception that is gone must leave the list.
    assert violations(graph) == set()


def test_no_imports_run_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert find_cycle(graph) == []


@pytest.mark.parametrize(
    ("file", "text", "is_allowed"),
    [
        ("tasks/probe.py", "from afire.weights import files", True),
        ("weights/files.py", "from afire.tasks.probe import run", False),
        ("weights/files.py", "def read():\n    from afire.tasks import probe", False),
        (
            "weights/files.py",
            "import typing\nif typing.TYPE_CHECKING:\n    import afire.tasks.probe",
            False,
        ),
        ("config.py", "import afire.tasks.probe", False),
        ("tasks/probe.py", "from afire import config", True),
        ("tasks/probe.py", "from afire import api", False),
        ("tasks/probe.py", "from afire import cli", False),
        ("api.py", "import afire.cli", False),
        ("api.py", "import afire.tasks.probe", True),
        ("cli/__init__.py", "from afire import api", True),
    ],
)
def test_the_rule_itself(tmp_path: Path, file: str, text: str, is_allowed: bool) -> None:
    package = tmp_path / "afire"
    for name in ("__init__", "config", "api", "cli/__init__", "tasks/probe", "weights/files"):
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text("run = print\n", encoding="utf-8")
    for folder in ("tasks", "weights"):
        (package / folder / "__init__.py").touch()
    (package / file).write_text(text, encoding="utf-8")
    assert (not violations(import_graph(package))) == is_allowed


def test_a_circle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PACKAGE.rglob("__init__.py")), ids=lambda path: path.name
)
def test_every_folder_says_what_it_knows(folder: Path) -> None:
    """What a room must not learn of is the rule above in words."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert folder == PACKAGE or re.search(r"^Knows [^\n]*; .*knows no", text, re.MULTILINE), f"{folder} says: {text}"


TESTS = Path(__file__).parent
OF_ROOMS = [path for path in TESTS.glob("*/**/test_*.py") if (PACKAGE / path.parent.relative_to(TESTS)).is_dir()]


@pytest.mark.parametrize("test", sorted(OF_ROOMS), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_tests_are_named_after_what_they_test(test: Path) -> None:
    """``test_X.py`` or ``test_X_aspect.py``: X is a module or a folder of the room, itself, or its commands."""
    room = PACKAGE / test.parent.relative_to(TESTS)
    names = {path.stem for path in room.iterdir()} | {room.name, "api", "cli"}
    name = test.stem.removeprefix("test_")
    assert any(name == known or name.startswith(f"{known}_") for known in names), f"{room.name} has {sorted(names)}"


def needs_newer_python(*paths: Path) -> str:
    """What in these files the oldest Python that we promise does not have; empty where there is nothing."""
    pyproject = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    promised = re.search(r'requires-python = ">=([\d.]+)"', pyproject)
    assert promised is not None
    options = [f"-t={promised[1]}-", "--violations", "--no-tips", "--quiet"]
    command = [sys.executable, "-c", "import vermin; vermin.main()", *options, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_oldest_python_we_promise_has_all_that_we_use() -> None:
    """Names such as ``typing.Self`` came later; the linters know the syntax of 3.10 but not its library."""
    root = PACKAGE.parent
    assert not needs_newer_python(PACKAGE, root / "scripts", root / "benchmarks", root / "tests")


def test_a_name_that_came_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("from typing import Self\n", encoding="utf-8")
    assert "late.py" in needs_newer_python(tmp_path)
