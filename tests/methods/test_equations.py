"""The equations: each loss against a slow reference, with the empty cases and the sign; Sinkhorn and the prototypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afire.methods import equations as losses_module
from afire.methods.equations import Contrast, PrototypeBank, position_mean, sinkhorn, surprise
from afire.methods.equations import category_loss as category_of
from afire.methods.equations import restoration_loss as restoration_of
from afire.methods.equations import structure_loss as structure_of


def structure_loss(q: Tensor, abnormal: Tensor, c: Tensor, tau: float = 0.1, similarity: str = "corrected") -> Tensor:
    return structure_of(Contrast(q, abnormal, c, temperature=tau, similarity=similarity))  # type: ignore[arg-type]


def category_loss(
    q: Tensor,
    abnormal: Tensor,
    c: Tensor,
    tau: float = 0.1,
    similarity: str = "corrected",
    abnormal_consistency: bool = False,
) -> Tensor:
    contrast = Contrast(q, abnormal, c, temperature=tau, similarity=similarity)  # type: ignore[arg-type]
    return category_of(contrast, abnormal_consistency=abnormal_consistency)


def token_losses(
    q: Tensor,
    abnormal: Tensor,
    c: Tensor,
    tau: float = 0.1,
    similarity: str = "corrected",
    abnormal_consistency: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both from one contrast, as training does."""
    contrast = Contrast(q, abnormal, c, temperature=tau, similarity=similarity)  # type: ignore[arg-type]
    structure = structure_of(contrast)
    return structure, category_of(contrast, abnormal_consistency=abnormal_consistency)


