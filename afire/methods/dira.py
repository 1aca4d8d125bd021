"""DiRA (Haghighi, Taher et al. 2022): views of a film are told from other films, restored, and judged by an adversary.

Written from the paper. As published, its form with MoCo v2: two views of a film; the query is spoilt as Models Genesis
does; InfoNCE of the query against a queue of a following network's keys (discriminative), mean squared error of the
restored query (restorative), and a network that tells restored views from real ones (adversarial), weighted 1 : 10 :
0.001. The networks warm up without the adversary; then it and they take turns in every step.

Ours, beside what :mod:`afire.methods.twins` and :mod:`afire.lesions.corrupt` say: a vision transformer with AFiRe's
decoder in place of a U-Net on ResNet-50; the adversary sees pixels as the decoder draws them, by the film's own grey
levels; the warm-up is a share of the run instead of one of its own, and both optimisers are AdamW. Beside the published
code: only the query is spoilt, by all that Models Genesis does, where there both views are, by cut-outs and exchanged
patches; what is restored is the view after its changes of brightness and blur, not before; the adversary learns by
cross-entropy, not by squared error, and takes its turn first, not last. Pixels are those of a normalised film, whose
variance is 1 and not about 1/20, so the weight of 10 counts for more here. The authors say that the content of the
paper is covered by patents pending.

Shapes: B films, F width of a key, L positions, P pixels of a patch, R regions of a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config
from afire.errors import UserError
from afire.lesions.corrupt import CorruptSettings, corrupted
from afire.methods.base import ALL, Keys, Losses, Outputs, Panel, Progress, Views, learns
from afire.methods.crops import crops
from afire.methods.health import Health
from afire.methods.moco import MoCoSettings
from afire.methods.restoring import Restored, Restoring, restored_well, squared_error
from afire.methods.twins import HEALTH_FILMS, Queued, global_mean, pooled
from afire.nn import distributed
from afire.nn.conv import Adversary, deceiving_loss, telling_loss
from afire.nn.memory import of_all
from afire.nn.vit import initialise, unpatchify

_DECODER = 0xD12A  # its first weights do not repeat those of the student
ADVERSARY, NETWORKS = "adversary", "networks"
_HALVINGS = 3


class DiRASettings(MoCoSettings, CorruptSettings):
    """Settings of DiRA itself."""

    discriminative: float = Field(1.0, gt=0, description="weight of telling films apart")
    restorative: float = Field(10.0, gt=0, description="weight of restoring views")
    adversarial: float = Field(0.001, ge=0, description="weight of deceiving the adversary")
    adversary_after: float = Field(0.5, ge=0, lt=1, description="share of the run before the adversary joins")
    adversary_width: int = Field(32, ge=1, description="channels of its first stage; each of the three doubles them")


class DiRA(Queued, Restoring):
    """Student, teacher and queue; a decoder; and an adversary that takes turns with them."""

    settings_type = DiRASettings
    options: DiRASettings
    sections = ("decoder",)
    turns = (ADVERSARY, NETWORKS)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.image.size % 2**_HALVINGS:
            raise UserError(
                f"dira's adversary halves a film {_HALVINGS} times, which {config.image.size} px do not allow; use "
                f"films whose side is a multiple of {2**_HALVINGS}."
            )
        widths = [self.options.adversary_width * 2**stage for stage in range(_HALVINGS)]
        self.decoder = self.make_decoder()
        self.adversary = Adversary(config.image.channels, widths)
        generator = torch.Generator().manual_seed(config.seed ^ _DECODER)
        initialise(self.decoder, generator)
        self.adversary.initialise(generator)
        self.is_judged = True

    # Turns

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in super().parameters_of(turn):
            if name.startswith("adversary.") == (turn == ADVERSARY):
                yield name, weight

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """The adversary joins after its share of the steps."""
        self.is_judged = progress.step >= self.options.adversary_after * progress.steps
        return super().schedule(progress)

    def rests(self, turn: str, progress: Progress) -> bool:
        return turn == ADVERSARY and progress.step < self.options.adversary_after * progress.steps

    def share(self, turn: str) -> float:
        return 1 - self.options.adversary_after if turn == ADVERSARY else 1.0

    def flops(self) -> float:
        """The mean over the run: before the adversary joins, nothing passes through it for the networks' turn."""
        now, counted = self.is_judged, 0.0
        late = self.share(ADVERSARY)
        for self.is_judged, share in ((False, 1 - late), (True, late)):
            counted += share * super().flops()
        self.is_judged = now
        return counted

    # A step

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Two random views of each film: one as it is (``view``) and spoilt (``query``), the other the ``key``."""
        two = crops(images, keys, views=2, size=self.config.image.size, settings=self.options.crop)
        spoilt = corrupted(two[0::2], seed=keys.seed, epoch=keys.epoch, rows=keys.rows, settings=self.options)
        views = {"view": two[0::2], "query": spoilt.images, "key": two[1::2], "rows": keys.rows.to(images.device)}
        depth = self.depth(keys, 1, images)
        return views if depth is None else {**views, "depth": depth}

    def forward(self, views: Views) -> Outputs:
        """What the turn at hand needs: queries and keys (B, F), patches (B, L, P), what the adversary says (B, R)."""
        self.check(views["view"])
        tokens = self.student.encoder(self.normalise(views["query"]), views.get("depth"))
        drawn, target = self.drawn(tokens), self.target(views["view"])
        outputs: dict[str, Tensor] = {}
        if learns(self.adversary):
            outputs |= {"fake": self._judged(drawn.detach()), "real": self._judged(target)}
        if learns(self.student):
            with torch.no_grad():
                key = self.teacher(self.normalise(views["key"]))
            query = self.student.head(pooled(tokens, self.student.pool))
            outputs |= {"query": query, "key": key, "rows": views["rows"], "drawn": drawn, "target": target}
            if self.is_judged:
                outputs["deceives"] = self._judged(drawn)
        return outputs

    def _judged(self, patches: Tensor) -> Tensor:
        """What the adversary says of patches (B, L, P), put together."""
        logits: Tensor = self.adversary(unpatchify(patches, self.patch_size, self.grid))
        return logits

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Of the adversary's turn what it minimises, of the networks' the three losses; keys wait for the queue."""
        if turn == ADVERSARY:
            telling = distributed.with_global_value(telling_loss(outputs["real"], outputs["fake"]))
            return Losses({"adversary": telling}, telling)
        weights = self.options
        counts = self.queue.others(outputs["rows"])
        terms = {
            "contrast": global_mean(self.told_apart(outputs["query"], outputs["key"].detach(), counts)),
            "restoration": distributed.with_global_value(squared_error(outputs["drawn"], outputs["target"])),
        }
        total = weights.discriminative * terms["contrast"] + weights.restorative * terms["restoration"]
        if "deceives" in outputs:
            terms["deception"] = distributed.with_global_value(deceiving_loss(outputs["deceives"]))
            total = total + weights.adversarial * terms["deception"]
        keys, owners = of_all(outputs["key"], outputs["rows"])
        return Losses(terms, total, {"keys": keys, "owners": owners})

    # An epoch

    @torch.no_grad()
    def look(self, views: Views) -> dict[str, float]:
        """Also how well views are restored, and how many regions the adversary tells right."""
        shown = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        drawn = self.drawn(self.student.encoder(self.normalise(shown["query"])))
        target = self.target(shown["view"])
        well = restored_well(drawn, self.target(shown["query"]), target)
        right = 0.5 * ((self._judged(target) > 0).float().mean() + (self._judged(drawn) < 0).float().mean())
        return {**super().look(views), **well._asdict(), "told_right": float(right)}

    def more_rules(self, numbers: Mapping[str, float]) -> list[tuple[str, bool, str]]:
        right = numbers["told_right"]
        return [
            (
                "amber",
                self.is_judged and right > 0.99,
                f"the adversary tells {right:.0%} of all regions right: what it says no longer teaches anything "
                "(a smaller options.adversary_width, or a later options.adversary_after)",
            ),
            *Restored(numbers["explained"], numbers["against_copy"]).rules(),
        ]

    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        health = super().health(views, losses)
        numbers = health.numbers
        shown = f"{health.shown}, {numbers['explained']:.0%} of what tells views apart restored"
        shown += f", adversary right {numbers['told_right']:.0%}" if self.is_judged else ""
        return Health(numbers, health.colour, health.reason, shown)

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """The view, spoilt, restored, the difference, and the other view."""
        view, spoilt = views["view"][:count], views["query"][:count]
        restored = self.picture(self.restore(spoilt), like=view)
        return [
            Panel("view", view),
            Panel("spoilt", spoilt),
            Panel("restored", restored),
            Panel("view − restored", view - restored, "difference"),
            Panel("key", views["key"][:count]),
        ]
