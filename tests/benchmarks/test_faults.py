"""The fault drill of ``benchmarks/faults.py``, shortened: the same checks, with one kill of each kind and few files."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.detect.conftest import model  # noqa: F401 - fixture
from tests.forked import fork_commands
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures
from tests.training.conftest import draw_pack

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, not a package

import fault_drills  # noqa: E402
from fault_drills import mutated, packing, page, pretraining  # noqa: E402
from fault_drills.commands import DrillError, afire, run  # noqa: E402
from fault_drills.mutants import SHARES, Mutant, write_good, write_mutants  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of pydicom, while bad files are made
]
MUTANTS = 24


def in_a_process(rank: int, drill: Callable[..., object], arguments: Sequence[object], out: Path) -> None:
    """A drill in a process that has imported everything, from which the commands are forked; writes what it found."""
    fork_commands(fault_drills.commands)
    out.write_text(json.dumps(drill(*arguments)), encoding="utf-8")


def found_by(drill: Callable[..., object], *arguments: object, out: Path) -> Any:
    commands.fork_processes(1, in_a_process, drill, arguments, out)
    return json.loads(out.read_text(encoding="utf-8"))


def drill_pretraining(folder: Path, pack: Path) -> dict[str, Any]:
    fewer = ("training.batch_size=8", "training.epochs=2", "run.picture_epochs=0", "run.checkpoint_minutes=1e-9")
    pretraining.SETTINGS = ("image.size=32", "encoder.patch_size=8", *fewer)
    return pretraining.drill(folder, pack, kills=1, seed=39, jobs=1)


@pytest.mark.slow
def test_a_killed_pretraining_ends_bit_identical(tmp_path: Path) -> None:
    found = found_by(drill_pretraining, tmp_path / "drill", draw_pack(tmp_path / "data"), out=tmp_path / "found.json")
    assert found["identical"] == 1 and sum(found["killed while"].values()) == found["kills"] >= 1


def drill_packing(folder: Path, source: Path) -> dict[str, Any]:
    return packing.drill(folder, source, kills=1, seed=23, workers=1)


@pytest.mark.slow
def test_a_killed_packing_ends_bit_identical(tmp_path: Path) -> None:
    source = packing.draw_films(tmp_path / "films", 80, 64)
    found = found_by(drill_packing, tmp_path / "drill", source, out=tmp_path / "found.json")
    assert found["identical"] == 1 and found["films"] == 80


def read_mutants(folder: Path, detector: Path) -> None:
    mutated._WORKERS = 1
    mutated.run_all(folder / "films", folder / "out", detector, folder / "logs")


@pytest.mark.slow
def test_mutated_files_are_named_and_good_films_are_not_lost(tmp_path: Path, model: Path) -> None:  # noqa: F811
    folder = tmp_path / "films"
    bad, good = write_mutants(folder, MUTANTS, seed=0), write_good(folder, 8)
    found_by(read_mutants, tmp_path, model, out=tmp_path / "found.json")
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
    results = json.loads((ROOT / "benchmarks/faults.json").read_text(encoding="utf-8"))
    assert (ROOT / "benchmarks/faults.md").read_text(encoding="utf-8") == page.write_page(results)
    assert results["pretraining"]["identical"] == results["pretraining"]["drills"] == 50
    assert results["packing"]["identical"] == results["packing"]["kills"] == 20
    assert results["mutated"]["mutants"] == 500 and results["disk"]["cases"]
