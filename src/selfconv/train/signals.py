"""SIGINT and SIGTERM as a wish to stop soon."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from selfconv.train.errors import Interrupted


class StopSignals:
    """Within the context, the first signal is noted in ``number``, and a second one acts at once.

    Args:
        insistent: whether a second signal does. Not in a process that hears of one Ctrl-C twice, from the
            terminal and from its parent.
    """

    def __init__(self, *, insistent: bool = True) -> None:
        self.number = 0
        self._insistent, self._at_once = insistent, False

    def _note(self, number: int, frame: FrameType | None) -> None:
        second, self.number = self.number != 0, self.number or number
        if self._at_once:
            self._at_once = False
            raise Interrupted("stopped", self.number)
        if second and self._insistent:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this one, a signal raises Interrupted, an earlier one too: for work that saves nothing."""
        self._at_once = True
        try:
            if self.number:
                raise Interrupted("stopped", self.number)
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> StopSignals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
