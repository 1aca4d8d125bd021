"""The detector `anatpaste`: patches in the lungs, of every size that may be drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.config import Config, ImageConfig
from afire.data.phantom.film import draw_film
from afire.detect.anatpaste import AnatPasteClassifier, AnatPasteSettings
from afire.detect.fit import detect_settings
from afire.errors import UserError
from afire.lesions.places import lung_field
from afire.methods.base import Keys

SIZE = 64


def classifier(**options: object) -> AnatPasteClassifier:
    settings = AnatPasteSettings.model_validate({"width": 8, "blocks": 1, **options})
    return AnatPasteClassifier(Config(image=ImageConfig(size=SIZE), options=settings.model_dump()))


@pytest.fixture(scope="module")
def films() -> Tensor:
    """Phantoms: what has lungs."""
    drawn = [draw_film(5, number, SIZE, diseases=()).image for number in range(12)]
    return torch.from_numpy(np.stack(drawn).astype(np.float32))[:, None]


def test_patches_lie_in_the_lungs_and_are_blended(films: Tensor) -> None:
    (pasted,) = classifier().pasted(films, Keys(0, 0, 0, torch.arange(12)))
    changed = (pasted != films)[:, 0]
    assert changed.flatten(1).any(1).all() and not (changed & ~lung_field(films[:, 0])).any()
    assert pasted.min() >= 0 and pasted.max() <= 1


def test_every_size_is_drawn_by_the_key_alone(films: Tensor) -> None:
    model, rows = classifier(sizes=[20, 80]), torch.arange(12)
    (whole,) = model.pasted(films, Keys(0, 0, 0, rows))
    some = torch.tensor([9, 1, 4])
    (alone,) = model.pasted(films[some], Keys(0, 0, 0, rows[some]))
    assert torch.equal(alone, whole[some])
    areas = (whole != films).flatten(1).sum(1)
    limit = (20 / 224 * SIZE) ** 2 * 1.2
    assert 2 < (areas > limit).sum() < 12
    (other,) = model.pasted(films, Keys(0, 1, 0, rows))
    assert not torch.equal(other, whole)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"opacity_min 0.9 is larger than opacity_max 0.5"):
        detect_settings(["anatpaste.opacity_min=0.9", "anatpaste.opacity_max=0.5"], "anatpaste")
    with pytest.raises(UserError, match=r"sizes .* not larger than 0"):
        detect_settings(["anatpaste.sizes=[10, 0]"], "anatpaste")
