"""What mkdocs does not do for our site: pages from files outside docs/, an index for the search, colours of code.

mkdocs calls these by name (`hooks` in mkdocs.yml); `make docs` builds the site.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

from afire.config import Config, Section
from afire.detect import DETECTORS
from afire.tasks.settings import FinetuneConfig, SegmentConfig

NOTEBOOK, NOTEBOOK_PAGE, SETTINGS_PAGE = "tutorial.ipynb", "tutorial.md", "reference/settings.md"
BENCHMARKS = ("search.md", "faults.md")  # pages that lie beside the code that writes them
_WORDS_KEPT = 4000
_index: list[dict[str, str]] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that are not files of docs/; the notebook itself stays beside its page for those who want to run it."""
    _index.clear()
    notebook = json.loads((Path(config.docs_dir) / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=notebook_page(notebook)))
    files.append(File.generated(config, SETTINGS_PAGE, content=settings_page()))
    for name in BENCHMARKS:
        page = Path(config.docs_dir).parent / "benchmarks" / name
        files.append(File.generated(config, name, content=page.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written for a code host, which shows files where they are; on the site they lead to the pages."""
    markdown = re.sub(r"\]\(\.\./(benchmarks|docs)/", "](", markdown)
    return markdown if page.file.src_uri == NOTEBOOK_PAGE else markdown.replace(f"]({NOTEBOOK})", f"]({NOTEBOOK_PAGE})")


def settings_page() -> str:
    """Every setting with its default and meaning, from the one place that holds them."""
    parts = [
        "# Reference: settings",
        "Defaults before any preset or recipe, from `afire.config`, `afire.tasks.settings` and the detectors; "
        "[settings](../settings.md) says how to change them.",
    ]
    kinds: dict[str, type[Section]] = {
        "Pre-training": Config,
        "Fine-tuning": FinetuneConfig,
        "Segmentation": SegmentConfig,
        **{f"Detection, --method {name}": detector.Settings for name, detector in DETECTORS.items()},
    }
    for title, section in kinds.items():
        rows = "\n".join(_settings(section()))
        parts.append(f"## {title}\n\n| setting | default | meaning |\n|---|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n"


def _settings(section: Section, prefix: str = "") -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            meaning = (field.description or "").replace("|", "&#124;")
            yield f"| `{prefix}{name}` | `{json.dumps(value)}` | {meaning} |"


def notebook_page(notebook: dict[str, Any]) -> str:
    """Cells and their outputs as markdown."""
    return "\n\n".join(_cell(cell) for cell in notebook["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = "".join(_output(output) for output in cell["outputs"])
    return f"```python\n{source}\n```" + (f'\n\n<div class="output">{outputs}</div>' if outputs else "")


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"<pre><code>{html.escape(''.join(output['text']))}</code></pre>"
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="output of the cell above" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return f"<pre><code>{html.escape(''.join(data['text/plain']))}</code></pre>"


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remember what each section says, and keep the names of options in one piece."""
    title = _plain(str(page.title))
    parts = re.split(r'<h[1-4][^>]*\bid="([^"]+)"[^>]*>(.*?)</h[1-4]>', content, flags=re.DOTALL)
    for anchor, heading, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        words = _plain(text).lower()[:_WORDS_KEPT]
        name = _plain(re.sub(r"<a [^>]*headerlink.*?</a>|<small.*?</small>", "", heading, flags=re.DOTALL))
        _index.append({"page": title, "title": name, "url": f"{page.url}#{anchor}", "text": words})
    return re.sub(r"<code>(-[\w-]+)</code>", r'<code class="word">\1</code>', content)  # no line ends inside --option


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<img[^>]*>", "", text))).split())


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index as a script (a page opened from disk may not fetch) and the colours of code."""
    site = Path(config.site_dir)
    index = json.dumps(_index, ensure_ascii=False, separators=(",", ":"))
    (site / "search_index.js").write_text(f"window.afireIndex={index};\n", encoding="utf-8")
    colours: str = HtmlFormatter(style="friendly").get_style_defs(".highlight")  # type: ignore[no-untyped-call]
    (site / "code.css").write_text(re.sub(r"(\.highlight) *\{[^}]*\}", "", colours), encoding="utf-8")
