"""f-AnoGAN: a generator that draws normal films only, and an encoder that finds the drawing nearest to a film.

After the paper (Schlegl et al., "f-AnoGAN: Fast unsupervised anomaly detection with generative adversarial
networks", Medical Image Analysis 2019). First a Wasserstein GAN with gradient penalty learns to draw normal films from
random codes; then, with both of its networks kept still, an encoder learns the code whose drawing looks like a given
film, to the eye (pixels) and to the critic (its last features): the paper's izi_f. What no code draws is left over. A
film's score is A_R + kappa A_D, the mean squared difference of pixels and kappa times that of the critic's features.

Ours: group in place of batch and layer normalisation; plain stages of 32 to 256 channels in place of residual blocks of
64 to 512; the encoder is trained by the Adam of the GAN, whose betas (0, 0.9) make it nearly the paper's RMSprop, at
the learning rate of the GAN, twice the paper's. The paper counts updates: 7 passes over 849,569 patches and 50,000
updates of the encoder, 143,000 in all; 1,000 epochs are as many where there are about 9,000 films.

Shapes: B films, s x s pixels as the networks see them, Z numbers of a code, F features of the critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, Section
from afire.detect.learned import (
    Examined,
    FilmLearner,
    LearnedConfig,
    LearnedDetector,
    TrainConfig,
    by_place,
    check_halvings,
    mean_square,
    restored_films,
)
from afire.errors import UserError
from afire.methods.base import (
    ALL,
    Keys,
    Losses,
    Outputs,
    Phase,
    Progress,
    Views,
    learns,
    normal_draws,
    uniform_draws,
)
from afire.nn import distributed
from afire.nn.conv import CodeDecoder, CodeEncoder, initialise_conv
from afire.nn.vit import at_least_float32, full_precision

_CODES, _MIXES = 0xFA01, 0xFA02  # keep these draws apart from others of the same key
_NO_SLOPE = 1e-12  # under the root, which has no derivative at nothing
SCORE = "residual"


class FAnoGANSettings(Section):
    """Generator, critic and encoder."""

    side: int = Field(64, ge=16, description="films larger than this are shrunk to it, in pixels")
    latent: int = Field(128, ge=1, description="numbers that a film is drawn from")
    width: int = Field(32, ge=1, description="channels of the first stage; each of the four doubles them")
    gan_share: float = Field(0.65, gt=0, lt=1, description="share of the epochs for the GAN; the rest for the encoder")
    critic_steps: int = Field(5, ge=1, description="updates of the critic for each of the generator")
    penalty: float = Field(10.0, ge=0, description="weight of the gradient penalty")
    kappa: float = Field(1.0, ge=0, description="weight of the critic's features, in the encoder's loss and the score")


class FAnoGANConfig(LearnedConfig):
    """All settings of fitting the detector `fanogan`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(
            epochs=1000, batch_size=64, learning_rate=1e-4, learning_rate_end=1e-4, beta1=0.0, beta2=0.9, clip=0.0
        ),
        description="as published",
    )
    fanogan: FAnoGANSettings = Field(default_factory=FAnoGANSettings)


def slopes(critic: nn.Module, images: Tensor) -> Tensor:
    """How steeply ``critic`` rises at each image: the length (B,) of its gradient, which can be differentiated again.

    A batch in pieces runs the networks without gradients first; the slope needs one even then.
    """
    differentiated_again = torch.is_grad_enabled()
    with torch.enable_grad(), full_precision(images):
        at = at_least_float32(images.detach()).requires_grad_()
        inputs = at.view_as(at)  # FLOPs are counted by hooks that do not take a leaf
        (gradient,) = torch.autograd.grad(critic(inputs).sum(), at, create_graph=differentiated_again)
        return (gradient.flatten(1).square().sum(dim=1) + _NO_SLOPE).sqrt()


