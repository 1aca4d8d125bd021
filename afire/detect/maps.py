"""Patch maps: how far each position of a film is from normal, the scores read from them, and the detector they make.

:class:`Evidence` holds the networks' outputs for a batch of films, each network run at most once. A :class:`PatchMap`
turns it into one number for every position; normal films fill its buffers, among them its standard, by which a map is
read in sd of normal films whatever it was made from. A score of ``SCORES`` draws one number a film from a map, with a
fixed direction: larger = more abnormal.

:class:`MapDetector` is what `afire detect fit` makes unless another detector is asked for. It holds the adapted
networks of any method and a map for everything they can do: Gaussians of tokens; restoration where there is a decoder;
surprise where there are prototypes; lesions where there is a classifier of them; findings where phantoms taught them. A
film is scored by the maps that were chosen on drawn lesions. The heatmap is as fine as the finest map that there is.

Shapes: B films, N normal films, L positions, D width, P pixels of a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from afire.config import Config
from afire.detect.base import AnomalyDetector, FitTask, Look, NormalFilms, Subsets
from afire.detect.choose import unchosen
from afire.detect.fit import adapted, for_detection
from afire.detect.normals import Fitted, Moments, Standard
from afire.errors import UserError
from afire.methods import Method, make_method
from afire.methods.afire import AFiRe, Network
from afire.methods.equations import anomaly_score
from afire.methods.equations import surprise as surprise_of
from afire.methods.phantom import PhantomTaught
from afire.nn.vit import Grid
from afire.tasks.settings import DetectConfig, DetectorConfig
from afire.weights import pick_device

PEAK_SHARE = 0.1  # of the positions: what `peak` averages
HIDDEN_SHARE = 0.25  # of the positions: what the second pass hides

_SURPRISED = 1024  # films that settle what is surprising: one more pass over all would cost a third of the fit

Maps = dict[str, Tensor]


def settle(model: Method) -> Method:
    """The model as it is after training: in evaluation mode, AFiRe's teacher at its last temperature."""
    if isinstance(model, AFiRe):
        model.teacher_temperature = model.config.losses.teacher_temperature
    return model.eval().requires_grad_(False)


class Evidence:
    """A model's outputs for films (B, C, S, S) in [0, 1]. A network runs when its output is needed, and once.

    ``surprising`` is the standard of the student's surprise, by which the second pass chooses what to hide. Only
    outputs that the model has may be read: :func:`possible_maps` lists its maps.
    """

    def __init__(self, model: Method, images: Tensor, surprising: Standard | None = None) -> None:
        self._model, self._images, self._surprising = model, images, surprising

    @cached_property
    def tokens(self) -> Tensor:
        """(B, L, D) of the network that is exported: of AFiRe the teacher."""
        return self._model.encode(self._images)

    @cached_property
    def student_tokens(self) -> Tensor:
        """(B, L, D)."""
        return self._afire.encode(self._images, "student")

    @cached_property
    def surprise(self) -> Tensor:
        """(B, L): H(q, c_j) of the teacher's tokens."""
        return self._surprise(self.tokens, "teacher")

    @cached_property
    def student_surprise(self) -> Tensor:
        """(B, L)."""
        return self._surprise(self.student_tokens, "student")

    @cached_property
    def lesion(self) -> Tensor:
        """(B, G * G): logits of the lesion classifier, of cells as fine as it tells apart."""
        return self._afire.lesion_cells(self.student_tokens, self._afire.grid).flatten(1)

    @cached_property
    def finding(self) -> Tensor:
        """(B, L): logits of any finding, as phantoms taught them."""
        assert isinstance(self._model, PhantomTaught)
        return self._model.finding_logits(self.tokens, self._model.grid)

    @cached_property
    def patches(self) -> Tensor:
        """(B, L, P): the films themselves, in the decoder's normalised pixels."""
        return self._model.patches(self._images)

    @cached_property
    def restored(self) -> Tensor:
        """(B, L, P), with no token hidden."""
        return self._decode(None)

    @cached_property
    def hidden(self) -> Tensor:
        """(B, L), bool: the tokens that the second pass hides."""
        assert self._surprising is not None
        return suspicious(self._surprising(self.student_surprise))

    @cached_property
    def behind(self) -> Tensor:
        """(B, L, P) as the decoder draws it with the ``hidden`` tokens replaced by z_mask."""
        return self._decode(self.hidden)

    def _decode(self, hidden_BL: Tensor | None) -> Tensor:
        if not isinstance(self._model, AFiRe):
            return self._model.restore(self._images, hidden_BL)
        assert self._model.decoder is not None
        patches: Tensor = self._model.decoder(self.student_tokens, hidden_BL)  # the student has run already
        return patches

    def _surprise(self, tokens: Tensor, network: Network) -> Tensor:
        return surprise_of(self._afire.assign_tokens(tokens, network), self._afire.prototypes, self._place)

    @cached_property
    def _place(self) -> Tensor | None:
        """(B, L): the place of each token, where prototypes are not those of positions."""
        return self._afire.places(self._images)

    @property
    def _afire(self) -> AFiRe:
        assert isinstance(self._model, AFiRe)
        return self._model


