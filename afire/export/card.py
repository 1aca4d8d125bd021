"""The pages of an export: the model card of a bundle, and the README of other formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from afire._version import __version__
from afire.config import Config, ImageConfig
from afire.export.formats import Format, Preprocess
from afire.export.verify import TOLERANCE
from afire.methods import method_type
from afire.weights import RANDOM, Weights
from afire.weights.bundle import DETECTOR, ENCODER, Holds

_FILM = """std, mean = torch.std_mean(images, dim=(1, 2, 3), correction=0, keepdim=True)
images = (images - mean) / std.clamp_min(1e-3)
"""
_OPEN = {
    "timm": """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True, num_classes=0).eval()
tokens = model.forward_features(images)[:, 1:]  # (B, L, D); the class token stands first
""",
    "hf": """from transformers import ViTModel

model = ViTModel.from_pretrained("FOLDER", add_pooling_layer=False).eval()
tokens = model(pixel_values=images).last_hidden_state[:, 1:]  # (B, L, D); the class token stands first
""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
tokens, embedding = session.run(["tokens", "embedding"], {"images": images})  # float32; (B, L, D) and (B, D)
""",
    "torch": """import torch

model = torch.export.load("FOLDER/encoder.pt2").module()
tokens, embedding = model(images)  # (B, L, D) and (B, D)
""",
}
_NORMALISE = {
    "imagenet": "ImageNet's mean and std (averaged over its channels where there is one), as in `preprocessing.json`",
    "none": "nothing: films stay in [0, 1]",
    "film": "the mean and standard deviation of each film by itself",
}


def format_readme(
    backbone: Weights, form: Format, preprocess: Preprocess, detector: Mapping[str, Any] | None = None
) -> str:
    """The text of ``README.md`` of an export to another library."""
    image = backbone.config.image
    sections = [
        f"# {backbone.name} for {form.backend}",
        _encoder_readme(backbone, form) if backbone.holds_vit else "",
        "" if detector is None else _detector_readme(detector),
        "## Input\n\n" + _input(image, form.name, preprocess),
        _cannot_say(image, form.name),
        "`sample/` holds a drawn film, no patient's, with the input and the outputs afire gives for it; "
        "`preprocessing.json` says how a film becomes the input.",
        "Research software, not a medical device.\n",
    ]
    return "\n\n".join(section for section in sections if section)


def _encoder_readme(backbone: Weights, form: Format) -> str:
    return (
        f"The encoder of `{backbone.name}` (hash `{backbone.hash[:16]}`), exported by afire {__version__}.\n\n"
        f"```python\n{_OPEN[form.name]}```"
    )


def _detector_readme(detector: Mapping[str, Any]) -> str:
    threshold = "never" if detector["threshold"] is None else f"from a score of {detector['threshold']:.6g} on"
    scale, networks = detector["heat_scale"], detector["networks_hash"][:16]
    return f"""## Detector

The detector `{detector["method"]}` (hash of its networks `{networks}`), exported by afire {__version__}.

```python
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/detector.onnx")
score, p_value, heatmap = session.run(["score", "p_value", "heatmap"], {{"images": images}})
```

