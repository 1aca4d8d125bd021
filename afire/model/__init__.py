"""The networks, prototypes and losses of AFiRe."""

from afire.model.afire import AFiRe, Losses, count_parameters
from afire.model.losses import category_loss, restoration_loss, structure_loss
from afire.model.prototypes import PrototypeBank, sinkhorn
from afire.model.vit import VisionTransformer

__all__ = [
    "AFiRe",
    "Losses",
    "PrototypeBank",
    "VisionTransformer",
    "category_loss",
    "count_parameters",
    "restoration_loss",
    "sinkhorn",
    "structure_loss",
]
