"""f-AnoGAN: gradient penalty, losses and score against slow references, and what each phase and turn trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.detect.base import load_detector
from afire.detect.fanogan import FAnoGAN, FAnoGANNetworks, slopes
from afire.detect.fit import fit_detector
from afire.errors import UserError
from afire.methods.base import Keys, Progress, train_only
from afire.nn.conv import CodeEncoder, initialise_conv
from afire.settings import load_config
from afire.training.pretrain import pretrain
from tests.detect.test_learned import SIZE, task_of

SMALL = {"side": 16, "width": 2, "latent": 5}


def networks(epochs: int = 8, **options: object) -> FAnoGANNetworks:
    config = load_config("tiny", overrides=[f"image.size={SIZE}", "encoder.patch_size=8", f"training.epochs={epochs}"])
    return FAnoGANNetworks(config.model_copy(update={"options": {**SMALL, **options}}))


def drawn_films(count: int = 4) -> Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(3))


def keys(rows: Tensor, step: int = 0, seed: int = 0) -> Keys:
    return Keys(seed, 0, step, rows)


def parameters(critic: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Some numbers of every kernel, matrix and norm."""
    for parameter in critic.parameters():
        yield from ((parameter, place) for place in {0, parameter.numel() // 2, parameter.numel() - 1})


def moved(parameter: nn.Parameter, place: int, by: float) -> None:
    with torch.no_grad():
        parameter.view(-1)[place] += by


def slow_slopes(critic: nn.Module, images: Tensor, step: float = 1e-5) -> Tensor:
    """Each pixel moved up and down: what the critic says changes by so much."""
    lengths = []
    for image in images:
        gradient = torch.zeros(image.numel(), dtype=images.dtype)
        for place in range(image.numel()):
            up, down = image.clone(), image.clone()
            up.view(-1)[place] += step
            down.view(-1)[place] -= step
            gradient[place] = (critic(up[None]) - critic(down[None])).item() / (2 * step)
        lengths.append(gradient.norm())
    return torch.stack(lengths)


def test_the_gradient_penalty_in_value_and_gradient() -> None:
    critic = CodeEncoder(1, [2, 3], 8, 1).double()
    initialise_conv(critic, torch.Generator().manual_seed(1))
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2 - 1
    found = slopes(critic, images)
    with torch.no_grad():
        torch.testing.assert_close(found.detach(), slow_slopes(critic, images), rtol=1e-6, atol=1e-9)
    (found - 1).square().mean().backward()
    for parameter, place in parameters(critic):
        penalties = []
        for by in (1e-5, -2e-5):
            moved(parameter, place, by)
            penalties.append((slopes(critic, images) - 1).square().mean().item())
        moved(parameter, place, 1e-5)
        gradient = 0.0 if parameter.grad is None else float(parameter.grad.view(-1)[place])
        assert gradient == pytest.approx((penalties[0] - penalties[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_slopes_are_there_without_gradients_too() -> None:
    """The first pass over a batch in pieces."""
    learner = networks()
    images = drawn_films() * 2 - 1
    expected = slopes(learner.critic, images)
    with torch.no_grad():
        found = slopes(learner.critic, images)
    assert expected.requires_grad and not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


def test_the_losses_of_each_turn() -> None:
    learner = networks(penalty=10.0, kappa=0.5)
    said = {"fake": [1.0, 3.0], "real": [4.0, 8.0], "slopes": [0.5, 3.0], "error": [0.1, 0.3]}
    outputs = {name: torch.tensor(values) for name, values in {**said, "feature_error": [2.0, 6.0]}.items()}
    critic = learner.losses(outputs, "critic")
    assert critic["critic"].item() == 2 - 6 and critic["penalty"].item() == pytest.approx((0.25 + 4) / 2)
    assert critic.total.item() == pytest.approx(-4 + 10 * 2.125)
    assert learner.losses(outputs, "generator").total.item() == -2
    assert learner.losses(outputs, "encoder").total.item() == pytest.approx(0.2 + 0.5 * 4)


def test_the_penalty_is_taken_between_film_and_drawing() -> None:
    learner = networks()
    views = learner.views(drawn_films(), keys(torch.arange(4)))
    with torch.no_grad():
        drawn = learner.generator(views["codes"])
    mixed = [
        (1 - mix) * film + mix * one for film, one, mix in zip(views["images"], drawn, views["mixes"], strict=True)
    ]
    torch.testing.assert_close(learner(views)["slopes"], slopes(learner.critic, torch.stack(mixed)), rtol=1e-2, atol=0)


def test_draws_follow_from_seed_step_and_film_alone() -> None:
    learner = networks()
    rows = torch.tensor([4, 9, 2])
    drawn = learner.views(drawn_films(3), keys(rows))
    alone = learner.views(drawn_films(1), keys(rows[1:2]))
    for name in ("codes", "mixes"):
        assert torch.equal(drawn[name][1:2], alone[name])
        for other in (keys(rows, step=1), keys(rows, seed=1), keys(rows + 1)):
            assert not torch.isclose(drawn[name], learner.views(drawn_films(3), other)[name]).any()
    many = learner.views(torch.zeros(2000, 1, 16, 16), keys(torch.arange(2000)))
    assert abs(many["codes"].mean()) < 0.03 and many["codes"].std() == pytest.approx(1, abs=0.03)
    assert abs(torch.corrcoef(many["codes"].T).fill_diagonal_(0)).max() < 0.1
    assert many["mixes"].min() >= 0 and many["mixes"].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("epochs", "share", "gan"), [(8, 0.65, 5), (2, 0.01, 1), (3, 0.99, 2)])
def test_each_phase_has_its_share_of_the_epochs(epochs: int, share: float, gan: int) -> None:
    phases = networks(epochs, gan_share=share).phases()
    assert [phase.epochs for phase in phases] == [gan, epochs - gan]


def test_one_epoch_is_too_few() -> None:
    with pytest.raises(UserError, match=r"which takes two epochs; set train\.epochs=2"):
        networks(1).phases()


def test_the_turns_of_a_run() -> None:
    learner = networks(4, gan_share=0.5, critic_steps=3)
    made = [
        "".join(turn[0] for turn in learner.turns if not learner.rests(turn, Progress(step, 12, 3)))
        for step in range(12)
    ]
    assert made == ["c", "c", "cg", "c", "c", "cg", "e", "e", "e", "e", "e", "e"]
    for turn in learner.turns:
        assert learner.share(turn) == pytest.approx(sum(turn[0] in step for step in made) / len(made))


def test_only_what_a_turn_needs_is_computed() -> None:
    learner = networks()
    views = learner.views(drawn_films(), keys(torch.arange(4)))
    trained = {turn: [weight for _, weight in learner.parameters_of(turn)] for turn in learner.turns}
    needed = {"critic": {"fake", "real", "slopes"}, "generator": {"fake"}, "encoder": {"error", "feature_error"}}
    for turn in learner.turns:
        train_only(turn, trained)
        outputs = learner(views)
        assert set(outputs) == needed[turn]
        learner.zero_grad()
        learner.losses(outputs, turn).total.backward()
        assert {name for name, weight in learner.named_parameters() if weight.grad is not None} == {
            name for name, _ in learner.parameters_of(turn)
        }


def test_a_phase_trains_its_networks_and_no_other(films: PackedFilms, tmp_path: Path) -> None:
    task = task_of("fanogan", films, tmp_path, "train.epochs=4", "fanogan.gan_share=0.5")
    config: Config = FAnoGAN.config_of(task.config, task.settings, 48)
    config = config.model_copy(update={"run": config.run.model_copy(update={"keep_checkpoints": 100})})
    pretrain(config, films, tmp_path / "run", np.arange(48), learner=FAnoGANNetworks, device="cpu")
    _, middle, _, last = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    start = FAnoGANNetworks(config).state_dict()
    after_gan, at_end = (load_file(folder / "model.safetensors") for folder in (middle, last))
    for name in start:
        if name == "critic.read.bias":  # it cancels in the difference between films and drawings
            continue
        of_encoder = name.startswith("encoder.")
        assert torch.equal(start[name], after_gan[name]) == of_encoder, name
        assert torch.equal(after_gan[name], at_end[name]) != of_encoder, name


def slow_mean_square(first: list[float], second: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) / len(first)


def test_the_score_is_the_papers(films: PackedFilms, tmp_path: Path) -> None:
    fit_detector(task_of("fanogan", films, tmp_path / "model", "held_out=0.4", "train.epochs=2", "fanogan.kappa=0.7"))
    detector = load_detector(tmp_path / "model")
    assert isinstance(detector, FAnoGAN)
    images = films.batch([50, 51])
    found = detector.score(images, all_scores=True)
    model = detector.model.double()
    for number, image in enumerate(images.double()):
        film = image[None] * 2 - 1
        with torch.no_grad():
            drawn = model.generator(model.encoder(film))
            features = [model.critic.features(one)[0].tolist() for one in (film, drawn)]
        of_pixels = slow_mean_square(film.flatten().tolist(), drawn.flatten().tolist())
        of_features = slow_mean_square(*features)
        assert found.scores["residual"][number] == pytest.approx(of_pixels + 0.7 * of_features, rel=1e-4)
        assert found.scores["error"][number] == pytest.approx(of_pixels, rel=1e-4)
        assert found.scores["features"][number] == pytest.approx(of_features, rel=1e-4)
