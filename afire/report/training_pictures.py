"""Pictures of a pre-training run: what was restored, and what the prototypes say about each place."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from afire.files import write_atomic
from afire.lesions import token_labels
from afire.model import AFiRe
from afire.training.loop import EpochView

_FILMS = 4


class EpochPictures:
    """An observer for the loop: every ``every`` epochs, and at the last one, two pictures in ``RUN/pictures``."""

    def __init__(self, every: int, epochs: int) -> None:
        self.every, self.epochs = every, epochs

    def __call__(self, view: EpochView) -> None:
        if view.epoch % self.every and view.epoch != self.epochs:
            return
        folder = view.out / "pictures"
        if view.model.decoder is not None:
            save(restorations(view), folder / f"restorations-{view.epoch:04d}.png")
        if view.model.bank is not None and view.model.config.losses.contrast == "probability":
            save(prototype_map(view.model, view.epoch), folder / f"prototypes-{view.epoch:04d}.png")


@torch.no_grad()
def restorations(view: EpochView) -> Figure:
    """Rows of films: normal, lesions, lesioned, restored, and what the restoration took away."""
    model, views = view.model, view.model.config.lesions.views
    count = min(_FILMS, len(view.images))
    images = view.images[:count]
    lesioned, mask = view.lesioned[: count * views : views], view.mask[: count * views : views]
    count = len(lesioned)
    images = images[:count]
    patches = model.restore(lesioned, token_labels(mask, model.patch_size))
    restored = model.picture(patches, like=images)
    columns = {
        f"normal (epoch {view.epoch})": (images, "gray", 0.0, 1.0),
        "lesion mask": (mask, "magma", 0.0, 1.0),
        "lesioned": (lesioned, "gray", 0.0, 1.0),
        "restored": (restored, "gray", 0.0, 1.0),
        "lesioned − restored": (lesioned - restored, "RdBu_r", -0.5, 0.5),
    }
    figure: Figure
    figure, axes = plt.subplots(count, len(columns), figsize=(2.1 * len(columns), 2.15 * count), squeeze=False)
    for column, (title, (films, colours, low, high)) in enumerate(columns.items()):
        axes[0, column].set_title(title, fontsize=10)
        for row in range(count):
            picture = films[row].mean(dim=0).float().cpu().numpy()
            axes[row, column].imshow(picture, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
            axes[row, column].axis("off")
    figure.tight_layout(pad=0.4)
    return figure


def prototype_map(model: AFiRe, epoch: int) -> Figure:
    """For each place of the film: its likeliest cluster, and how sure its prototype is."""
    rows, columns = model.grid
    prototypes = model.prototypes.detach().float().cpu()
    likeliest = prototypes.argmax(dim=1).view(rows, columns).numpy()
    entropy = (torch.special.entr(prototypes).sum(1) / np.log(prototypes.shape[1])).view(rows, columns).numpy()
    used, numbered = np.unique(likeliest, return_inverse=True)
    figure: Figure
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.6))
    axes[0].imshow(numbered.reshape(rows, columns), cmap="tab20" if len(used) <= 20 else "nipy_spectral")
    axes[0].set_title(f"epoch {epoch}: likeliest cluster ({len(used)} of {prototypes.shape[1]})", fontsize=9)
    shown = axes[1].imshow(entropy, cmap="viridis", vmin=0, vmax=1)
    axes[1].set_title("entropy of the prototype (1 = uniform)", fontsize=9)
    figure.colorbar(shown, ax=axes[1], fraction=0.046, pad=0.03)
    for axis in axes:
        axis.axis("off")
    figure.tight_layout(pad=0.5)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically and forget it."""
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)
