"""The equations of AFiRe, one public function each, numbered as in the paper (AAAI-25) and readable beside it.

Eq. 1 :func:`follow`, tokens' probabilities :func:`token_log_probabilities` and :func:`sinkhorn`, Eq. 6
:func:`afire.lesions.token_labels`, Eq. 7 :func:`moved_prototypes`, Eq. 12 :func:`structure_loss`, Eqs. 14 to 16
:func:`category_loss`, Eq. 20 :func:`restoration_loss`. :class:`PrototypeBank` keeps what Eq. 7 moves. Where ours
differs from the print, docs/deviations.md says why.

Shapes: N tokens, B images of this process, G of all, L positions, K clusters, P pixels of a patch. ``abnormal`` (B, L)
is true where a lesion was added.

A token belongs to a place, which has a prototype. By default places are the positions themselves. With ``place``
(B, L), a number below the number of prototypes for each token, they are whatever that says: several tokens of a film
may share a place, and a place may have no token in a film.

H(q, c) = -sum_k q_k log c_k is a distance between distributions, and f(q, c) = exp(-H(q, c) / tau). Everything below
works with log f, which is a matrix product of q with log c. With several processes a mean is over the tokens of all
of them, written so that DDP's averaging of gradients gives exactly its gradient (see afire.nn.distributed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afire.nn import distributed
from afire.nn.memory import follow as follow
from afire.nn.vit import at_least_float32, full_precision

Similarity = Literal["corrected", "literal", "cosine"]

PROTOTYPE_FLOOR = 1e-6  # a prototype may be zero in a cluster; its logarithm may not
_NOTHING = -1e30  # the logarithm of an empty sum: finite, because -inf has no gradient
_CHUNK = 1 << 26  # pair scores held at a time, 256 MB


def token_log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log q of the student, "Token Probabilities Prediction": a softmax of logits (..., K) at its temperature."""
    return torch.log_softmax(logits / temperature, dim=-1)


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """q of the teacher: logits (N, K) -> probabilities (N, K), rows sum to one, clusters are used about equally.

    Scales the columns and rows of exp(logits / temperature) in turn, clusters first, over the tokens of all
    processes. The largest exponent of each column, then of each row, is taken off beforehand: Sinkhorn's first step
    undoes any factor of a column, and the factor of a row is remembered in ``row_scale``. Then every row holds a 1,
    every column a 1 in a row of scale 1, so no sum is zero and nothing overflows, whatever the logits; and the
    iterations are products with vectors instead of passes of exp and log over the whole matrix.
    """
    if iterations < 1:
        raise ValueError(f"Sinkhorn needs at least one iteration, not {iterations}")
    with full_precision(logits):
        exponents = at_least_float32(logits) / temperature
        exponents -= distributed.maximum(exponents.amax(dim=0))
        row_maximum = exponents.amax(dim=1, keepdim=True)
        kernel = exponents.sub_(row_maximum).exp_()
        row_scale = row_maximum.squeeze(1).exp_()
        share = len(logits) * distributed.world_size() / logits.shape[1]  # tokens for each cluster
        for _ in range(iterations):
            # Clamped: where a cluster is out of reach of all but a few tokens, its scale grows without end.
            column_scale = share / distributed.total(row_scale @ kernel).clamp_(1e-30, 1e30)
            row_scale = (kernel @ column_scale).reciprocal_()
        return kernel.mul_(column_scale).mul_(row_scale[:, None])


