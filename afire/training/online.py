"""An optional look at the representation while it is trained: k-NN and a linear probe on validation films.

The test part is never touched. The label is normal / not normal, which every dataset here has.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from afire.data.pack import Films
from afire.data.splits import Split, official_split, random_split
from afire.errors import UserError
from afire.methods.base import Method
from afire.training.pretraining import EpochView

_BATCH = 64
_NEIGHBOURS = 20


class OnlineProbe:
    """An observer for the loop: every ``every`` epochs, AUC of k-NN and logistic regression on mean tokens."""

    def __init__(self, films: Films, split: Split | None, every: int, most: int, seed: int) -> None:
        self.films, self.every = films, every
        self.train, self.val = _labelled_rows(films, split, most, seed)
        self.labels = films.manifest.table["normal"].to_numpy()

    def __call__(self, view: EpochView) -> dict[str, float] | None:
        if view.epoch % self.every:
            return None
        assert isinstance(view.model, Method)
        train, val = (mean_tokens(view.model, self.films, rows) for rows in (self.train, self.val))
        abnormal, truth = (1 - self.labels[rows] for rows in (self.train, self.val))
        linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
        neighbours = KNeighborsClassifier(min(_NEIGHBOURS, len(train)), metric="cosine", weights="distance")
        return {
            "online/linear_auc": float(roc_auc_score(truth, linear.fit(train, abnormal).predict_proba(val)[:, 1])),
            "online/knn_auc": float(roc_auc_score(truth, neighbours.fit(train, abnormal).predict_proba(val)[:, 1])),
        }


@torch.no_grad()
def mean_tokens(model: Method, films: Films, rows: np.ndarray) -> np.ndarray:
    """Representations (N, D): the mean token of each film."""
    device = next(model.parameters()).device
    chunks = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
    means = [model.encode(films.batch(chunk).to(device)).mean(dim=1).float().cpu() for chunk in chunks]
    return torch.cat(means).numpy()


def _labelled_rows(films: Films, split: Split | None, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows with both classes, at most ``most`` each, drawn by the seed."""
    manifest = films.manifest
    if split is None:
        official = (manifest.table["split"] == "train").any()
        split = official_split(manifest, seed=seed) if official else random_split(manifest, test_share=0.0, seed=seed)
    parts = split.rows(manifest)
    labels = manifest.table["normal"].to_numpy()
    chosen = []
    for subset in ("train", "val"):
        known = parts[subset][~np.isnan(labels[parts[subset]])]
        if len(np.unique(labels[known])) < 2:
            raise UserError(
                f"the online probe needs normal and abnormal films in the {subset} part; "
                "set run.probe_epochs=0 where there are no labels."
            )
        order = np.random.default_rng([seed, len(subset)]).permutation(len(known))
        chosen.append(np.sort(known[order[:most]]))
    return chosen[0], chosen[1]
