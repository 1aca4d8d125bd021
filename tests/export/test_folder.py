"""A folder that appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from afire.errors import UserError
from afire.export.write import new_folder


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^cannot write .*: No space left; free space or choose another folder\.$"):  # noqa: SIM117
        with new_folder(tmp_path / "out", force=False) as part:
            (part / "half").touch()
            raise SafetensorError("No space left")
    assert not any(tmp_path.iterdir())
