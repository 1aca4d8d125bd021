"""The page beside an export: what it is, how it is opened, and what the format cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afire._version import __version__
from afire.bundle.formats import Format
from afire.bundle.formats.graph import Preprocess
from afire.config import ImageConfig
from afire.tasks.backbone import Backbone

_FILM = """std, mean = torch.std_mean(films, dim=(1, 2, 3), correction=0, keepdim=True)
films = (films - mean) / std.clamp_min(1e-3)
"""
_OPEN = {
    "timm": """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True, num_classes=0).eval()
tokens = model.forward_features(films)[:, 1:]  # (B, L, D); the class token stands first
""",
    "hf": """from transformers import ViTModel

model = ViTModel.from_pretrained("FOLDER", add_pooling_layer=False).eval()
tokens = model(pixel_values=films).last_hidden_state[:, 1:]  # (B, L, D); the class token stands first
""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
tokens, embedding = session.run(["tokens", "embedding"], {"images": films})  # float32; (B, L, D) and (B, D)
""",
    "torch": """import torch

model = torch.export.load("FOLDER/encoder.pt2").module()
tokens, embedding = model(films)  # (B, L, D) and (B, D)
""",
}
_NORMALISE = {
    "imagenet": "ImageNet's mean and std (averaged over its channels where there is one), as in `preprocessing.json`",
    "none": "nothing: films stay in [0, 1]",
    "film": "the mean and standard deviation of each film by itself",
}


def format_readme(
    backbone: Backbone, form: Format, preprocess: Preprocess, detector: Mapping[str, Any] | None = None
) -> str:
    """The text of ``README.md`` of an export to another library."""
    image = backbone.config.image
    parts = [
        f"# {backbone.name} for {form.backend}",
        f"The encoder of `{backbone.name}` (hash `{backbone.hash[:16]}`), exported by afire {__version__}.",
        f"```python\n{_OPEN[form.name]}```",
        "" if detector is None else _detector(detector),
        "## Input\n\n" + _input(image, form.name, preprocess),
        _cannot_say(image, form.name),
        "`sample/` holds a drawn film, no patient's, with the input and the outputs afire gives for it; "
        "`preprocessing.json` says how a film becomes the input.",
        "Research software, not a medical device.\n",
    ]
    return "\n\n".join(part for part in parts if part)


def _detector(detector: Mapping[str, Any]) -> str:
    threshold = "never" if detector["threshold"] is None else f"from a score of {detector['threshold']:.6g} on"
    scale = detector["heat_scale"]
    return f"""## Detector

```python
session = onnxruntime.InferenceSession("FOLDER/detector.onnx")
score, p_value, heatmap = session.run(["score", "p_value", "heatmap"], {{"images": films}})
```

Larger scores are more abnormal ({detector["score"]}). At a false-alarm rate of {detector["false_alarms"]:g} a film
alarms {threshold}, by {detector["calibration_films"]} normal films of `{detector["data"]}`. The heatmap
(B, rows, columns) is in sd of normal films: show nothing below {scale["low"]:.3g}, all from {scale["high"]:.3g} on.
The graph does not ask whether a film is of the kind it knows; afire does."""


def _input(image: ImageConfig, form: str, preprocess: Preprocess) -> str:
    size, channels = image.size, image.channels
    if form in ("timm", "hf") or preprocess == "none":
        shape = f"(B, {channels}, {size}, {size})"
        how = _NORMALISE[image.normalise]
        return f"`films` is float32 {shape}: grey in [0, 1] with black = 0, then normalised by {how}."
    side = f"{size}, {size}" if preprocess == "normalise" else "H, W"
    resized = " Any height and width: the graph squashes them." if preprocess == "resize" else ""
    return (
        f"`films` is float32 (B, 1, {side}), grey in [0, 1] with black = 0; the graph normalises them itself.{resized}"
    )


def _cannot_say(image: ImageConfig, form: str) -> str:
    if form not in ("timm", "hf"):
        return ""
    lines = []
    if image.normalise == "film":
        where = "`preprocessor_config.json` of transformers" if form == "hf" else "timm's `pretrained_cfg`"
        lines.append(
            f"- {where} has constants only: it cannot say that each film is normalised by itself. Resize, then:\n\n"
            f"```python\n{_FILM}```"
        )
    if image.fit != "squash":
        lines.append(f"- Films are made square by {image.fit}; the processors of other libraries squash. Do it before.")
    lines.append("- Films with 16 bits and DICOM must be brought to [0, 1] first; image processors divide by 255.")
    return "## What this format cannot say\n\n" + "\n".join(lines)
