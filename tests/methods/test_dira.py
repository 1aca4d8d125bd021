"""DiRA: three losses, two turns, and an adversary that joins later; each against a slow reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods.base import Progress, train_only
from afire.methods.dira import ADVERSARY, NETWORKS, DiRA
from afire.nn.vit import unpatchify
from afire.training.pretrain import pretrain
from tests.methods.test_restoring import film_model, films, keys, settings
from tests.training.conftest import packed, smallest  # noqa: F401 - fixtures


def made(*overrides: str) -> DiRA:
    model = film_model("dira", *overrides)
    assert isinstance(model, DiRA)
    return model


def with_past(model: DiRA) -> DiRA:
    """Keys of earlier films in its queue, one of them a film of the batch."""
    past = torch.nn.functional.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    model.queue.push(past, torch.tensor([2, 50, 51, 52, 53]))
    return model


def test_the_losses_equal_their_references_in_value_and_gradient() -> None:
    model = with_past(made("options.adversarial=0.5")).train()
    outputs = model(model.views(films(), keys()))
    losses = model.losses(outputs, NETWORKS)
    contrast = []
    for film in range(4):
        query = outputs["query"][film]
        others = [key for key, owner in zip(model.queue.keys[:5], (2, 50, 51, 52, 53), strict=True) if owner != film]
        terms = torch.stack([query @ outputs["key"][film], *(query @ key for key in others)]).div(0.2).exp()
        contrast.append(-(terms[0] / terms.sum()).log())
    restoration = torch.stack([(a - b) ** 2 for a, b in zip(outputs["drawn"], outputs["target"], strict=True)]).mean()
    pictures = unpatchify(outputs["drawn"], 8, (4, 4))
    deception = torch.stack([-torch.sigmoid(said).log() for said in model.adversary(pictures).flatten()]).mean()
    slow = torch.stack(contrast).mean() + 10 * restoration + 0.5 * deception
    torch.testing.assert_close(losses.total, slow)
    assert losses["contrast"] > 0
    for parameter in (model.student.encoder.blocks[0].mlp.fc1.weight, model.decoder.pred.weight):
        one, other = (torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (losses.total, slow))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    told = model.losses(outputs, ADVERSARY)
    real = model.adversary(unpatchify(outputs["target"], 8, (4, 4)))
    slow = -torch.sigmoid(real).log().mean() - (1 - torch.sigmoid(model.adversary(pictures.detach()))).log().mean()
    torch.testing.assert_close(told.total, slow)
    parameter = model.adversary.say.weight
    one, other = (torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (told.total, slow))
    torch.testing.assert_close(one, other)


def test_a_turn_computes_what_it_needs_and_trains_nothing_else() -> None:
    model = made().train()
    trained = {turn: [weight for _, weight in model.parameters_of(turn)] for turn in model.turns}
    assert sum(map(len, trained.values())) == sum(1 for weight in model.parameters() if weight.requires_grad)
    views = model.views(films(), keys())
    for turn, expected in (
        (ADVERSARY, {"fake", "real"}),
        (NETWORKS, {"query", "key", "rows", "drawn", "target", "deceives"}),
    ):
        train_only(turn, trained)
        outputs = model(views)
        assert outputs.keys() == expected
        model.zero_grad()
        model.losses(outputs, turn).total.backward()
        for owner, weights in trained.items():
            assert all((weight.grad is not None) == (owner == turn) for weight in weights)
    train_only(None, trained)


def test_the_adversary_joins_after_its_share_of_the_run() -> None:
    model = made("options.adversary_after=0.5").train()
    for step, rests in ((0, True), (4, True), (5, False), (9, False)):
        progress = Progress(step, 10, 5)
        model.schedule(progress)
        assert model.rests(ADVERSARY, progress) is rests and not model.rests(NETWORKS, progress)
        assert ("deceives" in model(model.views(films(), keys()))) is not rests
    assert model.share(ADVERSARY) == 0.5 and model.share(NETWORKS) == 1
    late, always = made("options.adversary_after=0.9").flops(), made("options.adversary_after=0").flops()
    assert late < always


def test_operations_are_counted_as_they_are_done() -> None:
    """Before the adversary joins the networks' turn passes nothing through it; the mean over the run knows that."""
    alone = made("options.adversary_after=0.999999").flops()
    always = made("options.adversary_after=0").flops()
    model = made("options.adversary_after=0.25")
    assert model.flops() == pytest.approx(0.25 * alone + 0.75 * always, rel=1e-4) and model.is_judged
    # alone: what the networks cost that are never judged
    model.is_judged = False
    in_the_first_steps = super(DiRA, model).flops() - model.share(ADVERSARY) * _of_the_adversary(model)
    assert alone == pytest.approx(in_the_first_steps, rel=1e-4)


