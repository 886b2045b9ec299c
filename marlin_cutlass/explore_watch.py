"""A watchdog over kernels: one that hangs on the GPU can only be ended with its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_S = 25.0  # without progress for so long, a kernel hangs
HUNG = 3  # exit status after a kernel hung


class Watchdog:
    """Ends the process when nothing happens for `seconds`: a GPU kernel that hangs cannot be
    stopped. `on_hang` is told what hung and saves."""

    def __init__(self, on_hang: Callable[[str], None], seconds: float = HANG_S) -> None:
        self._on_hang, self._seconds = on_hang, seconds
        self._what, self._since = "start", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __call__(self, what: str) -> None:
        self._what, self._since = what, time.monotonic()

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds / 10):
            if time.monotonic() - self._since > self._seconds:
                self._on_hang(self._what)
                return
