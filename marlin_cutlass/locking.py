"""One writer at a time for a folder, whatever happens to the writer."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, a file beside it; FileExistsError while another process has it.

    The kernel gives it back when its holder dies, however that happens. File systems without locks
    are used without one.
    """
    path = folder.with_name(f".{folder.name}.lock")
    handle = _acquire(path, folder)
    try:
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)


def _acquire(path: Path, folder: Path) -> int | None:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in _UNSUPPORTED:
                return None
            raise FileExistsError(f"{folder} is being written by another process") from None
        if _same_file(handle, path):
            return handle
        os.close(handle)  # its last holder has removed the file in the meantime


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
