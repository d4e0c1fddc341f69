"""The command line: one file per command group. The only place that imports runners and reports together.

This module and every command file import nothing heavy at the top, because `--help` must answer at once;
what a command needs is imported inside it.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from specbench import __version__
from specbench.cli import (
    crossover,
    demo,
    engines,
    lossless,
    machine,
    models,
    predict,
    report,
    run,
    selftest,
    workloads,
)
from specbench.errors import SpecbenchError

EXIT_PIPE = 141
"""As shells say that a pipe was closed: 128 + SIGPIPE."""

app = typer.Typer(
    name="specbench",
    help="Will speculative decoding pay off here, did it, and why not?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(run.run)
app.command()(report.report)
app.command()(predict.predict)
app.command()(crossover.crossover)
app.command()(lossless.lossless)
app.command()(selftest.selftest)
app.command()(machine.machine)
app.add_typer(engines.app, name="engines")
app.add_typer(models.app, name="models")
app.add_typer(workloads.app, name="workloads")


def _version(value: bool) -> None:
    if value:
        print(f"specbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Will speculative decoding pay off here, did it, and why not?"""


def main() -> None:
    """Run the command line; every expected error is one sentence on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without × or … must not end a run
    try:
        code = app(prog_name="specbench", standalone_mode=False)
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        _fail(_usage(error), 2)
    except SpecbenchError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; finished cells are kept.", 2)
    except ValueError as error:
        # The libraries below (workloads, models_roofline) have error types of their own.
        if type(error).__module__.split(".")[0] not in ("workloads", "models_roofline"):
            raise
        _fail(str(error), 2)
    except SystemExit:
        sys.exit(EXIT_PIPE)  # typer leaves this way, with 1, only where the reader of our output went away
    sys.exit(code or 0)


def _usage(error: TyperException) -> str:
    """A wrong flag or argument in one sentence, with where the right ones are listed."""
    said = " ".join(error.format_message().split()).rstrip(".?").replace("'. Did you", "'; did you")
    context = getattr(error, "ctx", None)
    return f"{said}; see `{context.command_path if context else 'specbench'} --help`."


LONGEST_SENTENCE = 1500
"""Characters of an error; names from a damaged file can be a hundred times as long."""


def _one_line(sentence: str) -> str:
    """The sentence as a terminal can show it: names from files may hold line ends and escape sequences."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    if len(shown) <= LONGEST_SENTENCE:
        return shown
    return f"{shown[: LONGEST_SENTENCE // 2]} … {shown[-LONGEST_SENTENCE // 2 :]}"


def _fail(sentence: str, code: int) -> None:
    print(f"specbench: {_one_line(sentence)}", file=sys.stderr)
    sys.exit(code)
