"""Models Genesis (Zhou et al. 2019, 2021): a film is bent, shuffled and painted over, and the networks restore it.

Written from the paper. As published: the corruptions and how often each happens (:mod:`afire.lesions.corrupt` says what
differs there), the whole film as the target, and the mean squared error over all of its pixels. Ours: a vision
transformer with AFiRe's decoder in place of a U-Net, without skips from encoder to decoder, and AdamW on a cosine in
place of SGD. The authors call it a patent-pending technology.

Shapes: B films, L positions, P pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from afire.config import Config
from afire.lesions.corrupt import CorruptSettings, corrupted
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Views
from afire.methods.health import Health
from afire.methods.restoring import RestoringMethod, judged, restored_well, squared_error
from afire.methods.twins import HEALTH_FILMS
from afire.nn import distributed
from afire.nn.vit import check_films


class GenesisSettings(CorruptSettings):
    """Settings of Models Genesis itself."""


class Genesis(RestoringMethod):
    """One encoder and a decoder."""

    settings_type = GenesisSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.initialise()

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """The images, the same spoilt, and where they were painted over."""
        assert isinstance(self.options, GenesisSettings)
        spoilt = corrupted(images, seed=keys.seed, epoch=keys.epoch, rows=keys.rows, settings=self.options)
        return {
            "images": images,
            "spoilt": spoilt.images,
            "painted": spoilt.painted,
            **self.depth(keys, images.device),
        }

    def forward(self, views: Views) -> Outputs:
        """Views ``images`` and ``spoilt`` (B, C, S, S) in [0, 1]."""
        check_films(views["images"], self.config.image.channels, "images", values=self.config.run.check_images)
        tokens = self.encoder(self.normalise(views["spoilt"]), views.get("depth"))
        return {"drawn": self.drawn(tokens), "target": self.target(views["images"])}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is."""
        restoration = distributed.with_global_value(squared_error(outputs["drawn"], outputs["target"]))
        return Losses({"restoration": restoration}, restoration)

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """The known shortcuts: the mean film, and the spoilt film handed on as it came."""
        some = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        outputs = self(some)
        well = restored_well(outputs["drawn"], self.target(some["spoilt"]), outputs["target"])
        rank = self.rank_of(some["images"])
        numbers = {"effective_rank": rank, **well._asdict(), "restoration": losses["restoration"]}
        shown = (
            f"rank {rank:.0f}, {well.explained:.0%} of what tells films apart restored, "
            f"{well.against_copy:.0%} of the damage undone"
        )
        return judged(numbers, well.rules(), "spoilt films come back nearer to what they were", shown)

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """The film, the film spoilt, where it was painted over, restored, and the difference to the film."""
        images, spoilt = views["images"][:count], views["spoilt"][:count]
        restored = self.picture(self.restore(spoilt), like=images)
        return [
            Panel("film", images),
            Panel("spoilt", spoilt),
            Panel("painted over", views["painted"][:count].float(), "mask"),
            Panel("restored", restored),
            Panel("film − restored", images - restored, "difference"),
        ]
