"""The keyboard while a model answers: the first Ctrl-C asks the answer to end, a second one ends the program.

The handler only sets a flag, because it runs in the middle of whatever the main thread does; the session looks at the flag between
tokens and between chunks of a prompt, and ends the answer in order, with what was written kept.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


class Ended(KeyboardInterrupt):
    """Ctrl-C was pressed a second time: the program ends."""


@contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` at the first Ctrl-C. Raises Ended at the second."""
    pressed = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise Ended
        pressed = True
        cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unechoed(stream: TextIO) -> Iterator[None]:
    """Keep what is typed during an answer out of the answer; it waits for the next prompt. Nothing to do where `stream` is no terminal."""
    if not stream.isatty():
        yield
        return
    import termios

    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    changed = [*before]
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