Larger scores are more abnormal ({detector["score"]}). At a false-alarm rate of {detector["false_alarms"]:g} a film
is flagged {threshold}, by {detector["calibration_films"]} normal films of `{detector["data"]}`. The heatmap
(B, rows, columns) is in sd of normal films: show nothing below {scale["low"]:.3g}, all from {scale["high"]:.3g} on.
The graph does not ask whether a film is of the kind it knows; afire does."""


def _input(image: ImageConfig, form: str, preprocess: Preprocess) -> str:
    size, channels = image.size, image.channels
    if form in ("timm", "hf") or preprocess == "none":
        shape = f"(B, {channels}, {size}, {size})"
        normalisation = _NORMALISE[image.normalise]
        return f"`images` is float32 {shape}: grey in [0, 1] with black = 0, then normalised by {normalisation}."
    side = f"{size}, {size}" if preprocess == "normalise" else "H, W"
    resized = " Any height and width: the graph squashes them." if preprocess == "resize" else ""
    return (
        f"`images` is float32 (B, 1, {side}), grey in [0, 1] with black = 0; the graph normalises them itself.{resized}"
    )


def _cannot_say(image: ImageConfig, form: str) -> str:
    if form not in ("timm", "hf"):
        return ""
    lines = []
    if image.normalise == "film":
        place = "`preprocessor_config.json` of transformers" if form == "hf" else "timm's `pretrained_cfg`"
        lines.append(
            f"- {place} has constants only: it cannot say that each film is normalised by itself. Resize, then:\n\n"
            f"```python\n{_FILM}```"
        )
    if image.fit != "squash":
        lines.append(f"- Films are made square by {image.fit}; the processors of other libraries squash. Do it before.")
    lines.append("- Films with 16 bits and DICOM must be brought to [0, 1] first; image processors divide by 255.")
    return "## What this format cannot say\n\n" + "\n".join(lines)


UNSPECIFIED = "unspecified: fill in"
_HUB_LICENCES = (
    "apache-2.0",
    "mit",
    "bsd-3-clause",
    "gpl-3.0",
    "cc0-1.0",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "cc-by-nc-4.0",
    "cc-by-nc-sa-4.0",
)
_DISCLAIMER = "Research software, not a medical device."


def card(name: str, about: Mapping[str, Any], config: Config, sizes: Mapping[str, int]) -> str:
    """The text of ``README.md``; ``sizes`` are the numbers of parameters of each component."""
    holds, detector = about["holds"], about["detector"]
    is_method = holds == "method"
    sections = [
        _front_matter(about["licence"], holds, config),
        f"# {name}\n\n**{_DISCLAIMER}** {_subject(about, config)} exported by afire {about['afire']}.",
        _use(holds, detector is not None, config),
        _data(about["source"]) if is_method else _detector_data(holds, detector),
        _settings(config, about["source"], sizes) if is_method else _detector_settings(config, about, sizes),
        _results(about["results"]),
        _detector(detector),
        _limits(config, holds),
        f"## Licence\n\n{about['licence']}\n\nThe weights' licence is the exporter's to state; films that a model was"
        " trained on may carry conditions of their own.",
        _files(list(sizes), detector is not None, config),
        f"{_DISCLAIMER}\n",
    ]
    return "\n\n".join(section for section in sections if section)


def _subject(about: Mapping[str, Any], config: Config) -> str:
    if about["holds"] == "method":
        by = method_type(config.method).__name__
        return f"A {_KINDS[config.encoder.kind]} for radiographs, pre-trained on normal films by {by} and"
    return f"A detector of abnormal radiographs, `{about['detector']['method']}`, fitted on normal films alone and"


_KINDS = {"vit": "vision transformer", "residual": "residual network"}


def _front_matter(licence: str, holds: Holds, config: Config) -> str:
    """Fields that a hub reads. A licence it has no name for is `other`."""
    tags = ["self-supervised-learning" if holds == "method" else "anomaly-detection"]
    tags += ["vision-transformer"] if holds != "detector" and config.encoder.kind == "vit" else []
    lines = ["library_name: afire", "tags:", "- chest-x-ray", *(f"- {tag}" for tag in tags)]
    if licence.lower() in _HUB_LICENCES:
        lines.append(f"license: {licence.lower()}")
    else:
        lines += ["license: other", f"license_name: {json.dumps(licence)}"]  # JSON strings are YAML strings
    return "\n".join(["---", *lines, "---"])


def _use(holds: Holds, detects: bool, config: Config) -> str:
    lines = [
        'model = afire.load("path/of/this/folder")    # or hf://owner/name',
        'images = model.read(["film.png"])            # PNG, JPEG, TIFF or DICOM -> (B, 1, S, S) in [0, 1]',
    ]
    if holds != "detector":
        lines.append("tokens = model.encode(images)                # (B, L, D)")
        lines.append("vector = model.embed(images)                 # (B, D), their mean")
    if detects:
        lines.append("found = model.detect(images)                 # found.score, found.p_value, found.heatmap")
    encoder_formats = "onnx|hf|timm|torch" if config.encoder.stem == "patch" else "onnx|torch"
    code, formats = "\n".join(lines), "onnx" if holds == "detector" else encoder_formats
    after = f"\n`afire export FOLDER --format {formats} --out OUT` turns it into the format of another library."
    after = after if holds == "detector" or config.encoder.kind == "vit" else ""
    after += "\n`afire detect run FILMS --model FOLDER --out OUT` scores a folder of films." if detects else ""
    return f"""## Use

