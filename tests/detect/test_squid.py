"""SQUID: patches, shrinkage, queues, in-painting, losses and score against slow references."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.data.pack import PackedFilms
from afire.detect.base import load_detector
from afire.detect.fit import detection_subsets, fit_detector
from afire.detect.squid import SQUID, Inpainting, PatternQueues, SQUIDNetworks, beside, cut, each, joined, shrunken
from afire.methods.base import Keys, Progress, train_only
from afire.nn.conv import initialise_conv
from afire.settings import load_config
from tests.detect.test_learned import SIZE, task_of


def networks(size: int = SIZE, **options: object) -> SQUIDNetworks:
    config = load_config("tiny", overrides=[f"image.size={size}", "encoder.patch_size=8"])
    return SQUIDNetworks(config.model_copy(update={"options": {"width": 8, "items": 6, **options}}))


def drawn_films(count: int = 3, side: int = SIZE) -> Tensor:
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(3))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_patches_are_cut_row_by_row_and_joined_again() -> None:
    images = drawn(2, 3, 12, 12)
    patches = cut(images, 4)
    for film in range(2):
        for place in range(16):
            top, left = 3 * (place // 4), 3 * (place % 4)
            assert torch.equal(patches[film, place], images[film, :, top : top + 3, left : left + 3])
    assert torch.equal(joined(patches, 4), images)


@pytest.mark.parametrize("along", [2, 4])
def test_neighbours_touch_and_nobody_is_his_own(along: int) -> None:
    places = [(row, column) for row in range(along) for column in range(along)]
    expected = [
        [first != second and abs(first[0] - second[0]) <= 1 and abs(first[1] - second[1]) <= 1 for second in places]
        for first in places
    ]
    assert beside(along).tolist() == expected


def slow_weights(likeness: list[float], nearest: int) -> list[float]:
    """Softmax, all but the largest struck out, the rest shared out anew."""
    exponents = [math.exp(value) for value in likeness]
    kept = sorted(range(len(likeness)), key=lambda place: -likeness[place])[:nearest]
    total = sum(exponents[place] for place in kept)
    return [exponents[place] / total if place in kept else 0.0 for place in range(len(likeness))]


@pytest.mark.parametrize("nearest", [1, 3, 7, 9])
def test_shrinkage_in_value_and_gradient(nearest: int) -> None:
    likeness = drawn(4, 7).requires_grad_()
    weights = shrunken(likeness, nearest)
    expected = torch.tensor([slow_weights(row, nearest) for row in likeness.tolist()], dtype=torch.float64)
    torch.testing.assert_close(weights.detach(), expected)
    asked = drawn(4, 7, seed=1)
    (found,) = torch.autograd.grad((weights * asked).sum(), likeness)
    (plain,) = torch.autograd.grad((likeness.softmax(dim=-1) * asked).sum(), likeness)
    torch.testing.assert_close(found, plain)


def test_a_queue_answers_with_a_mix_of_its_own_items() -> None:
    queues = PatternQueues(patches=2, items=5, width=3, nearest=2).double()
    queues.items.copy_(drawn(2, 5, 3))
    asked = drawn(4, 2, 3, seed=1)
    answers = queues(asked)
    for film in range(4):
        for patch in range(2):
            items = queues.items[patch]
            weights = slow_weights([float(item @ asked[film, patch]) for item in items], 2)
            expected = sum(weight * item for weight, item in zip(weights, items, strict=True))
            torch.testing.assert_close(answers[film, patch], expected)


def test_the_oldest_patterns_go_first() -> None:
    queues = PatternQueues(patches=2, items=5, width=1, nearest=1)
    kept: list[float] = [0.0] * 5
    place = pushed = 0
    for count in (2, 2, 3, 5, 1, 7):  # beyond the end, exactly full, and more than there is room for
        new = [float(pushed + number + 1) for number in range(count)]
        pushed += count
        queues.push(torch.tensor(new)[:, None, None].expand(-1, 2, 1) * torch.tensor([[[1.0], [-1.0]]]))
        for value in new[-5:]:
            kept[place] = value
            place = (place + 1) % 5
        assert queues.items[0, :, 0].tolist() == kept and queues.items[1, :, 0].tolist() == [-v for v in kept]
        assert queues.place.item() == place
        assert sorted(kept)[-min(pushed, 5) :] == [float(v) for v in range(max(1, pushed - 4), pushed + 1)]


def test_a_patch_is_drawn_from_memory_and_its_neighbours_and_from_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    block = Inpainting(channels=32, side=2, along=4, items=4, nearest=2)
    initialise_conv(block, generator)
    block.memory.initialise(generator)
    features = torch.rand(1, 16, 32, 2, 2, generator=generator)
    before, patterns = block(features)
    assert patterns.shape == (1, 16, block.memory.items.shape[-1]) and before.shape == features.shape
    with torch.no_grad():
        block.memory.items[0] += 1  # the queue of the upper left corner
        after, _ = block(features)
    changed = {place for place in range(16) if not torch.equal(before[0, place], after[0, place])}
    assert changed == {0, 1, 4, 5}


def test_the_masked_shortcut_shows_the_patch_itself() -> None:
    learner = networks()
    images = drawn_films()
    seen = learner.as_inputs(images)
    views = learner.views(images, Keys(0, 0, 0, torch.arange(3)))
    features = each(learner.encoder, cut(seen, 2))
    inpainted, _ = learner.inpainting(features)
    for share, source in ((1.0, inpainted), (0.0, features)):
        mask = torch.full_like(views["inpainted"], bool(share))
        error = learner({**views, "inpainted": mask})["error"]
        picture = learner.student(joined(source, 2)).tanh()
        torch.testing.assert_close(error, (picture - seen).square().mean(dim=(1, 2, 3)))
    torch.testing.assert_close(learner.draw(seen), learner.student(joined(inpainted, 2)).tanh())


def test_shortcuts_follow_from_seed_step_and_film_alone() -> None:
    learner = networks(size=128, inpainted=0.6)
    rows = torch.tensor([4, 9, 2])
    masks = learner.views(drawn_films(side=128), Keys(0, 0, 0, rows))["inpainted"]
    assert torch.equal(masks[1:2], learner.views(drawn_films(1, 128), Keys(0, 5, 0, rows[1:2]))["inpainted"])
    for other in (Keys(1, 0, 0, rows), Keys(0, 0, 1, rows), Keys(0, 0, 0, rows + 1)):
        assert not torch.equal(masks, learner.views(drawn_films(side=128), other)["inpainted"])
    many = learner.views(drawn_films(1, 128).expand(500, -1, -1, -1), Keys(0, 0, 0, torch.arange(500)))["inpainted"]
    assert many.double().mean().item() == pytest.approx(0.6, abs=0.02)


def test_the_losses_of_each_turn() -> None:
    learner = networks(restoration=10.0, teacher=0.01, distillation=0.001, adversarial=0.005)
    said = {"fake": [1.0, -3.0], "real": [0.5, 2.0], "error": [0.1, 0.3], "teacher_error": [0.5, 0.7]}
    outputs = {name: torch.tensor(values) for name, values in {**said, "distillation": [4.0, 8.0]}.items()}
    outputs["patterns"] = torch.ones(2, 4, 3)

    def crossed(logit: float, truth: int) -> float:
        """Cross-entropy as it is written."""
        chance = 1 / (1 + math.exp(-logit))
        return -math.log(chance) if truth else -math.log(1 - chance)

    judged = sum(crossed(logit, 1) for logit in said["real"]) / 2 + sum(crossed(logit, 0) for logit in said["fake"]) / 2
    fooled = sum(crossed(logit, 1) for logit in said["fake"]) / 2
    discriminator, generator = (learner.losses(outputs, turn) for turn in learner.turns)
    assert discriminator["discriminator"].item() == pytest.approx(judged, rel=1e-5) and not discriminator.pending
    assert generator.total.item() == pytest.approx(10 * 0.2 + 0.01 * 0.6 + 0.001 * 6 + 0.005 * fooled, rel=1e-5)
    assert torch.equal(generator.pending["patterns"], outputs["patterns"])


def test_the_teacher_leaves_the_encoder_alone_and_the_student_follows_it() -> None:
    learner = networks()
    outputs = learner(learner.views(drawn_films(), Keys(0, 0, 0, torch.arange(3))))
    reached = torch.autograd.grad(
        outputs["teacher_error"].sum(), list(learner.encoder.parameters()), allow_unused=True, retain_graph=True
    )
    assert all(gradient is None for gradient in reached)
    for network in (learner.student, learner.teacher):
        gradients = torch.autograd.grad(
            outputs["distillation"].sum(), list(network.stages.parameters()), retain_graph=True
        )
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_turns_train_their_networks_and_the_queues_move_with_the_generator() -> None:
    learner = networks(critic_steps=3)
    made = [[turn for turn in learner.turns if not learner.rests(turn, Progress(step, 9, 3))] for step in range(6)]
    assert made == [[*learner.turns], ["discriminator"], ["discriminator"]] * 2
    views = learner.views(drawn_films(), Keys(0, 0, 0, torch.arange(3)))
    trained = {turn: [weight for _, weight in learner.parameters_of(turn)] for turn in learner.turns}
    for turn in learner.turns:
        assert learner.share(turn) == pytest.approx(sum(turn in step for step in made) / len(made))
        train_only(turn, trained)
        learner.zero_grad()
        losses = learner.losses(learner(views), turn)
        losses.total.backward()
        for name, weight in learner.named_parameters():
            own = name.startswith("discriminator.") == (turn == "discriminator")
            assert (weight.grad is not None) == own, name
        before = learner.inpainting.memory.items.clone()
        learner.after_step(losses)
        moved = learner.inpainting.memory.items != before
        assert moved[:, :3].any() == (turn == "generator") and not moved[:, 3:].any()


def test_the_score_is_in_deviations_of_normal_films(films: PackedFilms, tmp_path: Path) -> None:
    task = task_of("squid", films, tmp_path / "model", "held_out=0.4", "train.epochs=2")
    fit_detector(task)
    detector = load_detector(tmp_path / "model")
    assert isinstance(detector, SQUID)
    model, images = detector.model, films.batch(range(len(films)))
    with torch.inference_mode():
        pictures = model.draw(images * 2 - 1)
        ratings = model.discriminator(pictures)[:, 0].double().numpy()
    fit = detection_subsets(films.manifest, None, task.settings.seed, task.settings.held_out).fit
    assert detector.mean.item() == pytest.approx(ratings[fit].mean(), abs=1e-5)
    assert detector.spread.item() == pytest.approx(ratings[fit].std(), rel=1e-4)
    found = detector.score(images, all_scores=True)
    below = (ratings[fit].mean() - ratings) / ratings[fit].std()
    np.testing.assert_allclose(found.scores["discriminator"], below, rtol=1e-3, atol=1e-3)
    for number in (0, 5):
        pairs = zip(pictures[number].flatten().tolist(), images[number].flatten().tolist(), strict=True)
        squares = [(drawing - (2 * film - 1)) ** 2 for drawing, film in pairs]
        assert found.scores["error"][number] == pytest.approx(np.mean(squares), rel=1e-4)
