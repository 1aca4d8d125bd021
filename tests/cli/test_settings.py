"""The one dialect of --set: where a key goes, and what is said of one that goes nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from afire.cli import app
from afire.cli.settings import (
    ABLATE,
    DETECT,
    FINETUNE,
    NETWORK,
    PRETRAIN,
    SEGMENT,
    Owner,
    sort_settings,
    sorted_settings,
)
from afire.errors import UserError


def test_a_key_goes_to_the_first_owner_that_has_it() -> None:
    texts = ["image.size=64", "training.epochs=3", "encoder.width=32", "augment.flip=0", "seed=4"]
    own, network = sort_settings(texts, FINETUNE, NETWORK)
    assert own == ["training.epochs=3", "augment.flip=0", "seed=4"]
    assert network == ["image.size=64", "encoder.width=32"]
    own, network = sort_settings(["adapt.lesions.haze=0.1", "training.epochs=3", "losses.category=0"], DETECT, PRETRAIN)
    assert own == ["adapt.lesions.haze=0.1"] and network == ["training.epochs=3", "losses.category=0"]
    assert sort_settings(None, FINETUNE, NETWORK) == [[], []]


def test_groups_and_values_that_only_their_reader_knows() -> None:
    texts = ["training={epochs: 3}", "options.mask_ratio=0.5", "training.epochs = 3"]
    assert sort_settings(texts, PRETRAIN) == [texts]


def test_the_name_of_a_command_says_whose_it_is() -> None:
    texts = ["finetune.training.epochs=3", "pretrain.encoder.width=32"]
    assert sort_settings(texts, FINETUNE, NETWORK) == [["training.epochs=3"], ["encoder.width=32"]]
    assert sort_settings(["ablate.training.epochs=3"], ABLATE) == [["training.epochs=3"]]


def test_a_reproduction_sorts_by_name() -> None:
    shares = sorted_settings(["training.epochs=2", "finetune.training.epochs=1", "ablate.losses.category=0"])
    assert shares == {
        "pretrain": ["training.epochs=2"],
        "finetune": ["training.epochs=1"],
        "segment": [],
        "detect": [],
        "ablate": ["losses.category=0"],
    }
    with pytest.raises(UserError, match=r"write finetune\.augment\.flip or segment\.augment\.flip\.$"):
        sorted_settings(["augment.flip=0"])
    with pytest.raises(UserError, match=r"unknown setting training\.epoch; did you mean training\.epochs\?"):
        sorted_settings(["finetune.training.epoch=3"])


@pytest.mark.parametrize(
    ("text", "owners", "message"),
    [
        ("epochs=3", [PRETRAIN], "unknown setting epochs; did you mean training.epochs?"),
        ("traning.epochs=3", [PRETRAIN], "unknown setting traning; did you mean training?"),
        ("encodr.width=3", [FINETUNE, NETWORK], "unknown setting encodr; did you mean encoder, of `afire pretrain`?"),
        ("losses.dice=2", [PRETRAIN], "unknown setting losses.dice: it is one of `afire segment`."),
        (
            "training.patience=3",
            [PRETRAIN],
            "unknown setting training.patience: it is one of `afire finetune` and `afire segment`.",
        ),
        ("head.hidden=3", [FINETUNE, NETWORK], "unknown setting head.hidden: it is one of `afire pretrain`."),
        ("qqqq=3", [SEGMENT, NETWORK], "unknown setting qqqq."),
        (
            "segment.masks.column=a",
            [FINETUNE, NETWORK],
            "--set segment.masks.column=a: nothing here is a setting of segment; this takes finetune, pretrain.",
        ),
        ("training.epochs", [DETECT], "--set 'training.epochs' is not key=value, as in --set training.epochs=10."),
        ("a=[", [PRETRAIN], "--set 'a=[': '[' is not a YAML value; quote it."),
    ],
)
def test_mistakes(text: str, owners: list[Owner], message: str) -> None:
    with pytest.raises(UserError) as error:
        sort_settings([text], *owners)
    assert str(error.value) == message


def commands_with_set() -> dict[str, str]:
    """The help of --set of every command that has it."""
    texts: dict[str, str] = {}

    def walk(command: object, path: list[str]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, [*path, name])
        for option in getattr(command, "params", []):
            if "--set" in getattr(option, "opts", []):
                texts[" ".join(path)] = option.help

    walk(get_command(app), [])
    return texts


def test_every_command_explains_it_the_same_way() -> None:
    texts = commands_with_set()
    assert {"pretrain", "finetune", "segment", "detect fit", "ablate", "reproduce", "probe", "config"} <= set(texts)
    assert len(set(texts.values())) == 1


NEEDS = {
    "pretrain": ["--data", "D", "--out", "O"],
    "probe": ["--weights", "random", "--data", "D", "--out", "O"],
    "finetune": ["--weights", "random", "--data", "D", "--out", "O"],
    "segment": ["--weights", "random", "--data", "D", "--out", "O"],
    "embed": ["--weights", "random", "--data", "D", "--out", "O.npz"],
    "detect fit": ["--weights", "random", "--data", "D", "--out", "O"],
    "ablate": ["--data", "D", "--out", "O"],
    "baselines": ["--data", "D", "--out", "O"],
    "reproduce": ["all", "--on", "phantom", "--out", "O"],
    "figure tsne": ["--weights", "random", "--data", "D", "--out", "O"],
    "figure landmarks": ["--weights", "random", "--data", "D", "--out", "O"],
    "lesions preview": ["--data", "D", "--out", "O.png"],
    "export": ["random", "--format", "timm", "--out", "O"],
    "config": [],
}


@pytest.mark.parametrize("command", list(NEEDS))
def test_every_command_refuses_a_misspelt_key_before_anything_else(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^unknown setting trainng; did you mean training"):
        CliRunner().invoke(
            app, [*command.split(), *NEEDS[command], "--set", "trainng.epochs=3"], catch_exceptions=False
        )
    assert set(commands_with_set()) == set(NEEDS)
