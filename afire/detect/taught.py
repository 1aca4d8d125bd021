"""A detector taught by drawn chests, on which fourteen findings and the anatomy are known.

A small residual network looks at phantoms (:mod:`afire.data.phantom`), whose findings and anatomy are known to the
pixel, and learns to predict which parts of the anatomy and which findings lie at every place, and which findings the
film has. Beside each phantom it sees a normal film of those that fit it, on which it must find nothing; where
those are drawn ones too, no patient's film takes part. Some of the normal films get patches of other films, blended in
without a seam: what a finding may look like on films of this scanner.

Findings that are fine texture and nothing else (fibrosis, miliary knots, emphysema, thickened pleura) are not taught:
the texture of a scanner that was never drawn would be taken for them. For the same reason every film is mottled. What
is kept is the running mean of the weights, which fits no single phantom.

With ``start`` it begins from the weights of another detector of this kind, by default the one that comes with afire.

Shapes: B normal films and as many phantoms, s x s pixels as the network sees them, g x g places of 8 px, F kinds of
findings, A parts of the anatomy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import Self

from afire.config import Config, Section
from afire.data.phantom import ANATOMY, DISEASES, PhantomBank, RenewedBank
from afire.detect.base import MODEL, FitTask, Subsets, detector_folder, read_description
from afire.detect.fit import train_networks
from afire.detect.learned import (
    Examined,
    LearnedConfig,
    LearnedDetector,
    TrainConfig,
    by_place,
    check_halvings,
)
from afire.detect.maps import peak
from afire.errors import UserError
from afire.lesions.augment import augmented
from afire.lesions.pastes import Donors, change_labels, naturally_pasted
from afire.lesions.places import keyed, unit
from afire.methods.base import ALL, Keys, Learner, Losses, Outputs, Progress, ReadFilms, Views
from afire.methods.dense import dense_loss
from afire.methods.donors import read_donors
from afire.methods.phantom import PhantomAugment
from afire.nn import distributed
from afire.nn.conv import DenseHead, initialise_conv, shrunk, standardised
from afire.nn.memory import follow, twin
from afire.nn.residual import ResidualStages
from afire.nn.vit import Grid, at_least_float32, full_precision
from afire.training.pretraining import Start
from afire.weights import pick_device
from afire.weights.files import read_tensors
from afire.weights.hub import BUILTIN

KINDS = len(DISEASES)
MAPS = 1 + KINDS + len(ANATOMY)  # any finding, each kind, each part of the anatomy
CELL, _HALVINGS = 8, 5
_TEACHING = 0x5EE10000
"""Added to the seed: no phantom that teaches is one of `afire data phantom`, whatever small number was its seed."""
_CHOICE = 0xFA47  # keeps the draw of what a film is changed by apart from other draws of the same key
_RARE = -2.0  # bias at the start: most places hold little
_FAINT = 0.1
DRAWN = "phantom-"  # how ids of drawn patients begin
DRAWN_NORMALS = (
    "its threshold comes from drawn films: on films of patients more normal ones are flagged than it says, until "
    "`afire detect calibrate` has set it by local normal films"
)
_NETWORK, _AVERAGE = "network.", "average."


FINE = ("Fibrosis", "Miliary", "Pleural_Thickening", "Emphysema")


class FinderAugment(PhantomAugment):
    """What is done to every film, so that no scanner's style gives anything away."""

    mottle: float = Field(
        0.08, ge=0, le=1, description="largest deviation of clouds from coarse to fine, each on half of the films"
    )


