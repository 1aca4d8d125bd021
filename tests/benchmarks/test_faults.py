"""The fault drill of ``benchmarks/faults.py``, shortened: the same checks, with one kill of each kind and few files."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.detect.conftest import model  # noqa: F401 - fixture
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures
from tests.training.conftest import draw_pack

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, not a package

from fault_drills import mutated, packing, page, pretraining  # noqa: E402
from fault_drills.commands import DrillError, afire, run  # noqa: E402
from fault_drills.mutants import SHARES, Mutant, write_good, write_mutants  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of pydicom, while bad files are made
]
MUTANTS = 24


@pytest.mark.slow
def test_a_killed_pretraining_ends_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = ("training.batch_size=8", "training.epochs=2", "run.picture_epochs=0", "run.checkpoint_minutes=1e-9")
    monkeypatch.setattr(pretraining, "SETTINGS", ("image.size=32", "encoder.patch_size=8", *fewer))
    found = pretraining.drill(tmp_path / "drill", draw_pack(tmp_path / "data"), kills=1, seed=39, jobs=1)
    assert found["identical"] == 1 and sum(found["killed while"].values()) == found["kills"] >= 1


@pytest.mark.slow
def test_a_killed_packing_ends_bit_identical(tmp_path: Path) -> None:
    source = packing.draw_films(tmp_path / "films", 80, 64)
    found = packing.drill(tmp_path / "drill", source, kills=1, seed=23, workers=1)
    assert found["identical"] == 1 and found["films"] == 80


@pytest.mark.slow
def test_mutated_files_are_named_and_good_films_are_not_lost(
    tmp_path: Path,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutated, "_WORKERS", 1)
    folder = tmp_path / "films"
    bad, good = write_mutants(folder, MUTANTS, seed=0), write_good(folder, 8)
    mutated.run_all(folder, tmp_path / "out", model, tmp_path / "logs")
    verdicts, _ = mutated.judge(tmp_path / "out", tmp_path / "logs", bad, good)
    table = mutated.table_of(bad, verdicts)
    assert sum(row["files"] for row in table.values()) == MUTANTS and set(table) == set(SHARES)
    assert sum(row["refused"] for row in table.values()) >= MUTANTS // 2


def test_five_hundred_mutants_are_planned_and_follow_from_the_seed(tmp_path: Path) -> None:
    assert sum(SHARES.values()) == 500
    first, second = (write_mutants(tmp_path / name, MUTANTS, seed=4) for name in ("a", "b"))
    assert first == second and set(Counter(one.kind for one in first)) == set(SHARES)
    for one in first:
        assert (tmp_path / "a" / one.file).read_bytes() == (tmp_path / "b" / one.file).read_bytes()


def test_a_drill_fails_when_a_promise_is_broken(tmp_path: Path) -> None:
    bad = [Mutant("a.png", "zip bomb", "PNG of 30,000 x 30,000", "refused")]
    read = {name: {"a.png": ""} for name in mutated.READERS}
    with pytest.raises(DrillError, match="is read, but must be refused"):
        mutated._require_verdicts(bad, [], read)
    read["data pack"]["a.png"] = "damaged"
    with pytest.raises(DrillError, match="refused by some commands and read by others"):
        mutated._require_verdicts(bad, [], read)
    with pytest.raises(DrillError, match="more than once or without a reason"):
        mutated._once([("a.png", "truncated"), ("a.png", "truncated")], "pack.json")
    with pytest.raises(DrillError, match=r"differs from the undisturbed run in metrics\.jsonl"):
        pretraining.require_equal({"metrics.jsonl": [1]}, {"metrics.jsonl": [2]}, "a run")
    with pytest.raises(DrillError, match="hangs"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", seconds=0.3)
    assert afire("data", "check")[1:] == ["-m", "afire", "data", "check"]


def test_the_page_shows_the_results() -> None:
    import json

    results = json.loads((ROOT / "benchmarks/faults.json").read_text(encoding="utf-8"))
    assert (ROOT / "benchmarks/faults.md").read_text(encoding="utf-8") == page.write_page(results)
    assert results["pretraining"]["identical"] == results["pretraining"]["drills"] == 50
    assert results["packing"]["identical"] == results["packing"]["kills"] == 20
    assert results["mutated"]["mutants"] == 500 and results["disk"]["cases"]
