"""The decoder: shapes, which depths it reads, that every parameter learns."""

from __future__ import annotations

import pytest
import torch

from afire.errors import UserError
from afire.nn.vit import Normalise, VisionTransformer, initialise
from afire.tasks.segment import Segmenter, depths
from afire.tasks.settings import SegDecoderConfig
from tests.tasks.drawn import smallest_model


def segmenter(levels: int = 4, depth: int = 6, patch: int = 16, size: int = 64, prior: float = 0.2) -> Segmenter:
    config = smallest_model([f"encoder.depth={depth}", f"encoder.patch_size={patch}", f"image.size={size}"])
    encoder = VisionTransformer.from_config(config.encoder, config.image)
    initialise(encoder, torch.Generator().manual_seed(0))
    decoder = SegDecoderConfig(width=32, levels=levels)
    return Segmenter(encoder, Normalise(config.image), decoder, prior, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("levels", "depth", "patch"), [(1, 2, 16), (4, 6, 16), (4, 2, 16), (6, 6, 8), (3, 3, 4)])
def test_logits_have_the_size_of_the_films(levels: int, depth: int, patch: int) -> None:
    model = segmenter(levels, depth, patch)
    for size in (64, 96):  # another size than the encoder was made for
        assert model(torch.rand(2, 1, size, size)).shape == (2, 1, size, size)


def test_every_parameter_learns() -> None:
    model = segmenter()
    model(torch.rand(2, 1, 64, 64)).square().mean().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert still == []


def test_it_starts_near_the_share_of_inside_pixels() -> None:
    chances = segmenter(prior=0.02)(torch.rand(4, 1, 64, 64)).sigmoid()
    assert chances.median().item() == pytest.approx(0.02, abs=0.02)


def test_depths_are_spread_and_end_at_the_last() -> None:
    assert depths(12, 4) == [3, 6, 9, 12] and depths(6, 4) == [2, 3, 4, 6] and depths(2, 4) == [1, 2]
    assert depths(5, 1) == [5]


def test_levels_end_with_what_the_encoder_gives() -> None:
    encoder = segmenter().encoder
    films = torch.rand(2, 1, 64, 64)
    found = encoder.levels(films, [2, 3, 6])
    assert len(found) == 3 and torch.equal(found[-1], encoder(films))
    torch.testing.assert_close(found[0], encoder.blocks[1](encoder.blocks[0](encoder._embed(films, None))))


def test_the_same_generator_gives_the_same_weights() -> None:
    torch.manual_seed(5)
    first = segmenter().state_dict()
    torch.manual_seed(6)  # torch's own generator decides nothing
    second = segmenter().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_cells_as_large_as_patches_are_refused() -> None:
    with pytest.raises(UserError, match=r"decoder\.finest 2 is not finer than the encoder's patches of 2 px"):
        segmenter(patch=2, size=16)
