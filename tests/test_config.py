"""Settings: presets, YAML that round-trips, and mistakes answered in words."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from afire.cli import options
from afire.config import PRESETS, Config, Fit, Section, Voi
from afire.errors import UserError
from afire.settings import load_config, parse_override, to_yaml


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_yaml_round_trips(preset: str | None, tmp_path: Path) -> None:
    config = load_config(preset)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(file=path) == config


def test_every_setting_is_explained_in_the_yaml() -> None:
    for line in to_yaml(Config()).splitlines():
        assert "  # " in line, line


def test_order_is_default_preset_file_override(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("training: {epochs: 7, batch_size: 5}")
    config = load_config("small", path, ["training.batch_size=3"])
    assert (config.training.epochs, config.training.batch_size) == (7, 3)
    assert config.image.size == 128  # from the preset
    assert config.training.clip == Config().training.clip  # the default


def test_presets_are_the_methods() -> None:
    paper = load_config("paper")
    assert (paper.encoder.width, paper.encoder.depth, paper.encoder.patch_size, paper.image.size) == (768, 12, 16, 224)
    assert paper.head.form == "per_position" and paper.losses.temperature == 0.1 and paper.losses.lesion == 0
    assert paper.training.epochs == 800 and paper.lesions.views == 9 and paper.head.clusters == 256
    assert load_config("original").losses.category == 0
    assert load_config("small").head.form == "shared" and load_config("small").losses.temperature == 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("traning.epochs=3", "did you mean training?"),
        ("training.epoch=3", "did you mean training.epochs?"),
        ("epochs=3", "did you mean training.epochs?"),
        ("training.epochs=many", "training.epochs is 'many', but input should be a valid integer"),
        ("head.form=foo", "'shared' or 'per_position'"),
        ("image.size=225", "image.size 225 is not a multiple of encoder.patch_size 16"),
        ("encoder.heads=5", "width 768 is not a multiple of heads 5"),
        ("lesions.size_min=99", "size_min 99.0 is larger than size_max 64.0"),
        ("training=3", "training is a group of settings"),
        ("training.epochs", "is not key=value"),
        ("training.epochs=[", "is not a YAML value"),
        ("training.epochs=0", "greater than or equal to 1"),
    ],
)
def test_mistakes_are_messages(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(overrides=[override])
    assert message in str(error.value)


def test_numbers_without_a_dot_are_numbers() -> None:
    assert parse_override("training.learning_rate=1e-4") == {"training": {"learning_rate": 1e-4}}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML at line 1"), ("- 1\n- 2", "holds no settings"), (None, "does not exist")],
)
def test_broken_files_are_messages(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(file=path)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(file=tmp_path / "empty.yaml") == Config()


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean small"):
        load_config("smal")


def test_presets_only_say_what_exists() -> None:
    for name in PRESETS:
        raw = yaml.safe_load((Path(options.__file__).parents[1] / "presets" / f"{name}.yaml").read_text())
        assert set(raw) <= set(Config.model_fields)


def test_every_field_has_a_description() -> None:
    def check(section: type[Section]) -> None:
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                check(field.annotation)
            else:
                assert field.description, f"{section.__name__}.{name}"

    check(Config)


def test_the_clis_choices_are_the_configs() -> None:
    assert get_args(options.Fit) == get_args(Fit) and get_args(options.Voi) == get_args(Voi)
    [annotation, *_] = get_args(options.Preset)
    [named, _] = get_args(annotation)
    assert get_args(named) == PRESETS
