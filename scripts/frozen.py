"""What must not change: fixtures of version 0, made and compared through the command line and `afire.load` alone.

python scripts/frozen.py --out FOLDER    make all fixtures with the code as it is
python scripts/frozen.py --check         run the records again, bit for bit; ends with 1 on a difference

Nothing here imports a module below `afire`, so that modules may move. Floats are compared with their last bit only on
the machine that made them: other processors round differently, and `tests/test_frozen.py` allows for that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "v0"
PHANTOM_FIXTURE = ROOT / "tests" / "fixtures" / "phantom"
EXPECTED, ARRAYS, TWENTY_STEPS = "expected.json", "expected.npz", "twenty_steps.json"

GLOBAL_BATCH = 4
STEPS = 20

# Depth 2, not 1: stochastic depth rises from 0 at the first block, so that a single block is never dropped.
SETTINGS = (
    *("image.size=32", "encoder.width=16", "encoder.depth=2", "encoder.heads=2", "encoder.patch_size=8"),
    *("head.hidden=16", "head.bottleneck=8", "head.clusters=8"),
    *("decoder.width=16", "decoder.depth=1", "decoder.heads=2", "losses.lesion=0.5"),
    *("training.epochs=5", "training.accumulate=1", "run.picture_epochs=0"),
)
# Everything that the plain record leaves at its default and that code of its own computes.
OTHER_SETTINGS = (
    *("head.form=per_position", "encoder.positions=learned", "image.channels=3", "image.normalise=imagenet"),
    *("lesions.views=2", "lesions.place=lungs", "lesions.haze=0.3", "lesions.rotate=true", "lesions.irregularity=0.3"),
    *("losses.abnormal_consistency=true", "decoder.mask_token=false"),
)
EVERY_MAP = "restoration+student_surprise+surprise_peak+gaussian_peak+two_pass+lesion"
FILMS = ("000000.png", "000001.png", "000002.png", "000003.png")
ODD_FILMS = ("marked.png", "inverted.png", "blank.png", "noise.png")
WEIGHTS = ("run", "bundle-run", "detector", "bundle-detector")
DETECTORS = ("detector", "bundle-detector")
CLOCK = ("images_per_second", "data_wait")  # of a row of metrics.jsonl; all its other numbers follow from the seed

Start = Callable[..., None]
"""`start(folder, *words, processes=1)` runs one `afire` command in a folder; tests do it without a new process."""


@dataclass(frozen=True)
class Record:
    """A training that is run again: its command, and where its numbers and weights are in the folder it writes."""

    words: tuple[str, ...]
    processes: int = 1
    metrics: str = "metrics.jsonl"
    weights: str = "checkpoints/step-00000020"
    unseeded: tuple[str, ...] = ()


def settings(*values: str) -> tuple[str, ...]:
    return tuple(word for value in values for word in ("--set", value))


def pretraining(*values: str, processes: int = 1, unseeded: tuple[str, ...] = ()) -> Record:
    words = ("pretrain", "--data", "pack", "--split", "split.json", "--preset", "tiny", "--device", "cpu")
    return Record(
        (*words, *settings(*SETTINGS, f"training.batch_size={GLOBAL_BATCH}", *values)), processes, unseeded=unseeded
    )


PHANTOM = ("data", "phantom", "--count", "12", "--size", "64", "--seed", "3", "--normal-share", "0.6", "--workers", "1")
PACK = ("data", "pack", "--data", "phantom/manifest.parquet", "--size", "32", "--workers", "1")
SPLIT = ("data", "split", "--data", "pack", "--val", "0.25", "--test", "0.25")
LABELLED = ("--data", "pack", "--split", "split.json", "--device", "cpu")
RECORDS = {
    "one_process": pretraining(),
    "two_processes": pretraining(processes=2),
    "drop_path": pretraining("encoder.drop_path=0.3"),
    "other_settings": pretraining(*OTHER_SETTINGS),
    "finetune": Record(
        (
            *("finetune", "--weights", "run", *LABELLED, "--labels", "abnormal", "--seeds", "0"),
            *settings("training.epochs=2", "training.batch_size=8", "training.min_epoch_steps=3", "bootstrap=20"),
            *settings("training.drop_path=0.2", "training.layer_decay=0.7", "class_weights=balanced"),
        ),
        metrics="seed-0/metrics.jsonl",
        weights="seed-0",
    ),
    "detect_fit": Record(
        (
            *("detect", "fit", "--weights", "run", *LABELLED, "--score", EVERY_MAP),
            *settings("adapt.epochs=2", "adapt.batch_size=8", "false_alarms=0.2", "choose_share=0.6"),
        ),
        metrics="adapt/metrics.jsonl",
        weights=".",
    ),
}


def run(folder: Path, *words: str, processes: int = 1) -> None:
    """One command as a user starts it. Its paths are relative, so that no file it writes knows this machine."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m")
    command = [sys.executable, "-m", *(launcher if processes > 1 else ()), "afire", *words, "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def record(name: str, folder: Path, out: str, start: Start = run) -> dict[str, Any]:
    """Run one training in a folder that holds pack, split and run; its numbers by step and the hashes of its end."""
    one = RECORDS[name]
    start(folder, *one.words, "--out", out, processes=one.processes)
    rows = metrics(folder / out / one.metrics, one.unseeded)
    if one.words[0] == "pretrain" and sum("total" in row for row in rows) != STEPS:
        raise RuntimeError(f"{name} took other than {STEPS} steps")
    made_by = {"processes": one.processes, "command": " ".join(one.words)}
    return {**made_by, "rows": rows, "hashes": hashes(folder / out / one.weights)}


def metrics(file: Path, unseeded: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl without what the clock or mere chance said."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in (*CLOCK, *unseeded)} for row in rows]


def hashes(folder: Path) -> dict[str, dict[str, str]]:
    """Of every safetensors file in a folder: of its tensors with their names, and of their values alone."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: _digest(value) for name, value in load_file(file).items()}
        named, values = sorted(f"{name} {digest}" for name, digest in tensors.items()), sorted(tensors.values())
        found[file.name] = {"named": _sha256("\n".join(named)), "values": _sha256("\n".join(values))}
    return found


def _digest(tensor: NDArray[Any]) -> str:
    return f"{tensor.dtype} {tensor.shape} {hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """What `afire.load` says of the films, for each of the four kinds of folder it opens."""
    import afire

    found: dict[str, NDArray[Any]] = {}
    for name in WEIGHTS:
        model = afire.load(folder / name, device="cpu")
        images = model.read([folder / "films" / film for film in FILMS])
        found |= {
            f"{name}/read": images.numpy(),
            f"{name}/embed": model.embed(images).numpy(),
            f"{name}/embed student": model.embed(images, network="student").numpy(),
            f"{name}/restore": model.restore(images).numpy(),
        }
        if name in DETECTORS:
            seen = model.detect([folder / "films" / film for film in (*FILMS, *ODD_FILMS)])
            kept = {"score": seen.score, "p_value": seen.p_value, "alarm": seen.alarm, "heatmap": seen.heatmap}
            found |= {f"{name}/{key}": np.asarray(value) for key, value in kept.items()}
            found[f"{name}/restored"] = np.asarray(seen.restored)
            found[f"{name}/objections"] = np.asarray(["; ".join(each) for each in seen.objections])
    return found


def answers(folder: Path, start: Start = run) -> dict[str, Any]:
    """What the commands say of the fixtures; results are written to `folder`/answers."""
    out = folder / "answers"
    found: dict[str, Any] = {"embed": {}, "detect": {}}
    for name in ("run", "bundle-run"):
        words = ("embed", "--weights", name, "--data", "pack", "--device", "cpu")
        start(folder, *words, "--out", f"answers/{name}.npz")
        with np.load(out / f"{name}.npz") as file:
            found["embed"][name] = {
                str(film): vector.tolist() for film, vector in zip(file["image"][:4], file["features"][:4], strict=True)
            }
    # The version that made the fixtures took no bundle here: the detector inside is named.
    for name in ("detector", "bundle-detector/detector"):
        result = f"answers/{name.replace('/', '-')}"
        words = ("detect", "run", "films", "--model", name, "--no-pictures", "--device", "cpu")
        start(folder, *words, "--out", result)
        found["detect"][name] = detections(folder / result / "results.json")
    probe = ("probe", "--weights", "run", *LABELLED, "--labels", "abnormal", "--seeds", "0", "--no-cache")
    start(folder, *probe, "--out", "answers/probe")
    result = json.loads((out / "probe" / "result.json").read_text())
    found["probe"] = {key: result[key] for key in ("split_hash", "test_hash", "labels", "fraction")}
    found["probe"] |= {"data": result["data"]["hash"], "weights": result["weights"]["hash"]}
    found["probe"] |= {key: result["runs"][0][key] for key in ("films", "chosen", "metrics")}
    return found


def detections(file: Path) -> dict[str, Any]:
    """Score, p-value, region and objections of each film, by its name."""
    columns = ("status", "score", "percentile", "p_value", "alarm", "region", "region_sd", "hottest_x", "hottest_y")
    result = json.loads(file.read_text())
    films = {
        film["file"]: {key: film[key] for key in (*columns, "reason", "score_not_to_be_trusted")}
        for film in result["films"]
    }
    return {"model": result["model"]["hash"], "threshold": result["rule"]["threshold"], "films": films}


def make(folder: Path) -> None:
    """All fixtures, in a folder that is not there yet."""
    folder.mkdir(parents=True)
    # The first edition of the phantom, which is no longer drawn: the records are about training, not about its films.
    shutil.copytree(FIXTURES / "phantom", folder / "phantom")
    for words, out in ((PACK, "pack"), (SPLIT, "splits")):
        run(folder, *words, "--out", out)
    (folder / "splits" / "split.json").rename(folder / "split.json")
    draw_films(folder / "phantom" / "images", folder / "films")
    # Later trainings start from the first one, and the detector is that of its record.
    kept = {"one_process": "run", "detect_fit": "detector"}
    records = {name: record(name, folder, kept.get(name, f"answers/{name}")) for name in RECORDS}
    for name in ("run", "detector"):
        run(folder, "export", name, "--out", f"bundle-{name}")
    strip(folder)
    found = answers(folder)
    found["weights"] = {name: hashes(part) for name, part in weights_folders(folder).items()}
    np.savez_compressed(folder / ARRAYS, **arrays(folder))
    shutil.rmtree(folder / "answers")
    write(folder / EXPECTED, found)
    write(folder / TWENTY_STEPS, {"global_batch": GLOBAL_BATCH, **records})


def weights_folders(folder: Path) -> dict[str, Path]:
    """Where weights lie in the fixtures, by name."""
    newest = sorted((folder / "run" / "checkpoints").iterdir())[-1]
    return {"run": newest, **{name: folder / name for name in WEIGHTS[1:]}}


def draw_films(phantom: Path, out: Path) -> None:
    """Films to detect on: four of the phantom, one with a bright square, and three that are no films of its kind."""
    out.mkdir()
    for name in FILMS:
        shutil.copy(phantom / name, out / name)
    film = Image.open(out / FILMS[0])
    ImageOps.invert(film).save(out / "inverted.png")
    Image.new("L", film.size, 90).save(out / "blank.png")
    noise = np.random.default_rng(0).integers(0, 256, film.size, np.uint8)
    Image.fromarray(noise).save(out / "noise.png")
    ImageDraw.Draw(film).rectangle((40, 22, 50, 32), fill=255)
    film.save(out / "marked.png")


def strip(folder: Path) -> None:
    """Leave out what no command reads: logs that name the machine, large pictures, locks."""
    for logs in folder.rglob("tensorboard"):
        shutil.rmtree(logs)
    for file in folder.rglob(".lock"):
        file.unlink()
    (folder / "splits").rmdir()


def write(path: Path, content: Any) -> None:
    """JSON with one row of metrics or one vector a line: small, and a difference is seen in a diff."""
    innermost = re.compile(r"\{[^{}\[\]]*\}|\[[^{}\[\]]*\]")
    text = innermost.sub(lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(content, indent=1))
    path.write_text(text + "\n", encoding="utf-8")


def check(names: list[str]) -> bool:
    """Run the records again; a table of what was and what is. True when every bit is the same."""
    before = json.loads((FIXTURES / TWENTY_STEPS).read_text())
    same = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("pack", "run"):
            shutil.copytree(FIXTURES / part, folder / part)
        shutil.copy(FIXTURES / "split.json", folder)
        say(f"{'record':15} {'what':38} {'before':24} {'after':24}")
        for name in names:
            after = record(name, folder, f"again/{name}")
            for what, old, new in compare(before[name], after):
                # Detectors of format 2 call their tensors otherwise; their values must still be those of before.
                renamed = what == "detector.safetensors named"
                same &= old == new or renamed
                verdict = "" if old == new else "renamed" if renamed else "DIFFERENT"
                say(f"{name:15} {what:38} {old:24} {new:24} {verdict}")
    say("every bit is the same" if same else "not the same")
    return same


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (what, before, after): the first number that differs or the last one, then the hashes. New numbers are
    no difference; those that are gone are."""
    old, new = numbers(before["rows"]), numbers(after["rows"])
    changed = [key for key in old if old[key] != new.get(key, "gone")]
    shown = changed[0] if changed else [key for key in old if key.endswith(("total", "loss"))][-1]
    rows = [(shown, old[shown], new.get(shown, "gone"))]
    rows.append(("numbers equal", f"{len(old)} of {len(old)}", f"{len(old) - len(changed)} of {len(old)}"))
    for file, kinds in before["hashes"].items():
        for kind, digest in kinds.items():
            rows.append((f"{file} {kind}", digest[:16], after["hashes"].get(file, {}).get(kind, "gone")[:16]))
    return rows


def numbers(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Every number by its step and name, as Python writes it: the shortest text that gives all its bits."""
    return {f"step {row['step']} {key}": repr(value) for row in rows for key, value in row.items()}


def say(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder for the fixtures; must not exist")
    what.add_argument("--check", action="store_true", help="run the records again and compare bit for bit")
    parser.add_argument("--only", choices=RECORDS, action="append", help="with --check: this record; repeat for more")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: sums over threads round differently
    if chosen.check:
        return 0 if check(chosen.only or list(RECORDS)) else 1
    make(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
