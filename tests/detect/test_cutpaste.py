"""The detector `cutpaste`: three versions of a film, a classifier of them, and a Gaussian of normal films."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from afire.config import Config, ImageConfig
from afire.detect.cutpaste import CutPasteClassifier, CutPasteSettings
from afire.detect.normals import Gaussian
from afire.errors import UserError
from afire.methods.base import Keys

SIZE = 32
ROWS = torch.tensor([7, 3, 11, 5])


def classifier(**options: object) -> CutPasteClassifier:
    settings = CutPasteSettings.model_validate({"width": 8, "blocks": 1, **options})
    return CutPasteClassifier(Config(image=ImageConfig(size=SIZE), options=settings.model_dump()))


def films(count: int = 4) -> Tensor:
    return torch.rand(count, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def keys(rows: Tensor = ROWS, epoch: int = 1) -> Keys:
    return Keys(0, epoch, 0, rows)


def test_versions_are_the_film_a_patch_and_a_scar() -> None:
    model = classifier(augment={"shift": 0, "gamma": 0, "turn": 0, "zoom": 0, "blur": 0, "noise": 0})
    pasted = torch.stack([films(), *model.pasted(films(), keys())], dim=1)
    changed = (pasted != films()[:, None]).flatten(2).float().mean(dim=2)
    assert changed.shape == (4, 3) and (changed[:, 0] == 0).all()
    assert (changed[:, 1] > 0.01).all() and (changed[:, 2] > 0).all() and changed[:, 2].mean() < changed[:, 1].mean()
    seen = model.views(films(), keys())["images"]
    assert seen.shape == (4, 3, 1, SIZE, SIZE)
    torch.testing.assert_close(seen.mean(dim=(3, 4)), torch.zeros(4, 3, 1), atol=1e-5, rtol=0)


def test_a_films_versions_do_not_depend_on_the_batch() -> None:
    model = classifier()
    whole, some = model.views(films(), keys())["images"], torch.tensor([2, 0])
    alone = model.views(films()[some], keys(ROWS[some]))["images"]
    torch.testing.assert_close(alone, whole[some], atol=1e-5, rtol=0)
    assert not torch.allclose(model.views(films(), keys(epoch=2))["images"], whole, atol=1e-2)


def test_the_loss_is_the_cross_entropy_of_the_versions() -> None:
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    loss = classifier().losses({"logits": logits})
    expected = [-float(logits[film, v].log_softmax(0)[v]) for film in range(2) for v in range(3)]
    assert loss["version"].item() == pytest.approx(np.mean(expected), rel=1e-5) and loss.total is loss["version"]


def test_odds_are_those_of_any_pasted_version() -> None:
    model = classifier()
    features = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    chances = model.head(features).softmax(dim=1)
    torch.testing.assert_close(model.odds(features), torch.log((1 - chances[:, 0]) / chances[:, 0]))


def test_the_heatmap_is_grad_cam() -> None:
    """The gradient that autograd finds for the odds of each film, times the features of each place."""
    model = classifier()
    features = torch.randn(3, 32, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(model.odds(features.mean(dim=(2, 3))).sum(), features)
    expected = (gradient * 16 * features).sum(dim=1, keepdim=True)
    torch.testing.assert_close(model.cam(features), expected, atol=1e-5, rtol=1e-4)


def test_the_gaussian_is_ledoit_wolfs() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 20
    gaussian = Gaussian()
    gaussian.fit(features.split(7))
    new = features[:10] + torch.randn(10, 6, generator=generator)
    reference = LedoitWolf().fit(features.double().numpy())
    expected = np.sqrt(reference.mahalanobis(new.double().numpy()) / 6)
    np.testing.assert_allclose(gaussian(new).numpy(), expected, rtol=1e-3)
    again = Gaussian()
    again.load_state_dict(gaussian.state_dict())
    assert torch.equal(again(new), gaussian(new))


def test_a_gaussian_needs_two_films() -> None:
    with pytest.raises(UserError, match="at least 2 normal films"):
        Gaussian().fit([torch.zeros(1, 4)])


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="cutpaste halves a film 3 times, which 20 px do not allow"):
        classifier(side=20)