@torch.no_grad()
def moved_prototypes(
    prototypes: Tensor, mean: Tensor, momentum: float, first: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Eq. 7: C (L, K) after this step's ``mean`` (L, K) of the global batch; at the ``first`` step the mean itself.

    ``first`` () is a tensor, not a bool: reading it would make a GPU wait for its queue at every step. With places of
    their own, ``first`` (L,) says which of them had no token before, and ``tokens`` (L,) how many each has now for
    every film: one for every film moves a prototype as far as the equation says, none leaves it alone.
    """
    if tokens is None:
        share = torch.where(first, 1.0, 1.0 - momentum).to(prototypes)
        return torch.lerp(prototypes, mean.to(prototypes), share)
    share = torch.where(first & (tokens > 0), 1.0, 1.0 - momentum**tokens)[:, None].to(prototypes)
    return torch.lerp(prototypes, mean.to(prototypes), share)


class PrototypeBank(nn.Module):
    """One vector for each place: the running mean of the teacher's assignments there on normal films.

    Cluster probabilities by default, whose rows sum to one at all times; unit features in the feature ablation. With
    ``own_places``, which are not in every film, it remembers which of them have been ``met``; one that has not is
    uniform.
    """

    prototypes: Tensor
    steps: Tensor
    met: Tensor

    def __init__(self, positions: int, clusters: int, momentum: float, own_places: bool = False) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("prototypes", torch.full((positions, clusters), 1.0 / clusters))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        if own_places:
            self.register_buffer("met", torch.zeros(positions, dtype=torch.bool))

    def moved(self, mean: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The prototypes (L, K) that this step's ``mean`` (L, K) leads to; nothing is stored yet.

        ``tokens`` (L,) is how many tokens a place has for each film, where places are not the positions.
        """
        first = self.steps == 0 if tokens is None else ~self.met
        return moved_prototypes(self.prototypes, mean, self.momentum, first, tokens)

    @torch.no_grad()
    def store(self, prototypes: Tensor, tokens: Tensor | None = None) -> None:
        """Store what :meth:`moved` returned."""
        self.prototypes.copy_(prototypes)
        self.steps += 1
        if tokens is not None:
            self.met |= tokens > 0


@torch.no_grad()
def position_mean(values: Tensor) -> Tensor:
    """(B, L, K) -> (L, K): the mean over the images of all processes, which hold equally many."""
    return distributed.total(values.mean(dim=0)) / distributed.world_size()


@torch.no_grad()
def place_mean(values: Tensor, place: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """(B, L, K) of tokens at ``place`` (B, L) -> their mean at each place (places, K) over the images of all
    processes, which hold equally many; and how many tokens a place has for each of these images, (places,)."""
    flat = place.flatten()
    summed = values.new_zeros(places, values.shape[-1]).index_add_(0, flat, values.flatten(0, 1))
    number = torch.bincount(flat, minlength=places).to(values)
    together = distributed.total(torch.cat([summed, number[:, None]], dim=1))
    summed, number = together[:, :-1], together[:, -1]
    return summed / number.clamp_min(1)[:, None], number / (len(values) * distributed.world_size())


class Contrast:
    """Tokens against prototypes: what the structure and the category loss have in common is computed once.

    ``log_q`` (B, L, K) finite log-probabilities, as log-softmax gives; ``prototypes`` (L, K) probabilities, zeros
    allowed, that receive no gradient. With ``cosine`` both are features instead. ``place`` (B, L) gives each token
    its place, its position by default.
    """

    def __init__(
        self,
        log_q: Tensor,
        abnormal: Tensor,
        prototypes: Tensor,
        *,
        temperature: float,
        similarity: Similarity,
        place: Tensor | None = None,
    ) -> None:
        self.similarity, self.scale = similarity, _sign(similarity) / temperature
        self.abnormal_LB = abnormal.bool().T
        self.place_LB = place.T if place is not None else None
        with full_precision(log_q):
            self.keys_LBK = _by_position(log_q)
            self.queries_LBK = _queries(self.keys_LBK, similarity)
            self.prototype_keys_LK = _prototype_keys(prototypes, similarity, temperature)

    @cached_property
    def scores_LBL(self) -> Tensor:
        """``scores_LBL[j, i, l]`` = log f(q_ij, c_l)."""
        return self.queries_LBK @ self.prototype_keys_LK.T

    @cached_property
    def own_LB(self) -> Tensor:
        """log f(q_ij, c_j): from the scores where they are there, else without the L times larger matrix."""
        if "scores_LBL" in self.__dict__:
            if self.place_LB is not None:
                return self.scores_LBL.gather(2, self.place_LB[..., None]).squeeze(2)
            return self.scores_LBL.diagonal(dim1=0, dim2=2).T
        if self.place_LB is not None:
            return (self.queries_LBK * self.prototype_keys_LK[self.place_LB]).sum(dim=-1)
        return (self.queries_LBK @ self.prototype_keys_LK[..., None]).squeeze(-1)

    @cached_property
    def images(self) -> _Images:
        """The images of all processes, gathered in one exchange."""
        return _gather_images(self.keys_LBK, self.own_LB, self.abnormal_LB, self.place_LB)

    @property
    def places(self) -> int:
        """How many there are."""
        return len(self.prototype_keys_LK)

    @property
    def normal_tokens(self) -> Tensor:
        """How many normal tokens all processes have; no second exchange where the images were gathered."""
        if "images" in self.__dict__:
            return (~self.images.abnormal).sum()
        return distributed.total((~self.abnormal_LB).sum())


def structure_loss(contrast: Contrast) -> Tensor:
    """Eq. 12: each normal token (i, j) should know its own prototype c_j among all L: a cross-entropy over places.

    Zero without normal tokens.
    """
    with full_precision(contrast.keys_LBK):
        scores_LBL, abnormal_LB, own_LB = contrast.scores_LBL, contrast.abnormal_LB, contrast.place_LB
        L, B = abnormal_LB.shape
        if own_LB is None:
            own_LB = torch.arange(L, device=scores_LBL.device)[:, None].expand(L, B)
        target_LB, places = own_LB.masked_fill(abnormal_LB, -100), contrast.places
        summed = F.cross_entropy(
            scores_LBL.view(L * B, places), target_LB.flatten(), ignore_index=-100, reduction="sum"
        )
        return _global_mean(summed, contrast.normal_tokens)


def category_loss(contrast: Contrast, *, abnormal_consistency: bool = False) -> Tensor:
    """Eqs. 14 to 16: a normal token should be like the normal tokens at its position, unlike the abnormal ones there.

    With P_j and N_j the normal and abnormal images at position j, a normal token (i, j) has
    pos = sum over b in P_j of f(q_ij, q_bj) and neg = sum over b in N_j of f(q_ij, q_bj) + f(q_bj, c_j);
    its loss is -log pos / (pos + neg) = softplus(log neg - log pos). Zero without abnormal or without normal tokens.

    ``abnormal_consistency`` adds the same for abnormal tokens among themselves (an ablation; the paper finds it worse).
    """
    with full_precision(contrast.keys_LBK):
        images = contrast.images
        # Anchors are the images of this process, the others those of all.
        anchors = _Anchors(contrast.queries_LBK, ~contrast.abnormal_LB, contrast.abnormal_LB)
        others = _Others(images.keys, images.own, ~images.abnormal, images.abnormal)
        if contrast.place_LB is not None:
            assert images.place is not None
            anchors = _Anchors(*_by_place(anchors, contrast.place_LB, contrast.places))
            others = _Others(*_by_place(others, images.place, contrast.places))
        towards_prototype_L = _log_sum(others.own.masked_fill(~others.abnormal, _NOTHING))
        normal_sum, abnormal_sum = _category_sums(anchors, others, towards_prototype_L, contrast.scale)
        loss = _global_mean(normal_sum, (~images.abnormal).sum())
        return loss + _global_mean(abnormal_sum, images.abnormal.sum()) if abnormal_consistency else loss


def _by_position(values: Tensor) -> Tensor:
    """(B, L, K) -> (L, B, K), laid out so: one copy here instead of one inside each product and its backward."""
    return at_least_float32(values).transpose(0, 1).contiguous()


class _Images(NamedTuple):
    """What anchors are compared with: the images of all processes, G of them."""

    keys: Tensor  # (L, G, K)
    own: Tensor  # (L, G), own[j, b] = log f(q_bj, c_j)
    abnormal: Tensor  # (L, G)
    place: Tensor | None  # (L, G), where places are not the positions


class _Anchors(NamedTuple):
    """Tokens of this process by place, B at each; where places have fewer, the rest is neither normal nor abnormal."""

    queries: Tensor  # (L, B, K)
    normal: Tensor  # (L, B)
    abnormal: Tensor  # (L, B)


class _Others(NamedTuple):
    """Tokens of all processes by place, G at each."""

    keys: Tensor  # (L, G, K)
    own: Tensor  # (L, G)
    normal: Tensor  # (L, G)
    abnormal: Tensor  # (L, G)


def _gather_images(keys_LBK: Tensor, own_LB: Tensor, abnormal_LB: Tensor, place_LB: Tensor | None) -> _Images:
    """(L, B, ...) of each process -> (L, G, ...) of all, in one exchange: processes wait for each other once."""
    if distributed.world_size() == 1:
        return _Images(keys_LBK, own_LB, abnormal_LB, place_LB)
    extra = [] if place_LB is None else [place_LB[..., None].to(own_LB)]  # whole numbers, exact
    parts = (*extra, keys_LBK, own_LB[..., None], abnormal_LB[..., None].to(own_LB))
    together_LGC = distributed.gather(torch.cat(parts, dim=-1).transpose(0, 1)).transpose(0, 1)
    place = together_LGC[..., 0].long() if extra else None
    keys = together_LGC[..., len(extra) : -2]
    return _Images(keys, together_LGC[..., -2], together_LGC[..., -1].bool(), place)


def _by_place(tensors: Iterable[Tensor], place_LB: Tensor, places: int) -> list[Tensor]:
    """Tensors (L, B, ...) of tokens -> (places, most tokens at one place, ...), empty seats 0 or false."""
    place_N = place_LB.flatten()
    number = torch.bincount(place_N, minlength=places)
    order = place_N.argsort(stable=True)
    sorted_places = place_N[order]
    seat = torch.arange(len(order), device=order.device) - (number.cumsum(0) - number)[sorted_places]
    most = int(number.max())
    grouped = []
    for tensor in tensors:
        tokens = tensor.flatten(0, 1)
        seats = tokens.new_zeros((places, most, *tokens.shape[1:]))
        grouped.append(seats.index_put((sorted_places, seat), tokens[order]))
    return grouped


def _category_sums(
    anchors: _Anchors, others: _Others, towards_prototype_L: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Sums over normal and over abnormal anchors, a few places at a time when G, the global batch, is large."""
    tensors = (*anchors, others.keys, others.normal, others.abnormal, towards_prototype_L)
    places = max(1, _CHUNK // (anchors.normal.shape[1] * others.normal.shape[1]))
    if places >= len(anchors.queries):
        return _category_chunk(*tensors, scale)
    sums = [
        checkpoint(_category_chunk, *chunk, scale, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*(torch.split(tensor, places) for tensor in tensors), strict=True)
    ]
    normal_sums, abnormal_sums = zip(*sums, strict=True)
    return torch.stack(normal_sums).sum(), torch.stack(abnormal_sums).sum()


def _category_chunk(
    queries_LBK: Tensor,
    normal_LB: Tensor,
    abnormal_LB: Tensor,
    keys_LGK: Tensor,
    others_normal_LG: Tensor,
    others_abnormal_LG: Tensor,
    towards_prototype_L: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores_LBG = torch.bmm(queries_LBK, keys_LGK.transpose(1, 2)) * scale
    to_normal = _log_sum(scores_LBG.masked_fill(~others_normal_LG[:, None], _NOTHING))
    to_abnormal = _log_sum(scores_LBG.masked_fill(~others_abnormal_LG[:, None], _NOTHING))
    negatives = torch.logaddexp(to_abnormal, towards_prototype_L[:, None])
    normal_losses = F.softplus(negatives - to_normal).masked_fill(~normal_LB, 0)
    abnormal_losses = F.softplus(to_normal - to_abnormal).masked_fill(~abnormal_LB, 0)
    return normal_losses.sum(), abnormal_losses.sum()


def restoration_loss(restored: Tensor, target: Tensor, abnormal: Tensor, *, abnormal_weight: float) -> Tensor:
    """Eq. 20: mean over tokens of the squared error of a patch, abnormal tokens counted ``abnormal_weight`` times.

    ``restored`` (..., L, P), ``target`` of a shape that broadcasts to it, ``abnormal`` (..., L).
    """
    with full_precision(restored):
        errors = F.mse_loss(at_least_float32(restored), target.expand_as(restored).float(), reduction="none")
        weights = torch.where(abnormal.bool(), abnormal_weight, 1.0)
        return (errors.mean(dim=-1) * weights).mean()


def surprise(log_q: Tensor, prototypes: Tensor, place: Tensor | None = None) -> Tensor:
    """H(q_ij, c_j): how far each token (B, L, K) is from the prototype (L, K) of its place (B, L) -> (B, L)."""
    with full_precision(log_q):
        expected = _log_floored(prototypes)
        return -(at_least_float32(log_q).exp() * (expected if place is None else expected[place])).sum(dim=-1)


def anomaly_score(errors: Tensor) -> Tensor:
    """log A (B,) of a film's restoration errors d_j = |y_j - x_j|^2 (B, L). Equation 51, appendix D of the paper:
    A = (1/L sum_j exp d_j)^-1, larger for films that are restored *well*.

    In log space and double precision, because exp overflows.
    """
    return math.log(errors.shape[1]) - torch.logsumexp(errors.double(), dim=1)


def _log_sum(exponents: Tensor) -> Tensor:
    """logsumexp over the last dimension. A term below e^-80 of the largest counts as e^-80, that is as nothing:
    exp is many times slower where its result underflows, as it would for all that is masked."""
    largest = exponents.detach().amax(dim=-1, keepdim=True)
    return (exponents - largest).clamp_min(-80).exp().sum(dim=-1).log() + largest.squeeze(-1)


def _queries(log_q: Tensor, similarity: Similarity) -> Tensor:
    return log_q if similarity == "cosine" else log_q.exp()


def _prototype_keys(prototypes: Tensor, similarity: Similarity, temperature: float) -> Tensor:
    """(L, K) such that a query times a key is log f."""
    if similarity == "cosine":
        return F.normalize(at_least_float32(prototypes.detach()), dim=-1) / temperature
    return _log_floored(prototypes) * (_sign(similarity) / temperature)


def _sign(similarity: Similarity) -> int:
    """+log c, that is -H: the printed +H repels every token from its own prototype (docs/deviations.md)."""
    return -1 if similarity == "literal" else 1


def _log_floored(prototypes: Tensor) -> Tensor:
    return at_least_float32(prototypes.detach()).clamp_min(PROTOTYPE_FLOOR).log()


def _global_mean(summed: Tensor, number: Tensor) -> Tensor:
    """A local sum over the ``number`` of tokens of all processes, times their number; 0 when there is no token."""
    return summed * (distributed.world_size() / number.to(summed).clamp_min(1))
