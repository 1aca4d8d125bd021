"""One walk: what all its steps draw from and check with. The steps are rules (:mod:`tests.sequences.rules`)."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from afire.methods import METHODS, unread
from tests.sequences.equal import differences
from tests.sequences.privacy import leaks
from tests.sequences.shell import BrokenPromiseError, Ended, Shell
from tests.sequences.world import Data, SplitFile, Weights, World

FITS = ("squash", "letterbox", "crop")
BATCH = 8
_SMALL = (
    *("image.size=32", "encoder.width=16", "encoder.heads=2", "encoder.patch_size=8", "decoder.width=16"),
    *("decoder.depth=1", f"training.batch_size={BATCH}", "run.picture_epochs=0"),
)
_SMALL_HEAD = ("head.hidden=16", "head.bottleneck=8", "head.clusters=8")
_SMALL_OPTIONS = {
    **{"queue": "32", "key_width": "8", "hidden": "8", "outputs": "16", "bottleneck": "8", "local_views": "2"},
    **{"clusters": "[2]", "films": "32"},
}
_METHODS = [name for name, kind in METHODS.items() if kind.trains and not kind.learns_from_labels]
"""Those that any film will do for."""
Thing = TypeVar("Thing")


class Pretraining(NamedTuple):
    """A `pretrain` without its --out."""

    words: list[str]
    data: Data
    split: SplitFile | None
    start: Weights | None
    fit: str
    method: str


class Walk:
    """``Walk(seed, folder).go(steps)``; ``shell.history`` then says what was done."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.shell, self.world = Shell(folder), World(folder)
        self.numbers: Counter[str] = Counter()
        self.absolute = self.rng.random() < 0.25  # how this user types paths
        self.cache = folder.with_name(f"{folder.name}-cache") if self.rng.random() < 0.5 else None  # of probes

    def go(self, steps: int) -> None:
        """Some films first, then ``steps`` rules; in the end nothing private stands anywhere."""
        from tests.sequences.rules import RULES, new_films

        new_films(self)
        for _ in range(steps):
            possible = [rule for rule in RULES if rule.possible(self.world)]
            (rule,) = self.rng.choices(possible, [rule.weight for rule in possible])
            rule.step(self)
        self.check_private()

    # Draws

    def pick(self, things: Sequence[Thing]) -> Thing:
        return self.rng.choice(things)

    def maybe(self, share: float, words: str) -> list[str]:
        return words.split() if self.rng.random() < share else []

    def name(self, kind: str) -> str:
        """A name that nothing has yet."""
        self.numbers[kind] += 1
        return f"{kind}-{self.numbers[kind]}"

    def typed(self, path: str) -> str:
        return str(self.world.folder / path) if self.absolute else path

    def split_for(self, data: Data) -> SplitFile | None:
        """A split of the films of ``data``, or none."""
        fitting = [split for split in self.world.splits if split.fits(data)]
        return self.pick(fitting) if fitting and self.rng.random() < 0.7 else None

    def network(self, method: str) -> list[str]:
        """Settings that are valid and small."""
        rng = self.rng
        chosen = [*_SMALL, f"encoder.depth={rng.randint(1, 2)}", f"encoder.drop_path={rng.choice([0, 0.3])}"]
        chosen += [f"image.channels={rng.choice([1, 3])}", f"encoder.positions={rng.choice(['sincos', 'learned'])}"]
        chosen += [f"image.normalise={rng.choice(['film', 'imagenet', 'none'])}", f"seed={rng.randrange(3)}"]
        chosen += [f"training.epochs={rng.randint(1, 2)}", f"training.accumulate={rng.choice([1, 1, 2, 4])}"]
        if method == "afire":
            chosen += [*_SMALL_HEAD, f"head.form={rng.choice(['shared', 'per_position'])}"]
            chosen += [f"lesions.views={rng.randint(1, 2)}", f"losses.lesion={rng.choice([0, 0.5])}"]
            chosen += [f"prototypes.enabled={rng.choice(['true', 'true', 'false'])}"]
            chosen += [f"losses.contrast={rng.choice(['probability', 'feature'])}"]
        own = METHODS[method].settings_type.model_fields
        chosen += [f"options.{name}={value}" for name, value in _SMALL_OPTIONS.items() if name in own]
        return settings(*(text for text in chosen if text.split(".")[0] not in unread(method)))

    def pretraining(self) -> Pretraining:
        data = self.pick(self.world.data)
        split = self.split_for(data)
        method = self.pick(sorted(_METHODS))
        start = self.pick(self.world.runs) if self.world.runs and self.rng.random() < 0.15 else None
        fit = data.fit or self.pick(FITS)
        words = ["pretrain", "--data", self.typed(data.path), "--method", method, *self.network(method)]
        words += settings(f"image.fit={fit}") if data.fit is None else []
        words += ["--split", self.typed(split.path)] if split else []
        words += ["--init", self.typed(start.path)] if start else []
        return Pretraining(words, data, split, start, fit, method)

    # Steps

    def run(self, words: Sequence[str], out: str, **options: Any) -> Ended:
        """The command with --out."""
        return self.shell.run(*words, "--out", self.typed(out), out=out, **options)

    def succeed(self, words: Sequence[str], out: str, **options: Any) -> None:
        self.run(words, out, expect=[0], **options)

    def refused(self, words: Sequence[str], out: str) -> str:
        """The command must not do it; what it says."""
        return self.run(words, out, expect=[2]).message

    def kill(self, words: Sequence[str], out: str, file: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Kill the command when ``file`` appears in ``out``, or without one at any moment; the exit code."""
        target = self.world.folder / out / file
        seconds = 30.0 if file else self.rng.uniform(0, 1.5)
        command = (*words, "--out", self.typed(out))
        return self.shell.kill(*command, out=out, when=lambda: bool(file) and target.exists(), seconds=seconds, how=how)

    def repeat(self, kind: str, words: Sequence[str], first: str) -> str:
        """The same command once more, to another place: all that a seed decides is equal."""
        second = self.name(f"again-{kind}") + Path(first).suffix
        self.succeed(words, second)
        self.must_be_equal(kind, first, second)
        return second

    # Checks

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenPromiseError(what)

    def must_be_equal(self, kind: str, first: str, second: str) -> None:
        found = differences(kind, self.world.folder / first, self.world.folder / second)
        self.must(not found, f"{first} and {second} differ in {found[:6]}")

    def must_say(self, told: dict[str, Any], tested: frozenset[str], seen: frozenset[str] | None) -> None:
        """What a result says about test films that were ``seen``; None: no record of them is kept."""
        if seen is None:
            self.must(told["answer"] != "none", f"no record is kept, but it said {told}")
            return
        count = len(tested & seen)
        right = told["seen"] == count and told["answer"] == ("seen" if count else "none")
        self.must(right, f"{count} of {len(tested)} were seen, but it said {told}")

    def check_private(self) -> None:
        private = [str(self.world.folder), *(name for source in self.world.sources for name in source.private)]
        for path in dict.fromkeys(self.world.outputs):
            found = leaks(self.world.folder / path, private)
            self.must(not found, f"private: {found[:4]}")


def settings(*values: str) -> list[str]:
    """``a=1``, ``b=2`` as words of a command."""
    return [word for value in values for word in ("--set", value)]
