"""FAE: structural similarity against a slow reference, and an autoencoder that fits any grid."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.detect.fae import FAE, Autoencoder, FeatureAutoencoder, Similarity, as_grey, sides_of
from afire.detect.fit import detect_settings
from afire.errors import UserError
from afire.settings import load_config

TRUNK = ["image.size=32", "encoder.width=16", "encoder.depth=4", "encoder.heads=2", "encoder.patch_size=8"]


def config(*settings: str, trunk: tuple[str, ...] = ()) -> Config:
    networks = load_config("tiny", overrides=[*TRUNK, *trunk])
    return FAE.config_of(networks, detect_settings(settings, "fae"))


def pictures(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_similarity(first: Tensor, second: Tensor, window: int) -> Tensor:
    """Place by place, from the weighted moments of the window, as Wang et al. define it."""
    found = torch.empty_like(first)
    reach = window // 2
    B, C, H, W = first.shape
    for b in range(B):
        for c in range(C):
            for row in range(H):
                for column in range(W):
                    places = [
                        (y, x)
                        for y in range(max(0, row - reach), min(H, row + reach + 1))
                        for x in range(max(0, column - reach), min(W, column + reach + 1))
                    ]
                    raw = [math.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * 1.5**2)) for y, x in places]
                    weights = [value / sum(raw) for value in raw]
                    a, b_ = ([picture[b, c, y, x] for y, x in places] for picture in (first, second))
                    found[b, c, row, column] = slow_window(weights, a, b_)
    return found


def slow_window(weights: list[float], a: list[Tensor], b: list[Tensor]) -> Tensor:
    mean_a, mean_b = (sum(w * v for w, v in zip(weights, values, strict=True)) for values in (a, b))
    var_a = sum(w * (v - mean_a) ** 2 for w, v in zip(weights, a, strict=True))
    var_b = sum(w * (v - mean_b) ** 2 for w, v in zip(weights, b, strict=True))
    both = sum(w * (v - mean_a) * (u - mean_b) for w, v, u in zip(weights, a, b, strict=True))
    luminance = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
    structure: Tensor = (2 * both + 9e-4) / (var_a + var_b + 9e-4)
    return luminance * structure


@pytest.mark.parametrize("window", [1, 3, 5])
def test_similarity_and_its_gradient_are_the_definition(window: int) -> None:
    given, drawn = pictures(0, 2, 2, 4, 5), pictures(1, 2, 2, 4, 5).requires_grad_()
    found, expected = Similarity((4, 5), window)(given, drawn), slow_similarity(given, drawn, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = pictures(2, *found.shape)
    gradients = [torch.autograd.grad((weights * value).sum(), drawn)[0] for value in (found, expected)]
    # float32 windows; the gradient of a variance of nearly nothing is large
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_similarity_knows_sameness_opposites_and_flat_pictures() -> None:
    same, flat = pictures(0, 1, 3, 6, 6), torch.ones(1, 3, 6, 6, dtype=torch.float64)
    similarity = Similarity((6, 6), 5)
    torch.testing.assert_close(similarity(same, same), torch.ones_like(same))
    torch.testing.assert_close(similarity(flat, flat), torch.ones_like(same), rtol=0, atol=1e-3)  # float32 windows
    nearly = same + 0.1 * pictures(1, 1, 3, 6, 6)
    assert similarity(as_grey(same), as_grey(-same)).mean() < 0 < similarity(as_grey(same), as_grey(nearly)).mean()
    assert (similarity(same, pictures(1, 1, 3, 6, 6)) <= 1).all()


def test_the_loss_is_one_minus_the_similarity() -> None:
    fae = FeatureAutoencoder(config())
    features, drawn = pictures(0, 2, 32, 4, 4), pictures(1, 2, 32, 4, 4)
    found = fae.losses({"features": features, "drawn": drawn}).total
    torch.testing.assert_close(
        found, 1 - slow_similarity(features / 6 + 0.5, drawn / 6 + 0.5, 5).mean(), rtol=1e-5, atol=1e-6
    )


def test_features_lie_where_their_tokens_lay() -> None:
    fae = FeatureAutoencoder(config())
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    features = fae.features(images)
    first, second = fae.tokens(images).unbind(dim=1)
    assert features.shape == (2, 32, 4, 4) and not features.requires_grad and fae.after == [1, 2]
    torch.testing.assert_close(features[1, :16, 2, 3], first[1, 2 * 4 + 3])
    torch.testing.assert_close(features[0, 16:, 3, 0], second[0, 3 * 4])


@pytest.mark.parametrize(
    ("side", "halvings", "sides"),
    [
        (8, 4, [8, 4, 2]),
        (14, 4, [14, 7, 4, 2]),
        (3, 4, [3, 2]),
        (32, 4, [32, 16, 8, 4, 2]),
        (32, 1, [32, 16]),
    ],
)
def test_pictures_are_halved_to_two_places_a_side(side: int, halvings: int, sides: list[int]) -> None:
    assert sides_of(side, halvings) == sides


@pytest.mark.parametrize("side", [3, 7, 8])
def test_what_is_drawn_has_the_size_of_what_was_given(side: int) -> None:
    autoencoder = Autoencoder(6, (side, side), [4, 8, 10, 12])
    assert autoencoder(torch.randn(2, 6, side, side)).shape == (2, 6, side, side)
    assert autoencoder.down[-1][0].out_channels == 12, "the last widths count"


def test_the_score_is_the_highest_tenth_of_the_map() -> None:
    settings = detect_settings([], "fae")
    fae = FAE(config(trunk=("encoder.patch_size=4",)), settings)
    with torch.no_grad():
        examined = fae.examine(torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0)), restore=False)
    for film in range(2):
        rising = sorted(examined.map[film].tolist())
        assert examined.scores["structure_peak"][film].item() == pytest.approx(sum(rising[-7:]) / 7, rel=1e-5)
        assert examined.scores["structure"][film].item() == pytest.approx(sum(rising) / 64, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "trunk", "message"),
    [
        ("fae.window=4", (), "no middle"),
        ("fae.widths=[]", (), "at least 1 item"),
        ("fae.blocks=[5]", (), "fae.blocks has 5, but the trunk has the blocks 1 to 4"),
        ("fae.window=5", ("encoder.patch_size=16",), "2 x 2 places to fewer"),
    ],
)
def test_hostile_settings_are_one_message(setting: str, trunk: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FeatureAutoencoder(config(setting, trunk=trunk))