def restoration_loss(restored: Tensor, target: Tensor, abnormal: Tensor, abnormal_weight: float = 4.0) -> Tensor:
    return restoration_of(restored, target, abnormal, abnormal_weight=abnormal_weight)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(B: int = 4, L: int = 3, K: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that ask for a gradient, labels, prototypes with a zero in them."""
    logits = (2 * draw(B, L, K, seed=seed)).requires_grad_()
    abnormal = draw(B, L, seed=seed + 1) > 0.3
    prototypes = torch.softmax(draw(L, K, seed=seed + 2), -1)
    prototypes[0, 0] = 0
    return logits, abnormal, prototypes / prototypes.sum(-1, keepdim=True)


def log_f(q: Tensor, log_c: Tensor, tau: float, similarity: str) -> Tensor:
    distance = -sum(q[k] * log_c[k] for k in range(len(q)))
    return distance / tau if similarity == "literal" else -distance / tau


def log_sum(terms: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(terms), 0)


def slow_structure(log_q: Tensor, abnormal: Tensor, c: Tensor, tau: float, similarity: str = "corrected") -> Tensor:
    log_c, terms = c.clamp_min(1e-6).log(), []
    B, L, _ = log_q.shape
    for i in range(B):
        for j in range(L):
            if not abnormal[i, j]:
                scores = [log_f(log_q[i, j].exp(), log_c[other], tau, similarity) for other in range(L)]
                terms.append(log_sum(scores) - scores[j])
    return torch.stack(terms).mean() if terms else log_q.sum() * 0


def slow_category(log_q: Tensor, abnormal: Tensor, c: Tensor, tau: float, similarity: str = "corrected") -> Tensor:
    log_c, terms = c.clamp_min(1e-6).log(), []
    B, L, _ = log_q.shape
    q = log_q.exp()
    for i in range(B):
        for j in range(L):
            if abnormal[i, j]:
                continue
            positives, negatives = [], []
            for b in range(B):
                score = log_f(q[i, j], log_q[b, j], tau, similarity)
                if abnormal[b, j]:
                    negatives += [score, log_f(q[b, j], log_c[j], tau, similarity)]
                else:
                    positives.append(score)
            terms.append(log_sum(positives + negatives) - log_sum(positives))
    return torch.stack(terms).mean() if terms else log_q.sum() * 0


def slow_abnormal_consistency(log_q: Tensor, abnormal: Tensor, tau: float) -> Tensor:
    terms = []
    B, L, _ = log_q.shape
    for i in range(B):
        for j in range(L):
            if abnormal[i, j]:
                scores = [log_f(log_q[i, j].exp(), log_q[b, j], tau, "corrected") for b in range(B)]
                alike = [score for b, score in enumerate(scores) if abnormal[b, j]]
                terms.append(log_sum(scores) - log_sum(alike))
    return torch.stack(terms).mean()


def assert_same(fast: Tensor, slow: Tensor, logits: Tensor) -> None:
    torch.testing.assert_close(fast, slow)
    (gradient,) = torch.autograd.grad(fast, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(slow, logits, retain_graph=True, allow_unused=True)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient) if expected is None else expected)


@pytest.mark.parametrize("similarity", ["corrected", "literal"])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_structure_equals_the_reference(similarity: str, tau: float) -> None:
    logits, abnormal, c = example()
    log_q = torch.log_softmax(logits, -1)
    assert 0 < abnormal.sum() < abnormal.numel()
    fast = structure_loss(log_q, abnormal, c, tau, similarity)
    assert_same(fast, slow_structure(log_q, abnormal, c, tau, similarity), logits)


@pytest.mark.parametrize("similarity", ["corrected", "literal"])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_category_equals_the_reference(similarity: str, tau: float) -> None:
    logits, abnormal, c = example()
    log_q = torch.log_softmax(logits, -1)
    fast = category_loss(log_q, abnormal, c, tau, similarity)
    assert fast > 0
    assert_same(fast, slow_category(log_q, abnormal, c, tau, similarity), logits)


def test_abnormal_consistency_equals_the_reference() -> None:
    logits, abnormal, c = example(B=5)
    log_q = torch.log_softmax(logits, -1)
    fast = category_loss(log_q, abnormal, c, 0.5, abnormal_consistency=True)
    slow = slow_category(log_q, abnormal, c, 0.5) + slow_abnormal_consistency(log_q, abnormal, 0.5)
    assert_same(fast, slow, logits)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.integers(0, 50), st.data(), st.sampled_from([0.1, 1.0])
)
def test_any_shape_and_any_mask(B: int, L: int, K: int, seed: int, data: st.DataObject, tau: float) -> None:
    logits, _, c = example(B, L, K, seed)
    bits = data.draw(st.lists(st.booleans(), min_size=B * L, max_size=B * L))
    abnormal = torch.tensor(bits).view(B, L)
    log_q = torch.log_softmax(logits, -1)
    structure, category = token_losses(log_q, abnormal, c, tau)
    assert_same(structure, slow_structure(log_q, abnormal, c, tau), logits)
    assert_same(category, slow_category(log_q, abnormal, c, tau), logits)


def test_in_one_go_equals_one_by_one() -> None:
    logits, abnormal, c = example()
    log_q = torch.log_softmax(logits, -1)
    structure, category = token_losses(log_q, abnormal, c, 0.3, "literal", abnormal_consistency=True)
    assert_same(structure, structure_loss(log_q, abnormal, c, 0.3, "literal"), logits)
    assert_same(category, category_loss(log_q, abnormal, c, 0.3, "literal", abnormal_consistency=True), logits)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_labels_may_be_numbers(dtype: torch.dtype) -> None:
    logits, abnormal, c = example()
    log_q = torch.log_softmax(logits, -1)
    torch.testing.assert_close(token_losses(log_q, abnormal.to(dtype), c), token_losses(log_q, abnormal, c))


def test_a_few_positions_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, abnormal, c = example(B=3, L=7)
    log_q = torch.log_softmax(logits, -1)
    whole = category_loss(log_q, abnormal, c, abnormal_consistency=True)
    monkeypatch.setattr(losses_module, "_CHUNK", 2 * 3 * 3)  # two positions at a time
    assert_same(category_loss(log_q, abnormal, c, abnormal_consistency=True), whole, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("labels", ["normal", "abnormal", "mixed"])
@pytest.mark.parametrize(("B", "L", "K"), [(1, 1, 2), (1, 4, 2), (3, 4, 2), (3, 4, 64)])
def test_finite_and_zero_where_there_is_nothing_to_compare(
    dtype: torch.dtype, labels: str, B: int, L: int, K: int
) -> None:
    logits = (200 * draw(B, L, K)).to(dtype).requires_grad_()  # nearly one-hot
    prototypes = torch.nn.functional.one_hot(torch.arange(L) % K, K).to(dtype)  # zeros everywhere but one
    mixed = draw(B, L, seed=5) > 0
    abnormal = {"normal": torch.zeros_like(mixed), "abnormal": torch.ones_like(mixed), "mixed": mixed}[labels]
    structure, category = token_losses(torch.log_softmax(logits, -1), abnormal, prototypes, 0.1)
    for loss, empty in ((structure, labels == "abnormal"), (category, labels != "mixed")):
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all() and loss >= 0
        if empty:
            assert loss == 0 and (gradient == 0).all()


def test_autocast_does_not_lower_the_precision_of_the_losses() -> None:
    logits, abnormal, c = example(B=6, L=5, K=16)
    log_q = torch.log_softmax(logits, -1).float()
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.stack(token_losses(log_q, abnormal, c.float()))
    torch.testing.assert_close(low, torch.stack(token_losses(log_q, abnormal, c.float())), rtol=0, atol=0)


def test_gradients_flow_to_both_sides_but_never_to_prototypes() -> None:
    logits, _, c = example(B=2, L=1)
    c.requires_grad_()
    abnormal = torch.tensor([[False], [True]])
    total = sum(token_losses(torch.log_softmax(logits, -1), abnormal, c, 1.0))
    total.backward()
    assert (logits.grad.abs().sum(-1) > 0).all()  # the abnormal token is no anchor, yet it is pushed
    assert c.grad is None


@pytest.mark.parametrize(("similarity", "share"), [("corrected", 1.0), ("literal", 0.0)])
def test_the_sign(similarity: str, share: float) -> None:
    """Free tokens end nearest to their own prototype with -H, and farthest from it with the printed +H."""
    L, K = 6, 8
    c = torch.softmax(2 * draw(L, K, seed=3), -1)
    logits = (0.1 * draw(4, L, K)).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.1)
    abnormal = torch.zeros(4, L, dtype=torch.bool)
    for _ in range(150):
        optimiser.zero_grad()
        structure_loss(torch.log_softmax(logits, -1), abnormal, c, 0.1, similarity).backward()
        optimiser.step()
    distances = -torch.softmax(logits, -1) @ c.log().T  # (B, L, L)
    own = torch.arange(L)
    assert (distances.argmin(-1) == own).double().mean() == share
    assert (distances.argmax(-1) == own).double().mean() == 1 - share


def test_cosine_compares_features() -> None:
    features = torch.nn.functional.normalize(draw(3, 4, 6), dim=-1)
    abnormal = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    means = 3 * draw(4, 6, seed=9)
    structure, category = token_losses(features, abnormal, means, 0.2, "cosine")
    unit = torch.nn.functional.normalize(means, dim=-1)
    expected = [
        -torch.log_softmax(features[i, j] @ unit.T / 0.2, -1)[j]
        for i in range(3)
        for j in range(4)
        if not abnormal[i, j]
    ]
    torch.testing.assert_close(structure, torch.stack(expected).mean())
    pairs = []
    for i in range(3):
        for j in range(4):
            if not abnormal[i, j]:
                f = [(features[i, j] @ features[b, j] / 0.2).exp() for b in range(3)]
                pos = sum(f[b] for b in range(3) if not abnormal[b, j])
                neg = sum(f[b] + (features[b, j] @ unit[j] / 0.2).exp() for b in range(3) if abnormal[b, j])
                pairs.append(-torch.log(pos / (pos + neg)))
    torch.testing.assert_close(category, torch.stack(pairs).mean())


def test_restoration_equals_the_reference() -> None:
    restored, target = draw(2, 3, 4).requires_grad_(), draw(2, 3, 4, seed=1)
    abnormal = torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=torch.bool)
    terms = []
    for i in range(2):
        for j in range(3):
            error = sum((restored[i, j, k] - target[i, j, k]) ** 2 for k in range(4)) / 4
            terms.append(4 * error if abnormal[i, j] else error)
    fast = restoration_loss(restored, target, abnormal)
    assert_same(fast, sum(terms) / 6, restored)
    plain = restoration_loss(restored, target, abnormal, abnormal_weight=1.0)
    torch.testing.assert_close(plain, (restored - target).square().mean())


def test_restoration_of_views_broadcasts_the_target() -> None:
    restored, target, abnormal = draw(2, 3, 5, 4), draw(2, 1, 5, 4, seed=1), draw(2, 3, 5) > 0
    repeated = restoration_loss(
        restored.flatten(0, 1), target.repeat_interleave(3, 1).flatten(0, 1), abnormal.flatten(0, 1)
    )
    torch.testing.assert_close(restoration_loss(restored, target, abnormal), repeated)


def test_restoration_in_bfloat16_is_summed_in_float32() -> None:
    restored = torch.full((8, 64, 256), 3.0, dtype=torch.bfloat16)
    loss = restoration_loss(restored, torch.zeros(8, 64, 256), torch.zeros(8, 64, dtype=torch.bool))
    assert loss.dtype == torch.float32 and loss == 9


def test_surprise_is_the_distance_to_the_own_prototype() -> None:
    logits, _, c = example()
    log_q = torch.log_softmax(logits, -1).detach()
    values = surprise(log_q, c)
    for i in range(4):
        for j in range(3):
            torch.testing.assert_close(values[i, j], -(log_q[i, j].exp() * c[j].clamp_min(1e-6).log()).sum())


def drawn_logits(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def update(bank: PrototypeBank, mean: Tensor) -> Tensor:
    """A step of the bank; the prototypes it leaves."""
    before, moved = bank.prototypes.clone(), bank.moved(mean)
    assert torch.equal(bank.prototypes, before)  # nothing is stored yet
    bank.store(moved)
    return bank.prototypes


def reference(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """Sinkhorn-Knopp as the books have it, in log space and float64."""
    log_p = logits.double() / temperature
    for _ in range(iterations):
        log_p = log_p - torch.logsumexp(log_p, dim=0, keepdim=True)  # each cluster the same mass
        log_p = log_p - torch.logsumexp(log_p, dim=1, keepdim=True)  # each token a probability
    return log_p.exp()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(2, 12), st.integers(0, 99), st.sampled_from([0.04, 0.07, 1.0]), st.integers(1, 5)
)
def test_equals_the_slow_reference(N: int, K: int, seed: int, temperature: float, iterations: int) -> None:
    logits = drawn_logits(N, K, seed=seed, scale=0.3)
    expected = reference(logits, temperature, iterations).float()
    torch.testing.assert_close(sinkhorn(logits, temperature, iterations), expected, rtol=1e-3, atol=1e-6)


def test_marginals() -> None:
    logits = drawn_logits(600, 8) + torch.linspace(0, 2, 8)  # some clusters much more likely than others
    unbalanced = torch.softmax(logits / 0.5, dim=1).sum(0)
    balanced = sinkhorn(logits, 0.5, 3)
    torch.testing.assert_close(balanced.sum(1), torch.ones(600))
    assert unbalanced.max() / unbalanced.min() > 10
    torch.testing.assert_close(
        balanced.sum(0), torch.full((8,), 75.0), rtol=0.06, atol=0
    )  # three iterations come close
    torch.testing.assert_close(sinkhorn(logits, 0.5, 100).sum(0), torch.full((8,), 75.0), rtol=1e-4, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(2, 9), st.integers(0, 99), st.floats(0, 1e4), st.integers(1, 40))
def test_rows_sum_to_one_whatever_the_logits(N: int, K: int, seed: int, scale: float, iterations: int) -> None:
    probs = sinkhorn(drawn_logits(N, K, seed=seed, scale=scale), 0.05, iterations)
    assert torch.isfinite(probs).all() and (probs >= 0).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(N), rtol=1e-4, atol=1e-4)


def test_a_cluster_out_of_reach_and_equal_logits() -> None:
    logits = torch.zeros(50, 3)
    torch.testing.assert_close(sinkhorn(logits, 0.05, 3), torch.full((50, 3), 1 / 3))
    logits[:, 0] = -1e6  # every token shuns it alike: balancing brings it back
    torch.testing.assert_close(sinkhorn(logits, 0.05, 3), torch.full((50, 3), 1 / 3))
    logits[0, 0] = 0  # now one token alone can take it
    probs = sinkhorn(logits, 0.05, 50)
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs[0], torch.tensor([1.0, 0.0, 0.0]))


def test_gives_float32_from_bfloat16_and_leaves_its_input_alone() -> None:
    logits = drawn_logits(20, 4).bfloat16()
    before = logits.clone()
    with torch.autocast("cpu", torch.bfloat16):
        probs = sinkhorn(logits.requires_grad_(), 0.05, 3)
    assert probs.dtype == torch.float32 and not probs.requires_grad
    assert torch.equal(logits, before)
    with pytest.raises(ValueError, match="at least one iteration"):
        sinkhorn(logits, 0.05, 0)


def test_float32_input_is_not_overwritten() -> None:
    logits = drawn_logits(20, 4)
    before = logits.clone()
    sinkhorn(logits, 1.0, 3)
    assert torch.equal(logits, before)


def test_prototypes_move_as_the_momentum_says() -> None:
    bank = PrototypeBank(6, 5, momentum=0.75)
    torch.testing.assert_close(bank.prototypes.sum(1), torch.ones(6))
    means = [position_mean(torch.softmax(drawn_logits(4, 6, 5, seed=seed), -1)) for seed in range(3)]
    expected = means[0]
    torch.testing.assert_close(update(bank, means[0]), expected, rtol=0, atol=0)
    for mean in means[1:]:
        expected = 0.75 * expected + 0.25 * mean
        torch.testing.assert_close(update(bank, mean), expected)
    assert bank.steps == 3


def test_rows_sum_to_one_after_many_steps() -> None:
    bank = PrototypeBank(3, 7, momentum=0.75)
    for seed in range(500):
        update(bank, sinkhorn(drawn_logits(3, 7, seed=seed), 0.1, 3))
    torch.testing.assert_close(bank.prototypes.sum(1), torch.ones(3), rtol=0, atol=1e-5)


def test_saved_and_restored_with_its_count() -> None:
    bank, other = PrototypeBank(3, 4, momentum=0.75), PrototypeBank(3, 4, momentum=0.75)
    update(bank, torch.softmax(drawn_logits(3, 4), -1))
    other.load_state_dict(bank.state_dict())
    mean = torch.softmax(drawn_logits(3, 4, seed=1), -1)
    assert torch.equal(update(bank, mean), update(other, mean))
    assert not list(bank.parameters())
