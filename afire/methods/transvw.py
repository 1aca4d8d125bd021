"""TransVW (Haghighi et al. 2021): parts of films that recur from patient to patient are words, named and restored.

Written from the paper. As published: words are found without labels (a random place of a random film and the same place
in the films that resemble it most, one pseudo-class each), spoilt as Models Genesis does, classified by a head on the
pooled features and restored by a decoder, at 1 : 0.01; 44 words of 200 films, the numbers of the published code. Ours:

- films resemble each other in the leading directions of variance of small versions of them, which is what the best
  linear autoencoder keeps; the paper trains a deep one. They are found by a pass over all films before the first epoch.
- every word has a reference film of its own, where the paper takes all from one: with one, most films would have no
  word. A film that is in none shows a random part, which is restored and not named.
- a word is half as wide as the film and is enlarged to its size; a transformer with AFiRe's decoder in place of a
  U-Net; the class is read from the mean token, which is what tasks read too.

The authors say that the content of the paper is covered by patents pending.

Shapes: B films, W words, K films of a word, L positions, P pixels of a patch, N films of the run, F numbers of a film.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config
from afire.lesions.corrupt import CorruptSettings, corrupted
from afire.lesions.places import below, keyed, unit
from afire.methods.base import ALL, AllFilms, Keys, Losses, Outputs, Panel, Views
from afire.methods.crops import cut
from afire.methods.health import Health
from afire.methods.restoring import RestoringMethod, Rule, judged, restored_well, squared_error
from afire.methods.twins import HEALTH_FILMS
from afire.nn import distributed
from afire.nn.conv import shrunk, standardised
from afire.nn.vit import at_least_float32, check_films, full_precision

_WORDS, _CHOICE = 0x70AD, 0x70AE  # keep these draws apart from others of the same key
_SMALL = 16  # side of the small versions by which films are compared
_DIRECTIONS = 32
NONE = -1
"""The word of a film that is in none, and the film of a word that has fewer than its number."""


class TransVWSettings(CorruptSettings):
    """Settings of TransVW itself."""

    words: int = Field(44, ge=2, description="number of words, which are the pseudo-classes")
    films: int = Field(200, ge=2, description="films of each word: those that resemble its reference film most")
    word_side: float = Field(0.5, gt=0, le=1, description="side of a word as a share of the film's")
    classification: float = Field(0.01, ge=0, description="weight of naming the words")
    restoration: float = Field(1.0, gt=0, description="weight of restoring them")


def word_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Cross-entropy of ``logits`` (B, W) over the films of all processes that have a word (B,); 0 where none has.

    W / N times the sum of this process, see :mod:`afire.nn.distributed`.
    """
    with full_precision(logits):
        named = words != NONE
        losses = F.cross_entropy(at_least_float32(logits), words.clamp_min(0), reduction="none")
        number = distributed.total(named.sum()).clamp_min(1)
        return (losses * named).sum() * (distributed.world_size() / number)


def directions(small_NF: Tensor, count: int = _DIRECTIONS) -> Tensor:
    """Films (N, F) as their coordinates along the ``count`` directions in which they vary most."""
    centred = small_NF.double() - small_NF.double().mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    leading: Tensor = centred @ vectors[:, -min(count, vectors.shape[1]) :]
    return leading


def nearest_films(codes_ND: Tensor, references: Tensor, count: int) -> Tensor:
    """For each reference (W,), an index, the ``count`` films nearest to it, itself first; NONE fills up."""
    near = torch.cdist(codes_ND[references], codes_ND, compute_mode="donot_use_mm_for_euclid_dist")
    near[torch.arange(len(references)), references] = -1.0  # before copies of itself
    order = near.argsort(dim=1, stable=True)[:, :count]
    return F.pad(order, (0, count - order.shape[1]), value=NONE)


def word_boxes(places_B2: Tensor, side: float) -> Tensor:
    """Boxes (B, 4) of parts ``side`` as wide as the film; places are shares of what is left beside them."""
    return torch.cat([places_B2 * (1 - side), torch.full_like(places_B2, side)], dim=1)