class FAnoGANNetworks(FilmLearner):
    """Generator, critic and encoder, each with four stages. Every turn updates the network of its name."""

    settings_type = FAnoGANSettings
    turns = ("critic", "generator", "encoder")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, FAnoGANSettings)
        widths = [self.options.width * 2**stage for stage in range(4)]
        self.side = check_halvings(config, self.options.side, len(widths), "fanogan")
        self.latent, self.kappa, self.penalty = self.options.latent, self.options.kappa, self.options.penalty
        self.critic_steps, self.gan_share = self.options.critic_steps, self.options.gan_share
        self.generator = CodeDecoder(1, widths, self.side, self.latent)
        self.critic = CodeEncoder(1, widths, self.side, 1)
        self.encoder = CodeEncoder(1, widths, self.side, self.latent)
        initialise_conv(self, torch.Generator().manual_seed(config.seed))

    def phases(self) -> tuple[Phase, ...]:
        return Phase("gan", self.gan_epochs), Phase("encoder", self.config.training.epochs - self.gan_epochs)

    @property
    def gan_epochs(self) -> int:
        """Epochs of the first phase; either has one at least."""
        epochs = self.config.training.epochs
        if epochs < 2:
            raise UserError(
                "fanogan trains its GAN, then its encoder, which takes two epochs; set train.epochs=2 or give more "
                "--minutes."
            )
        return min(max(round(self.gan_share * epochs), 1), epochs - 1)

    def rests(self, turn: str, progress: Progress) -> bool:
        in_gan = progress.step < self.gan_epochs * progress.steps_per_epoch
        if turn == "generator":
            return not in_gan or (progress.step + 1) % self.critic_steps != 0
        return in_gan == (turn == "encoder")

    def share(self, turn: str) -> float:
        gan = self.gan_epochs / self.config.training.epochs
        return {"critic": gan, "generator": gan / self.critic_steps, "encoder": 1 - gan}[turn]

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, weight) for name, weight in self.named_parameters() if name.startswith(f"{turn}."))

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Films, a random code (B, Z) for each, and how far (B, 1) its drawing is mixed into the film."""
        codes = normal_draws(self.latent, keys.seed ^ _CODES, keys.step, keys.rows)
        mixes = uniform_draws(1, keys.seed ^ _MIXES, keys.step, keys.rows)
        return {"images": self.as_inputs(images), "codes": codes.to(images.device), "mixes": mixes.to(images.device)}

    def forward(self, views: Views) -> Outputs:
        """What the turn at hand needs, each (B,)."""
        images, outputs = views["images"], {}
        if learns(self.critic, self.generator):
            drawing = self.generator(views["codes"])
            outputs["fake"] = self.critic(drawing)[:, 0]
            if learns(self.critic):
                mixed = images + views["mixes"][:, :, None, None] * (drawing - images)
                outputs |= {"real": self.critic(images)[:, 0], "slopes": slopes(self.critic, mixed)}
        if learns(self.encoder):
            drawing, features = self.draw(images)
            outputs |= {"error": mean_square(drawing - images), "feature_error": mean_square(features)}
        return outputs

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The drawing (B, 1, s, s) that the encoder finds, and how its features (B, F) differ from the film's."""
        drawing: Tensor = self.generator(self.encoder(images))
        return drawing, self.critic.features(drawing) - self.critic.features(images)

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        def mean(name: str) -> Tensor:
            return distributed.with_global_value(at_least_float32(outputs[name]).mean())

        if turn == "critic":
            apart = mean("fake") - mean("real")
            steep = at_least_float32(outputs["slopes"]) - 1
            penalty = distributed.with_global_value(steep.square().mean())
            return Losses({"critic": apart, "penalty": penalty}, apart + self.penalty * penalty)
        if turn == "generator":
            generator = -mean("fake")
            return Losses({"generator": generator}, generator)
        error, features = mean("error"), mean("feature_error")
        return Losses({"error": error, "feature_error": features}, error + self.kappa * features)


class FAnoGAN(LearnedDetector):
    """A GAN of normal films, and an encoder into it."""

    method = "fanogan"
    Settings = FAnoGANConfig
    Networks = FAnoGANNetworks
    published = "64 px; 93,000 updates of the GAN (7 epochs of 849,569 patches), 50,000 of the encoder"
    published_epochs = 1000
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "squared error of the nearest drawing, pixels plus kappa times the critic's features, means",
        "error": "squared error of the nearest drawing, mean over the pixels",
        "features": "squared error of the nearest drawing, mean over the critic's features",
    }
    model: FAnoGANNetworks

    def examine(self, images: Tensor, restore: bool) -> Examined:
        inputs = self.model.as_inputs(images)
        drawing, apart = self.model.draw(inputs)
        error, features = mean_square(drawing - inputs), mean_square(apart)
        scores = {SCORE: error + self.model.kappa * features, "error": error, "features": features}
        restored = restored_films(drawing, images) if restore else None
        return Examined(scores, by_place((drawing - inputs).abs(), self.grid), restored)
