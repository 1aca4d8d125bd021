"""Is the phantom too easy? AUC of trivial detectors, with 400 training and 200 test films.

An AUC below 0.8 means that no simple cue separates normal from abnormal films; logistic regression on 32-px films
uses the labels. Directions are fixed beforehand: larger = more abnormal. What says
nothing about findings (devices, view, age, sex, style) must stay near 0.5, also for a classifier that is given the
labels; an AUC of 0.5 has a standard error of 0.04 here.

python benchmarks/phantom_shortcuts.py [--seed K] [--size S] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import laplace
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from timing import report

from afire.data.phantom.film import PhantomFilm, draw_film, patient_of, split_of

Array = NDArray[np.float32]
GOAL = 0.8


def choose(seed: int, split: str, count: int) -> list[int]:
    """The first ``count`` films of a split."""
    chosen: list[int] = []
    index = 0
    while len(chosen) < count:
        if split_of(seed, patient_of(seed, index)) == split:
            chosen.append(index)
        index += 1
    return chosen


def standardised(images: Array, side: int) -> Array:
    """Films shrunk to ``side`` px, each with mean 0 and deviation 1, as rows."""
    small = [np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BOX)) for image in images]
    rows = np.stack(small).reshape(len(images), -1)
    result: Array = (rows - rows.mean(axis=1, keepdims=True)) / rows.std(axis=1, keepdims=True)
    return result


def scores(train: Array, abnormal: NDArray[np.bool_], test: Array) -> dict[str, NDArray[np.floating]]:
    """Score of each test film by each detector; all but the last are fitted on the normal training films."""
    fit, judge = standardised(train, 32), standardised(test, 32)
    normal = fit[~abnormal]
    mean, deviation = normal.mean(axis=0), normal.std(axis=0) + 1e-3
    pca = PCA(64, random_state=0).fit(normal)
    whitened = PCA(64, whiten=True, random_state=0).fit(standardised(train, 16)[~abnormal])
    logistic = LogisticRegression(C=0.01, max_iter=3000).fit((fit - mean) / deviation, abnormal)
    return {
        "mean brightness": test.mean(axis=(1, 2)),
        "blur (minus variance of the Laplacian)": -np.array([laplace(image).var() for image in test]),
        "per-pixel Gaussian, 32 px": (((judge - mean) / deviation) ** 2).mean(axis=1),
        "PCA-64 residual, 32 px": ((judge - pca.inverse_transform(pca.transform(judge))) ** 2).mean(axis=1),
        "PCA-64 Mahalanobis, 16 px": (whitened.transform(standardised(test, 16)) ** 2).sum(axis=1),
        "logistic regression, 32 px, with labels": logistic.decision_function((judge - mean) / deviation),
    }


def beside_the_point(film: PhantomFilm) -> dict[str, float]:
    """What is known about a film and says nothing about its findings."""
    patient, pose = film.sitting.patient, film.sitting.pose
    return {
        "devices": len(film.devices),
        "view is AP": pose.view == "AP",
        "age": patient.years,
        "sex": patient.female,
        "turn": abs(pose.yaw),
        "breath": pose.breath,
        **{f"style: {name}": value for name, value in asdict(film.style).items()},
    }


def file_size(image: Array) -> int:
    """Bytes of the film as the phantom writes it."""
    stored = io.BytesIO()
    Image.fromarray(np.rint(image * 255).astype(np.uint8)).save(stored, format="PNG", compress_level=1)
    return stored.tell()


def simple_scores(
    train: list[PhantomFilm], abnormal: NDArray[np.bool_], test: list[PhantomFilm]
) -> dict[str, NDArray[np.floating]]:
    """Score of each test film by what is not its content."""
    fit, judge = (np.array([list(beside_the_point(film).values()) for film in films]) for films in (train, test))
    mean, deviation = fit.mean(axis=0), fit.std(axis=0) + 1e-6
    logistic = LogisticRegression(C=0.1, max_iter=3000).fit((fit - mean) / deviation, abnormal)
    return {
        "contrast (deviation of the grey values)": np.array([film.image.std() for film in test]),
        "black pixels": np.array([(film.image < 0.02).mean() for film in test]),
        "size of the file": np.array([file_size(film.image) for film in test]),
        "number of devices": np.array([len(film.devices) for film in test]),
        "logistic regression, devices, view, age, sex and style, with labels": logistic.decision_function(
            (judge - mean) / deviation
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    films = {
        split: [draw_film(options.seed, index, options.size) for index in choose(options.seed, split, count)]
        for split, count in (("train", 400), ("test", 200))
    }
    train, test = (np.stack([film.image for film in films[split]]) for split in ("train", "test"))
    abnormal = {split: np.array([not film.normal for film in films[split]]) for split in films}
    found = scores(train, abnormal["train"], test)
    found |= simple_scores(films["train"], abnormal["train"], films["test"])
    aucs = {name: round(float(roc_auc_score(abnormal["test"], score)), 3) for name, score in found.items()}
    report({"auc": aucs, "goal_below": GOAL, "seed": options.seed, "size": options.size}, options.json)


if __name__ == "__main__":
    main()
