"""`afire export`, `afire verify` and `afire push` as commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.errors import UserError
from afire.export import verify as verifying
from afire.export.verify import read_expected, write_expected
from afire.files import write_json
from afire.weights.bundle import MANIFEST, list_files, open_bundle
from tests import commands


@pytest.fixture
def only_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FORMATS", {"hf": verifying.FORMATS["hf"]})


def test_export_and_verify(run_folder: Path, tmp_path: Path, only_transformers: None) -> None:
    out = tmp_path / "bundle"
    done = CliRunner().invoke(app, ["export", str(run_folder), "--out", str(out), "--licence", "mit", "--name", "mine"])
    assert done.exit_code == 0 and "encoder, student, head, decoder, lesion_classifier, prototypes" in done.output
    bundle = open_bundle(out)
    assert bundle.about["licence"] == "mit" and bundle.about["name"] == "mine"
    done = CliRunner().invoke(app, ["verify", str(out)])
    assert done.exit_code == 0 and done.output.splitlines()[-1] == "equal"
    assert "torch cpu: equal, largest difference 0.0e+00" in done.output


def test_export_of_a_bundle_to_another_library(bundle_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = CliRunner().invoke(app, ["export", str(bundle_folder), "--format", "hf", "--out", str(tmp_path / "hf")])
    assert done.exit_code == 0 and "tokens of transformers: largest difference" in done.output
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()


def test_verify_ends_with_1_when_outputs_differ(
    bundle_folder: Path, copy_of: Callable[[Path], Path], only_transformers: None
) -> None:
    folder = copy_of(bundle_folder)
    expected = read_expected(folder)
    write_expected(folder, {**expected, "tokens": expected["tokens"] + 1})
    write_json(folder / MANIFEST, list_files(folder))
    done = CliRunner().invoke(app, ["verify", str(folder)])
    assert done.exit_code == 1 and "torch cpu: NOT EQUAL" in done.output
    assert "not equal: torch cpu, transformers" in done.output


def test_push_checks_before_it_sends(bundle_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(bundle_folder)
    (folder / "student.safetensors").unlink()
    done = CliRunner().invoke(app, ["push", str(folder), "hf://owner/name"])
    assert isinstance(done.exception, UserError) and "lacks student.safetensors" in str(done.exception)


def test_a_truncated_bundle_is_one_message_and_exit_code_2(
    bundle_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(bundle_folder)
    content = bytearray((folder / "decoder.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "decoder.safetensors").write_bytes(content)
    ended = commands.run("verify", folder, expect=2)
    assert "decoder.safetensors is not what was exported" in ended.stderr and ended.stderr.count("\n") == 1
