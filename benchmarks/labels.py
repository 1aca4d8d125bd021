"""What the built-in detector's network reaches once it is told the labels, and by what: numbers for docs/builtin.md.

A detector that has seen no abnormal film may be limited by its network, by the resolution, by the labels it is judged
by, or by what it was taught. The same network, at the same 128 px, learns the labels of 60 % of the patients and is
judged on the others. Only films of the training and validation lists are read, never one of the test list.

Each of four views of the films is learnt and judged separately: the whole film; the same shrunk to 32 px and enlarged
again, which leaves large opacities and takes fine texture away; the film without its chest, the box around the lungs
painted over (which still tells how large the aerated lungs are); and the outermost tenth of the film along each edge,
with everything else painted over. What can be told from the last two is hardly disease. Beside them: the detector as it
is, and trivial scores.

python benchmarks/labels.py --data PACK [--split split.json] [--seeds 0,1,2] [--steps 400] [--start builtin|nothing]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor

from afire.data.pack import open_films
from afire.data.splits import official_split, read_split
from afire.detect.base import MODEL, detector_folder
from afire.detect.maps import peak
from afire.detect.taught import FinderAugment, FinderNetwork
from afire.lesions.augment import augmented
from afire.lesions.pastes import chests
from afire.lesions.places import lung_field
from afire.nn.conv import standardised
from afire.nn.memory import follow, twin
from afire.tasks.features import laplacian_variance
from afire.weights.files import read_tensors
from afire.weights.hub import BUILTIN

SIDE, COARSE = 128, 32
SHARE, MOST = 0.6, 450  # of patients that are learnt from; films of each class that are judged, at most
BATCH, RATE, WARMUP, MEMORY = 32, 5e-4, 20, 0.99
_GROUPS = 5  # seed of which patients are learnt from: the same for all seeds of training


@dataclass(frozen=True)
class Films:
    """Labelled films (N, 1, S, S), 1 for abnormal, with the boxes (N, 4) around their lungs."""

    images: Tensor
    abnormal: Tensor
    boxes: Tensor

    @classmethod
    def of(cls, images: Tensor, abnormal: np.ndarray) -> Films:
        return cls(images, torch.from_numpy(abnormal.astype(np.float32)), chests(lung_field(images[:, 0])))


def whole(films: Films) -> Tensor:
    return films.images


def coarse(films: Films) -> Tensor:
    small = F.interpolate(films.images, (COARSE, COARSE), mode="area")
    return F.interpolate(small, films.images.shape[-2:], mode="bilinear", align_corners=False)


def without_chest(films: Films) -> Tensor:
    return torch.where(_inside(films), films.images.mean(dim=(1, 2, 3), keepdim=True), films.images)


def edge_alone(films: Films) -> Tensor:
    """Painted over alike in all films: neither the place nor the grey of the rest tells anything."""
    edge, kept = films.images.shape[-1] // 10, films.images.clone()
    kept[..., edge:-edge, edge:-edge] = 0.5
    return kept


VIEWS: dict[str, Callable[[Films], Tensor]] = {
    "whole film": whole,
    f"shrunk to {COARSE} px": coarse,
    "without the chest": without_chest,
    "edge alone": edge_alone,
}


def _inside(films: Films) -> Tensor:
    """Pixels (N, 1, S, S) of the box around the lungs."""
    left, right, top, bottom = (end[:, None] for end in films.boxes.unbind(1))
    at = torch.arange(films.images.shape[-1])
    across, down = (at >= left) & (at <= right), (at >= top) & (at <= bottom)
    return (down[:, :, None] & across[:, None, :])[:, None]


def development(data: Path, split_file: Path | None) -> tuple[Films, Films]:
    """Films to learn from and films to judge by, of different patients, none of the test list."""
    films = open_films(data, size=SIDE)
    split = read_split(split_file) if split_file is not None else official_split(films.manifest)
    subsets = split.rows(films.manifest)
    table = films.manifest.table
    normal, patients = table["normal"].to_numpy(dtype=float), table["patient"].astype(str).to_numpy()
    rows = np.concatenate([subsets["train"], subsets["val"]])
    rows = rows[~np.isnan(normal[rows])]
    generator = np.random.default_rng(_GROUPS)
    names = generator.permutation(np.unique(patients[rows]))
    learnt = np.isin(patients[rows], names[: int(SHARE * len(names))])
    judged = generator.permutation(rows[~learnt])
    judged = np.concatenate([judged[normal[judged] == value][:MOST] for value in (1, 0)])

    def read(some: np.ndarray) -> Films:
        return Films.of(films.batch(some)[:, :1], normal[some] == 0)

    return read(rows[learnt]), read(judged)


def built_in() -> dict[str, Tensor]:
    tensors = read_tensors(detector_folder(BUILTIN) / MODEL)
    return {key.removeprefix("network."): tensor for key, tensor in tensors.items()}


def auc(abnormal: Tensor, score: Tensor) -> float:
    return float(roc_auc_score(abnormal.numpy(), score.double().numpy()))


@torch.no_grad()
def outputs(network: FinderNetwork, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of any finding at every place (N, places), and in the film (N,)."""
    network.eval()
    said = [network(standardised(some)) for some in torch.split(images, 64)]
    return torch.cat([places[:, 0].flatten(1) for places, _ in said]), torch.cat([film[:, 0] for _, film in said])


