from __future__ import annotations

import numpy as np
import pytest
import torch

from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.methods.equations import sinkhorn
from afire.nn.vit import patchify
from afire.tasks.pretrained import Atlas, build_atlas, standardised
from tests.figure_parts import smallest

CPU, ROWS, NEAREST = torch.device("cpu"), np.arange(3, 33), 5


@pytest.fixture(scope="module")
def model(films: PackedFilms) -> AFiRe:
    """Prototypes are the mean assignments at each place, as after a training step on all films."""
    model = AFiRe(smallest()).eval()
    assert model.bank is not None
    model.bank.prototypes.copy_(assignments(model, films).mean(0))
    return model


def assignments(model: AFiRe, films: PackedFilms) -> torch.Tensor:
    assert model.teacher.head is not None
    with torch.no_grad():
        logits = model.teacher.head(model.encode(films.batch(ROWS)))
    return sinkhorn(logits.flatten(0, 1), model.teacher_temperature, 3).view_as(logits)


@pytest.fixture(scope="module")
def atlas(model: AFiRe, films: PackedFilms) -> Atlas:
    return build_atlas(model, films, ROWS, NEAREST, CPU)


def test_nearest_patches_equal_a_slow_search(atlas: Atlas, model: AFiRe, films: PackedFilms) -> None:
    q_NLK, prototypes = assignments(model, films).numpy(), model.prototypes.numpy()
    for place in range(16):
        overlap = np.sqrt(q_NLK * prototypes[place]).sum(-1)  # (films, places)
        order = np.argsort(-overlap.max(1), kind="stable")[:NEAREST]
        distance = np.sqrt(np.clip(1 - overlap.max(1)[order], 0, None))
        assert atlas.nearest_distance[place] == pytest.approx(distance, abs=2e-3)
        assert len(set(atlas.nearest_film[place].tolist())) == NEAREST
        assert atlas.typical_film[place] == ROWS[overlap[:, place].argmax()]
        assert atlas.own_place[place] == pytest.approx((overlap.argmax(1) == place).mean())


def test_places_in_the_chest_are_those_of_each_film(films: PackedFilms, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AFiRe(smallest(["prototypes.place=anatomy"])).eval()
    place_NL = torch.randint(0, 15, (len(ROWS), 16), generator=torch.Generator().manual_seed(0))  # none at the last
    monkeypatch.setattr(AFiRe, "places", lambda _, images: place_NL[: len(images)])
    q_NLK = assignments(model, films)
    assert model.bank is not None
    model.bank.prototypes.copy_(torch.softmax(3 * torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), 1))
    atlas = build_atlas(model, films, ROWS, NEAREST, CPU)
    for place in range(16):
        overlap = (q_NLK * model.prototypes[place]).sqrt().sum(-1).numpy()  # (films, tokens)
        here = (place_NL == place).numpy() if place < 15 else np.ones((len(ROWS), 16), bool)
        film, token = ROWS.tolist().index(atlas.typical_film[place]), atlas.typical_place[place]
        assert here[film, token] and overlap[film, token] == pytest.approx(overlap[here].max(), abs=1e-6)
        closest = place_NL[np.arange(len(ROWS)), overlap.argmax(1)].numpy()
        assert atlas.own_place[place] == pytest.approx((closest == place).mean())


def test_patches_are_those_of_the_films_they_name(atlas: Atlas, films: PackedFilms) -> None:
    for place in (0, 7, 15):
        for number in range(NEAREST):
            film = standardised(films.batch([int(atlas.nearest_film[place, number])]))
            patch = patchify(film, 8)[0, int(atlas.nearest_place[place, number])].view(8, 8).numpy()
            assert np.array_equal(patch, atlas.nearest_patches[place, number])


def test_entropy_is_1_for_a_uniform_prototype_and_0_for_a_sure_one(model: AFiRe, films: PackedFilms) -> None:
    assert model.bank is not None
    kept = model.bank.prototypes.clone()
    model.bank.prototypes[0] = 1 / 6
    model.bank.prototypes[1] = torch.eye(6)[4]
    atlas = build_atlas(model, films, ROWS, NEAREST, CPU)
    model.bank.prototypes.copy_(kept)
    assert atlas.entropy[0] == pytest.approx(1) and atlas.entropy[1] == pytest.approx(0, abs=1e-6)
    assert atlas.cluster[1] == 4 and atlas.probability[1] == 1
    assert (atlas.near_place >= atlas.own_place).all()


def test_what_has_no_atlas_is_a_message(model: AFiRe, films: PackedFilms) -> None:
    with pytest.raises(UserError, match="keeps no prototypes"):
        build_atlas(AFiRe(smallest(["prototypes.enabled=false"])), films, ROWS, NEAREST, CPU)
    with pytest.raises(UserError, match="no clusters to show"):
        build_atlas(AFiRe(smallest(["losses.contrast=feature"])), films, ROWS, NEAREST, CPU)
    with pytest.raises(UserError, match="pack the films at 64"):
        build_atlas(AFiRe(smallest(["image.size=64"])), films, ROWS, NEAREST, CPU)
    with pytest.raises(UserError, match="as many normal films, but there are 2"):
        build_atlas(model, films, ROWS[:2], NEAREST, CPU)
