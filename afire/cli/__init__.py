"""The ``afire`` command. Commands import what they need when they run, so that ``--help`` needs no torch.

Knows options and screen output; knows no computation.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from itertools import pairwise

import typer

from afire.cli import benches, data, detect, export, figure, pretrain, samples, serve, studies, tasks
from afire.cli.options import EXAMPLE_STYLE, print_version
from afire.errors import UserError
from afire.processes import keep_freed_memory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Anatomy-driven self-supervised learning for radiographs: data, pre-training, tasks, evidence.",
    epilog="Research software, not a medical device.",
    context_settings=EXAMPLE_STYLE,
)
app.add_typer(data.app, name="data")
app.add_typer(samples.app, name="lesions")
app.command("pretrain")(pretrain.pretrain)
app.command("embed")(tasks.embed)
app.command("probe")(tasks.probe)
app.command("compare")(studies.compare)
app.command("finetune")(tasks.finetune)
app.command("segment")(tasks.segment)
app.add_typer(detect.app, name="detect")
app.command("serve")(serve.serve)
app.command("ablate")(studies.ablate)
app.command("baselines")(benches.baselines)
app.command("reproduce")(studies.reproduce)
app.add_typer(figure.app, name="figure")
app.command("export")(export.export)
app.command("verify")(export.verify)
app.command("push")(export.push)
app.command("config")(pretrain.config)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=print_version, is_eager=True),
) -> None:
    """Anatomy-driven self-supervised learning for radiographs: data, pre-training, tasks, evidence."""


def main() -> None:
    """Run the command line: 2 for a user's mistake and a message, 130 for Ctrl-C, a traceback only for a defect."""
    keep_freed_memory()
    try:
        _refuse_empty_paths(sys.argv[1:])
        app()
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _USERS_DISK:
            raise
        where = f" {error.filename}" if error.filename else ""
        _fail(f"cannot write or read{where}: {error.strerror}; {_USERS_DISK[error.errno]}.")
    except (KeyboardInterrupt, SystemExit) as error:
        if _is_interrupt(error):
            sys.stderr.write("interrupted: the same command with --resume, where it has one, goes on from here\n")
            sys.exit(_INTERRUPTED)
        raise
    finally:
        _leave_processes()


_INTERRUPTED = 130


def _is_interrupt(error: KeyboardInterrupt | SystemExit) -> bool:
    """Whether it was Ctrl-C, of which typer makes an exit without a word."""
    if isinstance(error, KeyboardInterrupt):
        return True
    cause = getattr(error.__context__, "__cause__", None)
    return error.code == _INTERRUPTED and isinstance(cause, KeyboardInterrupt)


_PATHS = {  # all options that take one; not --labels, which takes names as well
    *("--out", "--data", "--root", "--model", "--split", "--config", "--weights", "--init", "--normals", "--csv"),
    *("--results", "--spool", "--cache", "--detector", "--pretrain-data", "--disk", "--readers"),
    *("--train-list", "--val-list", "--test-list"),
    *("--tls-ca", "--tls-cert", "--tls-key", "--tls-key-password-file"),
    *("--send-ca", "--send-cert", "--send-key", "--send-key-password-file", "--send-password-file"),
}


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """An empty path means the current folder to Python, and a shell variable that is not set to a user."""
    for before, argument in pairwise(["", *arguments]):
        option = before if argument == "" else argument.removesuffix("=") if argument.endswith("=") else ""
        if option in _PATHS:
            raise UserError(f"{option} is empty; give a path (is a shell variable not set?).")
        if argument == "" and not before.startswith("-"):
            raise UserError("an argument is empty; give a path (is a shell variable not set?).")


def _leave_processes() -> None:
    """End the group of processes, if there is one: otherwise the interpreter may abort at its exit."""
    distributed = sys.modules.get("torch.distributed")  # not imported for it: most commands never load torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        from afire.nn.distributed import leave

        leave()


_USERS_DISK = {  # errors that are no defect of ours, and what helps
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions or choose another folder"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where a folder is needed: choose another path"),
    errno.EISDIR: "a folder is where a file is needed: choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _fail(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    sys.exit(2)
