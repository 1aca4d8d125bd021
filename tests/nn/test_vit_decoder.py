"""The decoder: z_mask hides abnormal tokens, positions tell places apart."""

from __future__ import annotations

import torch

from afire.config import DecoderConfig
from afire.nn.vit import Decoder, initialise


def make(mask_token: bool = True, checkpointing: bool = False) -> Decoder:
    decoder = Decoder(12, 64, (2, 3), DecoderConfig(width=16, depth=2, heads=2, mask_token=mask_token), checkpointing)
    generator = torch.Generator().manual_seed(0)
    initialise(decoder, generator)
    decoder.initialise(generator)
    return decoder


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(seed))


ABNORMAL = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)


def test_the_mask_token_hides_abnormal_tokens() -> None:
    changed = torch.where(ABNORMAL[..., None], tokens(2), tokens(1))
    hidden, open_ = make(True), make(False)
    assert hidden(tokens(), ABNORMAL).shape == (2, 6, 64)
    assert torch.equal(hidden(tokens(), ABNORMAL), hidden(changed, ABNORMAL))
    assert not torch.allclose(open_(tokens(), ABNORMAL), open_(changed, ABNORMAL))
    assert not torch.allclose(hidden(tokens(), None), hidden(changed, None))


def test_no_gradient_reaches_a_hidden_token_and_some_reaches_the_others() -> None:
    inputs = tokens().requires_grad_()
    make()(inputs, ABNORMAL).square().sum().backward()
    sizes = inputs.grad.abs().sum(-1)
    assert (sizes[ABNORMAL] == 0).all() and (sizes[~ABNORMAL] > 0).all()


def test_z_mask_has_a_gradient_even_without_abnormal_tokens() -> None:
    decoder = make()
    decoder(tokens(), torch.zeros_like(ABNORMAL)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert decoder.mask_token.grad.abs().sum() == 0


def test_hidden_tokens_differ_by_position_only() -> None:
    decoder = make()
    out = decoder(tokens(), torch.ones_like(ABNORMAL))
    torch.testing.assert_close(out[0], out[1])
    assert not torch.allclose(out[0, 0], out[0, 1])


def test_another_grid_and_checkpointing() -> None:
    assert make()(torch.zeros(1, 24, 12), None, (4, 6)).shape == (1, 24, 64)
    torch.testing.assert_close(make(checkpointing=True)(tokens(), ABNORMAL), make()(tokens(), ABNORMAL))