def learnt(start: str, learn: Films, judge: Films, view: Callable[[Films], Tensor], seed: int, steps: int) -> float:
    """AUC on the films to judge by, of the running mean of the weights at the last step."""
    network = FinderNetwork(32, 2)
    network.initialise(torch.Generator().manual_seed(seed))
    if start == BUILTIN:
        network.load_state_dict(built_in())
    mean = twin(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.05)
    generator = np.random.default_rng(seed)
    images, judged, settings = view(learn), view(judge), FinderAugment()
    classes = [np.flatnonzero(learn.abnormal.numpy() == value) for value in (0, 1)]
    network.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        rows = torch.from_numpy(np.concatenate([generator.choice(one, BATCH // 2) for one in classes]))
        batch, _ = augmented(images[rows], None, seed=seed, epoch=step, rows=rows, settings=settings)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network(standardised(batch))[1][:, 0]
        loss = F.binary_cross_entropy_with_logits(logits.float(), learn.abnormal[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        follow(mean.parameters(), network.parameters(), min(MEMORY, (step + 1) / (step + 10)))
    return auc(judge.abnormal, outputs(mean, judged)[1])


def untaught(judge: Films) -> dict[str, float]:
    """The detector as it is, and scores that look at sharpness alone, with and without frames at the film's edge."""
    network = FinderNetwork(32, 2)
    network.load_state_dict(built_in())
    places, _ = outputs(network, judge.images)
    likely, highest = torch.log(torch.sigmoid(places).mean(dim=1)), peak(places)
    both = sum(score / score[judge.abnormal == 0].std() for score in (likely, highest))
    assert isinstance(both, Tensor)
    framed = F.pad(judge.images, (1, 1, 1, 1), mode="replicate")
    return {
        "built-in, no labels": auc(judge.abnormal, both),
        "blur": auc(judge.abnormal, -laplacian_variance(framed)),
        "blur, without the film's edge": auc(judge.abnormal, -laplacian_variance(judge.images)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--start", choices=(BUILTIN, "nothing"), default=BUILTIN)
    parser.add_argument("--views", default=",".join(VIEWS), help="some of them, separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    learn, judge = development(arguments.data, arguments.split)
    counts = {
        name: [int((some.abnormal == value).sum()) for value in (0, 1)]
        for name, some in (("learnt", learn), ("judged", judge))
    }
    found: dict[str, object] = {"normal and abnormal films": counts, **untaught(judge)}
    print(json.dumps(found), flush=True)
    for name in arguments.views.split(","):
        began = time.process_time()
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        aucs = [learnt(arguments.start, learn, judge, VIEWS[name], seed, arguments.steps) for seed in seeds]
        spread = float(np.std(aucs, ddof=1)) if len(aucs) > 1 else float("nan")
        row = {"view": name, "AUC": round(float(np.mean(aucs)), 4), "sd": round(spread, 4), "seeds": seeds}
        print(json.dumps({**row, "core-minutes": round((time.process_time() - began) / 60, 1)}), flush=True)


if __name__ == "__main__":
    main()
