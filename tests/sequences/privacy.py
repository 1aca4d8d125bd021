"""What must stand in no output: names of patients, and where somebody keeps their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq


def leaks(path: Path, private: Sequence[str]) -> list[str]:
    """Files below ``path`` that hold one of the ``private`` texts, and which."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [f"{text} in {file}" for file in files for text in private if text.encode() in _content(file)]


def _content(file: Path) -> bytes:
    if file.suffix != ".parquet":
        return file.read_bytes()
    text = pd.read_parquet(file).to_csv() + str(pq.read_schema(file).metadata)  # its columns are compressed
    return text.encode()
