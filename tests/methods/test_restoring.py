"""Methods that restore: views by key, hidden patches, pictures, their error and their verdict.

That they resume, work in pieces and on two processes is tested with all other methods.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.methods import complete, make_method, method_type
from afire.methods.base import Keys
from afire.methods.restoring import Restoring, judged, restored_well, squared_error
from afire.settings import load_config
from tests.training.conftest import SMALLEST

OWN = {
    "genesis": [],
    "transvw": ["options.words=6", "options.films=12"],
    "dira": ["options.queue=24", "options.key_width=8", "options.hidden=16", "options.adversary_width=2"],
    "pcrl": ["options.queue=24", "options.key_width=8", "options.hidden=16"],
}
"""Settings of each method for runs of seconds."""
METHODS = list(OWN)


def settings(method: str) -> list[str]:
    return [f"method={method}", *OWN[method]]


def film_model(method: str, *overrides: str) -> Restoring:
    model = make_method(load_config("tiny", overrides=[*SMALLEST, *settings(method), *overrides]))
    assert isinstance(model, Restoring)
    return model


def films(count: int = 4, seed: int = 0, size: int = 32) -> Tensor:
    coarse = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


def keys(count: int = 4, step: int = 0) -> Keys:
    return Keys(0, step, step, torch.arange(count))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_are_pictures_of_what_is_restored(method: str) -> None:
    model = film_model(method).eval()
    panels = model.panels(model.views(films(), keys()), 3)
    assert len(panels) >= 4 and all(panel.images.shape == (3, 1, 32, 32) for panel in panels)
    assert [panel.kind for panel in panels].count("difference") == 1
    assert any(panel.title in ("restored", "drawn") for panel in panels)


def test_views_follow_from_film_and_epoch_alone(method: str) -> None:
    model, images = film_model(method), films()
    whole = model.views(images, keys())
    part = model.views(images[1:3], Keys(0, 0, 0, torch.tensor([1, 2])))
    other = model.views(images, keys(step=1))
    for name, view in whole.items():
        # A steep grey curve makes rounding of the warp, which may differ with the size of a batch, visible.
        torch.testing.assert_close(part[name], view[1:3], rtol=0, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}")
    assert any(not torch.equal(other[name], view) for name, view in whole.items() if view.dtype == torch.float32)


def test_restoring_with_and_without_hidden_patches(method: str) -> None:
    model, images = film_model(method).eval(), films()
    hidden = torch.zeros(4, 16, dtype=torch.bool)
    hidden[:, 5] = True
    with torch.no_grad():
        seen, covered = model.restore(images), model.restore(images, hidden)
        assert seen.shape == covered.shape == model.patches(images).shape and not torch.allclose(seen, covered)
        changed = images.clone()
        changed[:, :, 8:16, 8:16] = 0  # the hidden patch: what is in it does not matter
        torch.testing.assert_close(model.restore(changed, hidden), covered)
        assert model.restore(films(size=64)).shape == (4, 64, 64)  # another size


def test_settings_have_defaults_and_limits(method: str) -> None:
    completed = complete(load_config("tiny", overrides=[f"method={method}"]), method_type(method)).options
    assert completed and completed.keys() == method_type(method).settings_type.model_fields.keys()


def test_the_error_and_what_was_restored_against_slow_references() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, target, spoilt = (torch.rand(3, 2, 5, generator=generator) for _ in range(3))
    drawn.requires_grad_()
    slow = sum((one - other) ** 2 for one, other in zip(drawn.flatten(), target.flatten(), strict=True)) / 30
    loss = squared_error(drawn, target)
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close(torch.autograd.grad(loss, drawn), torch.autograd.grad(slow, drawn))
    well = restored_well(drawn.detach(), spoilt, target)
    assert well.explained == pytest.approx(
        1 - float(slow.detach()) / float(target.var(0, correction=0).mean()), rel=1e-4
    )
    assert well.against_copy == pytest.approx(
        1 - float(slow.detach()) / float((spoilt - target).square().mean()), rel=1e-4
    )
    assert restored_well(target, spoilt, target) == (1.0, 1.0)
    mean_film = restored_well(target.mean(0).expand(3, -1, -1), target, target)
    assert abs(mean_film.explained) < 1e-5 and mean_film.against_copy < 0


def test_the_verdict_names_the_first_rule_that_holds() -> None:
    rules = [("amber", False, "one"), ("amber", True, "two"), ("amber", True, "three")]
    assert judged({"effective_rank": 9.0}, rules, "good", "").reason == "two"
    assert judged({"effective_rank": 9.0}, [], "good", "shown").colour == "green"
    assert judged({"effective_rank": 1.2}, rules, "good", "").reason.startswith("collapse: the encoder's features")
