"""The head: unit features, cosines to the clusters, one batched product for all positions."""

from __future__ import annotations

import pytest
import torch

from afire.config import HeadConfig
from afire.errors import UserError
from afire.nn.vit import ProjectionHead, initialise


def make(form: str, positions: int = 6, clusters: bool = True) -> ProjectionHead:
    config = HeadConfig(form=form, hidden=16, bottleneck=8, clusters=5)
    head = ProjectionHead(12, positions, config, clusters)
    generator = torch.Generator().manual_seed(0)
    initialise(head, generator)
    if head.last_layer is not None:
        head.last_layer.initialise(generator)
    return head


def tokens() -> torch.Tensor:
    return torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["shared", "per_position"])
def test_logits_equal_a_loop_over_tokens(form: str) -> None:
    head = make(form)
    logits = head(tokens())
    assert logits.shape == (3, 6, 5)
    for i in range(3):
        for j in range(6):
            z = head.mlp(tokens()[i, j])
            z = z / z.norm()
            weight = head.last_layer.weight if form == "shared" else head.last_layer.weight[j]
            for k in range(5):
                cosine = (z * weight[k]).sum() / weight[k].norm()
                torch.testing.assert_close(logits[i, j, k], cosine)


@pytest.mark.parametrize("form", ["shared", "per_position"])
def test_only_the_direction_of_a_cluster_counts(form: str) -> None:
    head = make(form)
    before = head(tokens())
    with torch.no_grad():
        head.last_layer.weight *= 3
    torch.testing.assert_close(head(tokens()), before)
    assert before.abs().max() <= 1 + 1e-6
    head(tokens()).square().sum().backward()
    radial = (head.last_layer.weight.grad * head.last_layer.weight).sum(-1)
    torch.testing.assert_close(radial, torch.zeros_like(radial), atol=1e-5, rtol=0)


def test_a_zero_cluster_gives_no_nan() -> None:
    head = make("shared")
    with torch.no_grad():
        head.last_layer.weight[2] = 0
    head(tokens()).sum().backward()
    assert torch.isfinite(head(tokens())).all() and torch.isfinite(head.mlp[0].weight.grad).all()
    assert torch.isfinite(head.last_layer.weight.grad).all()


def test_per_position_refuses_another_number_of_positions() -> None:
    with pytest.raises(UserError, match="per_position head of 4 positions cannot take 6 tokens"):
        make("per_position", positions=4)(tokens())
    assert make("shared", positions=4)(tokens()).shape == (3, 6, 5)


def test_without_clusters_there_are_only_features() -> None:
    head = make("shared", clusters=False)
    torch.testing.assert_close(head.features(tokens()).norm(dim=-1), torch.ones(3, 6))
    assert head.last_layer is None
    with pytest.raises(UserError, match="no clusters"):
        head(tokens())


def test_float32_logits_under_bfloat16() -> None:
    head = make("per_position")
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(tokens())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, head(tokens()), atol=0.05, rtol=0)
