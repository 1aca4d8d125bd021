"""Run the code cells of a notebook and keep what they show: ``python scripts/notebook.py docs/tutorial.ipynb``.

Text, the value of the last line and open matplotlib figures become outputs, as in Jupyter. The cells run in a temporary
folder, so the outputs hold no path of this machine. No notebook server is needed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

Outputs = list[dict[str, Any]]


def run_cell(source: str, names: dict[str, Any], place: str) -> Outputs:
    """Run one cell in ``names``; what it printed, its last value and its figures."""
    body = ast.parse(source, place).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), place, "exec"), names)
        if last is not None:
            value = eval(compile(last, place, "eval"), names)
    outputs: Outputs = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append(_shown("execute_result", {"text/plain": _lines(repr(value))}) | {"execution_count": None})
    outputs += [_shown("display_data", {"image/png": _picture(number)}) for number in plt.get_fignums()]
    plt.close("all")
    return outputs


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run in a temporary folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context():
        os.chdir(folder)
        try:
            for number, cell in enumerate(notebook["cells"], 1):
                if cell["cell_type"] == "code":
                    cell = cell | {"outputs": run_cell("".join(cell["source"]), names, f"<cell {number}>")}
                cells.append(cell)
        finally:
            os.chdir(home)
    return notebook | {"cells": cells}


def _shown(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": kind, "data": data, "metadata": {}}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _picture(number: int) -> str:
    """A figure as a PNG of 64 colours in base64: films are grey, and a repository should stay small."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    plt.figure(number).savefig(raw, dpi=80, bbox_inches="tight")
    Image.open(raw).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    finished = run_notebook(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(finished, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