class TransVW(RestoringMethod):
    """An encoder, a decoder, and a head that names words."""

    settings_type = TransVWSettings
    prepares = True
    members: Tensor  # (W, K) rows of the manifest
    places: Tensor  # (W, 2) from the left and from the top, as shares of what is left beside the word

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, TransVWSettings)
        self.settings = self.options
        width = config.encoder.width
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, self.settings.words))
        self.initialise()
        self.register_buffer("members", torch.full((self.settings.words, self.settings.films), NONE))
        draws = unit(keyed(config.seed ^ _WORDS, 0, range(self.settings.words), 1, 1))[:, 0, 0]
        self.register_buffer("places", draws[:, 1:3].contiguous())

    @torch.no_grad()
    def prepare(self, epoch: int, films: AllFilms) -> None:
        """Find the words, before the first epoch."""
        if epoch > 0:
            return
        batches = [(standardised(shrunk(images[:, :1], _SMALL)).flatten(1).cpu(), rows) for images, rows in films()]
        rows_N = torch.cat([rows for _, rows in batches])
        codes = directions(torch.cat([small for small, _ in batches]))
        draws = keyed(self.config.seed ^ _WORDS, 0, range(self.settings.words), 1, 1)[:, 0, 0, 0]
        nearest = nearest_films(codes, below(draws, len(rows_N)), self.settings.films)
        self.members.copy_(torch.where(nearest == NONE, NONE, rows_N[nearest.clamp_min(0)]))

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """A part of each film that is a word, as it is and spoilt, and which word; whole ``images`` for the health."""
        rows = keys.rows.to(self.members.device)
        has_BW = (self.members[None] == rows[:, None, None]).any(dim=-1)
        draws = keyed(keys.seed ^ _CHOICE, keys.epoch, keys.rows, 1, 1)[:, 0, 0].to(self.members.device)
        rank = below(draws[:, 0], has_BW.sum(dim=1))
        chosen = ((has_BW.cumsum(dim=1) == rank[:, None] + 1) & has_BW).float().argmax(dim=1)
        word = torch.where(has_BW.any(dim=1), chosen, NONE)
        place = torch.where((word == NONE)[:, None], unit(draws[:, 1:3]), self.places[word.clamp_min(0)])
        parts = cut(images, word_boxes(place, self.settings.word_side)[:, None], images.shape[-1])
        spoilt = corrupted(parts, seed=keys.seed, epoch=keys.epoch, rows=keys.rows, settings=self.settings)
        return {
            "images": images,
            "parts": parts,
            "spoilt": spoilt.images,
            "painted": spoilt.painted,
            "word": word,
            **self.depth(keys, images.device),
        }

    def forward(self, views: Views) -> Outputs:
        """Views ``parts`` and ``spoilt`` (B, C, S, S) in [0, 1], ``word`` (B,)."""
        check_films(views["parts"], self.config.image.channels, "images", values=self.config.run.check_images)
        tokens = self.encoder(self.normalise(views["spoilt"]), views.get("depth"))
        return {
            "drawn": self.drawn(tokens),
            "target": self.target(views["parts"]),
            "logits": self.head(tokens[:, 1:].mean(dim=1)),
            "word": views["word"],
        }

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Naming and restoring."""
        named = distributed.with_global_value(word_loss(outputs["logits"], outputs["word"]))
        restored = distributed.with_global_value(squared_error(outputs["drawn"], outputs["target"]))
        total = self.settings.classification * named + self.settings.restoration * restored
        return Losses({"classification": named, "restoration": restored}, total)

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """Beside the shortcuts of restoring: words that cannot be told apart, and films that are in none."""
        some = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        outputs = self(some)
        well = restored_well(outputs["drawn"], self.target(some["spoilt"]), outputs["target"])
        named = some["word"] != NONE
        right = (outputs["logits"].argmax(dim=1) == some["word"]) & named
        accuracy, share = float(right.sum() / named.sum().clamp_min(1)), float(named.float().mean())
        rank, chance = self.rank_of(some["images"]), 1 / self.settings.words
        numbers = {"effective_rank": rank, **well._asdict(), "words_named": accuracy, "films_with_words": share}
        rules: list[Rule] = [
            ("amber", share < 0.5, f"only {share:.0%} of the films are in a word; more options.words or options.films"),
            ("amber", accuracy <= 2 * chance, f"{accuracy:.0%} of the words are named, and chance names {chance:.0%}"),
        ]
        shown = (
            f"rank {rank:.0f}, {accuracy:.0%} of the words named, "
            f"{well.explained:.0%} of what tells them apart restored, {share:.0%} of the films have words"
        )
        good = "words are told apart and restored"
        return judged({**numbers, **losses}, [*rules, *well.rules()], good, shown)

    @torch.no_grad()
    def panels(self, views: Views, count: int) -> list[Panel]:
        """The film, its word, the word spoilt, restored, and the difference."""
        parts, spoilt = views["parts"][:count], views["spoilt"][:count]
        restored = self.picture(self.restore(spoilt), like=parts)
        return [
            Panel("film", views["images"][:count]),
            Panel("word", parts),
            Panel("spoilt", spoilt),
            Panel("restored", restored),
            Panel("word − restored", parts - restored, "difference"),
        ]
