"""The site builds, its links lead somewhere, its reference is whole, its errors are raised, its tutorial runs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from afire.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
NOTEBOOK = DOCS / "tutorial.ipynb"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
    ]  # --quiet would hide the warnings that strict counts
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(site)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loads(HTMLParser):
    """What a browser fetches when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values.get("src") or ""] + ([values.get("href") or ""] if tag == "link" else [])


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        for address in loads.found:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
            local = address.split("#")[0]
            assert local == "" or local.startswith("data:") or (page.parent / local).exists(), f"{page.name}: {address}"
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles and not any(re.search(r"@import|url\((?!.?data:)", style) for style in styles)


@pytest.mark.slow
def test_every_name_of_the_reference_has_its_place(site: Path) -> None:
    """A name that lost its docstring, or was renamed, would silently vanish from the page."""
    for page in REFERENCE:
        built = (site / "reference" / f"{page.stem}.html").read_text(encoding="utf-8")
        for name in referred(page):
            assert f'id="{name}"' in built, f"{page.name}: {name} is not there; it may have lost its docstring"


def referred(page: Path) -> list[str]:
    directives = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    names = []
    for module, options in directives:
        members = yaml.safe_load(options)["options"].get("members", [])
        names += [f"{module}.{member}" for member in members]
    return names


def test_what_packages_offer_is_in_the_reference() -> None:
    listed = {name.rpartition(".")[2] for page in REFERENCE for name in referred(page)}
    # constants, and settings, which have a page of their own
    aside = {
        "BUILDERS",
        "METHODS",
        "DISEASES",
        "ANATOMY",
        "MASK_NUMBERS",
        "FORMATS",
        "RANDOM",
        "__version__",
        "UserError",
        "LesionConfig",
    }
    for file in sorted((ROOT / "afire").rglob("__init__.py")):
        module = ".".join(file.parent.relative_to(ROOT).parts)
        offered = re.search(r"^__all__ = (\[.*?\])", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if offered is not None and ".cli" not in module:
            missing = set(ast.literal_eval(offered[1])) - listed - aside
            assert not missing, f"{module} offers {sorted(missing)}; add them to docs/reference"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](other.md#no-such-heading)", "no-such-heading"),
        ("![gone](images/gone.png)", "images/gone.png"),
    ],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, text: str, sentence: str) -> None:
    """With the settings of our site, on two pages."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = {**yaml.safe_load(settings), "docs_dir": "docs", "plugins": [], "hooks": [], "exclude_docs": ""}
    config |= {
        "nav": [{"Start": ["index.md", "other.md"]}],
        "theme": {"name": None, "custom_dir": str(DOCS / "_theme")},
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## A heading\n", encoding="utf-8")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Home\n\n[there](other.md#a-heading)\n", encoding="utf-8")
    whole = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    page.write_text(f"# Home\n\n{text}\n", encoding="utf-8")
    broken = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert broken.returncode != 0 and sentence in broken.stdout + broken.stderr


def commands(command: Any, path: str = "afire") -> Iterator[str]:
    below = getattr(command, "commands", {})
    if not below:
        yield path
    for name, child in below.items():
        yield from commands(child, f"{path} {name}")


def test_every_command_was_run_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    another_name = {"afire data build shenzhen"}  # of lungmasks
    for command in set(commands(get_command(app))) - another_name:
        assert re.search(rf"^(\$ )?{command}\b", blocks, re.MULTILINE), f"no page shows a run of `{command}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_on_the_pages_imports_what_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        check_imports(block, page.name)


def check_imports(source: str, where: str) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "afire":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{where} imports {alias.name} from {node.module}"


def sentences_of_the_source() -> set[str]:
    """Every text in afire's source, with … where a value is put in."""
    found = set()
    for file in (ROOT / "afire").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_errors_of_troubleshooting_are_raised() -> None:
    known = sentences_of_the_source()
    rows = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 60
    for sentence in rows:
        pieces = [re.escape(piece) for piece in sentence.split("…") if piece.strip(" .;:,")]
        pattern = re.compile(".*".join(pieces), re.DOTALL)
        assert any(pattern.search(text) for text in known), f"no error says: {sentence}"


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_the_tutorial_shows_what_it_printed_and_drew() -> None:
    code = cells("code")
    shown = [cell for cell in code if cell["outputs"]]
    pictures = [one for cell in code for one in cell["outputs"] if "image/png" in one.get("data", {})]
    assert len(shown) >= len(code) - 1 and len(pictures) >= 5
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 400_000, "the pictures of the tutorial have grown"
    assert "Research software, not a medical device." in text
    for folder in (str(Path.home()), str(ROOT), "/tmp/", "Traceback"):
        assert folder not in text
    check_imports("\n".join("".join(cell["source"]) for cell in code), NOTEBOOK.name)


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    # A process of its own, as a reader has: figures and log handlers of other tests would show up in its cells.
    copy = tmp_path / NOTEBOOK.name
    copy.write_bytes(NOTEBOOK.read_bytes())
    script = [sys.executable, str(ROOT / "scripts" / "notebook.py"), str(copy)]
    ran = subprocess.run(script, env=os.environ | {"AFIRE_CACHE": str(tmp_path)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    committed, fresh = (json.loads(path.read_text(encoding="utf-8")) for path in (NOTEBOOK, copy))
    for before, after in zip(committed["cells"], fresh["cells"], strict=True):
        kinds = [[one["output_type"] for one in cell.get("outputs", [])] for cell in (before, after)]
        assert kinds[0] == kinds[1], "".join(before["source"])