class FinderSettings(Section):
    """The network, what it is taught with, and what it starts from."""

    start: str = Field(
        BUILTIN, description="detector of this kind whose weights it begins with: builtin, a folder, or nothing"
    )
    side: int = Field(128, ge=64, description="films larger than this are shrunk to it, in pixels")
    width: int = Field(32, ge=4, description="channels of the stem; each of the three stages doubles them")
    blocks: int = Field(2, ge=1, description="residual blocks of the first two stages")
    kinds: list[str] = Field(
        [name for name in DISEASES if name not in FINE], description="findings that the phantoms have"
    )
    films: int = Field(3000, ge=16, description="phantoms that are drawn when the training begins")
    normal_share: float = Field(0.4, ge=0, lt=1, description="share of them without any finding")
    renewed: float = Field(0.0, ge=0, le=1, description="share of them that is drawn anew before every epoch")
    faintest: float = Field(0.25, ge=0, lt=1, description="phantoms whose findings are all fainter are not shown")
    pasted: float = Field(0.5, ge=0, le=1, description="share of the normal films that get patches of others")
    donors: int = Field(128, ge=0, description="normal films that patches are cut from; 0 = each film is its own")
    places: float = Field(1.0, ge=0, description="weight of where there is any finding")
    findings: float = Field(2.0, ge=0, description="weight of where each kind of finding is")
    anatomy: float = Field(0.3, ge=0, description="weight of where the anatomy is")
    film: float = Field(0.15, ge=0, description="weight of which findings a film has")
    positive: float = Field(3.0, gt=0, description="how many times a place counts that a finding covers")
    average: float = Field(0.998, ge=0, lt=1, description="memory of the running mean of weights; 0 = the last ones")
    augment: FinderAugment = Field(default_factory=FinderAugment)

    @field_validator("kinds")
    @classmethod
    def _are_findings(cls, kinds: list[str]) -> list[str]:
        unknown = [kind for kind in kinds if kind not in DISEASES]
        if unknown or not kinds:
            problem = f"{unknown[0]!r} is no finding of the phantom" if unknown else "no kind of finding is left"
            raise ValueError(f"{problem}; findings are {', '.join(DISEASES)}")
        return kinds


class FinderConfig(LearnedConfig):
    """All settings of fitting the detector `taught`."""

    train: TrainConfig = Field(
        TrainConfig(epochs=12, batch_size=32, learning_rate=5e-4, learning_rate_end=1e-6, weight_decay=0.02),
        description="from the built-in weights; from nothing it takes about 100,000 films, at four times the rate",
    )
    taught: FinderSettings = Field(default_factory=FinderSettings)


class FinderNetwork(ResidualStages):
    """Residual stages, a head for every place, and one for the film."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__(width, blocks)
        self.head = DenseHead(MAPS, self.stage_widths)
        self.film = nn.Linear(2 * self.stage_widths[-1], 1 + KINDS)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised films -> logits of every place (N, MAPS, g, g) and of the film (N, 1 + F)."""
        maps = self.maps(images)
        pooled = torch.cat([maps[-1].mean(dim=(2, 3)), maps[-1].amax(dim=(2, 3))], dim=1)
        return self.head(maps), self.film(pooled)

    def initialise(self, generator: torch.Generator) -> None:
        """It starts by predicting for every place what most places are."""
        initialise_conv(self, generator)
        for layer in (self.head.last, self.film):
            layer.weight.data.mul_(_FAINT)
        assert self.head.last.bias is not None
        self.head.last.bias.data.fill_(_RARE)


