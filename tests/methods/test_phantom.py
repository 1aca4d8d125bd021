"""Teaching by phantoms: the loss against a slow reference, what is seen when, and that anatomy is learnt."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from afire.config import Config
from afire.data.phantom import ANATOMY, DISEASES, draw_batch
from afire.detect.maps import Evidence, possible_maps
from afire.errors import UserError
from afire.lesions.augment import AugmentSettings
from afire.lesions.frames import anatomy_places, chest_places
from afire.methods import check_overrides, complete, make_method
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.methods.dense import cells_of
from afire.methods.phantom import MAPS, PhantomTaught
from afire.nn.residual import ResidualTrunk
from afire.settings import load_config
from afire.weights import start_from

PLAIN = [f"options.augment.{name}=0" for name in AugmentSettings.model_fields]


def config(*overrides: str) -> Config:
    small = ["image.size=32", "encoder.patch_size=8", "options.films=6"]
    return load_config("tiny", overrides=["method=phantom", *small, *overrides])


def begun(*overrides: str, rows: int = 4) -> PhantomTaught:
    model = PhantomTaught(config(*overrides))
    model.begin_run(torch.arange(rows), lambda rows: torch.zeros(len(rows), 1, 32, 32))
    return model.train()


def keys(rows: list[int], epoch: int = 0, seed: int = 0) -> Keys:
    return Keys(seed, epoch, 0, torch.tensor(rows))


def films(count: int = 4) -> Tensor:
    coarse = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def test_losses_are_those_of_each_kind_of_map() -> None:
    model = begun("options.anatomy=0.5", "options.findings=3", "options.any_finding=2", "options.positive=4")
    outputs = model(model.views(films(), keys([0, 1, 2, 3])))
    assert outputs["told"].shape == outputs["maps"].shape == (4, MAPS, 8, 8)
    losses = model.losses(outputs)
    parts = {"anatomy": slice(0, 13), "findings": slice(13, 27), "any_finding": slice(27, 28)}
    factors = {"anatomy": (0.5, 1.0), "findings": (3.0, 4.0), "any_finding": (2.0, 4.0)}
    total = torch.zeros(())
    for name, part in parts.items():
        weight, positive = factors[name]
        p, share = outputs["told"][:, part].sigmoid(), outputs["maps"][:, part]
        expected = -(positive * share * p.log() + (1 - share) * (1 - p).log()).mean()
        torch.testing.assert_close(losses[name], expected)
        total = total + weight * expected
    torch.testing.assert_close(losses.total, total)


def test_without_changes_a_view_is_what_the_bank_holds() -> None:
    model = begun(*PLAIN)
    assert model._bank is not None
    bank = model._bank.at(0)
    assert len(bank) == 6
    views = model.views(films(2), keys([1, 3], epoch=1))  # the second epoch of four rows begins at film 4
    torch.testing.assert_close(views["films"], torch.from_numpy(bank.images[[5, 1]]) / 255)
    torch.testing.assert_close(views["maps"][:, : len(ANATOMY)], torch.from_numpy(bank.anatomy[[5, 1]]) / 255)
    findings = torch.from_numpy(bank.findings[[5, 1]]) / 255
    torch.testing.assert_close(views["maps"][:, len(ANATOMY) : -1], findings)
    torch.testing.assert_close(views["maps"][:, -1], findings.amax(dim=1))
    assert findings.shape[1] == len(DISEASES)


def test_views_follow_from_seed_epoch_and_row_alone() -> None:
    model = begun()
    views = model.views(films(), keys([0, 1, 2, 3]))
    again = begun().views(films(2), keys([2, 1]))  # another bank, drawn again, as after a resume
    for name in ("films", "maps"):
        torch.testing.assert_close(again[name], views[name][[2, 1]], atol=1e-6, rtol=0)
    assert not torch.equal(model.views(films(), keys([0, 1, 2, 3], epoch=3))["films"], views["films"])  # same films
    other = PhantomTaught(config("seed=1"))
    other.begin_run(torch.arange(4), lambda rows: rows)
    assert other._bank is not None and model._bank is not None
    assert (other._bank.at(0).images != model._bank.at(0).images).any()


def test_with_all_films_renewed_no_epoch_shows_those_of_another() -> None:
    model = begun(*PLAIN, "options.renewed=1", rows=6)
    numbers = list(range(6))
    shown = [model.views(films(6), keys(numbers, epoch=epoch))["films"] for epoch in (0, 1, 2)]
    every = torch.cat(shown).flatten(1)
    assert len(torch.unique(every, dim=0)) == 18
    resumed = begun(*PLAIN, "options.renewed=1", rows=6)
    torch.testing.assert_close(resumed.views(films(6), keys(numbers, epoch=2))["films"], shown[2])
    held = begun(*PLAIN, rows=6)
    torch.testing.assert_close(held.views(films(6), keys(numbers))["films"], shown[0])
    torch.testing.assert_close(held.views(films(6), keys(numbers, epoch=5))["films"], shown[0])
    model.end_run()
    PhantomTaught(config()).end_run()  # of a run that ended before it began


def test_afires_teacher_begins_as_its_student_does(tmp_path: Path) -> None:
    source = make_method(config()).trunk().state_dict()
    save_file({name: tensor.contiguous() for name, tensor in source.items()}, tmp_path / "vit.safetensors")
    for settings in ((), ("options.afire=1",)):
        model = PhantomTaught(config("seed=5", *settings))
        start_from(tmp_path / "vit.safetensors")(model)
        trunks = [model.encoder, *([model.afire.teacher.encoder] if model.afire is not None else [])]
        assert len(trunks) == 1 + len(settings)
        for trunk in trunks:
            assert all(torch.equal(tensor, source[name]) for name, tensor in trunk.state_dict().items())


def test_bad_settings_are_messages() -> None:
    with pytest.raises(UserError, match="cannot be split into 3 x 3 cells"):
        make_method(config("options.finer=3"))
    with pytest.raises(UserError, match="would teach nothing"):
        make_method(config("options.anatomy=0", "options.findings=0", "options.any_finding=0"))
    with pytest.raises(UserError, match=r"unknown setting augment\.turns; did you mean augment\.turn"):
        make_method(config("options.augment.turns=1"))
    with pytest.raises(UserError, match="no phantom has been drawn"):
        make_method(config()).views(films(), keys([0, 1, 2, 3]))
    check_overrides("phantom", ["losses.temperature=0.3"])
    assert complete(config(), PhantomTaught).options["augment"]["contrast"] == 0.6
    assert PhantomTaught.own_films(config()) == 6 and PhantomTaught.own_films(config("options.afire=1")) == 0
    assert AFiRe.own_films(load_config("tiny")) == 0


def test_every_parameter_has_a_gradient_and_flops_are_counted() -> None:
    for settings in ((), ("options.afire=1", "losses.lesion=1", "encoder.drop_path=0.2")):
        model = begun(*settings)
        model.losses(model(model.views(films(), keys([0, 1, 2, 3])))).total.backward()
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert all(model.get_parameter(name).grad is not None for name in trained)
        assert any(name.startswith("encoder.") for name in trained)
    alone, both = PhantomTaught(config()), PhantomTaught(config("options.afire=1"))
    assert both.flops() > 1.5 * alone.flops() > 0
    assert alone._bank is None


def test_the_encoder_may_be_a_residual_network() -> None:
    settings = ("encoder.kind=residual", "encoder.width=56", "encoder.depth=5", "encoder.heads=1")
    model = begun(*settings, "image.normalise=none")
    assert isinstance(model.encoder, ResidualTrunk)
    views = model.views(films(), keys([0, 1, 2, 3]))
    told = model(views)["told"]
    tokens = model.encoder(views["films"])[:, 1:]
    torch.testing.assert_close(told, cells_of(model.head(tokens), (4, 4), 2))
    model.losses(model(views)).total.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert PhantomTaught(config(*settings)).flops() > 0
    layers = [model.layers_behind(name) for name in ("head.weight", "encoder.stages.2.0.x", "encoder.stem.1.0.weight")]
    assert layers == [0, 1, 4]
    with pytest.raises(UserError, match=r"AFiRe's student is a vision transformer, but encoder\.kind is residual"):
        begun(*settings, "options.afire=1")


def test_stages_of_a_residual_network_keep_still() -> None:
    settings = ("encoder.kind=residual", "encoder.width=56", "encoder.depth=5", "encoder.heads=1")
    model = begun(*settings, "training.frozen_blocks=2")
    model.hold_blocks()
    trained = {".".join(name.split(".")[:3]) for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {"encoder.stages.2", "head.weight", "head.bias"}
    with pytest.raises(UserError, match="frozen_blocks is 4, but the encoder has 3 blocks"):
        begun(*settings, "training.frozen_blocks=4").hold_blocks()


def test_afire_beside_it_is_afire_itself() -> None:
    model = begun("options.afire=0.5", "losses.lesion=1")
    reference = AFiRe(load_config("tiny", overrides=["image.size=32", "encoder.patch_size=8", "losses.lesion=1"]))
    assert model.afire is not None
    for mine, theirs in zip(model.afire.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    reference.train()
    at = keys([0, 1, 2, 3])
    views = model.views(films(), at)
    losses = model.losses(model(views))
    expected = reference.losses(reference(reference.views(films(), at)))
    for name, value in expected.terms.items():
        torch.testing.assert_close(losses[name], value)
    own = losses["anatomy"] + 2 * losses["findings"] + losses["any_finding"]
    torch.testing.assert_close(losses.total, own + 0.5 * expected.total)
    model.after_step(losses)
    reference.after_step(expected)
    assert torch.equal(model.state_dict()["bank.prototypes"], reference.prototypes)
    names = model.state_dict().keys()
    assert len({model.state_dict()[name].data_ptr() for name in names}) == len(names)  # no tensor by two names
    assert model.restores and model.restore(films()).shape == (4, 16, 64)
    assert model.trunk() is model.afire.trunk("student")


def test_afire_moves_evaluates_and_is_copied_with_it() -> None:
    model = begun("options.afire=1")
    assert model.afire is not None
    model.eval()
    assert not model.afire.training
    model.train()
    assert model.afire.training and not model.afire.teacher.training
    twin = copy.deepcopy(model)
    assert twin.afire is not None and twin.afire.student.encoder is twin.encoder is not model.encoder
    other = PhantomTaught(config("options.afire=1", "seed=3"))
    other.load_state_dict(model.state_dict())
    assert other.afire is not None
    assert torch.equal(other.afire.encode(films(), "student"), model.afire.encode(films(), "student"))


PLACED = ("options.afire=1", "prototypes.place=anatomy", "prototypes.lungs=predicted")


def test_places_follow_from_the_anatomy_that_it_predicts() -> None:
    model = begun(*PLACED, "losses.lesion=1", "encoder.drop_path=0.3")
    assert model.afire is not None
    drawn = draw_batch(2, range(4), 32, normal_share=1.0)
    patients = torch.from_numpy(drawn.images)
    tokens = model.afire.teacher.tokens(model.normalise(patients))
    likely = cells_of(model.head(tokens), (4, 4), 2).sigmoid()[:, : len(ANATOMY)]
    with torch.no_grad():
        torch.testing.assert_close(model.afire.anatomy(patients), likely)  # type: ignore[misc]
    places = model.afire.places(patients)
    assert places is not None and not anatomy_places(likely, (4, 4), (4, 4))[1].any()
    assert torch.equal(places, chest_places(patients, (4, 4), (4, 4))), "nothing is known yet: as by Otsu"
    views = model.views(patients, keys([0, 1, 2, 3]))
    assert "place" not in views and torch.equal(model(views)["place"], places)
    model.afire.anatomy = lambda _: torch.from_numpy(drawn.anatomy).float()
    known, has_lungs = anatomy_places(torch.from_numpy(drawn.anatomy).float(), (4, 4), (4, 4))
    outputs = model(views)
    assert has_lungs.all() and torch.equal(outputs["place"], known) and not torch.equal(known, places)
    losses = model.losses(outputs)
    losses.total.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    assert model.health(views, losses.as_floats()).numbers["afire_place_entropy"] >= 0


def test_a_copy_predicts_its_own_anatomy() -> None:
    model = begun(*PLACED)
    twin = copy.deepcopy(model)
    assert twin.afire is not None and model.afire is not None and twin.afire.anatomy is not None
    with torch.no_grad():
        twin.head.bias.add_(1)
        assert not torch.equal(twin.afire.anatomy(films()), model.afire.anatomy(films()))  # type: ignore[misc]


def test_predicted_lungs_look_at_no_values_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait for them: ``run.check_images`` is off."""
    model = begun(*PLACED)
    views = model.views(films(), keys([0, 1, 2, 3]))
    looked: list[object] = []
    monkeypatch.setattr("afire.methods.base.check_films", lambda *_, **settings: looked.append(settings))
    assert "place" in model(views) and not looked


