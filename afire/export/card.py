"""The facts of a bundle and the pages that tell them: the model card and the README of other formats.

Facts are those of the run, its films and its end, of measured results and of the detector. Nothing that names a person,
a machine or a path on it goes into a bundle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afire._version import __version__
from afire.config import Config, ImageConfig
from afire.detect.base import AnomalyDetector, load_detector
from afire.errors import UserError
from afire.export.formats import Format, Preprocess
from afire.export.verify import TOLERANCE
from afire.files import read_json
from afire.methods import method_type
from afire.tasks.results import Result, find_results, read_result
from afire.training.run_folder import DATA, ENVIRONMENT, STATE, SUMMARY
from afire.weights import BundleWeights, RunWeights, Weights
from afire.weights.bundle import ENCODER
from afire.weights.files import tensor_hash

_SUMMARY = ("status", "step", "steps", "epoch", "losses", "health", "parameters", "processes", "bad_films")
_DATA = ("source", "films", "used", "hash")


def source_facts(weights: Weights) -> dict[str, Any]:
    """Where weights come from: a run's data, counts, end and environment; those of a bundle are passed on."""
    if isinstance(weights, BundleWeights):
        return dict(weights.bundle.about["source"])
    assert isinstance(weights, RunWeights)  # others hold no method
    run, state = weights.run, weights.file.parent / STATE
    environment = _read_if_there(run / ENVIRONMENT)
    git = environment.get("git") or {}
    return {
        "run": run.resolve().name,
        "step": _read_if_there(state).get("step"),
        "data": _chosen(_read_if_there(run / DATA), _DATA),
        "summary": _chosen(_read_if_there(run / SUMMARY), _SUMMARY),
        "trained_with": {
            "afire": environment.get("afire"),
            "commit": git.get("commit"),
            "changed": git.get("changed"),
            "torch": (environment.get("packages") or {}).get("torch"),
            "started": environment.get("started"),
        },
    }


def measured(folders: Iterable[Path], weights: Weights) -> list[dict[str, Any]]:
    """Results in ``folders`` as rows of the card; those of other weights are refused."""
    trunks = (weights.method.trunk(network) for network in weights.method.networks)
    own = {weights.method_hash, *(tensor_hash(trunk.state_dict()) for trunk in trunks)}
    rows = []
    for folder in folders:
        for place in find_results(folder):
            result = read_result(place)
            if result.weights.get("hash") not in own:
                raise UserError(
                    f"the results in {place} were measured with other weights ({result.weights.get('name')}); "
                    "a card quotes only those of the weights in the bundle."
                )
            rows.append(_row(result))
    return rows