class Finder(Learner):
    """The network, the running mean of its weights, and what it is shown."""

    settings_type = FinderSettings
    options: FinderSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.side = check_halvings(config, self.options.side, _HALVINGS, "taught")
        self.network = FinderNetwork(self.options.width, self.options.blocks)
        self.network.initialise(torch.Generator().manual_seed(config.seed))
        self.average = twin(self.network) if self.options.average else None
        # No buffers: pixels of patients must not be saved with the weights.
        self.donors: Donors | None = None
        self._bank = RenewedBank.holding(PhantomBank.blank(1, self.side, CELL), CELL)
        self._rows = torch.zeros(1, dtype=torch.int64)

    def load_network(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with the weights of another network."""
        for network in (self.network, self.average):
            if network is not None:
                network.load_state_dict(dict(tensors))

    def schedule(self, progress: Progress) -> Mapping[str, float]:
        """In the first steps the mean reaches back less far, or it would remember how it was initialised."""
        self._memory = min(self.options.average, (progress.step + 1) / (progress.step + 10))
        return {}

    def after_step(self, losses: Losses) -> None:
        if self.average is not None:
            follow(self.average.parameters(), self.network.parameters(), self._memory)

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        """Draw the phantoms, and look up the films that patches are cut from."""
        options = self.options
        self._bank = RenewedBank(
            _TEACHING + self.config.seed,
            options.films,
            self.side,
            CELL,
            normal_share=options.normal_share,
            among=options.kinds,
            renewed=options.renewed,
            epochs=self.config.training.epochs,
        )
        self._rows = rows
        if not options.renewed:  # one that moves on is drawn by the first views, which know the epoch
            self._bank.at(0)
        donors = options.donors if options.pasted else 0
        self.donors = read_donors(rows, donors, self.config.seed, read, self.side)

    def end_run(self) -> None:
        self._bank.close()

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Normal films and phantoms, one of each for a row, with what is known about them.

        ``known`` (2B, 1) says whether the anatomy is: it is not on normal films, nor is the kind of what was pasted.
        """
        films, changed = self._normal(shrunk(images[:, :1], self.side), keys)
        phantoms, maps, labels = self._phantoms(keys, images.device)
        blank = torch.zeros_like(maps)
        blank[:, :1] = changed
        settings, seed, epoch, rows = self.options.augment, keys.seed, keys.epoch, keys.rows
        films, blank_too = augmented(films, blank, seed=seed, epoch=epoch, rows=rows, settings=settings)
        phantoms, maps_too = augmented(phantoms, maps, seed=seed ^ _TEACHING, epoch=epoch, rows=rows, settings=settings)
        assert blank_too is not None and maps_too is not None
        any_pasted = (changed.flatten(1).amax(dim=1, keepdim=True) > 0.5).float()
        pasted_labels = F.pad(any_pasted, (0, KINDS))
        known = torch.cat([torch.zeros(len(films), 1), torch.ones(len(phantoms), 1)]).to(images.device)
        return {
            "images": standardised(torch.cat([films, phantoms])),
            "maps": torch.cat([blank_too, maps_too]),
            "labels": torch.cat([pasted_labels, labels]),
            "known": known,
        }

    def _normal(self, films_B1ss: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Normal films, some with patches of others, and how much each place has changed (B, 1, g, g)."""
        chance = unit(keyed(keys.seed ^ _CHOICE, keys.epoch, keys.rows, 1, 1)[:, 0, 0, 0])
        indices = (chance < self.options.pasted).nonzero()[:, 0]
        places = self.side // CELL
        changed = films_B1ss.new_zeros(len(films_B1ss), 1, places, places)
        if not len(indices):
            return films_B1ss, changed
        pasted = indices.to(films_B1ss.device)
        films, originals = films_B1ss.clone(), films_B1ss[pasted]
        films[pasted] = naturally_pasted(
            originals, self.donors, seed=keys.seed, epoch=keys.epoch, rows=keys.rows[indices], blend="either"
        )
        changed[pasted] = F.avg_pool2d(change_labels(originals, films[pasted], "logistic"), CELL)
        return films, changed

    def _phantoms(self, keys: Keys, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The phantoms shown with the rows of an epoch: epoch after epoch they go through the bank in turn."""
        bank = self._bank.at(keys.epoch)
        shown = plain(bank, self.options.faintest)
        if not len(shown):
            raise UserError(
                f"no phantom is left to show: all findings are fainter than taught.faintest={self.options.faintest:g}; "
                "lower it, or raise taught.films or taught.normal_share."
            )
        place = torch.searchsorted(self._rows, keys.rows).clamp(max=len(self._rows) - 1).numpy()
        numbers = shown[(place + keys.epoch * len(self._rows)) % len(shown)]
        channels = [bank.any_finding[numbers][:, None], bank.findings[numbers], bank.anatomy[numbers]]
        maps = torch.cat([torch.from_numpy(channel).to(device) for channel in channels], dim=1).float() / 255
        labels = torch.from_numpy(bank.labels[numbers]).to(device)
        labels = torch.cat([labels.amax(dim=1, keepdim=True), labels], dim=1)
        return torch.from_numpy(bank.images[numbers]).to(device).float() / 255, maps, labels

    def forward(self, views: Views) -> Outputs:
        places, film = self.network(views["images"])
        return {"places": places, "film": film, **{name: views[name] for name in ("maps", "labels", "known")}}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """Any finding everywhere; kinds and anatomy where they are known; which findings the film has."""
        options, logits, truth, known = self.options, outputs["places"], outputs["maps"], outputs["known"]
        terms = torch.stack(
            [
                dense_loss(logits[:, :1], truth[:, :1], positive=options.positive),
                known_loss(logits[:, 1 : 1 + KINDS], truth[:, 1 : 1 + KINDS], known, options.positive),
                known_loss(logits[:, 1 + KINDS :], truth[:, 1 + KINDS :], known),
                film_loss(outputs["film"], outputs["labels"], known),
            ]
        )
        terms = distributed.with_global_value(terms)
        factors = terms.new_tensor([options.places, options.findings, options.anatomy, options.film])
        losses = dict(zip(("places", "findings", "anatomy", "film"), terms.unbind(), strict=True))
        return Losses(losses, (factors * terms).sum())

    def place_logits(self, images: Tensor) -> Tensor:
        """Films (B, C, S, S) in [0, 1] -> logits of every place (B, MAPS, g, g)."""
        places: Tensor = self.network(standardised(shrunk(images[:, :1], self.side)))[0]
        return places


def plain(bank: PhantomBank, faintest: float) -> NDArray[np.intp]:
    """Films of a bank that are normal, or have a finding that is no fainter."""
    return np.flatnonzero(bank.normal | (bank.severity.max(axis=1) >= faintest))


def known_loss(logits: Tensor, target: Tensor, known: Tensor, positive: float = 1.0) -> Tensor:
    """:func:`dense_loss` over the films that are ``known`` (N, 1); half of them are, whatever the batch."""
    with full_precision(logits):
        logits = at_least_float32(logits)
        weight = logits.new_tensor(positive)
        cost = F.binary_cross_entropy_with_logits(logits, target.to(logits), pos_weight=weight, reduction="none")
        return (cost.flatten(1).mean(dim=1) * known[:, 0]).sum() / known.sum().clamp_min(1)


def film_loss(logits: Tensor, labels: Tensor, known: Tensor) -> Tensor:
    """Cross-entropy of whether a film (N, 1 + F) has any finding, and of each kind where the kinds are known."""
    with full_precision(logits):
        logits = at_least_float32(logits)
        cost = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        kinds = (cost[:, 1:].mean(dim=1) * known[:, 0]).sum() / known.sum().clamp_min(1)
        return cost[:, 0].mean() + kinds


class Taught(LearnedDetector):
    """The network's findings at places as scores."""

    method = "taught"
    Settings = FinderConfig
    Networks = Finder
    published = "ours: 128 px, taught by drawn films"
    published_epochs = 12
    # The head of the film gives no score: on development films of three hospitals it separated less than the places.
    meanings: ClassVar[Mapping[str, str]] = {
        "places": "how sure the network is of a finding at its places, mean over the film",
        "peak": "how sure it is of a finding at its places, highest tenth",
    }
    model: Finder

    @classmethod
    def grid_of(cls, config: Config) -> Grid:
        """The places of the network."""
        side = min(config.image.size, int(config.options["side"])) // CELL
        return side, side

    @classmethod
    def remarks(cls, task: FitTask) -> Iterator[str]:
        if task.films.manifest.table["patient"].astype(str).str.startswith(DRAWN).all():
            yield DRAWN_NORMALS

    @classmethod
    def begins_with(cls, task: FitTask) -> str | None:
        assert isinstance(task.settings, FinderConfig)
        start = task.settings.taught.start
        return None if start == "nothing" else start

    @classmethod
    def first_weights(cls, task: FitTask) -> Start | None:
        name = cls.begins_with(task)
        if name is None:
            return None
        folder = detector_folder(name)
        if read_description(folder).get("method") != cls.method:
            raise UserError(f"{name} is no detector of the kind taught; set taught.start to one, or to nothing.")
        tensors = {key.removeprefix(_NETWORK): tensor for key, tensor in read_tensors(folder / MODEL).items()}

        def start(learner: Finder) -> None:
            state = learner.network.state_dict()
            if tensors.keys() != state.keys() or any(tensors[key].shape != state[key].shape for key in state):
                raise UserError(f"the network of {name} has another width; set taught.width as it was fitted with.")
            learner.load_network(tensors)

        return start

    @classmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        """As for any; of the two networks that training keeps, the detector holds one."""
        config = cls.config_of(task.config, task.settings, len(subsets.fit))
        trained = train_networks(task, subsets, config, cls.Networks, cls.first_weights(task))
        lean = trained.config.model_copy(update={"options": {**config.options, "average": 0.0}})
        detector = cls(lean, task.settings)
        prefix = _AVERAGE if config.options["average"] else _NETWORK
        detector.model.load_network(
            {key.removeprefix(prefix): tensor for key, tensor in trained.tensors.items() if key.startswith(prefix)}
        )
        return detector.to(pick_device(task.device))

    def examine(self, images: Tensor, restore: bool) -> Examined:
        sure = at_least_float32(self.model.place_logits(images)[:, :1])
        likely = torch.sigmoid(sure).flatten(1)
        scores = {"places": torch.log(likely.mean(dim=1).clamp_min(1e-6)), "peak": peak(sure.flatten(1))}
        return Examined(scores, by_place(sure, self.grid))
