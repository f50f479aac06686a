"""``playground``: the local web page."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from zbsolve.cli.base import command
from zbsolve.errors import EnvironmentFailedError, InputError


@command("playground")
def playground_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve a page to try schedules and solve live.

    Only this machine can reach it unless --host says otherwise: then anyone who can may use the processor.
    Ctrl-C ends it.
    """
    try:
        import uvicorn

        from zbsolve.playground.app import create_app
    except ImportError as error:
        raise EnvironmentFailedError(
            f'{error.name} is not installed: pip install "zbsolve[playground]"'
        ) from None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # who follows the address before the server is up waits, and is not refused
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}): "
            "choose another (port 0: a free one)"
        ) from None
    local = host in ("127.0.0.1", "localhost")
    hosts = ("localhost", "127.0.0.1") if local else ("*",)
    shown = "127.0.0.1" if local else host
    url = f"http://{shown}:{listener.getsockname()[1]}/"
    if not local:
        typer.echo(f"zbsolve: {host} is open to others: whoever reaches it can use this machine", err=True)
    try:
        config = uvicorn.Config(create_app(hosts), log_level="warning", timeout_graceful_shutdown=2)
        typer.echo(f"playground: {url} (Ctrl-C ends it)")
        if open_browser:
            import webbrowser

            webbrowser.open(url)
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        typer.echo("playground ended", err=True)
