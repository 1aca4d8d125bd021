"""MoCo v2 (He et al. 2020; Chen, Fan, Girshick and He 2020): find a film's own key among those of many others.

Written from the papers. As published: two random views, one through the student, one through a teacher that follows
it, a two-layer projector, InfoNCE against a queue of the teacher's earlier keys. Ours, beside what
:mod:`afire.methods.twins` says: the trunk is a vision transformer whose mean token takes the place of the ResNet's
average pooling; no shuffled batch norm, because there is none; hue and saturation mean nothing on grey films.

Shapes: B films, F width of a key, Q places of the queue.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from afire.methods.base import ALL, Keys, Losses, Outputs, Views
from afire.methods.crops import CropSettings, crops
from afire.methods.twins import Queued, QueueSettings, global_mean
from afire.nn.memory import of_all


class MoCoSettings(QueueSettings):
    """Settings of MoCo itself."""

    crop: CropSettings = Field(default_factory=CropSettings)


class MoCo(Queued):
    """Student, teacher and queue."""

    settings_type = MoCoSettings
    options: MoCoSettings

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Two random views of each film, ``query`` and ``key``, and whose they are."""
        two = crops(images, keys, views=2, size=self.config.image.size, settings=self.options.crop)
        views = {"query": two[0::2], "key": two[1::2], "rows": keys.rows.to(images.device)}
        depth = self.depth(keys, 1, images)
        return views if depth is None else {**views, "depth": depth}

    def forward(self, views: Views) -> Outputs:
        """Queries of the student and keys of the teacher, (B, F) each."""
        self.check(views["query"])
        with torch.no_grad():
            key = self.teacher(self.normalise(views["key"]))
        return {
            "query": self.student(self.normalise(views["query"]), views.get("depth")),
            "key": key,
            "rows": views["rows"],
        }

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is; keys of all processes wait for the queue."""
        counts = self.queue.others(outputs["rows"])
        contrast = global_mean(self.told_apart(outputs["query"], outputs["key"].detach(), counts))
        keys, owners = of_all(outputs["key"], outputs["rows"])
        return Losses({"contrast": contrast}, contrast, {"keys": keys, "owners": owners})
