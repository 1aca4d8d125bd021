"""DINO and Adam v2: losses against slow references, views and their positions, centre, phases, and collapse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.errors import UserError
from afire.methods import make_method
from afire.methods.adam2 import ALONE, TOGETHER, Adam2, agreement, part_boxes, whole_boxes
from afire.methods.base import Keys, Phase, Progress
from afire.methods.crops import inside
from afire.methods.dino import DINO, Distilled, distillation_loss, local_side, teacher_says
from afire.settings import load_config

SMALL = ["image.size=32", "encoder.patch_size=8", "encoder.width=16", "encoder.depth=1"]
HEAD = ["options.outputs=12", "options.hidden=8", "options.bottleneck=6"]


def made(method: str, *overrides: str) -> Distilled:
    model = make_method(load_config("tiny", overrides=[f"method={method}", *SMALL, *HEAD, *overrides]))
    assert isinstance(model, Distilled)
    return model.train()


def dino(*overrides: str) -> DINO:
    model = made("dino", "options.local_views=3", *overrides)
    assert isinstance(model, DINO)
    return model


def adam(*overrides: str) -> Adam2:
    model = made("adam2", "options.local_views=2", *overrides)
    assert isinstance(model, Adam2)
    return model


def draw(count: int = 6) -> Tensor:
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def keys(*rows: int, epoch: int = 0) -> Keys:
    return Keys(0, epoch, 3 * epoch, torch.tensor(rows))


def slow_cross_entropy(teacher: Tensor, centre: Tensor, hot: float, student: Tensor, cold: float) -> Tensor:
    says = torch.exp((teacher - centre) / hot)
    return -((says / says.sum()) * torch.log(torch.exp(student / cold) / torch.exp(student / cold).sum())).sum()


def assert_same(parameters: list[nn.Parameter], fast: Tensor, slow: Tensor) -> None:
    torch.testing.assert_close(fast, slow)
    first, second = (
        torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) for value in (fast, slow)
    )
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# DINO


def test_dino_compares_all_pairs_of_different_views() -> None:
    model = dino()
    model.centre.copy_(torch.linspace(-0.5, 0.5, 12))
    model.teacher_temperature = 0.05
    outputs = model(model.views(draw(), keys(*range(6))))
    losses = model.losses(outputs)
    student = torch.cat([outputs["student"], outputs["local"]], dim=1)
    assert student.shape == (6, 5, 12) and outputs["teacher"].shape == (6, 2, 12)
    terms = [
        slow_cross_entropy(outputs["teacher"][film, seen], model.centre, 0.05, student[film, view], 0.1)
        for film in range(6)
        for seen in range(2)
        for view in range(5)
        if view != seen
    ]
    assert len(terms) == 6 * 8
    assert_same([*model.student.parameters()], losses.total, torch.stack(terms).mean())
    assert not outputs["teacher"].requires_grad
    before = model.centre.clone()
    model.after_step(losses)
    torch.testing.assert_close(model.centre, 0.9 * before + 0.1 * outputs["teacher"].mean(dim=(0, 1)))


def test_the_loss_of_given_pairs_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator).requires_grad_()
    says = teacher_says(torch.randn(2, 2, 5, generator=generator), torch.zeros(5), 0.5)
    pairs = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    fast = distillation_loss(logits, says, pairs, 0.2)
    slow = torch.stack(
        [
            sum(
                -(says[film, t] * torch.log_softmax(logits[film, s] / 0.2, 0)).sum()
                for t, s in ((0, 0), (0, 2), (1, 2))
            )
            for film in range(2)
        ]
    )
    torch.testing.assert_close(fast, slow / 3)
    gradients = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (fast, slow / 3)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_local_views_have_the_positions_of_a_coarser_grid(positions: str) -> None:
    model = dino(f"encoder.positions={positions}", "options.local_size=16", "image.normalise=none").eval()
    views = model.views(draw(), keys(*range(6)))
    assert views["local"].shape == (18, 1, 16, 16)
    encoder = model.student.encoder
    where = encoder.positions_for((2, 2))
    assert where.shape == (1, 5, 16)
    if positions == "learned":
        assert isinstance(encoder.pos_embed, nn.Parameter)
        whole = encoder.pos_embed[:, 1:].view(1, 4, 4, 16).permute(0, 3, 1, 2)
        expected = F.interpolate(whole, size=(2, 2), mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
        torch.testing.assert_close(where[:, 1:], expected)
        model.train().losses(model(views)).total.backward()
        assert encoder.pos_embed.grad is not None and encoder.pos_embed.grad[:, 1:].abs().min() > 0
    by_hand = encoder.patch_embed(views["local"]) + where[:, 1:]
    tokens = torch.cat([(encoder.cls_token + where[:, :1]).expand(18, -1, -1), by_hand], dim=1)
    expected = encoder.norm(encoder.blocks[0](tokens))
    torch.testing.assert_close(encoder(views["local"]), expected)


def test_the_views_of_a_film_stay_beside_each_other() -> None:
    model = dino("options.local_views=2", "encoder.drop_path=0.5")
    whole = model.views(draw(), keys(*range(6)))
    part = model.views(draw()[2:4], keys(2, 3))
    for name, per_film in (("first", 1), ("second", 1), ("local", 2), ("depth", 2), ("local_depth", 2)):
        torch.testing.assert_close(part[name], whole[name][2 * per_film : 4 * per_film])
    assert not torch.equal(whole["first"], whole["second"])
    assert model(whole)["local"].shape == (6, 2, 12)


def test_temperature_warms_up_and_the_last_layer_waits() -> None:
    model = dino(
        "options.teacher_temperature_warmup=0.5",
        "options.teacher_temperature=0.07",
        "training.freeze_last_layer_epochs=1",
    )
    seen = [model.schedule(Progress(step, 20, 5))["teacher_temperature"] for step in (0, 5, 10, 19)]
    assert seen == pytest.approx([0.04, 0.055, 0.07, 0.07])
    [frozen] = model.frozen(Progress(4, 20, 5))
    assert frozen.shape == (12, 6) and not list(model.frozen(Progress(5, 20, 5)))
    assert dino("options.teacher_temperature_warmup=0").schedule(Progress(0, 9, 3))["teacher_temperature"] == 0.04


def test_both_collapses_are_said() -> None:
    model = dino("options.outputs=64").eval()
    views = model.views(draw(), keys(*range(6)))
    model.centre.fill_(0)
    model.centre[3] = -5  # everything goes to one output
    one = model.health(views, {"distillation": 1.0})
    assert one.colour == "red" and "one output takes every film" in one.reason
    model.centre.zero_()
    model.teacher_temperature = 1e4
    even = model.health(views, {"distillation": 1.0})
    assert even.colour == "red" and "evenly over all outputs" in even.reason
    assert {"effective_rank", "usage_entropy", "output_entropy", "distillation"} == set(even.numbers)


def test_sides_of_local_views() -> None:
    for size, patch, expected in ((224, 16, 96), (128, 16, 48), (64, 16, 32), (32, 8, 16), (16, 16, 16)):
        config = load_config("tiny", overrides=[f"image.size={size}", f"encoder.patch_size={patch}"])
        assert local_side(config, None) == expected
    with pytest.raises(UserError, match=r"options\.local_size 12 is not a multiple of encoder\.patch_size 8"):
        dino("options.local_size=12")
    with pytest.raises(UserError, match=r"up to image\.size 32"):
        dino("options.local_size=64")
    with pytest.raises(UserError, match=r"unknown setting local\.area; did you mean"):
        dino("options.local.area=3")
    assert dino("options.local.area_min=0.1").options.local.area_max == 0.4  # the other defaults of this view stay


# Adam v2


def test_the_three_branches_equal_the_reference() -> None:
    model = adam("image.normalise=none", "options.decomposability=0.5", "options.pool=mean")
    model.teacher_temperature = 0.05
    views = model.views(draw(4), keys(*range(4)))
    losses = model.losses(model(views))

    def embedded(network: str, images: Tensor) -> Tensor:
        return getattr(model, network).encoder(images)[:, 1:].mean(dim=1)

    local, composed, decomposed = [], [], []
    for film in range(4):
        whole, parts = views["whole"][film : film + 1], views["parts"][4 * film : 4 * film + 4]
        seen = [views["wide"][film : film + 1], *views["local"][2 * film : 2 * film + 2].split(1)]
        with torch.no_grad():
            target, target_parts = embedded("teacher", whole)[0], embedded("teacher", parts)
            teacher = model.teacher.head(target)
        local += [slow_cross_entropy(teacher, model.centre, 0.05, model.student(view)[0], 0.1) for view in seen]
        said = model.compose(torch.cat([embedded("student", part)[0] for part in parts.split(1)]))
        composed.append(((said / said.norm() - target / target.norm()) ** 2).mean())
        said_parts = model.decompose(embedded("student", whole)[0]).view(4, -1)
        for one, true in zip(said_parts, target_parts, strict=True):
            decomposed.append(((one / one.norm() - true / true.norm()) ** 2).mean())
    slow = {"localizability": local, "composability": composed, "decomposability": decomposed}
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    for name, values in slow.items():
        assert_same(parameters, losses[name], torch.stack(values).mean())
    expected = losses["localizability"] + losses["composability"] + 0.5 * losses["decomposability"]
    torch.testing.assert_close(losses.total, expected)


def test_parts_are_the_quarters_of_the_whole() -> None:
    box = whole_boxes(1, keys(*range(200)))
    assert (box[:, 2:] == 0.5).all() and box[:, :2].min() >= 0 and (box[:, :2] + 0.5).max() <= 1
    assert torch.equal(whole_boxes(0, keys(3)), torch.tensor([[0.0, 0, 1, 1]]))
    model = adam(
        "options.levels=[0]",
        "image.normalise=none",
        *(f"options.{view}.{name}=0" for view in ("whole", "wide", "local") for name in ("turn", "jitter", "blur")),
    )
    images = draw()
    views = model.views(images, keys(*range(6)))
    torch.testing.assert_close(views["whole"], images)
    for film in range(6):
        for number, (row, column) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            quarter = images[film : film + 1, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            part = views["parts"][4 * film + number]
            torch.testing.assert_close(part[:, 4:-4, 4:-4], _doubled(quarter)[0, :, 4:-4, 4:-4], atol=1e-5, rtol=0)
    nested = inside(part_boxes(200), box[:, None])
    torch.testing.assert_close(nested[:, 3, :2], box[:, :2] + 0.25)
    torch.testing.assert_close(nested[..., 2:], torch.full((200, 4, 2), 0.25))


def _doubled(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)


def test_local_views_grow_around_the_centre() -> None:
    model = adam(
        "options.local_views=8",
        "options.levels=[0]",
        *(f"options.local.{name}=0" for name in ("turn", "jitter", "blur")),
        "options.local.aspect=1",
    )
    distance = (torch.linspace(-1, 1, 32).abs()[:, None].maximum(torch.linspace(-1, 1, 32).abs()))[None, None]
    views = model.views(distance, keys(5))["local"]
    reach = views.flatten(1).amax(1)
    assert (reach.diff() > 0).all()  # each shows more than the one before
    assert views[:, 0, 7:9, 7:9].max() < 0.15 and 0.15 < reach[0] < 0.4 and reach[-1] > 0.8


def test_localizability_is_learnt_alone_first() -> None:
    model = adam("training.epochs=8", "options.alone=0.25")
    assert model.phases() == (Phase(ALONE, 2), Phase(TOGETHER, 6))
    both = model.flops()
    model.begin_phase(ALONE)
    assert not any(weight.requires_grad for weight in (*model.compose.parameters(), *model.decompose.parameters()))
    views = model.views(draw(4), keys(0, 1, 2, 3))
    assert "parts" not in views
    losses = model.losses(model(views))
    assert losses["composability"] == 0 == losses["decomposability"]
    losses.total.backward()
    assert all(weight.grad is not None for weight in model.student.parameters())
    assert model.flops() == both  # of the run, whatever the phase
    model.begin_phase(TOGETHER)
    assert all(weight.requires_grad for weight in model.compose.parameters())
    assert adam("training.epochs=1").phases() == (Phase(ALONE, 0), Phase(TOGETHER, 1))
    never = adam("training.epochs=4", "options.composability=0", "options.decomposability=0")
    assert never.phases()[0] == Phase(ALONE, 4) and never.flops() < both


def test_parts_that_look_the_same_are_a_collapse() -> None:
    model = adam().eval()
    views = model.views(draw(), keys(*range(6)))
    report = model.health(views, {"localizability": 1.0, "composability": 0.1, "decomposability": 0.1})
    assert "part_similarity" in report.numbers and "parts alike" in report.shown
    same = {**views, "parts": views["parts"][:1].expand_as(views["parts"])}
    report = model.health(same, {"localizability": 1.0})
    assert report.colour == "red" and ("parts" in report.reason or "collapse" in report.reason)
    assert math.isclose(report.numbers.get("part_similarity", 1.0), 1.0, abs_tol=1e-4)


def test_agreement_is_of_unit_vectors() -> None:
    first, second = torch.tensor([[[3.0, 0], [0, 2]]]), torch.tensor([[[0.0, 5], [0, 1]]])
    torch.testing.assert_close(agreement(first, second), torch.tensor([0.5]))
    with pytest.raises(UserError, match="halved 0 to 6 times, not 9"):
        adam("options.levels=[9]")