def _of_the_adversary(model: DiRA) -> float:
    """Operations of its own turn: all that the turns cost together but those of the networks."""
    both = super(DiRA, model).flops()
    model.share = lambda turn: 0.0 if turn == ADVERSARY else 1.0  # type: ignore[method-assign]
    networks = super(DiRA, model).flops()
    del model.share
    return (both - networks) / model.share(ADVERSARY)


def test_the_turns_in_the_loop(packed: Path, smallest, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    config = smallest(*settings("dira"), "training.epochs=2", "run.keep_checkpoints=9")
    pretrain(config, PackedFilms(packed), tmp_path / "run")
    start = DiRA(config).state_dict()
    first, last = (
        load_file(folder / "model.safetensors") for folder in sorted((tmp_path / "run/checkpoints").glob("*"))
    )
    assert torch.equal(first["adversary.say.weight"], start["adversary.say.weight"]), "it rests in the first half"
    assert not torch.equal(last["adversary.say.weight"], start["adversary.say.weight"])
    assert not torch.equal(first["decoder.pred.weight"], start["decoder.pred.weight"])
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "total" in record]
    assert [("adversary" in step, "deception" in step) for step in steps] == [(False, False)] * 5 + [(True, True)] * 5
    assert last["queue.pointer"] == (10 * 8) % 24 and (last["queue.owners"] >= 0).all()


def test_pieces_of_a_batch_give_what_the_whole_gives(packed: Path, smallest, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    """In both turns."""
    for pieces in (1, 4):
        config = smallest(
            *settings("dira"), "training.epochs=1", "options.adversary_after=0", f"training.accumulate={pieces}"
        )
        pretrain(config, PackedFilms(packed), tmp_path / str(pieces))
    one, other = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines() if "total" in line]
        for name in ("1", "4")
    )
    for whole, in_pieces in zip(one, other, strict=True):
        for name in ("contrast", "restoration", "deception", "adversary", "total", "gradient_norm"):
            assert in_pieces[name] == pytest.approx(whole[name], rel=2e-3, abs=1e-6), (whole["step"], name)


def test_health_tells_of_an_adversary_that_wins() -> None:
    model = with_past(made())
    views = model.views(films(8), keys(8))
    numbers = model.look(views)
    assert {"told_right", "explained", "found", "key_similarity"} <= numbers.keys()
    rules = model.more_rules({**numbers, "told_right": 1.0})
    assert rules[0][1] and rules[0][2].startswith("the adversary tells 100% of all regions right")
    model.is_judged = False
    assert not model.more_rules({**numbers, "told_right": 1.0})[0][1]
    health = model.health(views, {"contrast": 1.0, "restoration": 1.0})
    assert "of what tells views apart restored" in health.shown and health.colour in ("amber", "red", "green")


def test_bad_settings_are_messages() -> None:
    with pytest.raises(UserError, match="halves a film 3 times, which 36 px do not allow"):
        made("image.size=36", "encoder.patch_size=4")
    with pytest.raises(UserError, match="adversary_after"):
        made("options.adversary_after=1")
