"""Learning from labels: the loss with missing ones, whose labels are seen, what is refused; and learning nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import make_manifest
from afire.errors import UserError
from afire.methods import make_method
from afire.methods.base import Keys, Labels
from afire.methods.supervised import Supervised, label_loss
from afire.nn.vit import VisionTransformer, initialise
from afire.settings import load_config
from afire.training.batches import labelled_training_rows, run_labels
from afire.weights import open_weights
from tests.tasks.drawn import draw_spots

SMALL = ["image.size=32", "encoder.patch_size=8", "encoder.width=16", "encoder.depth=1", "encoder.heads=2"]
NAN = float("nan")


def made(*overrides: str, names: tuple[str, ...] = ("A", "B")) -> Supervised:
    config = load_config("tiny", overrides=["method=supervised", *SMALL, *overrides])
    model = make_method(Supervised.settled(config, 8, names))
    assert isinstance(model, Supervised)
    return model.train()


def test_the_loss_equals_the_reference_in_value_and_gradient() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([[1, 0, NAN], [NAN, NAN, NAN], [0, 1, 1], [NAN, 0, NAN]])
    slow = []
    for film in range(4):
        for label in range(3):
            true = float(labels[film, label])
            if true == true:
                chance = torch.sigmoid(logits[film, label])
                slow.append(-(true * torch.log(chance) + (1 - true) * torch.log(1 - chance)))
    assert len(slow) == 6
    fast, expected = label_loss(logits, labels), torch.stack(slow).mean()
    torch.testing.assert_close(fast, expected)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (fast, expected)]
    torch.testing.assert_close(*gradients)
    nothing = label_loss(logits, torch.full((4, 3), NAN))
    assert nothing == 0 and (torch.autograd.grad(nothing, logits)[0] == 0).all()


def table(count: int = 8) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "image": [f"{number}.png" for number in range(count)],
            "patient": [f"p{number // 2}" for number in range(count)],
            "split": ["train"] * 6 + ["test"] * 2,
            "label:A": [1, 0, NAN, 1, NAN, 0, 1, 1],
            "label:B": [NAN, 0, NAN, 1, NAN, 1, 0, 0],
        }
    )


def test_only_labels_of_the_runs_films_are_seen(tmp_path: Path) -> None:
    manifest = make_manifest(table(), tmp_path)
    rows, message = labelled_training_rows(manifest)
    assert rows.tolist() == [0, 1, 3, 5]  # films without any label are left out, and so are test films
    assert message == "using 4 films with labels of 6 training films (2 of other parts left alone)"
    labels = run_labels(manifest, rows)
    assert labels.names == ("A", "B") and labels.values.shape == (4, 2)
    np.testing.assert_array_equal(labels.values.numpy(), np.array([[1, NAN], [0, 0], [1, 1], [0, 1]]))
    assert run_labels(manifest, rows, ["B"]).values[:, 0].nansum() == 2
    with pytest.raises(UserError, match=r"no label 'C'.*\(it has A, B, abnormal\)"):
        run_labels(manifest, rows, ["C"])
    without = make_manifest(table()[["image", "patient", "split"]], tmp_path)
    with pytest.raises(UserError, match=r"none of the 6 training films .* has a label"):
        labelled_training_rows(without)


def test_each_film_gets_its_own_labels_and_they_stay_out_of_the_weights() -> None:
    model = made()
    values = torch.tensor([[1, NAN], [0, 0], [1, 1], [0, 1]])
    model.begin_labels(Labels(("A", "B"), torch.tensor([2, 5, 6, 9]), values))
    views = model.views(torch.rand(2, 1, 32, 32), Keys(0, 0, 0, torch.tensor([9, 5])))
    assert torch.equal(views["labels"], values[[3, 1]])
    assert not any("label" in name for name in model.state_dict())
    assert model.says.out_features == 2
    with pytest.raises(UserError, match="no label is both present and absent"):
        model.begin_labels(Labels(("A", "B"), torch.arange(2), torch.tensor([[1, NAN], [1, 0]])))


def test_health_tells_learning_from_guessing() -> None:
    model = made(names=("A",)).eval()
    images = torch.rand(16, 1, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.2
    truth = (torch.arange(16) % 2).float()[:, None]
    images[1::2, :, 8:24, 8:24] += 0.7
    model.begin_labels(Labels(("A",), torch.arange(16), truth))
    views = model.views(images, Keys(0, 0, 0, torch.arange(16)))
    with torch.no_grad():
        model.says.weight.zero_()
    guessing = model.health(views, {"labels": 0.69})
    assert guessing.colour == "amber" and "frequency" in guessing.reason
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for epoch in range(40):
        loss = model.losses(model(model.views(images, Keys(0, epoch, epoch, torch.arange(16))))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    learnt = model.eval().health(model.views(images, Keys(0, 0, 0, torch.arange(16))), {"labels": loss.item()})
    assert learnt.colour == "green" and learnt.numbers["explained"] > 0.3
    assert model.panels(views, 2)[0].images.shape == (2, 1, 32, 32)


# In the command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("films") / "data")


def pretrain(data: Path | None, out: Path, method: str, *more: str) -> str:
    settings = [
        *SMALL,
        "training.epochs=1",
        "training.batch_size=8",
        "training.warmup_epochs=0",
        "run.picture_epochs=0",
    ]
    words = ["pretrain", "--method", method, "--preset", "tiny", "--out", str(out), *more]
    words += ["--data", str(data)] if data is not None else []
    done = CliRunner().invoke(app, [*words, *(word for text in settings for word in ("--set", text))])
    if isinstance(done.exception, UserError):
        return str(done.exception)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


def test_the_command_takes_films_with_labels(data: Path, tmp_path: Path) -> None:
    said = pretrain(data, tmp_path / "run", "supervised", "--set", "options.labels=[Spot]")
    assert "films with labels" in said and "normal films" not in said
    config = open_weights(tmp_path / "run").config
    assert config.options["labels"] == ["Spot"]
    assert "films with labels of" in (tmp_path / "run/README.md").read_text()
    assert "no label 'Sport'; did you mean Spot?" in pretrain(
        data, tmp_path / "other", "supervised", "--set", "options.labels=[Sport]"
    )
    assert not (tmp_path / "other").exists()


def vit(folder: Path, *overrides: str) -> tuple[Path, dict[str, Tensor]]:
    config = load_config("tiny", overrides=[*SMALL, *overrides])
    trunk = VisionTransformer.from_config(config.encoder, config.image)
    initialise(trunk, torch.Generator().manual_seed(3))
    tensors = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    save_file(tensors, folder / "vit.safetensors")
    return folder / "vit.safetensors", tensors


def test_imagenet_is_the_file_and_nothing_else(data: Path, tmp_path: Path) -> None:
    file, tensors = vit(tmp_path)
    message = pretrain(data, tmp_path / "none", "imagenet")
    assert message == "the method imagenet learns nothing by itself; give it weights with --init."
    assert not (tmp_path / "none").exists()
    pretrain(data, tmp_path / "run", "imagenet", "--init", str(file))
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    stored = load_file(checkpoint / "model.safetensors")
    assert {name.removeprefix("encoder.") for name in stored} == set(tensors)
    assert all(torch.equal(stored[f"encoder.{name}"], tensor) for name, tensor in tensors.items())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["step"] == 0 == summary["steps"]
    pretrain(data, tmp_path / "run", "imagenet", "--init", str(file), "--resume")
    pretrain(data, tmp_path / "further", "moco", "--init", str(tmp_path / "run"))  # a start for others
    pretrain(None, tmp_path / "nobody", "imagenet", "--init", str(file))  # nobody's films are needed
    assert "none: the weights are those" in (tmp_path / "nobody/README.md").read_text()
