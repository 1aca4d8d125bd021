"""MoCo, C2L, PCL and Adam: losses against slow references, what is compared with what, and the health of collapse."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.errors import UserError
from afire.methods import METHODS, complete, make_method
from afire.methods.adam1 import Adam1, cell_boxes, stage_of
from afire.methods.base import Keys, Losses, Progress
from afire.methods.c2l import C2L, mixed, neighbours
from afire.methods.moco import MoCo
from afire.methods.pcl import PCL, UNKNOWN, prototype_loss, spreads
from afire.methods.twins import Queued, info_nce
from afire.nn.memory import kmeans, nearest_centres
from afire.settings import load_config

SMALL = ["image.size=32", "encoder.patch_size=8", "encoder.width=16", "encoder.depth=1", "options.hidden=8"]


def made(method: str, *overrides: str, films: int = 16) -> Queued:
    config = load_config(
        "tiny", overrides=[f"method={method}", *SMALL, "options.key_width=4", "options.queue=12", *overrides]
    )
    kind = METHODS[method]
    model = make_method(kind.settled(complete(config, kind), films, ()))
    model.begin_run(torch.arange(films), lambda rows: draw(films)[rows])
    assert isinstance(model, Queued)
    return model.train()


def draw(count: int = 16) -> Tensor:
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def keys(*rows: int, epoch: int = 0) -> Keys:
    return Keys(0, epoch, 3 * epoch, torch.tensor(rows))


def unit_rows(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def slow_nce(query: Tensor, positive: Tensor, negatives: list[Tensor], temperature: float) -> Tensor:
    own = torch.exp(query @ positive / temperature)
    return -torch.log(own / (own + sum((torch.exp(query @ one / temperature) for one in negatives), torch.zeros(()))))


def assert_same_gradient(model: Queued, fast: Tensor, slow: Tensor) -> None:
    torch.testing.assert_close(fast, slow)
    parameters = [*model.student.parameters()]
    first, second = (torch.autograd.grad(value, parameters, retain_graph=True) for value in (fast, slow))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# The loss they share


def test_info_nce_equals_the_reference_in_value_and_gradient() -> None:
    query = unit_rows(3, 4).requires_grad_()
    positive, negatives = unit_rows(3, 4, seed=1), unit_rows(5, 4, seed=2)
    counts = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    fast = info_nce(query, positive, negatives, counts, 0.2)
    slow = torch.stack(
        [slow_nce(query[i], positive[i], [negatives[j] for j in range(5) if counts[i, j]], 0.2) for i in range(3)]
    )
    torch.testing.assert_close(fast, slow)
    assert fast[1] == 0  # nothing to tell it from
    gradients = [torch.autograd.grad(loss.sum(), query, retain_graph=True)[0] for loss in (fast, slow)]
    torch.testing.assert_close(*gradients)
    assert info_nce(query.bfloat16(), positive, negatives, counts, 0.2).dtype == torch.float32


# MoCo


def test_moco_compares_with_the_queue_but_never_with_itself() -> None:
    model = made("moco")
    assert isinstance(model, MoCo)
    first = keys(0, 1, 2, 3, 4, 5)
    model.after_step(model.losses(model(model.views(draw()[:6], first))))
    assert model.queue.owners.tolist() == [0, 1, 2, 3, 4, 5] + [-1] * 6
    outputs = model(model.views(draw()[4:8], keys(4, 5, 6, 7, epoch=1)))
    losses = model.losses(outputs)
    terms = []
    for place, row in enumerate((4, 5, 6, 7)):
        others = [model.queue.keys[at] for at in range(6) if at != row]
        terms.append(slow_nce(outputs["query"][place], outputs["key"][place], others, 0.2))
    assert_same_gradient(model, losses.total, torch.stack(terms).mean())
    assert not outputs["key"].requires_grad
    model.after_step(losses)
    assert model.queue.owners.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, -1, -1]
    torch.testing.assert_close(model.queue.keys[6:10], outputs["key"])


def test_the_teacher_follows_the_student() -> None:
    model = made("moco", "training.teacher_momentum=0.9")
    before = model.teacher.encoder.norm.weight.clone()
    with torch.no_grad():
        model.student.encoder.norm.weight.add_(1)
    rates = model.schedule(Progress(0, 10, 5))
    assert rates == {"teacher_momentum": 0.9}
    model.after_step(model.losses(model(model.views(draw()[:4], keys(0, 1, 2, 3)))))
    torch.testing.assert_close(model.teacher.encoder.norm.weight, before + 0.1)
    assert model.schedule(Progress(9, 10, 5))["teacher_momentum"] == pytest.approx(1)
    assert not model.train().teacher.training and model.student.training


def test_collapsed_keys_are_red_and_useless_ones_amber() -> None:
    model = made("moco").eval()
    views = model.views(draw(), keys(*range(16)))
    healthy = model.health(views, {"contrast": 1.0})
    assert set(healthy.numbers) == {"effective_rank", "key_similarity", "found", "contrast"}
    with torch.no_grad():
        model.teacher.head.mlp[2].weight.zero_()
        model.teacher.head.mlp[2].bias.fill_(1)
    same = model.health(views, {"contrast": 1.0})
    assert same.colour == "red" and "all films have the same key" in same.reason
    with torch.no_grad():
        model.student.encoder.norm.weight.zero_()
    none = model.health(views, {"contrast": 1.0})
    assert none.colour == "red" and "one direction left" in none.reason


# C2L


def test_c2l_mixes_neighbours_and_its_three_losses_equal_the_reference() -> None:
    model = made("c2l", "image.normalise=none")
    assert isinstance(model, C2L)
    model.queue.push(unit_rows(7, 4, seed=4), torch.tensor([0, 1, 2, 9, 3, 10, 11]))
    views = model.views(draw()[:4], keys(0, 1, 2, 3))
    assert (views["share"] >= 0.5).all() and len(set(views["share"].tolist())) == 4
    outputs = model(views)
    losses = model.losses(outputs)
    partner = [1, 0, 3, 2]
    terms: dict[str, list[Tensor]] = {"contrast": [], "homogeneous": [], "heterogeneous": []}
    for film in range(4):
        share, other = views["share"][film], partner[film]
        query = model.student(views["query"][film : film + 1])[0]
        key, key_of_other = (model.teacher(views["key"][one : one + 1])[0] for one in (film, other))
        image = share * views["query"][film] + (1 - share) * views["query"][other]
        mixed_image = share * views["key"][film] + (1 - share) * views["key"][other]
        mixed_query = model.student(image[None])[0]
        owners = model.queue.owners[:7].tolist()
        plain = [model.queue.keys[at] for at in range(7) if owners[at] != film]
        neither = [model.queue.keys[at] for at in range(7) if owners[at] not in (film, other)]
        terms["contrast"].append(slow_nce(query, key, plain, 0.07))
        terms["homogeneous"].append(slow_nce(mixed_query, model.teacher(mixed_image[None])[0], neither, 0.07))
        mix = F.normalize(share * key + (1 - share) * key_of_other, dim=0)
        terms["heterogeneous"].append(slow_nce(mixed_query, mix, neither, 0.07))
    for name, values in terms.items():
        assert_same_gradient(model, losses[name], torch.stack(values).mean())
    assert_same_gradient(model, losses.total, sum((losses[name] for name in terms), torch.zeros(())) / 3)
    assert torch.equal(losses.pending["keys"], outputs["key"])  # mixed ones stay out of the queue
    assert [panel.title for panel in model.panels(views, 2)] == ["query", "key", "mixed query"]


def test_pairs_are_whole_or_it_is_a_message() -> None:
    assert neighbours(6).tolist() == [1, 0, 3, 2, 5, 4] and neighbours(1).tolist() == [0]
    with pytest.raises(UserError, match="mixes films in pairs, but a process works on 3 at a time"):
        made("c2l").views(draw()[:3], keys(0, 1, 2))
    torch.testing.assert_close(
        mixed(torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([0.25, 1]))[:, 0].tolist(), [0.25, 1.0]
    )


# PCL


def test_kmeans_finds_groups_and_leaves_no_centre_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([[0.0, 0], [10, 0], [0, 10]])
    points = (groups[:, None] + torch.randn(3, 20, 2, generator=generator)).reshape(-1, 2)
    for seed in range(5):
        centres, nearest = kmeans(points, 3, torch.Generator().manual_seed(seed))
        for number in range(3):
            torch.testing.assert_close(centres[number], points[nearest == number].mean(0))
        distances = (points[:, None] - centres).norm(dim=-1)
        assert torch.equal(nearest, distances.argmin(1)) and nearest.bincount(minlength=3).min() > 0
    twice = torch.cat([points[:1].expand(50, -1), points])  # 50 times the same: draws of it lose their points
    _, nearest = kmeans(twice, 8, torch.Generator().manual_seed(0))
    assert len(nearest.bincount()) == 8 and nearest.bincount(minlength=8).min() > 0
    assert torch.equal(*(kmeans(points, 4, torch.Generator().manual_seed(2))[0] for _ in range(2)))
    torch.testing.assert_close(nearest_centres(points, points)[1], torch.zeros(60), atol=1e-2, rtol=0)
    with pytest.raises(UserError, match="2 points cannot make 3 clusters"):
        kmeans(points[:2], 3, generator)


def test_spreads_equal_the_reference() -> None:
    points = unit_rows(30, 4)
    centres, nearest = kmeans(points, 5, torch.Generator().manual_seed(0))
    nearest[nearest == 4] = 3
    nearest[0] = 4  # a cluster of one
    slow = []
    for number in range(5):
        members = [at for at in range(30) if nearest[at] == number]
        total = sum(float((points[at] - centres[number]).norm()) for at in members)
        slow.append(total / (len(members) * math.log(len(members) + 10)) if len(members) > 1 else math.nan)
    most = max(value for value in slow if not math.isnan(value))
    single = float((points[0] - centres[4]).norm()) / math.log(11)
    filled = torch.tensor([max(most, single) if math.isnan(value) else value for value in slow])
    low, high = filled.quantile(0.1), filled.quantile(0.9)
    expected = filled.clamp(low, high)
    torch.testing.assert_close(spreads(points, centres, nearest, 0.2), 0.2 * expected / expected.mean())
    same = spreads(torch.ones(6, 4), torch.ones(2, 4), torch.tensor([0, 0, 0, 1, 1, 1]), 0.2)
    torch.testing.assert_close(same, torch.full((2,), 0.2))


def test_the_prototype_loss_equals_the_reference_in_value_and_gradient() -> None:
    query, prototypes = unit_rows(4, 6).requires_grad_(), unit_rows(5, 6, seed=1)
    temperatures, own = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), torch.tensor([2, 0, UNKNOWN, 4])
    fast = prototype_loss(query, prototypes, temperatures, own)
    slow = []
    for film in range(4):
        scores = [torch.exp(query[film] @ prototypes[k] / temperatures[k]) for k in range(5)]
        known = own[film] != UNKNOWN
        slow.append(-torch.log(scores[own[film]] / sum(scores)) if known else query[film].sum() * 0)
    torch.testing.assert_close(fast, torch.stack(slow))
    gradients = [torch.autograd.grad(loss.sum(), query, retain_graph=True)[0] for loss in (fast, torch.stack(slow))]
    torch.testing.assert_close(*gradients)


def test_the_pass_over_all_films_gives_each_its_prototype() -> None:
    model = made("pcl", "options.clusters=[2,3]", "training.epochs=10", "options.warmup=0.11")
    assert isinstance(model, PCL) and model.warmup_epochs == 2
    images, seen = draw(), []

    def films() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 16, 6):
            seen.append(start)
            yield images[start : start + 6], torch.arange(16)[start : start + 6]

    model.prepare(1, films)
    assert not seen and (model.assigned == UNKNOWN).all()
    warm = model.losses(model(model.views(images[:4], keys(3, 1, 8, 9))))
    assert warm["prototypes"] == 0 and warm.total == warm["contrast"]
    model.prepare(2, films)
    assert seen == [0, 6, 12]
    own = model.teacher(model.normalise(images))
    for number, clusters in enumerate((2, 3)):
        assigned, prototypes = model.assigned[:, number], model.get_buffer(f"prototypes{number}")
        assert sorted(set(assigned.tolist())) == list(range(clusters))
        for cluster in range(clusters):
            expected = F.normalize(own[assigned == cluster].mean(0), dim=0)
            torch.testing.assert_close(prototypes[cluster], expected)
        assert model.get_buffer(f"temperatures{number}").mean() == pytest.approx(0.2)
    rows = [3, 1, 8, 9]
    views = model.views(images[rows], keys(*rows, epoch=2))
    assert torch.equal(views["clusters"], model.assigned[rows])
    outputs = model(views)
    losses = model.losses(outputs)
    parts = [
        prototype_loss(
            outputs["query"],
            model.get_buffer(f"prototypes{number}"),
            model.get_buffer(f"temperatures{number}"),
            model.assigned[rows, number],
        ).mean()
        for number in range(2)
    ]
    assert_same_gradient(model, losses["prototypes"], (parts[0] + parts[1]) / 2)
    assert losses.total == losses["contrast"] + losses["prototypes"]
    again = made("pcl", "options.clusters=[2,3]", "training.epochs=10")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.views(images[rows], keys(*rows, epoch=2))["clusters"], views["clusters"])


def test_rows_of_a_run_need_not_begin_at_zero() -> None:
    model = made("pcl", "options.clusters=[2]", "options.warmup=0", films=4)
    assert isinstance(model, PCL)
    rows = torch.tensor([5, 11, 12, 40])
    model.begin_run(rows, lambda rows: draw()[rows])
    model.prepare(0, lambda: iter([(draw()[:4], rows)]))
    assert torch.equal(model.views(draw()[:2], keys(40, 11))["clusters"], model.assigned[[3, 1]])


def test_mistakes_of_pcl_are_messages() -> None:
    with pytest.raises(UserError, match=r"asks for 20 clusters, but there are 16 films.*options\.clusters=\[2\]"):
        made("pcl", "options.clusters=[4,20]")
    with pytest.raises(UserError, match="at least 2 clusters, not 1"):
        made("pcl", "options.clusters=[1]")
    with pytest.raises(UserError, match=r"options\.films is 16, but the run has 5; leave it out"):
        made("pcl", "options.clusters=[2]", "options.warmup=0").prepare(0, lambda: iter([(draw(5), torch.arange(5))]))


def test_one_large_cluster_is_said() -> None:
    model = made("pcl", "options.clusters=[2]").eval()
    assert isinstance(model, PCL)
    views = model.views(draw(), keys(*range(16)))
    model.assigned[:, 0] = 0
    report = model.health(views, {"contrast": 1.0, "prototypes": 0.1})
    assert report.colour == "red" and report.numbers["largest_cluster"] == 1


def test_the_pass_costs_what_a_look_costs() -> None:
    with_pass, without = (made("pcl", "options.clusters=[2]", f"options.warmup={w}").flops() for w in (0, 1))
    plain = made("moco").flops()
    assert with_pass > without >= plain > 0
    assert with_pass - without == pytest.approx((plain - (with_pass - without)) / 3, rel=0.2)  # an update: 1 + 3 looks


# Adam


def test_stages_go_from_coarse_to_fine() -> None:
    assert [stage_of(epoch, 7, 3) for epoch in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert stage_of(0, 1, 3) == 0
    model = made("adam1", "training.epochs=6")
    assert isinstance(model, Adam1)
    seen = [model.schedule(Progress(2 * epoch, 12, 2))["cells"] for epoch in range(6)]
    assert seen == [1, 1, 2, 2, 4, 4]


def test_cells_tile_the_film_and_views_stay_inside_theirs() -> None:
    boxes, numbers = cell_boxes(3, keys(*range(300)))
    assert sorted(set(numbers.tolist())) == list(range(9))
    for box, number in zip(boxes.tolist(), numbers.tolist(), strict=True):
        row, column = divmod(number, 3)
        assert box == pytest.approx([column / 3, row / 3, 1 / 3, 1 / 3])
    model = made("adam1", "options.stages=[4]", "options.crop.jitter=0", "options.crop.blur=0", "options.crop.turn=0")
    images = torch.arange(16.0).view(1, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3) / 16
    views = model.views(images.expand(6, -1, -1, -1), keys(*range(6)))
    _, numbers = cell_boxes(4, keys(*range(6)))
    for name in ("query", "key"):
        middle = views[name][:, 0, 12:20, 12:20].flatten(1)
        torch.testing.assert_close(middle.mean(1), numbers / 16, atol=0.02, rtol=0)
    assert len(set(views["rows"].tolist())) == 6
    other = made("adam1", "options.stages=[2]").views(images.expand(6, -1, -1, -1), keys(*range(6)))
    assert not set(other["rows"].tolist()) & set(views["rows"].tolist())


@pytest.mark.parametrize("cells", [1, 2])
def test_adam_prunes_what_looks_alike(cells: int) -> None:
    model = made("adam1", f"options.stages=[{cells}]", "options.pruned_from=0.3")
    assert isinstance(model, Adam1)
    model.queue.push(unit_rows(9, 4, seed=5), torch.arange(9) - 100)
    outputs = model(model.views(draw()[:4], keys(0, 1, 2, 3)))
    losses = model.losses(outputs)
    terms, shares = [], []
    for film in range(4):
        query, kept = outputs["query"][film], [*range(9)]
        if cells > 1:
            kept = [at for at in kept if float(query.detach() @ model.queue.keys[at]) < 0.3]
        terms.append(slow_nce(query, outputs["key"][film], [model.queue.keys[at] for at in kept], 0.2))
        shares.append(len(kept) / 9)
    assert_same_gradient(model, losses.total, torch.stack(terms).mean())
    assert float(losses["kept"]) == pytest.approx(sum(shares) / 4)
    assert (float(losses["kept"]) < 1) == (cells > 1)


def test_a_queue_that_is_all_pruned_is_red() -> None:
    model = made("adam1", "options.stages=[2]", "options.pruned_from=-0.99").eval()
    views = model.views(draw(), keys(*range(16)))
    report = model.health(views, {"contrast": 0.0, "kept": 0.0})
    assert report.colour == "red" and "100% of the queue is pruned" in report.reason
    with pytest.raises(UserError, match="1 to 16 cells along a side, not 0"):
        made("adam1", "options.stages=[0]")


def test_pending_keys_are_those_of_the_step() -> None:
    for name in ("moco", "c2l", "pcl", "adam1"):
        model = made(name, *(["options.clusters=[2]"] if name == "pcl" else []))
        losses: Losses = model.losses(model(model.views(draw()[:4], keys(0, 1, 2, 3))))
        assert losses.pending["keys"].shape == (4, 4) and not losses.pending["keys"].requires_grad
        torch.testing.assert_close(losses.pending["keys"].norm(dim=1), torch.ones(4))