def suspicious(surprise_BL: Tensor) -> Tensor:
    """The positions to hide, bool (B, L): the most surprising quarter of each film.

    A fixed share and not a threshold, so that films are restored from equally many tokens and their errors compare.
    """
    count = max(1, round(HIDDEN_SHARE * surprise_BL.shape[1]))
    hidden = torch.zeros_like(surprise_BL, dtype=torch.bool)
    return hidden.scatter_(1, surprise_BL.topk(count, dim=1).indices, True)


Pass = Callable[[str], Iterable[Evidence]]
"""One pass over normal films; its argument is the description shown with the progress."""


class PatchMap(Fitted, ABC):
    """Evidence -> one number for every position (B, L), larger = more abnormal, and its standard on normal films.

    A map may be finer than the tokens, the same along both sides.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.standard = Standard()

    @abstractmethod
    def forward(self, evidence: Evidence) -> Tensor: ...

    def learn(self, normals: Pass) -> None:
        """What :meth:`forward` needs from normal films; nothing, for most maps."""

    def fit(self, normals: Pass) -> None:
        """Fill the buffers from normal films: what the map needs, and its standard."""
        fit_maps([self], normals)


@torch.no_grad()
def fit_maps(maps: Sequence[PatchMap], normals: Pass, description: str = "maps of normal films") -> None:
    """Fit maps together: their standards share one pass over the films."""
    for patch_map in maps:
        patch_map.learn(normals)
    batches: list[list[Tensor]] = [[] for _ in maps]
    for evidence in normals(description):
        for values, patch_map in zip(batches, maps, strict=True):
            values.append(patch_map(evidence))
    for values, patch_map in zip(batches, maps, strict=True):
        patch_map.standard.fit(torch.cat(values))


class Restoration(PatchMap):
    """Squared restoration error of each patch."""

    name = "restoration"

    def forward(self, evidence: Evidence) -> Tensor:
        """d_j = |y_j - x_j|^2 of every position, summed over its pixels."""
        return (evidence.restored - evidence.patches).square().sum(dim=-1)


class Surprise(PatchMap):
    """Cross-entropy between a token's clusters and the prototype of its place, by the teacher."""

    name = "surprise"

    def forward(self, evidence: Evidence) -> Tensor:
        return evidence.surprise


class StudentSurprise(PatchMap):
    """The same by the student, which learnt to tell lesions from their place's prototype."""

    name = "student_surprise"

    def forward(self, evidence: Evidence) -> Tensor:
        return evidence.student_surprise


class TokenGaussian(PatchMap):
    """Mahalanobis distance of a token from the normal tokens of its place.

    ``whiten`` maps a centred token to one of unit covariance, so a distance is a length.
    """

    name = "gaussian"
    mean: Tensor  # (L, D)
    whiten: Tensor  # (L, D, D)
    shrinkage: Tensor  # (L,)

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "whiten", "shrinkage"):
            self.register_buffer(name, torch.zeros(0))

    def learn(self, normals: Pass) -> None:
        moments = Moments()
        for evidence in normals("token Gaussians"):
            moments.add(evidence.tokens)
        self.mean, self.whiten, self.shrinkage = moments.gaussian()

    def forward(self, evidence: Evidence) -> Tensor:
        """Divided by the root of D: about 1 for normals."""
        centred_LBD = (evidence.tokens.float() - self.mean).transpose(0, 1)
        whitened = torch.bmm(centred_LBD, self.whiten)
        return (whitened.square().mean(dim=-1)).sqrt().T


