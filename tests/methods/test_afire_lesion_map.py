"""The lesion classifier at a resolution of its own: loss, readouts, pictures, health, and what it was before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.errors import UserError
from afire.lesions import lesion_shares, token_labels
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.methods.mae import MAE
from afire.methods.phantom import PhantomTaught
from afire.settings import load_config

ALONE = ("losses.structure=0", "losses.category=0", "losses.restoration=0")


def config(*overrides: str) -> Config:
    small = ["image.size=32", "encoder.patch_size=8", "losses.lesion=1", "lesions.size_min=30"]
    return load_config("tiny", overrides=[*small, *overrides])


def films(count: int = 8) -> Tensor:
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def keys(count: int = 8, epoch: int = 0) -> Keys:
    return Keys(0, epoch, 0, torch.arange(count))


def slow_loss(model: AFiRe, lesioned: Tensor, mask: Tensor, finer: int) -> Tensor:
    """Film by film, token by token, cell by cell."""
    classifier, cell = model.lesion_classifier, 8 // finer
    assert classifier is not None
    tokens = model.student.tokens(model.normalise(lesioned))
    terms = []
    for film in range(len(lesioned)):
        is_lesion = mask[film, 0] > mask[film, 0].mean()
        for token in range(16):
            values = classifier.weight @ tokens[film, token] + classifier.bias
            for number, value in enumerate(values):
                top = token // 4 * 8 + number // finer * cell
                left = token % 4 * 8 + number % finer * cell
                share = is_lesion[top : top + cell, left : left + cell].float().mean()
                terms.append(share * (1 + (-value).exp()).log() + (1 - share) * (1 + value.exp()).log())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("finer", [2, 8])
@pytest.mark.parametrize("views", [1, 2])
def test_the_loss_equals_the_slow_reference_in_value_and_gradient(finer: int, views: int) -> None:
    model = AFiRe(config(f"losses.lesion_finer={finer}", f"lesions.views={views}", *ALONE))
    seen = model.views(films(3), keys(3))
    fast = model.losses(model(seen)).total
    slow = slow_loss(model, seen["lesioned"], seen["mask"], finer)
    torch.testing.assert_close(fast, slow)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    pairs = zip(torch.autograd.grad(fast, weights), torch.autograd.grad(slow, weights), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_by_default_it_is_the_token_classifier_of_before() -> None:
    model = AFiRe(config())
    assert model.lesion_classifier is not None and model.lesion_classifier.weight.shape == (1, 64)
    seen = model.views(films(), keys())
    logits = model.lesion_classifier(model.encode(seen["lesioned"], "student")).squeeze(-1)
    labels = token_labels(seen["mask"], 8)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert torch.equal(model.losses(model(seen))["lesion"], expected)
    assert torch.equal(model.lesion_logits(seen["lesioned"]), logits)
    torch.testing.assert_close(model.lesion_maps(seen["lesioned"]).flatten(1), logits.sigmoid())
    other = AFiRe(config("losses.lesion_finer=2"))
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.state_dict()["lesion_classifier.weight"].shape == (4, 64)


def test_readouts_are_as_fine_as_asked_for() -> None:
    model = AFiRe(config("losses.lesion_finer=4")).eval()
    with torch.no_grad():
        readouts = model.readouts(films())
        assert readouts["lesion_logits"].shape == (8, 16) and readouts["lesion_map"].shape == (8, 1, 16, 16)
        assert torch.equal(readouts["lesion_map"], model.lesion_maps(films()))
        highest = torch.nn.functional.max_pool2d(readouts["lesion_map"], 4).flatten(1)
        torch.testing.assert_close(highest, readouts["lesion_logits"].sigmoid())
        assert model.lesion_maps(torch.rand(2, 1, 16, 48)).shape == (2, 1, 8, 24)  # another size


def test_who_has_no_classifier_says_so() -> None:
    for call in (AFiRe(config("losses.lesion=0")).lesion_maps, AFiRe(config("losses.lesion=0")).lesion_logits):
        with pytest.raises(UserError, match="no lesion classifier"):
            call(films())
    with pytest.raises(UserError, match="method mae have no lesion classifier and map no lesions"):
        MAE(config("method=mae")).lesion_maps(films())
    with pytest.raises(UserError, match=r"cannot be split into 3 x 3 cells; choose losses\.lesion_finer among its"):
        AFiRe(config("losses.lesion_finer=3"))


def test_beside_phantoms_it_is_the_same() -> None:
    model = PhantomTaught(config("method=phantom", "options.afire=1", "losses.lesion_finer=2", "options.films=2"))
    assert model.afire is not None
    assert torch.equal(model.lesion_maps(films()), model.afire.lesion_maps(films()))
    with pytest.raises(UserError, match="map no lesions"):
        PhantomTaught(config("method=phantom", "options.films=2")).lesion_maps(films())


def test_pieces_give_what_the_whole_batch_gives() -> None:
    model = AFiRe(config("losses.lesion_finer=2", "lesions.views=2"))
    whole = model.losses(model(model.views(films(), keys())))
    parts = [
        model(model.views(images, keys()._replace(rows=rows)))
        for images, rows in zip(films().chunk(4), torch.arange(8).chunk(4), strict=True)
    ]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    torch.testing.assert_close(model.losses(joined)["lesion"], whole["lesion"])


@pytest.mark.parametrize("overrides", [(), ("losses.restoration=0",)])
def test_pictures_show_the_map_as_drawn_and_as_told(overrides: tuple[str, ...]) -> None:
    model = AFiRe(config("losses.lesion_finer=2", "lesions.views=2", *overrides))
    seen = model.views(films(), keys())
    panels = {panel.title: panel for panel in model.panels(seen, 3)}
    assert ("restored" in panels) == (not overrides)
    drawn, told = (panels[f"lesion map, {whose}"] for whose in ("drawn", "told"))
    assert drawn.images.shape == told.images.shape == (3, 1, 32, 32) and drawn.kind == told.kind == "mask"
    cells = torch.nn.functional.avg_pool2d(drawn.images, 4)
    torch.testing.assert_close(cells, lesion_shares(seen["mask"][:6:2], 4))
    torch.testing.assert_close(told.images[..., ::4, ::4], model.lesion_maps(seen["lesioned"][:6:2]))
    without = AFiRe(config("losses.lesion=0")).panels(seen, 3)
    assert [panel.title for panel in without] == [
        "normal",
        "lesion mask",
        "lesioned",
        "restored",
        "lesioned − restored",
    ]
    assert AFiRe(config("losses.lesion=0", "losses.restoration=0")).panels(seen, 3) == []


@pytest.mark.parametrize("finer", [1, 4])
def test_sixty_steps_lower_the_loss_and_health_says_so(finer: int) -> None:
    strong = ("losses.lesion=10", "losses.restoration=0", "lesions.amplitude_min=0.8", "lesions.count_max=1")
    model, images = AFiRe(config(f"losses.lesion_finer={finer}", *strong)).train(), 0.2 + 0.2 * films()
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    said = model.losses(model(model.views(images, keys())))
    before = model.health(model.views(images, keys()), said.as_floats())
    for epoch in range(60):
        losses = model.losses(model(model.views(images, keys(epoch=epoch))))
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
        model.after_step(losses)
    after = model.health(model.views(images, keys()), losses.as_floats())
    assert before is not None and after is not None and losses["lesion"].item() < 0.8 * said["lesion"].item()
    assert after.numbers["lesion_auc"] > max(0.75, before.numbers["lesion_auc"]) and "lesion AUC" in after.shown
    assert math.isfinite(losses.total.item())
    none = AFiRe(config("losses.lesion=0"))
    other = none.health(none.views(images, keys()), said.as_floats())
    assert other is not None and "lesion_auc" not in other.numbers
