"""The residual trunk: tokens that hold every stage, settings read off its tensors, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from afire.config import EncoderConfig, ImageConfig
from afire.detect.taught import FinderNetwork
from afire.errors import UserError
from afire.nn.conv import standardised
from afire.nn.residual import (
    ResidualTrunk,
    initialise_trunk,
    make_trunk,
    residual_settings,
    residual_tensors,
)
from afire.nn.vit import VisionTransformer, layer_of

IMAGE = ImageConfig(size=64, channels=1, normalise="none")


@pytest.fixture(scope="module")
def trunk() -> ResidualTrunk:
    network = ResidualTrunk(8, 2, image_size=64)
    initialise_trunk(network, torch.Generator().manual_seed(0))
    return network.eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(3, 1, 64, 64, generator=torch.Generator().manual_seed(1))


def test_a_token_holds_all_stages_at_its_place(trunk: ResidualTrunk, images: torch.Tensor) -> None:
    tokens = trunk(images)
    assert tokens.shape == (3, 1 + 64, 14 * 8) and trunk.width == 112 and trunk.grid == (8, 8)
    fine, middle, coarse = trunk.maps(standardised(images))
    for row, column in ((0, 0), (3, 6), (7, 7)):
        expected = [
            fine[:, :, row, column],
            middle[:, :, row // 2, column // 2],
            coarse[:, :, row // 4, column // 4],
        ]
        torch.testing.assert_close(tokens[:, 1 + 8 * row + column], torch.cat(expected, dim=1))
    means = torch.cat([stage.mean(dim=(2, 3)) for stage in (fine, middle, coarse)], dim=1)
    torch.testing.assert_close(tokens[:, 1:].mean(dim=1), means)
    highest = torch.cat([stage.amax(dim=(2, 3)) for stage in (fine, middle, coarse)], dim=1)
    torch.testing.assert_close(tokens[:, 0], highest)


def test_a_film_is_standardised_inside(trunk: ResidualTrunk, images: torch.Tensor) -> None:
    torch.testing.assert_close(trunk(0.5 * images + 0.2), trunk(images), rtol=1e-3, atol=1e-4)


def test_shallow_levels_have_the_first_stages_and_zeros(trunk: ResidualTrunk, images: torch.Tensor) -> None:
    first, second, last = trunk.levels(images, [1, 2, 3])
    assert first[:, :, 16:].abs().max() == 0 and second[:, :, 48:].abs().max() == 0
    torch.testing.assert_close(first[..., :16], last[..., :16])
    torch.testing.assert_close(second[..., :48], last[..., :48])
    torch.testing.assert_close(last, trunk(images))


@pytest.mark.parametrize("side", [40, 72, 128])
def test_any_side_that_8_divides_is_taken(trunk: ResidualTrunk, side: int) -> None:
    assert trunk(torch.rand(1, 1, side, side)).shape == (1, 1 + (side // 8) ** 2, 112)


@pytest.mark.parametrize("side", [100, 130, 132])
def test_other_sides_are_refused(trunk: ResidualTrunk, side: int) -> None:
    """Also those that the stem could fold, whose last row and column would be lost or made up."""
    with pytest.raises(UserError, match=f"{side} x {side} pixels is not a multiple of the patch size 8"):
        trunk(torch.rand(1, 1, side, side))


def test_every_weight_gets_a_gradient(images: torch.Tensor) -> None:
    network = ResidualTrunk(4, 1, image_size=64)
    network(images).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in network.parameters())


def test_tensors_of_a_detector_say_which_trunk_they_are_of() -> None:
    finder = FinderNetwork(width=4, blocks=3)
    stored = {f"network.{name}": tensor for name, tensor in finder.state_dict().items()}
    tensors = residual_tensors(stored, "network.")
    settings = residual_settings(tensors)
    assert (settings.kind, settings.width, settings.depth, settings.patch_size) == ("residual", 56, 7, 8)
    trunk = make_trunk(settings, IMAGE)
    trunk.load_state_dict(tensors)  # strict: no name is missing or left over
    assert (
        residual_tensors(stored, "average.") == {}
        and residual_tensors({"network.fc": torch.zeros(1)}, "network.") == {}
    )


def test_settings_that_no_residual_network_has_are_refused() -> None:
    for wrong in ({"width": 100}, {"width": 56, "depth": 4}, {"width": 56, "depth": 5, "patch_size": 16}):
        with pytest.raises(ValidationError, match="kind residual needs a width that is a multiple of 14"):
            EncoderConfig(**{"kind": "residual", "heads": 1, "patch_size": 8, "depth": 5, **wrong})
    odd = residual_settings({"stem.1.0.weight": torch.zeros(5, 16, 3, 3), "stages.0.0.x": torch.zeros(1)})
    assert odd.width == 70, "it has no positions, which would need a multiple of 4"
    fitting = EncoderConfig(kind="residual", width=56, depth=5, heads=1, patch_size=8)
    with pytest.raises(UserError, match="no vision transformer"):
        VisionTransformer.from_config(fitting, IMAGE)
    assert isinstance(make_trunk(EncoderConfig(width=16, depth=1, heads=2, patch_size=8), IMAGE), VisionTransformer)


def test_stages_are_layers_of_a_layered_learning_rate() -> None:
    names = {name: layer_of(name, 3) for name, _ in ResidualTrunk(4, 1).named_parameters()}
    assert {layer for name, layer in names.items() if name.startswith("stem.")} == {0}
    assert {layer for name, layer in names.items() if name.startswith("stages.2.")} == {3}
