"""The whole model: one step, its switches, its teacher, its edges, and that it learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.errors import UserError
from afire.lesions.synthesis import token_labels
from afire.methods.afire import AFiRe
from afire.methods.base import Losses, Progress, count_parameters
from afire.methods.equations import Contrast, category_loss, restoration_loss, sinkhorn, structure_loss
from afire.nn.vit import patchify
from afire.settings import load_config


def config(*overrides: str) -> Config:
    return load_config("tiny", overrides=["losses.lesion=0.5", *overrides])


def batch(films: int = 4, views: int = 1, seed: int = 0, channels: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Smooth random films, round bright spots on them, and the spots alone."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(films, channels, 6, 6, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear") * 0.6 + 0.1
    centres = torch.rand(films * views, 2, 1, 1, generator=generator) * 64
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    squared = (rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2
    mask = 0.5 * torch.exp(-squared / 100)[:, None]
    return images, (images.repeat_interleave(views, 0) + mask).clamp(0, 1), mask


def judge(model: AFiRe, images: Tensor, lesioned: Tensor, mask: Tensor) -> Losses:
    return model.losses(model({"images": images, "lesioned": lesioned, "mask": mask}))


def step(model: AFiRe, images: Tensor, lesioned: Tensor, mask: Tensor, momentum: float = 1.0) -> Losses:
    """Losses of a step, and what follows it."""
    losses = judge(model, images, lesioned, mask)
    model.teacher_momentum = momentum
    model.after_step(losses)
    return losses


def follow(model: AFiRe, momentum: float) -> None:
    """The teacher's part of a step."""
    model.teacher_momentum = momentum
    model.after_step(Losses({}, torch.zeros(())))


def test_losses_equal_the_parts_put_together_by_hand() -> None:
    settings = config("losses.structure=0.7", "losses.category=1.3", "losses.restoration=2")
    model = AFiRe(settings)
    images, lesioned, mask = batch(views=2)
    losses = step(model, images, lesioned, mask)

    def film(pixels: Tensor) -> Tensor:
        return (pixels - pixels.mean((1, 2, 3), keepdim=True)) / pixels.std((1, 2, 3), correction=0, keepdim=True)

    abnormal = token_labels(mask, 16)
    tokens = model.student.encoder(film(lesioned))[:, 1:]
    log_q = torch.log_softmax(model.student.head(tokens) / 0.1, -1)
    teacher_logits = model.teacher.head(model.teacher.encoder(film(images))[:, 1:])
    assignments = sinkhorn(teacher_logits.reshape(-1, 16), model.teacher_temperature, 3).view(4, 16, 16)
    prototypes = assignments.mean(0)
    target = patchify(film(images), 16).repeat_interleave(2, 0)
    contrast = Contrast(log_q, abnormal, prototypes, temperature=1.0, similarity="corrected")
    expected = {
        "structure": structure_loss(contrast),
        "category": category_loss(contrast),
        "restoration": restoration_loss(model.decoder(tokens, abnormal), target, abnormal, abnormal_weight=4.0),
        "lesion": torch.nn.functional.binary_cross_entropy_with_logits(
            model.lesion_classifier(tokens)[..., 0], abnormal.float()
        ),
    }
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, msg=name)
    weights = {"structure": 0.7, "category": 1.3, "restoration": 2, "lesion": 0.5}
    total = sum(weight * losses[name] for name, weight in weights.items())
    torch.testing.assert_close(losses.total, total)
    torch.testing.assert_close(model.prototypes, prototypes)
    assert losses.as_floats()["total"] == losses.total.item()
    assert not any(value.requires_grad for value in losses.pending.values())


VARIANTS = [
    ("head.form=per_position",),
    ("losses.contrast=feature",),
    ("losses.similarity=literal",),
    ("losses.abnormal_consistency=true",),
    ("decoder.mask_token=false",),
    ("prototypes.enabled=false",),
    ("losses.structure=0",),
    ("losses.category=0",),
    ("losses.structure=0", "losses.category=0"),
    ("losses.restoration=0",),
    ("losses.lesion=0",),
    ("losses.lesion_finer=4",),
    ("encoder.positions=learned", "encoder.drop_path=0.2", "encoder.gradient_checkpointing=true"),
    ("image.channels=3", "image.normalise=imagenet"),
]


@pytest.mark.parametrize("overrides", [(), *VARIANTS], ids="+".join)
@pytest.mark.parametrize("lesions", [True, False])
def test_every_trained_parameter_has_a_gradient_and_no_teacher_one(overrides: tuple[str, ...], lesions: bool) -> None:
    model = AFiRe(config(*overrides)).train()
    images, lesioned, mask = batch()
    losses = judge(model, images, *((lesioned, mask) if lesions else (images, torch.zeros_like(mask))))
    assert torch.isfinite(losses.total)
    losses.total.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("teacher."):
            assert parameter.grad is None and not parameter.requires_grad, name
        else:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            # Drawn depth may leave a block out, and without lesions z_mask stands nowhere.
            if lesions and "drop_path" not in "".join(overrides):
                assert parameter.grad.abs().sum() > 0, name


