"""Figures for papers, one function each: weights and films in; PNG, PDF and a JSON with every number out.

draw_tsne(Path("tsne"), {"AFiRe": "runs/nih", "random": "random"}, Path("packs/nih"))
draw_landmarks(Path("landmarks"), {"AFiRe": "runs/nih"}, Source(Path("packs/nih"), subset="val", most=100))
draw_gradcam(Path("gradcam"), {"AFiRe": "results/nih"}, Path("packs/nih"))      # folders of `afire finetune`
draw_restorations(Path("restorations"), "runs/nih", Path("packs/nih"))
draw_atlas(Path("atlas"), "runs/nih", Path("packs/nih"))
draw_auc(Path("auc"), {"AFiRe": Path("results/nih"), "random": Path("results/random")})

Knows the measurements of tasks; knows no training.
"""

from afire.report.figures.classifiers import draw_auc, draw_gradcam
from afire.report.figures.files import FigureFiles, Source
from afire.report.figures.maps import draw_landmarks, draw_tsne
from afire.report.figures.pretrained import draw_atlas, draw_restorations

__all__ = [
    "FigureFiles",
    "Source",
    "draw_atlas",
    "draw_auc",
    "draw_gradcam",
    "draw_landmarks",
    "draw_restorations",
    "draw_tsne",
]
