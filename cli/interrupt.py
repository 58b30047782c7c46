"""The keyboard while a model answers: the first Ctrl-C asks the answer to end, a second one ends the program.

The handler only sets a flag, because it runs in the middle of whatever the main thread does; the session looks at the flag between
tokens and between chunks of a prompt, and ends the answer in order, with what was written kept.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO


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


def falling_apart_quietly() -> None:
    """What Python writes of an exception that a destructor raised is for nobody: a library's object that Ctrl-C left half made falls apart.
    A Ctrl-C that arrived in a destructor itself was lost there, and is sent once more."""

    def on_unraisable(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            import _thread
            from threading import Timer

            again = Timer(0.01, _thread.interrupt_main)  # not now: it would be lost in here too
            again.daemon = True
            again.start()

    sys.unraisablehook = on_unraisable
