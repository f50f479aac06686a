"""The application, the rule that turns errors into one line and an exit code, and the consoles."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from zbsolve.errors import EnvironmentFailedError, ZbsolveError

if TYPE_CHECKING:
    from rich.console import Console


logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="zbsolve",
    help="Pipeline-parallel schedules: solved exactly, certified, run on torch, predicted against measured.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

P = ParamSpec("P")


def _set_verbose(value: bool) -> bool:
    if value:
        logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(name)s: %(message)s")
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
    return value


def command(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command: errors become one line and an exit code, ``--verbose`` adds the traceback."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            verbose = bool(kwargs.pop("verbose", False))
            try:
                function(*args, **kwargs)
                sys.stdout.flush()
            except ZbsolveError as error:
                if verbose:
                    logger.exception("where it happened")
                typer.echo(f"zbsolve: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(error.exit_code) from None
            except KeyboardInterrupt:
                typer.echo("zbsolve: interrupted", err=True)
                raise typer.Exit(EXIT_INTERRUPTED) from None
            except BrokenPipeError:
                # The reader (head, less) has what it wanted; keep the interpreter's last flush quiet too.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except MemoryError:
                if verbose:
                    logger.exception("where it happened")
                typer.echo("zbsolve: not enough memory: use fewer micro-batches or stages", err=True)
                raise typer.Exit(EnvironmentFailedError.exit_code) from None
            except OSError as error:
                if verbose:
                    logger.exception("where it happened")
                place = f"{error.filename}: " if error.filename else ""
                typer.echo(f"zbsolve: {place}{error.strerror or error}: nothing was overwritten", err=True)
                raise typer.Exit(EnvironmentFailedError.exit_code) from None

        signature = inspect.signature(function, eval_str=True)
        option = inspect.Parameter(
            "verbose",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option("--verbose", callback=_set_verbose, help="Log details and show tracebacks."),
            ],
        )
        parameters = [*signature.parameters.values(), option]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(run)
        return function

    return register


def _print_version(value: bool) -> None:
    if value:
        from zbsolve import __version__

        typer.echo(f"zbsolve {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def make_console(*, stderr: bool = False) -> Console:
    """A console that wraps tables at the terminal's width, and at 160 columns in files and pipes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, width=width, highlight=False)


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a changing line on stderr; silent where stderr is no terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield logger.info
        return
    from rich.markup import escape

    with console.status(escape(message)) as status:
        yield lambda text: status.update(escape(text))
