"""Docstrings are plain prose; this makes them markdown for the reference (`extensions` in mkdocs.yml).

A star is a star, and roles such as ``:class:`` lose their prefix.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainProse(griffe.Extension):  # type: ignore[misc]
    """Prepare each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Escape what markdown would read as emphasis or tags, outside code; drop the names of roles."""
    text = re.sub(r":(?:class|func|meth|mod|data):`~?([^`]+)`", r"`\1`", text)
    parts = re.split(r"(``.+?``|`[^`\n]+`|^    .*$)", text, flags=re.MULTILINE)
    return "".join(part if index % 2 else re.sub(r"([*_<])", r"\\\1", part) for index, part in enumerate(parts))
