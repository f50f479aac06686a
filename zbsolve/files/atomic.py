"""Writing output files whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbsolve.errors import InputError


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it into place.

    A failure or Ctrl-C leaves what was there before, and no half-written file. A link stays a link: the file
    that it points to is replaced. A device or pipe (``/dev/stdout``) is written to, never replaced.
    """
    path = Path(path)
    special = is_special(path)
    target = path if special else path.resolve()
    folder = None if special else target.parent
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=path.suffix, dir=folder)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another place") from None
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        if special:
            with temporary.open("rb") as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            return
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether ``path`` leads to something that is neither a file nor a folder: a device, a pipe, a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    write_atomically(path, lambda temporary: _write(temporary, text))


def write_json_atomically(path: str | Path, data: Any) -> None:
    """Write JSON data for a person to read, whole or not at all."""
    write_text_atomically(path, json.dumps(data, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
