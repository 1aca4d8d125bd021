"""The seam: methods with every special need run in the loop, and go on after a stop as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods import METHODS
from afire.methods.base import ALL, AllFilms, Keys, Losses, Method, Outputs, Phase, Views
from afire.nn.vit import VisionTransformer, initialise
from afire.training.pretrain import pretrain
from tests.training.conftest import packed, smallest  # noqa: F401 - fixtures

MakeConfig = Callable[..., Config]


class Toy(Method):
    """A trunk that should say how bright a film is."""

    networks = ("encoder",)
    sections = ()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.score = nn.Linear(config.encoder.width, 1)
        initialise(self, torch.Generator().manual_seed(config.seed))

    def views(self, images: Tensor, keys: Keys) -> Views:
        return {"images": images}

    def forward(self, views: Views) -> Outputs:
        tokens = self.encoder(self.normalise(views["images"]))[:, 0]
        return {"said": self.score(tokens)[:, 0], "true": views["images"].mean(dim=(1, 2, 3))}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        loss = (outputs["said"] - outputs["true"]).square().mean()
        return Losses({"brightness": loss}, loss)

    def trunk_prefix(self, network: str | None = None) -> str:
        return f"{self.network(network)}."


class Adversarial(Toy):
    """Two optimisers that take turns."""

    turns = ("trunk", "critic")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.critic = nn.Linear(config.encoder.width, 1)
        nn.init.constant_(self.critic.weight, 0.1)
        nn.init.zeros_(self.critic.bias)

    def forward(self, views: Views) -> Outputs:
        tokens = self.encoder(self.normalise(views["images"]))[:, 0]
        said = {"said": self.score(tokens)[:, 0], "true": views["images"].mean(dim=(1, 2, 3))}
        return {**said, "critic": self.critic(tokens)[:, 0]}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        critic = outputs["critic"].square().mean()
        if turn == "critic":
            return Losses({"critic": critic}, -critic)
        plain = super().losses(outputs)
        return Losses(plain.terms, plain.total + critic)

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, parameter)
            for name, parameter in self.named_parameters()
            if name.startswith("critic.") == (turn == "critic")
        )


class Phased(Toy):
    """The score alone first, then the trunk too; before each epoch, a pass that finds the mean of all films."""

    prepares = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.queue: Tensor
        self.register_buffer("queue", torch.zeros(5))

    def phases(self) -> tuple[Phase, ...]:
        epochs = self.config.training.epochs
        return Phase("score", 1), Phase("all", epochs - 1)

    def begin_phase(self, name: str) -> None:
        self.encoder.requires_grad_(name == "all")

    def prepare(self, epoch: int, films: AllFilms) -> None:
        means = torch.cat([images.mean(dim=(1, 2, 3)) for images, _ in films()])
        assert torch.equal(torch.cat([rows for _, rows in films()]), torch.arange(len(means)))
        self.mean.copy_(means.mean())  # type: ignore[operator]
        self.passes += 1

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        loss = (outputs["said"] - (outputs["true"] - self.mean)).square().mean()
        return Losses({"brightness": loss}, loss, {"entry": outputs["true"].mean().detach()})

    def after_step(self, losses: Losses) -> None:
        self.queue.copy_(torch.cat([self.queue[1:], losses.pending["entry"][None]]))


class AdversarialInPhases(Adversarial):
    """Two optimisers in two phases, each with the parameters that are not frozen then."""

    def phases(self) -> tuple[Phase, ...]:
        return Phase("first", 1), Phase("second", self.config.training.epochs - 1)

    def begin_phase(self, name: str) -> None:
        assert all(parameter.requires_grad for parameter in self.parameters()), "a turn has left something frozen"

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in super().parameters_of(turn) if parameter.requires_grad)


METHODS_HERE = {"toy": Toy, "adversarial": Adversarial, "phased": Phased, "in_phases": AdversarialInPhases}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in METHODS_HERE.items():
        monkeypatch.setitem(METHODS, name, method)


def newest(run: Path) -> dict[str, Tensor]:
    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    tensors = load_file(folder / "model.safetensors")
    return tensors | {f"optimizer {key}": value for key, value in load_file(folder / "optimizer.safetensors").items()}


@pytest.mark.parametrize("method", [*METHODS_HERE, "mae", "afire"])
def test_what_is_resumed_ends_bit_identical(
    packed: Path,  # noqa: F811
    smallest: MakeConfig,  # noqa: F811
    tmp_path: Path,
    method: str,
) -> None:
    config = smallest(f"method={method}", "run.keep_checkpoints=100", "run.checkpoint_minutes=1e-9")
    films = PackedFilms(packed)
    assert pretrain(config, films, tmp_path / "whole").status == "finished"
    whole = newest(tmp_path / "whole")
    for kept in (2, 4):  # of five checkpoints: the first two lie in the first epoch's neighbourhood
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"resumed after {kept}")
        for step in range(4 * kept - 3, 16):
            (run / "checkpoints" / f"step-{step:08d}" / "state.json").unlink()  # as a kill while writing leaves them
        pretrain(config, films, run, resume=True)
        resumed = newest(run)
        assert whole.keys() == resumed.keys() and len(whole) > 10
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_optimisers_take_turns(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:  # noqa: F811
    config = smallest(
        "method=adversarial", "training.epochs=1", "training.weight_decay=0", "training.weight_decay_end=0"
    )
    before = Adversarial(config).state_dict()
    pretrain(config, PackedFilms(packed), tmp_path / "run")
    after = newest(tmp_path / "run")
    assert not torch.equal(after["critic.weight"], before["critic.weight"])
    assert not torch.equal(after["encoder.norm.weight"], before["encoder.norm.weight"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"critic", "brightness"} <= lines[0].keys()


def test_a_turn_leaves_nothing_frozen_for_the_next_phase(packed: Path, smallest: MakeConfig, tmp_path: Path) -> None:  # noqa: F811
    config = smallest("method=in_phases", "training.epochs=2", "run.keep_checkpoints=100")
    pretrain(config, PackedFilms(packed), tmp_path / "run")
    first, last = (
        load_file(folder / "model.safetensors") for folder in sorted((tmp_path / "run/checkpoints").glob("step-*"))
    )
    for name in ("critic.weight", "encoder.norm.weight"):
        assert not torch.equal(first[name], last[name])


def test_an_update_costs_what_its_turns_cost(smallest: MakeConfig) -> None:  # noqa: F811
    class Rare(Adversarial):
        def share(self, turn: str) -> float:
            return 0.25 if turn == "trunk" else 1.0

    config = smallest("method=adversarial")
    whole, rare, alone = Adversarial(config), Rare(config), Toy(config)
    trunk, both = alone.flops(), whole.flops()
    assert both > 1.2 * trunk, "the critic's turn runs the trunk once more, forward only"
    assert rare.flops() == pytest.approx(both - 0.75 * trunk, rel=0.01)
    assert all(parameter.requires_grad for parameter in whole.parameters())


def test_a_phase_trains_what_it_says_and_a_pass_comes_before_each_epoch(
    packed: Path,  # noqa: F811
    smallest: MakeConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = smallest("method=phased", "run.keep_checkpoints=100")
    films = PackedFilms(packed)
    pretrain(config, films, tmp_path / "run")
    first, *_, last = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    start, after_one, at_end = Phased(config).state_dict(), *(load_file(f / "model.safetensors") for f in (first, last))
    assert torch.equal(after_one["encoder.norm.weight"], start["encoder.norm.weight"])
    assert not torch.equal(after_one["score.weight"], start["score.weight"])
    assert not torch.equal(at_end["encoder.norm.weight"], start["encoder.norm.weight"])
    assert at_end["passes"] == 3
    torch.testing.assert_close(at_end["mean"], films.batch(range(40)).mean(dim=(1, 2, 3)).mean())
    assert (at_end["queue"] > 0).all()


def test_phases_must_fill_the_epochs(
    packed: Path,  # noqa: F811
    smallest: MakeConfig,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Phased, "phases", lambda self: (Phase("score", 2),))
    with pytest.raises(UserError, match=r"the phases of phased have 2 epochs, but training\.epochs is 3"):
        pretrain(smallest("method=phased"), PackedFilms(packed), tmp_path / "run")
    assert not (tmp_path / "run").exists()
