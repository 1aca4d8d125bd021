"""The adversary: its losses against slow references, one number for every region, and that it learns to tell."""

from __future__ import annotations

import torch

from afire.nn.adversary import Adversary, deceiving_loss, telling_loss


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