def test_what_is_switched_off_does_not_exist() -> None:
    model = AFiRe(config("losses.restoration=0", "losses.structure=0", "losses.category=0"))
    assert model.decoder is None and model.bank is None and model.student.head is None and model.teacher.head is None
    losses = judge(model, *batch())
    assert losses["structure"] == losses["category"] == losses["restoration"] == 0 and losses["lesion"] > 0
    images = batch()[0]
    for call in (model.restore, model.assign):
        with pytest.raises(UserError, match=r"has no (decoder|head)"):
            call(images)
    with pytest.raises(UserError, match="no prototypes"):
        _ = model.prototypes
    with pytest.raises(UserError, match="no lesion classifier"):
        AFiRe(config("losses.lesion=0")).lesion_logits(images)
    with pytest.raises(UserError, match="no clusters"):
        AFiRe(config("losses.contrast=feature")).assign(images)


def test_without_memory_the_target_is_the_batch_of_the_step() -> None:
    with_memory, without = AFiRe(config()), AFiRe(config("prototypes.enabled=false"))
    first, second = batch(seed=1), batch(seed=2)
    # The first mean is C itself.
    torch.testing.assert_close(step(with_memory, *first)["structure"], step(without, *first)["structure"])
    assert not torch.allclose(judge(with_memory, *second)["structure"], judge(without, *second)["structure"])


def test_views_of_a_film_share_its_teacher_forward() -> None:
    model = AFiRe(config())
    sizes: list[int] = []
    model.teacher.encoder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    images, lesioned, mask = batch(films=3, views=4)
    losses = judge(model, images, lesioned, mask)
    assert sizes == [3]
    repeated = judge(AFiRe(config()), images.repeat_interleave(4, 0), lesioned, mask)
    torch.testing.assert_close(losses["restoration"], repeated["restoration"])
    # Sinkhorn saw each 4 times.
    torch.testing.assert_close(losses["structure"], repeated["structure"], rtol=1e-3, atol=1e-4)


def test_the_teacher_follows_the_student_and_stays_in_evaluation_mode() -> None:
    model = AFiRe(config("encoder.drop_path=0.3"))
    model.train()
    assert model.student.training and not any(part.training for part in model.teacher.modules())
    before = copy.deepcopy(model.teacher)
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter += 1
    follow(model, 0.9)
    after = dict(model.teacher.named_parameters())
    for name, old in before.named_parameters():
        torch.testing.assert_close(after[name], old + 0.1)
    assert torch.equal(model.teacher.encoder.pos_embed, before.encoder.pos_embed)
    follow(model, 1.0)
    assert torch.equal(after["encoder.cls_token"], model.teacher.encoder.cls_token)
    follow(model, 0.0)
    assert torch.equal(model.student.encoder.cls_token, model.teacher.encoder.cls_token)


def test_prototypes_move_in_training_only_and_only_after_the_step() -> None:
    model = AFiRe(config())
    judge(model, *batch(seed=1))
    assert model.bank.steps == 0 and torch.equal(model.prototypes, torch.full((16, 16), 1 / 16))  # no side effect
    step(model, *batch(seed=1))
    first = model.prototypes.clone()
    model.eval()
    losses = step(model, *batch(seed=2))
    assert torch.equal(model.prototypes, first) and model.bank.steps == 1 and not losses.pending
    model.train()
    losses = judge(model, *batch(seed=2))
    mean = (losses.pending["prototypes"] - 0.75 * first) / 0.25
    torch.testing.assert_close(mean.sum(-1), torch.ones(16))
    model.after_step(losses)
    assert torch.equal(model.prototypes, losses.pending["prototypes"]) and model.bank.steps == 2
    torch.testing.assert_close(model.prototypes.sum(-1), torch.ones(16))


def test_state_goes_through_a_file_and_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file, save_file

    model = AFiRe(config("head.form=per_position"))
    step(model, *batch())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = AFiRe(config("head.form=per_position", "seed=5"))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    model.eval(), other.eval()
    assert torch.equal(judge(model, *batch(seed=3)).total, judge(other, *batch(seed=3)).total)


def test_weights_follow_the_seed() -> None:
    same, again, other = AFiRe(config("seed=3")), AFiRe(config("seed=3")), AFiRe(config("seed=4"))
    state, repeated, different = same.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], repeated[name]) for name in state)
    assert not torch.equal(state["student.head.last_layer.weight"], different["student.head.last_layer.weight"])
    assert all(
        torch.equal(value, state[name.replace("student.", "teacher.")])
        for name, value in state.items()
        if name.startswith("student.")
    )


