"""The command line's manners: quick help, one message for a mistake, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from afire import cli
from afire._version import __version__
from afire.cli import app


def afire(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def all_commands() -> list[list[str]]:
    commands: list[list[str]] = []

    def walk(command: object, path: list[str]) -> None:
        below = getattr(command, "commands", None)
        if below:
            for name, child in below.items():
                walk(child, [*path, name])
        else:
            commands.append(path)

    walk(get_command(app), [])
    return commands


def test_version() -> None:
    assert afire("--version").stdout == f"afire {__version__}\n"


def test_help_needs_neither_torch_nor_pandas() -> None:
    code = (
        "import sys\n"
        "from afire.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'pydantic', 'matplotlib', 'sklearn', 'scipy', 'pydicom', 'pynetdicom'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import afire.data.pack\n"
        "assert 'torch' not in sys.modules, 'each process that packs would wait for it'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    known = get_command(app)
    for name in command:
        known = known.commands[name]  # type: ignore[attr-defined]
    words = " ".join(command).replace("shenzhen", "lungmasks")  # two names of one command
    assert f"Example: [cyan]afire {words}" in (known.help or "")


def test_unknown_command_is_a_usage_error() -> None:
    assert afire("nonsense").returncode == 2


def test_wrong_choice_names_the_allowed_ones() -> None:
    done = afire("config", "--preset", "enormous", COLUMNS="200")
    assert done.returncode == 2 and "tiny" in done.stderr and "Traceback" not in done.stderr


def test_config_prints_what_it_reads(tmp_path: Path) -> None:
    first = afire("config", "--preset", "tiny", "--set", "training.epochs=2")
    (tmp_path / "c.yaml").write_text(first.stdout)
    second = afire("config", "--config", str(tmp_path / "c.yaml"))
    assert first.returncode == 0 and first.stdout == second.stdout
    third = afire("config", "--preset", "tiny", "--set", "training.epochs=2", "--out", str(tmp_path / "d.yaml"))
    assert third.returncode == 0 and (tmp_path / "d.yaml").read_text() == first.stdout


def test_a_users_mistake_is_one_line_on_standard_error() -> None:
    done = afire("config", "--set", "nonsense=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: unknown setting nonsense")


@pytest.mark.skipif(not hasattr(os, "geteuid") or not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_message() -> None:
    code = (
        "import errno, sys\nimport afire.cli as cli\n"
        "@cli.app.command('fill')\n"
        "def fill() -> None:\n    raise OSError(errno.ENOSPC, 'No space left on device', '/data/out')\n"
        "sys.argv = ['afire', 'fill']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("below", ["", "below", "below/it"])
def test_an_out_that_is_a_file_is_a_message(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = afire("config", "--out", str(tmp_path / "file" / below / "settings.yaml"))
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("a file is where a folder is needed: choose another path.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("detect", "run", "", "--out", "o"), "error: an argument is empty; give a path"),
        (("detect", "run", "films", "--out", ""), "error: --out is empty; give a path"),
        (("data", "stats", "--data="), "error: --data is empty; give a path"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "afire", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_every_option_that_takes_a_path_is_among_them() -> None:
    known = cli._PATHS | {"--labels"}
    for command in all_commands():
        found = get_command(app)
        for name in command:
            found = found.commands[name]  # type: ignore[attr-defined]
        for option in found.params:
            if option.param_type_name == "option" and "Path" in str(option.bare_type()):  # type: ignore[attr-defined]
                assert known.intersection(option.opts), f"{' '.join(command)}: {option.opts}"


def test_an_empty_text_is_a_text() -> None:
    done = afire("data", "build", "csv", "--root", "nowhere", "--csv", "t.csv", "--out", "o.csv", "--path-prefix", "")
    assert "root nowhere does not exist" in done.stderr


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt(), "interrupted: the same"), (typer.Exit(130), "")])
def test_ctrl_c_says_how_to_go_on(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = typer.Typer()

    @small.command()
    def work() -> None:
        raise error

    monkeypatch.setattr(cli, "app", small)
    monkeypatch.setattr(sys, "argv", ["afire"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    errors = capsys.readouterr().err.strip()
    assert errors.startswith(said) and (said or not errors)
