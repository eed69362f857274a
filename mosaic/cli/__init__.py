"""The `mosaic` command: one file per subcommand, results on stdout, errors one line on stderr.

Exit codes: 0 done and fits, 3 a valid question whose answer is "does not fit", 2 usage,
130 interrupted and 143 terminated (`mosaic_dllm`), 1 anything else.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from copy import copy
from functools import cache
from typing import Any

import typer

from mosaic.cli import bench, calibrate, check, devices, generate, models, pack, plan, serve, show, warm
from mosaic.cli.output import degrade_output, note, noted_warnings
from mosaic.errors import MosaicError
from mosaic.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="mosaic",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mosaic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Plan a diffusion LLM to the byte: where every buffer goes, whether a request fits, how long a step takes."""


for command in (
    generate.generate,
    plan.plan,
    check.check,
    show.show,
    pack.pack,
    models.models,
    devices.devices,
    calibrate.calibrate,
    serve.serve,
    warm.warm,
):
    app.command()(command)
app.add_typer(bench.app)


@cache
def _command(commands: typer.Typer, name: str) -> Any:
    """The commands as Click objects, or only the named one: Typer takes some milliseconds for each.

    Without a callback of all commands, Typer treats a single one as the program itself, so the callback is kept.
    """
    asked = [command for command in commands.registered_commands if getattr(command.callback, "__name__", "") == name]
    if asked and commands.registered_callback is not None:
        commands = copy(commands)
        commands.registered_commands, commands.registered_groups = asked, []
    return typer.main.get_command(commands)


def main(commands: typer.Typer = app) -> None:
    """Run the command line; Mosaic's errors end as one line and their exit code."""
    degrade_output()
    try:
        try:
            with noted_warnings():
                _command(commands, "".join(sys.argv[1:2]))()
        finally:
            sys.stdout.flush()
    except MosaicError as error:
        note(str(error))
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        _abandon_stdout()  # the reader (head, less) has gone
        raise SystemExit(1) from None
    except OSError as error:
        _abandon_stdout()
        note(f"{error.filename or 'standard output'}: {error.strerror or error}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _abandon_stdout() -> None:
    """Keep the interpreter from complaining when it flushes stdout at exit."""
    with suppress(io.UnsupportedOperation):  # no descriptor if a caller captures the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