def test_predicted_lungs_need_who_predicts_them() -> None:
    with pytest.raises(UserError, match="nothing in the method afire predicts anatomy; choose --method phantom"):
        AFiRe(load_config("tiny", overrides=list(PLACED[1:])))
    with pytest.raises(UserError, match=r"prototypes\.lungs predicted needs prototypes\.place anatomy"):
        config("prototypes.lungs=predicted")


def test_sixty_steps_lower_the_loss_and_health_says_so() -> None:
    model = begun("options.films=16", rows=16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers = list(range(16))
    before = model.health(model.views(films(16), keys(numbers)), {})
    losses = []
    for step in range(60):
        loss = model.losses(model(model.views(films(16), keys(numbers, epoch=step)))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])
    after = model.health(model.views(films(16), keys(numbers)), {})
    assert after.numbers["anatomy_dice"] > before.numbers["anatomy_dice"]
    assert after.numbers["finding_auc"] > 0.6 and math.isfinite(after.numbers["effective_rank"])
    panels = model.panels(model.views(films(16), keys(numbers)), 3)
    assert [panel.images.shape for panel in panels] == [(3, 1, 32, 32)] * 5
    with torch.no_grad():
        readouts = model.eval().readouts(films(2))
    assert readouts["anatomy"].shape == (2, 13, 8, 8) and readouts["any_finding"].shape == (2, 1, 8, 8)
    assert all(value.min() >= 0 and value.max() <= 1 for value in readouts.values())


def test_a_detector_reads_the_findings_it_was_taught() -> None:
    model = begun("options.finer=4").eval()
    maps = {patch_map.name: patch_map for patch_map in possible_maps(model)}
    assert set(maps) == {"gaussian", "finding"}
    with torch.no_grad():
        told, found = model.tell(films())[:, -1], maps["finding"](Evidence(model, films()))
    for token in range(16):
        row, column = divmod(token, 4)
        cells = told[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        torch.testing.assert_close(found[:, token], cells.amax(dim=(1, 2)))
    assert {"finding", "restoration"} <= {patch_map.name for patch_map in possible_maps(begun("options.afire=1"))}


def test_a_collapse_is_red_and_afire_speaks_too() -> None:
    model = begun("options.afire=1")
    views = model.views(films(), keys([0, 1, 2, 3]))
    said = model.health(views, {"structure": 1.0})
    assert said.numbers["afire_effective_rank"] > 1 and "film dependence" in said.shown
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.zero_()
    assert model.health(views, {"structure": 1.0}).colour == "red"