```python
import afire

{code}
```

`afire verify FOLDER` recomputes the outputs for the sample film and says whether they are the exporter's.{after}"""


_NO_FILM = "No film and no name of a film is in this folder; the sample is drawn, no patient's."


def _data(source: Mapping[str, Any]) -> str:
    data = source.get("data") or {}
    if not data:
        return "## Data\n\nThe run did not say which films it was trained on."
    return (
        f"## Data\n\nPre-trained on **{data['used']:,} normal films** of {data['films']:,} in `{data['source']}`"
        f" (content hash `{str(data['hash'])[:16]}`), without labels other than normal. {_NO_FILM}"
    )


def _detector_data(holds: Holds, detector: Mapping[str, Any]) -> str:
    name = "random weights" if detector["weights"] == RANDOM else f"`{detector['weights']}`"
    networks = "Its encoder is that of" if holds == "encoder" else "Its networks started from"
    return (
        f"## Data\n\nFitted on **{detector['fitted_on']} normal films** of {detector['films']} in `{detector['data']}`"
        f" (content hash `{str(detector['data_hash'])[:16]}`), without labels other than normal. {networks} {name}."
        f" {_NO_FILM}"
    )


def _settings(config: Config, source: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    summary, recipe = source.get("summary") or {}, config.training
    rows = {
        "input": _input_row(config),
        "encoder": _encoder_row(config),
        "numbers in each file": ", ".join(f"{name} {count:,}" for name, count in sizes.items()),
        **_method_rows(config),
        "recipe": f"{recipe.epochs} epochs, batch {recipe.batch_size} on {summary.get('processes', 1)} process(es), "
        f"learning rate {recipe.learning_rate:g} per 256, seed {config.seed}",
        "run": f"`{source.get('run')}`, step {source.get('step')} of {summary.get('steps', 'unknown')}, "
        f"{summary.get('status', 'not finished')}",
        "health at the end": ": ".join(summary.get("health") or ["unknown"]),
        "trained with": _versions(source.get("trained_with") or {}),
    }
    return _all_settings(rows)


def _detector_settings(config: Config, about: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """What a detector was fitted with; the recipe of the networks it may have started from is not its own."""
    detector, settings = about["detector"], about["detector"]["settings"]
    groups = {name: settings[name] for name in (detector["method"], "train") if name in settings}
    size = config.image.size
    plain = {"input": f"{size} x {size} px, grey in [0, 1], {config.image.fit}"}
    rows = {
        **({"input": _input_row(config), "encoder": _encoder_row(config)} if sizes else plain),
        "numbers of its networks": f"{detector['networks_numbers']:,}",
        **{name: ", ".join(f"{key} {value}" for key, value in group.items()) for name, group in groups.items()},
        "seed": str(settings["seed"]),
        "fitted with": _versions(detector["fitted_with"]),
    }
    return _all_settings(rows)


def _all_settings(rows: Mapping[str, str]) -> str:
    return "## Settings\n\nAll of them are in `config.json`.\n\n" + _table(("", ""), list(rows.items()))


def _input_row(config: Config) -> str:
    image = config.image
    return f"{image.size} x {image.size} px, {image.channels} channel, {image.fit}, normalise {image.normalise}"


def _encoder_row(config: Config) -> str:
    encoder = config.encoder
    if encoder.kind == "residual":
        return f"residual network, width {encoder.width}, depth {encoder.depth}, patch {encoder.patch_size}"
    return (
        f"width {encoder.width}, depth {encoder.depth}, heads {encoder.heads}, patch {encoder.patch_size}"
        f"{' by a convolutional stem' if encoder.stem == 'conv' else ''}, {encoder.positions} positions"
    )


def _versions(origin: Mapping[str, Any]) -> str:
    changed = " with changes" if origin.get("changed") else ""
    return (
        f"afire {origin.get('afire')}, torch {origin.get('torch')}, commit `{str(origin.get('commit'))[:12]}`{changed}"
    )


def _method_rows(config: Config) -> dict[str, str]:
    """Settings that only some methods read."""
    sections, rows = method_type(config.method).sections, {}
    if "losses" in sections and "head" in sections:
        terms = ("structure", "category", "restoration", "lesion")
        weights = ", ".join(f"{name} {getattr(config.losses, name):g}" for name in terms)
        head = f"head {config.head.form}, K = {config.head.clusters}"
        rows["losses"] = f"{weights}; tau {config.losses.temperature:g}; {head}"
    if config.options:
        rows["options"] = ", ".join(f"{name} {value}" for name, value in config.options.items())
    return rows


def _results(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "## Measured results\n\nNone were given to the export (`--results DIR`). Measure before use."
    rows = []
    for row in results:
        numbers = "; ".join(f"{name} {_estimate(value)}" for name, value in row["metrics"].items())
        labels = ", ".join(row["labels"][:4]) + (", ..." if len(row["labels"]) > 4 else "")
        rows.append(
            (
                f"{row['task']} ({row['method']})",
                f"{row['data']}, {row['test_films']} test films{_cautions(row)}",
                labels,
                f"{100 * row['fraction']:g} %",
                numbers,
            )
        )
    head = "Mean ± sd over runs, and the 95 % interval over test patients where they are known."
    return f"## Measured results\n\n{head}\n\n" + _table(("task", "data", "labels", "labels used", "metrics"), rows)


def _cautions(row: Mapping[str, Any]) -> str:
    """What a reader of a number must know about its test films; results of earlier versions do not say it."""
    over, record = row.get("drawn_over", "test patients"), row.get("seen", {}).get("pretraining", {})
    note = "" if over == "test patients" else f"; interval over {over}"
    return f"{note}; **{record['seen']:,} seen in pre-training**" if record.get("seen") else note


def _estimate(value: Mapping[str, float | None]) -> str:
    if value["mean"] is None:
        return "unknown"
    spread = "" if value["sd"] is None else f" ± {value['sd']:.3f}"
    interval = "" if value["low"] is None else f" [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value['mean']:.3f}{spread}{interval}"


def _detector(detector: Mapping[str, Any] | None) -> str:
    if detector is None:
        return ""
    threshold = "none" if detector["threshold"] is None else f"{detector['threshold']:.4g}"
    notes = "".join(f"\n\nNote: {note}." for note in detector["notes"])
    return (
        f"## Detector\n\n`model.detect(images)` gives each image a score ({detector['score']}; larger: more abnormal), "
        f"a p-value and a heatmap. Fitted on {detector['fitted_on']} normal films of `{detector['data']}`, calibrated"
        f" on {detector['calibration_films']} others: a false-alarm rate of {detector['false_alarms']:g} is reached at "
        f"a score of {threshold}. This holds for films from where those came from; fit it again for others.{notes}"
    )


def _limits(config: Config, holds: Holds) -> str:
    small = (
        "small findings" if holds == "detector" else f"findings smaller than a patch of {config.encoder.patch_size} px"
    )
    return f"""## Limits

- For research. It has not been cleared for diagnosis, and no score of it should reach a patient.
- It knows films like those above: another age, projection, scanner or country is another distribution. Measure first.
- Films are seen at {config.image.size} x {config.image.size} pixels; {small} there are easily lost.
- A model of normal films also finds what is rare and harmless: devices, markers, rotation, exposure.
- Weights learnt from films can be probed for age, sex and site; treat them as you would treat derived data."""


def _files(components: Sequence[str], has_detector: bool, config: Config) -> str:
    names = "in timm's names" + ("" if config.encoder.stem == "patch" else " but for its convolutional stem")
    names = names if config.encoder.kind == "vit" else "in afire's names"
    other_files = ", ".join(f"`{name}.safetensors`" for name in components if name != ENCODER)
    files = [
        f"`encoder.safetensors` ({names}: the one to use)" if ENCODER in components else "",
        f"{other_files} (what else the method has)" if other_files else "",
        f"`{DETECTOR}/` the detector with its networks, calibration and threshold" if has_detector else "",
        "`config.json` every setting",
        "`preprocessing.json` from a film to the input",
        "`sample/` a phantom film and the outputs for it (equal means within "
        f"{TOLERANCE:g} of the largest value, at least of 1)",
        "`manifest.json` the SHA-256 of every file",
    ]
    return "## Files\n\n" + ";\n".join(file for file in files if file) + "."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(entry).replace("|", "\\|") for entry in line) + " |" for line in lines)
