"""The application, the rule that turns errors into one line and an exit code, and the consoles."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from zbsolve.errors import EnvironmentFailedError, InputError, ZbsolveError
from zbsolve.words import alike

if TYPE_CHECKING:
    from rich.console import Console


logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

# The base of typer's errors about usage, which typer exports under no name of its own.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]


class OneLineGroup(TyperGroup):
    """Errors about usage, several lines in typer, are one line and exit 2 like those about input."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that the arguments name, and exit."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _USAGE_ERROR as error:
            typer.echo(_usage_line(error), err=True)
            code = InputError.exit_code
        except typer.Abort:
            typer.echo("zbsolve: interrupted", err=True)
            code = EXIT_INTERRUPTED
        sys.exit(code)


def _usage_line(error: Any) -> str:
    """What is wrong and where to read on."""
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    text = text[:1].lower() + text[1:] + _meant(text)
    if error.ctx is None:
        return f"zbsolve: {text}"
    command = f"{error.ctx.info_name}: " if error.ctx.parent is not None else ""
    return f"zbsolve: {command}{text}: see {error.ctx.command_path} --help"


def _meant(complaint: str) -> str:
    """Which of the choices may have been meant by one that is none."""
    found = re.search(r"'([^']*)' is not one of ('.*')", complaint)
    close = alike(found[1], re.findall(r"'([^']*)'", found[2])) if found else ""
    return f" (did you mean {close}?)" if close else ""


app = typer.Typer(
    name="zbsolve",
    cls=OneLineGroup,
    help="Pipeline-parallel schedules: solved exactly, certified, run on torch, predicted against measured.",
    invoke_without_command=True,
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


def _in_any_case(parameter: inspect.Parameter) -> inspect.Parameter:
    """Choices are taken however they are capitalised."""
    for words in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(words, (OptionInfo, ArgumentInfo)):
            words.case_sensitive = False
    return parameter


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
        parameters = [_in_any_case(parameter) for parameter in (*signature.parameters.values(), option)]
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
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(InputError.exit_code)


def say_interrupted() -> None:
    """What Ctrl-C left, on stderr: the results that follow are not those of a whole search."""
    typer.echo("zbsolve: interrupted: this is the best plan found until then", err=True)


def echo_json(data: Any) -> None:
    """JSON data on stdout."""
    typer.echo(json.dumps(data, indent=1))


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
