"""Output files: whole or not at all, and nothing replaced that is no file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from zbsolve.errors import InputError
from zbsolve.files.atomic import is_special, write_atomically, write_text_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The writer dies halfway: the old text stays and no temporary file is left."""
    path = tmp_path / "x.txt"
    path.write_text("old")

    def half(temporary: Path) -> None:
        temporary.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(path, half)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.txt", "old")]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The file that a link points to is written, also where it is not there yet."""
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/real")
    for text in ("one", "two"):
        write_text_atomically(link, text)
        assert link.is_symlink()
        assert (folder / "real").read_text() == text


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """What a reader of a named pipe gets is the text; the pipe is still a pipe afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert is_special(pipe)
    # Non-blocking: a pipe that nobody writes to gives an empty text instead of a hanging test.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=write_text_atomically, args=(pipe, "text"), daemon=True)
    writer.start()
    writer.join(timeout=30)
    try:
        got = os.read(reader, 100).decode()
    finally:
        os.close(reader)
    assert got == "text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """One line: the path, the reason, what to do."""
    with pytest.raises(InputError, match=r"x\.txt: cannot be written .*: choose another place"):
        write_text_atomically(tmp_path / "absent" / "x.txt", "text")