class TwoPass(PatchMap):
    """Restoration error of the tokens that the prototypes find abnormal, hidden behind z_mask."""

    name = "two_pass"

    def forward(self, evidence: Evidence) -> Tensor:
        """Mean squared error between the film and what the decoder draws where tokens are hidden, 0 elsewhere."""
        return (evidence.behind - evidence.patches).square().mean(dim=-1) * evidence.hidden


class Lesion(PatchMap):
    """Logit of the lesion classifier, of a value for every cell of its own."""

    name = "lesion"

    def forward(self, evidence: Evidence) -> Tensor:
        return evidence.lesion


class Finding(PatchMap):
    """Logit of any finding, from the head that phantoms taught."""

    name = "finding"

    def forward(self, evidence: Evidence) -> Tensor:
        return evidence.finding


def possible_maps(model: Method) -> Iterator[PatchMap]:
    """The maps that a model has the networks for, not fitted."""
    prototypes = isinstance(model, AFiRe) and model.bank is not None and model.has_clusters
    if model.restores:
        yield Restoration()
    if prototypes:
        yield Surprise()
        yield StudentSurprise()
    yield TokenGaussian()
    if prototypes and model.restores:
        yield TwoPass()
    if tells_lesions(model):
        yield Lesion()
    if isinstance(model, PhantomTaught):
        yield Finding()


def finest_grid(model: Method) -> Grid:
    """Rows and columns of the finest of these maps: tokens, unless the lesion classifier tells parts of them apart."""
    rows, columns = model.grid
    finer = model.config.losses.lesion_finer if tells_lesions(model) else 1
    return rows * finer, columns * finer


def tells_lesions(model: Method) -> bool:
    """Whether it has a lesion classifier whose map may be read."""
    return isinstance(model, AFiRe) and model.lesion_classifier is not None


def mean(map_BL: Tensor) -> Tensor:
    return map_BL.mean(dim=1)


def peak(map_BL: Tensor) -> Tensor:
    """Mean of the highest tenth: a lesion is small, and the rest of the film would dilute it."""
    count = max(1, round(PEAK_SHARE * map_BL.shape[1]))
    return map_BL.topk(count, dim=1).values.mean(dim=1)


def badly_restored(errors_BL: Tensor) -> Tensor:
    """-log of the paper's anomaly score, which is larger for films that are restored *well*."""
    return -anomaly_score(errors_BL)


@dataclass(frozen=True)
class Score:
    """A score: the map it reads, how a film's number comes from it, and whether it reads the map in sd of normals."""

    map: str
    pool: Callable[[Tensor], Tensor]
    meaning: str
    standard: bool = True


SCORES: dict[str, Score] = {
    "restoration": Score("restoration", badly_restored, "the paper's restoration score in log space", standard=False),
    "paper": Score(
        "restoration", anomaly_score, "the reciprocal as the paper prints it: larger when restored well", standard=False
    ),
    "surprise": Score("surprise", mean, "prototype surprise of the teacher, mean over the film"),
    "surprise_peak": Score("surprise", peak, "prototype surprise of the teacher, highest tenth"),
    "student_surprise": Score("student_surprise", mean, "prototype surprise of the student, mean over the film"),
    "student_surprise_peak": Score("student_surprise", peak, "prototype surprise of the student, highest tenth"),
    "gaussian": Score("gaussian", mean, "distance of tokens from their place's Gaussian, mean over the film"),
    "gaussian_peak": Score("gaussian", peak, "distance of tokens from their place's Gaussian, highest tenth"),
    "two_pass": Score("two_pass", peak, "restoration of what the prototypes find abnormal, highest tenth"),
    # Not standardised: a logit is a probability of its own, and sd would lift places where all normals are sure.
    "lesion": Score("lesion", peak, "token lesion classifier, highest tenth", standard=False),
    "finding": Score("finding", peak, "finding as phantoms taught it, highest tenth", standard=False),
}


def film_scores(raw: Mapping[str, Tensor], standard: Mapping[str, Tensor], names: Sequence[str]) -> Maps:
    """The named scores (B,) in double precision, from maps (B, L) as they are and in sd of normals."""
    scores: Maps = {}
    for name in names:
        score = SCORES[name]
        if score.map not in raw:
            raise UserError(f"score {name} needs the map {score.map}, which these weights have no part for.")
        scores[name] = score.pool((standard if score.standard else raw)[score.map]).double()
    return scores