def test_bfloat16_autocast_agrees_with_float32() -> None:
    reference = judge(AFiRe(config()), *batch())
    model = AFiRe(config())
    with torch.autocast("cpu", torch.bfloat16):
        losses = step(model, *batch())
    losses.total.backward()
    assert losses.total.dtype == torch.float32
    for name in ("structure", "category", "restoration", "lesion"):
        torch.testing.assert_close(losses[name], reference[name], rtol=0.1, atol=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    torch.testing.assert_close(model.prototypes.sum(-1), torch.ones(16))


def test_encode_assign_restore_and_lesion_logits() -> None:
    model = AFiRe(config()).eval()
    images, lesioned, mask = batch()
    tokens = model.encode(lesioned)
    assert tokens.shape == (4, 16, 64)
    assert model.encode(torch.rand(2, 1, 96, 32)).shape == (2, 12, 64)  # another size
    for network, temperature in (("teacher", model.teacher_temperature), ("student", 0.1)):
        log_q = model.assign(images, network)
        torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(4, 16))
        branch = getattr(model, network)
        logits = branch.head(model.encode(images, network))
        torch.testing.assert_close(log_q, torch.log_softmax(logits / temperature, -1))
        torch.testing.assert_close(model.assign(images[:1], network), log_q[:1])  # no film depends on its neighbours
    restored = model.restore(lesioned, token_labels(mask, 16))
    assert restored.shape == model.patches(images).shape == (4, 16, 256)
    assert not torch.equal(restored, model.restore(lesioned))
    assert model.lesion_logits(images).shape == (4, 16)


@pytest.mark.parametrize("normalise", ["film", "imagenet", "none"])
@pytest.mark.parametrize(("channels", "film_channels"), [(1, 1), (3, 1), (3, 3)])
def test_normalised_patches_become_the_picture_again(normalise: str, channels: int, film_channels: int) -> None:
    model = AFiRe(config(f"image.normalise={normalise}", f"image.channels={channels}"))
    images, lesioned, mask = batch(channels=film_channels)
    picture = model.picture(model.patches(images), images)
    torch.testing.assert_close(picture, images.expand(-1, channels, -1, -1))
    if normalise == "film":
        pixels = model.normalise(images)
        torch.testing.assert_close(pixels.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(pixels.std((1, 2, 3), correction=0), torch.ones(4))
    assert torch.isfinite(judge(model, images, lesioned, mask).total)


def test_a_blank_film_gives_no_nan() -> None:
    images, _, mask = batch()
    blank = torch.full_like(images, 0.5)
    losses = judge(AFiRe(config()), blank, (blank + mask).clamp(0, 1), mask)
    losses.total.backward()
    assert torch.isfinite(losses.total)


def test_mistakes_are_told_in_words() -> None:
    model = AFiRe(config("run.check_images=true"))
    images, lesioned, mask = batch()
    cases = [
        ((images * 255, lesioned, mask), r"images lie between .* should lie in \[0, 1\]"),
        ((images, lesioned - 0.5, mask), "lesioned images lie between"),
        ((torch.full_like(images, torch.nan), lesioned, mask), "lie between nan and nan"),
        (((images * 255).byte(), lesioned, mask), "torch.uint8"),
        ((images.expand(-1, 3, -1, -1), lesioned, mask), r"\(films, 1, height, width\)"),
        ((images, lesioned[:3], mask), "not whole sets of views"),
        ((images, lesioned, mask[:, 0]), "mask"),
        ((images[..., :32, :32], lesioned, mask), "32 x 32 pixels, but the model was made for 64 x 64"),
        ((images[:0], lesioned, mask), "empty batch"),
    ]
    for arguments, words in cases:
        with pytest.raises(UserError, match=words):
            judge(model, *arguments)


def test_parameters_are_counted() -> None:
    model = AFiRe(config())
    counts = count_parameters(model)
    assert counts["student.encoder"] == counts["teacher.encoder"]
    assert counts["trained"] == counts["student.encoder"] + counts["student.head"] + counts["decoder"] + 65


def test_cluster_directions_keep_still_in_the_first_epochs() -> None:
    model = AFiRe(config("training.freeze_last_layer_epochs=1"))
    assert [parameter.shape for parameter in model.frozen(Progress(4, 30, 5))] == [(16, 32)]
    assert not [*model.frozen(Progress(5, 30, 5))]


def test_the_schedule_of_the_teacher() -> None:
    model = AFiRe(config("losses.teacher_temperature_epochs=2", "training.teacher_momentum=0.9"))
    first, middle, last = (model.schedule(Progress(at, 31, 10)) for at in (0, 10, 30))
    assert first == {"teacher_momentum": pytest.approx(0.9), "teacher_temperature": pytest.approx(0.04)}
    assert middle["teacher_temperature"] == pytest.approx(0.055)
    assert last == {"teacher_momentum": 1.0, "teacher_temperature": pytest.approx(0.07)}
    assert model.teacher_temperature == last["teacher_temperature"] and model.teacher_momentum == 1.0


@pytest.mark.parametrize("form", ["shared", "per_position"])
def test_thirty_steps_lower_the_loss(form: str) -> None:
    model = AFiRe(config(f"head.form={form}"))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    totals = []
    model.teacher_momentum = 0.95
    for number in range(30):
        losses = judge(model, *batch(films=8, seed=number % 3))
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
        model.after_step(losses)
        totals.append(losses.as_floats())
    for name in ("total", "structure", "restoration", "lesion"):
        first, last = (sum(row[name] for row in rows) / 3 for rows in (totals[:3], totals[-3:]))
        assert last < 0.8 * first, (name, first, last)