def _row(result: Result) -> dict[str, Any]:
    films = result.runs[0].films if result.runs else {}
    return {
        "task": result.task,
        "method": result.method,
        "data": result.data.get("name"),
        "labels": result.labels,
        "fraction": result.fraction,
        "runs": len(result.runs),
        "test_films": films.get("test"),
        "drawn_over": result.drawn_over,
        "seen": result.seen,
        "split_hash": result.split_hash,
        "metrics": {
            name: {key: _number(getattr(value, key)) for key in ("mean", "sd", "low", "high")}
            for name, value in result.metrics.items()
        },
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chosen(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _read_if_there(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return content


def find_detector(weights: Weights, asked: Path | None) -> AnomalyDetector | None:
    """The detector that was asked for, else the one that lies with the weights: in a bundle, or a detector's folder."""
    folder = asked or weights.detector
    return None if folder is None else load_detector(folder)


def check_origin(detector: AnomalyDetector, weights: Weights) -> None:
    """A bundle's detector was fitted from the bundle's weights, or is them."""
    fitted_from = detector.origin.get("weights") or {}
    if weights.method_hash not in (fitted_from.get("hash"), detector.weights_hash):
        raise UserError(
            f"the detector was fitted from other weights ({fitted_from.get('name')}) than {weights.name}; "
            "export those, or give the detector's folder itself in place of the run."
        )


def without_traces(detector: AnomalyDetector) -> AnomalyDetector:
    """Without the command and its paths, which are nobody else's business."""
    environment = detector.origin.get("environment") or {}
    kept = {name: environment[name] for name in ("afire", "python", "packages", "git") if name in environment}
    detector.origin = {**detector.origin, "environment": kept}
    return detector


def detector_facts(detector: AnomalyDetector) -> dict[str, Any]:
    """What ``config.json`` and the card say about it."""
    data = detector.origin.get("data") or {}
    threshold = detector.threshold if np.isfinite(detector.threshold) else None
    films = detector.origin.get("parts") or {}
    return {
        "method": detector.method,
        "score": detector.choice.name,
        "false_alarms": detector.false_alarms,
        "threshold": threshold,
        "calibration_films": len(detector.calibration),
        "fitted_on": films.get("fit"),
        "data": data.get("name"),
        "notes": detector.origin.get("notes") or [],
        "heat_scale": {"low": detector.scale.low, "high": detector.scale.high},
    }


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
        f"The encoder of `{backbone.name}` (hash `{backbone.hash[:16]}`), exported by afire {__version__}.",
        f"```python\n{_OPEN[form.name]}```",
        "" if detector is None else _detector_readme(detector),
        "## Input\n\n" + _input(image, form.name, preprocess),
        _cannot_say(image, form.name),
        "`sample/` holds a drawn film, no patient's, with the input and the outputs afire gives for it; "
        "`preprocessing.json` says how a film becomes the input.",
        "Research software, not a medical device.\n",
    ]
    return "\n\n".join(section for section in sections if section)


def _detector_readme(detector: Mapping[str, Any]) -> str:
    threshold = "never" if detector["threshold"] is None else f"from a score of {detector['threshold']:.6g} on"
    scale = detector["heat_scale"]
    return f"""## Detector

```python
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
        how = _NORMALISE[image.normalise]
        return f"`images` is float32 {shape}: grey in [0, 1] with black = 0, then normalised by {how}."
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
        where = "`preprocessor_config.json` of transformers" if form == "hf" else "timm's `pretrained_cfg`"
        lines.append(
            f"- {where} has constants only: it cannot say that each film is normalised by itself. Resize, then:\n\n"
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
    sections = [
        _front_matter(about["licence"]),
        f"# {name}\n\n**{_DISCLAIMER}** A vision transformer for radiographs, pre-trained on normal films by"
        f" {method_type(config.method).__name__} and exported by afire {about['afire']}.",
        _use(),
        _data(about["source"]),
        _settings(config, about["source"], sizes),
        _results(about["results"]),
        _detector(about.get("detector")),
        _limits(config),
        f"## Licence\n\n{about['licence']}\n\nThe weights' licence is the exporter's to state; films that a model was"
        " trained on may carry conditions of their own.",
        _files(list(sizes)),
        f"{_DISCLAIMER}\n",
    ]
    return "\n\n".join(section for section in sections if section)


def _front_matter(licence: str) -> str:
    """Fields that a hub reads. A licence it has no name for is `other`."""
    lines = ["library_name: afire", "tags:", "- chest-x-ray", "- self-supervised-learning", "- vision-transformer"]
    if licence.lower() in _HUB_LICENCES:
        lines.append(f"license: {licence.lower()}")
    else:
        lines += ["license: other", f"license_name: {json.dumps(licence)}"]  # JSON strings are YAML strings
    return "\n".join(["---", *lines, "---"])


def _use() -> str:
    return """## Use

```python
import afire

model = afire.load("path/of/this/folder")    # or hf://owner/name
images = model.read(["film.png"])            # PNG, JPEG, TIFF or DICOM -> (B, 1, S, S) in [0, 1]
tokens = model.encode(images)                # (B, L, D)
vector = model.embed(images)                 # (B, D), their mean
```

`afire verify FOLDER` recomputes the outputs for the sample film and says whether they are those of the exporter.
`afire export FOLDER --format onnx|hf|timm|torch --out OUT` turns it into the format of another library."""


def _data(source: Mapping[str, Any]) -> str:
    data = source.get("data") or {}
    if not data:
        return "## Data\n\nThe run did not say which films it was trained on."
    return (
        f"## Data\n\nPre-trained on **{data['used']:,} normal films** of {data['films']:,} in `{data['source']}`"
        f" (content hash `{str(data['hash'])[:16]}`), without labels other than normal. No film and no name of a film"
        " is in this folder; the sample is drawn, no patient's."
    )


def _settings(config: Config, source: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    image, encoder = config.image, config.encoder
    summary, trained = source.get("summary") or {}, source.get("trained_with") or {}
    recipe, changed = config.training, " with changes" if trained.get("changed") else ""
    rows = {
        "input": f"{image.size} x {image.size} px, {image.channels} channel, {image.fit}, normalise {image.normalise}",
        "encoder": f"width {encoder.width}, depth {encoder.depth}, heads {encoder.heads}, patch {encoder.patch_size}, "
        f"{encoder.positions} positions",
        "numbers in each file": ", ".join(f"{name} {count:,}" for name, count in sizes.items()),
        **_method_rows(config),
        "recipe": f"{recipe.epochs} epochs, batch {recipe.batch_size} on {summary.get('processes', 1)} process(es), "
        f"learning rate {recipe.learning_rate:g} per 256, seed {config.seed}",
        "run": f"`{source.get('run')}`, step {source.get('step')} of {summary.get('steps', 'unknown')}, "
        f"{summary.get('status', 'not finished')}",
        "health at the end": ": ".join(summary.get("health") or ["unknown"]),
        "trained with": f"afire {trained.get('afire')}, torch {trained.get('torch')}, commit "
        f"`{str(trained.get('commit'))[:12]}`{changed}",
    }
    return "## Settings\n\nAll of them are in `config.json`.\n\n" + _table(("", ""), list(rows.items()))


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
    over, seen = row.get("drawn_over", "test patients"), row.get("seen", {}).get("pretraining", {})
    known = "" if over == "test patients" else f"; interval over {over}"
    return f"{known}; **{seen['seen']:,} seen in pre-training**" if seen.get("seen") else known


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


def _limits(config: Config) -> str:
    return f"""## Limits

- For research. It has not been cleared for diagnosis, and no score of it should reach a patient.
- It knows films like those above: another age, projection, scanner or country is another distribution. Measure first.
- Films are seen at {config.image.size} x {config.image.size} pixels; findings smaller than a patch of \
{config.encoder.patch_size} px there are easily lost.
- A model of normal films also finds what is rare and harmless: devices, markers, rotation, exposure.
- Self-supervised weights can be probed for age, sex and site; treat them as you would treat derived data."""


def _files(components: Sequence[str]) -> str:
    others = ", ".join(f"`{name}.safetensors`" for name in components if name != ENCODER)
    return f"""## Files

`encoder.safetensors` (in timm's names: the one to use), {others} (what else the method has);
`config.json` every setting; `preprocessing.json` from a film to the input; `sample/` a phantom film and the outputs
for it (equal means within {TOLERANCE:g} of the largest value, at least of 1); `manifest.json` the SHA-256 of every
file."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(entry).replace("|", "\\|") for entry in line) + " |" for line in lines)
