"""What a pre-training step costs at each size: FLOPs per image, parameters, memory, bytes between processes.

    python benchmarks/flops.py [--json FILE]

FLOPs are counted by torch's counter on a real forward and backward (a multiply and an add are two); on a CPU it does
not see the products inside fused attention, which are added by formula. Memory is what autograd keeps for the
backward pass, bytes follow from the tensors that are exchanged. From them, and an assumed speed, the time of long
runs is predicted; the assumptions are printed with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import machine, report
from torch.utils.flop_counter import FlopCounterMode

from afire.config import Config, DecoderConfig, EncoderConfig
from afire.lesions.synthesis import synthesize
from afire.methods.afire import AFiRe
from afire.methods.base import count_parameters
from afire.settings import load_config
from afire.training.engine import make_optimizer

SIZES = ("tiny", "small", "base")
A6000_TFLOPS, A100_TFLOPS, UTILISATION = 155.0, 312.0, 0.40  # dense bf16 peaks of the data sheets; a usual share


def settings(size: str, views: int) -> Config:
    choices = [f"encoder.size={size}", f"lesions.views={views}", "training.precision=fp32"]
    return load_config("paper", overrides=choices)


def flops(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def cost(config: Config, batch: int) -> dict[str, Any]:
    """One step of ``batch`` films with the config's views."""
    model = AFiRe(config).train()
    optimizer = make_optimizer(model.parameters_of("all"), config.training)
    images = torch.rand(batch, 1, config.image.size, config.image.size)
    lesioned, mask = synthesize(images, generator=torch.Generator().manual_seed(0), config=config.lesions)

    views = {"images": images, "lesioned": lesioned, "mask": mask}

    def step() -> None:
        torch.autograd.backward(model.losses(model(views)).total)
        optimizer.step()
        optimizer.zero_grad()

    counted = flops(step) + attention_flops(config, len(images), len(lesioned))
    held = kept_for_backward(lambda: model.losses(model(views)), model)
    parameters = count_parameters(model)
    with torch.no_grad():
        encoder = flops(lambda: model.encode(images)) / batch + attention(config.encoder, positions(config) + 1)
    return {
        "encoder forward, GFLOP/image": round(encoder / 1e9, 2),
        "step, GFLOP/view": round(counted / len(lesioned) / 1e9, 1),
        "trained parameters, M": round(parameters["trained"] / 1e6, 1),
        "kept for backward, MB/view (fp32)": round(held / 1e6 / len(lesioned), 1),
        "gradients exchanged, MB/step (fp32)": round(parameters["trained"] * 4 / 1e6, 1),
        "tokens exchanged, MB/view (fp32)": round(tokens_exchanged(config) / 1e6, 2),
    }


def positions(config: Config) -> int:
    return (config.image.size // config.encoder.patch_size) ** 2


def attention(network: EncoderConfig | DecoderConfig, tokens: int) -> int:
    """FLOPs of query times key and weights times value, forward, for one image."""
    return 4 * tokens**2 * network.width * network.depth


def attention_flops(config: Config, films: int, views: int) -> int:
    """Those of a step: the teacher forward on films, student and decoder forward and (twice that) backward on views."""
    encoder = attention(config.encoder, positions(config) + 1)
    return films * encoder + 3 * views * (encoder + attention(config.decoder, positions(config)))


def kept_for_backward(work: Callable[[], object], model: AFiRe) -> int:
    """Bytes of activations that autograd holds between forward and backward; weights are not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []  # kept, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    return sum(sizes.values())


def tokens_exchanged(config: Config) -> float:
    """Bytes that a process sends for one view: log q of its tokens forward, their gradient backward."""
    return 2 * 4 * positions(config) * (config.head.clusters + 1)


def hours(gigaflop_per_view: float, views: float, gpus: int, tflops: float) -> float:
    return gigaflop_per_view * 1e9 * views / (gpus * tflops * 1e12 * UTILISATION) / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    for name in SIZES:
        result[f"ViT-{name}/16, 224 px, 1 view"] = cost(settings(name, views=1), batch=4)
    # Nine views share the teacher's forward: the cost of a view falls a little.
    base = cost(settings("base", views=9), batch=1)
    result["ViT-base/16, 224 px, 9 views"] = base
    per_view = float(base["step, GFLOP/view"])
    paper_views, large_views = 81_117 * 9 * 800, 10_000_000 * 9 * 100
    result["assumed"] = (
        f"{UTILISATION:.0%} of the data sheet's dense bf16 peak ({A6000_TFLOPS:g} TFLOP/s A6000, {A100_TFLOPS:g} A100)"
    )
    result["paper's run (81,117 films x 9 views x 800 epochs), 8 A6000, hours"] = round(
        hours(per_view, paper_views, 8, A6000_TFLOPS)
    )
    result["10 million films x 9 views x 100 epochs, 64 A100, hours"] = round(
        hours(per_view, large_views, 64, A100_TFLOPS)
    )
    report(result, options.json)


if __name__ == "__main__":
    main()