class MapDetector(AnomalyDetector):
    """Networks, and a map for all that they can do."""

    method = "afire"
    Settings = DetectConfig
    meanings: ClassVar[Mapping[str, str]] = {name: score.meaning for name, score in SCORES.items()}
    model: Method

    def __init__(self, model: Method, settings: DetectorConfig | None = None) -> None:
        super().__init__(settle(model), model.config, finest_grid(model), settings or DetectConfig())
        self.maps = nn.ModuleDict({patch_map.name: patch_map for patch_map in possible_maps(model)})
        self.choice = unchosen(TokenGaussian.name)  # every model has it

    @classmethod
    def build(cls, config: Config, settings: DetectorConfig) -> Self:
        return cls(make_method(config), settings)

    @classmethod
    def length(cls, pretrained: bool) -> str:
        return "adapt.epochs" if pretrained else "training.epochs"

    @classmethod
    def training_flops(cls, config: Config, settings: DetectorConfig) -> float:
        assert isinstance(settings, DetectConfig)
        return make_method(for_detection(config, settings)).flops()

    @classmethod
    def start(cls, task: FitTask, subsets: Subsets) -> Self:
        device = pick_device(task.device)
        # The Gaussians need double precision, which Apple's GPUs do not have.
        return cls(adapted(task, subsets), task.settings).to("cpu" if device.type == "mps" else device)

    def fit(self, normals: NormalFilms) -> None:
        """The student's surprise first: its standard decides what the second pass hides."""
        maps = self._maps
        student_maps = [maps.pop(StudentSurprise.name)] if StudentSurprise.name in maps else []
        if student_maps:
            fit_maps(
                student_maps, lambda description: self._evidence(normals, description, _SURPRISED), "what is surprising"
            )
        fit_maps(list(maps.values()), lambda description: self._evidence(normals, description))

    def _evidence(self, normals: NormalFilms, description: str, limit: int | None = None) -> Iterable[Evidence]:
        for images in normals.batches(description, limit):
            yield Evidence(self.model, self.prepared(images), self.surprising)

    def look(self, images: Tensor, names: Sequence[str] | None, restore: bool) -> Look:
        evidence, maps = Evidence(self.model, images, self.surprising), self._maps
        score_names = [name for name, score in SCORES.items() if score.map in maps] if names is None else names
        raw = {name: maps[name](evidence) for name in dict.fromkeys(SCORES[n].map for n in score_names) if name in maps}
        standard = {name: maps[name].standard(values) for name, values in raw.items()}
        map_names = [SCORES[name].map for name in self.choice.names]
        if self.device.type == "mps":  # which has no double precision
            raw, standard = ({name: values.cpu() for name, values in maps.items()} for maps in (raw, standard))
        return Look(
            scores=film_scores(raw, standard, score_names),
            heat=torch.stack([self._on_cells(standard[name]) for name in map_names]).mean(dim=0),
            restored=self._restored(images, evidence) if restore else None,
        )

    def _on_cells(self, map_BN: Tensor) -> Tensor:
        """A map of tokens, or of cells as it is, for every cell of the heatmap."""
        (rows, columns), finer = self.model.grid, self.grid[0] // self.model.grid[0]
        if map_BN.shape[1] != rows * columns or finer == 1:
            return map_BN
        tokens = map_BN.view(-1, rows, columns)
        return tokens.repeat_interleave(finer, dim=1).repeat_interleave(finer, dim=2).flatten(1)

    def _restored(self, images: Tensor, evidence: Evidence) -> Tensor | None:
        """The film as the decoder draws it with the most suspicious quarter of its tokens hidden."""
        if not self.model.restores:
            return None
        if self.surprising is None:
            return self.model.picture(evidence.restored, images)
        patches = torch.where(evidence.hidden[:, :, None], evidence.behind, evidence.patches)
        return self.model.picture(patches, images)

    @property
    def _maps(self) -> dict[str, PatchMap]:
        return {name: cast(PatchMap, patch_map) for name, patch_map in self.maps.items()}

    @property
    def surprising(self) -> Standard | None:
        """By which the second pass chooses what to hide; None where the model has no prototypes."""
        return self._maps[StudentSurprise.name].standard if StudentSurprise.name in self.maps else None
