"""Shapes, way back and independence of the convolutional networks; an adversary and its two losses."""

from __future__ import annotations

import torch

from afire.nn.conv import (
    Adversary,
    DenseHead,
    ResidualBlock,
    ResidualEncoder,
    deceiving_loss,
    initialise_conv,
    standardised,
    telling_loss,
)


def images(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def networks() -> tuple[ResidualEncoder, DenseHead]:
    encoder, head = ResidualEncoder(1, [8, 16, 32], (2, 2, 2), blocks=2), DenseHead(1, [8, 16, 32])
    for part in (encoder, head):
        initialise_conv(part, torch.Generator().manual_seed(0))
    return encoder, head


def test_levels_are_halved_and_the_head_leads_back_to_the_finest() -> None:
    encoder, head = networks()
    levels = encoder.levels(images())
    assert [tuple(level.shape) for level in levels] == [(2, 8, 8, 8), (2, 16, 4, 4), (2, 32, 2, 2)]
    assert torch.equal(levels[-1], encoder(images())) and head(levels).shape == (2, 1, 8, 8)


def test_a_stage_may_keep_the_size() -> None:
    assert ResidualEncoder(1, [8, 16], (2, 1), blocks=1)(images()).shape == (2, 16, 8, 8)


def test_every_place_hears_of_the_coarsest_level() -> None:
    encoder, head = networks()
    levels = [level.detach().requires_grad_() for level in encoder.levels(images())]
    head(levels)[:, :, 0, 0].sum().backward()
    assert all(level.grad is not None and (level.grad != 0).any() for level in levels)


def test_a_block_starts_from_what_came_in() -> None:
    block = ResidualBlock(8, 8)
    for parameter in block.second.parameters():
        torch.nn.init.zeros_(parameter)
    features = torch.rand(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(features), features)


def test_films_do_not_know_of_each_other() -> None:
    encoder, head = networks()
    together = head(encoder.levels(images(4)))
    torch.testing.assert_close(head(encoder.levels(images(4)[2:3])), together[2:3], atol=1e-5, rtol=1e-4)


def test_standardised_films_forget_exposure_and_contrast() -> None:
    films = standardised(images())
    torch.testing.assert_close(films.mean(dim=(1, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(films.square().mean(dim=(1, 2, 3)), torch.ones(2))
    torch.testing.assert_close(standardised(images() * 0.4 + 0.3), films, atol=1e-4, rtol=0)
    assert torch.equal(standardised(torch.full((1, 1, 8, 8), 0.5)), torch.zeros(1, 1, 8, 8))


def test_losses_equal_their_references_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2))
    told = torch.stack([-torch.sigmoid(number).log() for number in real.flatten()]).mean()
    told = told + torch.stack([-(1 - torch.sigmoid(number)).log() for number in fake.flatten()]).mean()
    deceived = torch.stack([-torch.sigmoid(number).log() for number in fake.flatten()]).mean()
    for loss, slow, inputs in (
        (telling_loss(real, fake), told, [real, fake]),
        (deceiving_loss(fake), deceived, [fake]),
    ):
        torch.testing.assert_close(loss, slow)
        for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(slow, inputs), strict=True):
            torch.testing.assert_close(one, other)


def test_it_says_a_number_for_every_region_and_learns_to_tell() -> None:
    adversary = Adversary(1, [4, 8])
    adversary.initialise(torch.Generator().manual_seed(0))
    films, drawings = (
        torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(1)),
        torch.full((8, 1, 16, 16), 0.5),
    )
    assert adversary(films).shape == (8, 16)
    optimiser = torch.optim.Adam(adversary.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = telling_loss(adversary(films), adversary(drawings))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]
    assert deceiving_loss(adversary(drawings)) > deceiving_loss(adversary(films))
