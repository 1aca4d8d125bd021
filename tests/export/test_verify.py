"""`afire verify` says equal where it is, and names what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afire.export import verify as verifying
from afire.export.formats import Format
from afire.export.verify import read_expected, verify_bundle, write_expected
from afire.files import write_json
from afire.weights.bundle import MANIFEST, list_files, open_bundle


def quick_formats() -> dict[str, Format]:
    """Without onnx, whose graphs take seconds; its parity is measured in test_formats."""
    return {name: one for name, one in verifying.FORMATS.items() if name in ("hf", "timm")}


def test_every_backend_here_is_equal(full_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FORMATS", quick_formats())
    checks = {check.backend: check for check in verify_bundle(open_bundle(full_bundle))}
    assert checks["reading and resizing"].equal and checks["torch cpu"].equal
    outputs = {one.output for one in checks["torch cpu"].differences}
    assert outputs == {
        *("tokens", "embedding", "student_tokens", "log_q", "surprise", "restored", "lesion_logits", "lesion_map"),
        *("score", "p_value", "heatmap"),
    }
    for name, module in (("transformers", "transformers"), ("timm", "timm")):
        if verifying.missing((module,)):
            assert checks[name].equal is None and "not installed" in checks[name].note
        else:
            assert checks[name].equal is not False


def test_other_outputs_are_not_equal(
    bundle_folder: Path, copy_of: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that fit say only that a file is the one that was listed; the numbers are computed again."""
    folder = copy_of(bundle_folder)
    expected = read_expected(folder)
    expected["log_q"] = expected["log_q"] + 0.1
    expected["surprise"] = torch.full_like(expected["surprise"], float("nan"))
    write_expected(folder, expected)
    write_json(folder / MANIFEST, list_files(folder))
    monkeypatch.setattr(verifying, "FORMATS", {})
    checks = {check.backend: check for check in verify_bundle(open_bundle(folder))}
    wrong = [one.output for one in checks["torch cpu"].differences if not one.equal]
    assert wrong == ["log_q", "surprise"] and checks["torch cpu"].equal is False


def test_a_library_that_fails_is_an_answer(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, torch.Tensor]:
        raise ImportError("version 0.1 is too old")

    broken = Format("hf", "transformers", lambda *_: None, fail)
    monkeypatch.setattr(verifying, "FORMATS", {"hf": broken})
    last = list(verify_bundle(open_bundle(bundle_folder)))[-1]
    assert last.equal is False and last.note == "failed: ImportError: version 0.1 is too old"
