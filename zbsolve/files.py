"""Writing output files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from zbsolve.errors import InputError


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it into place.

    A failure or Ctrl-C leaves what was there before, and no half-written file.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another place") from None
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    write_atomically(path, lambda temporary: _write(temporary, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
