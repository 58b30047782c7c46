"""The keyboard while a model answers, and who ends the program from outside: the first Ctrl-C asks the answer to end, a second one ends
the program. SIGTERM (`kill`, `timeout`, a system that shuts down) and SIGHUP (a terminal that was closed) ask the answer to end too; then
what is kept of the conversation is saved, and the program dies of the signal as it would have.

The handlers only set a flag, because they run in the middle of whatever the main thread does; the session looks at the flag between
tokens and between chunks of a prompt, and ends the answer in order, with what was written kept.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP)
# A shell and the kernel both tell of a closed terminal, `timeout` tells the program and its group: seconds in which that is one signal.
ONE_SIGNAL_S = 1.0
_asked: list[tuple[signal.Signals, float]] = []  # what ended an answer, and when


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed a second time: the program ends."""


class EndedBySignal(BaseException):
    """A signal ended an answer, all that was to be kept is, and the program ends."""

    def die(self) -> int:
        """Die of the signal; returns the exit code that a shell would show where that is impossible."""
        (number, _), *_ = _asked
        _asked.clear()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return 128 + number


@contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` at the first Ctrl-C, or at a signal that ends the program, of which `end_if_asked` makes an end. Raises Ended at the
    second Ctrl-C, also where both came during one long pass; a signal from outside that comes later than ONE_SIGNAL_S after the first ends
    the program at once, also while a session is saved. A signal that is ignored (`nohup`) stays so."""
    pressed = 0
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        before, pressed = pressed, pressed + (new := presses())
        if before == 0 < new:
            cancel()
        if new and pressed > 1:
            raise SecondInterrupt

    def on_end(signum: int, frame: FrameType | None) -> None:
        if _asked and time.monotonic() - _asked[0][1] > ONE_SIGNAL_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        _asked.append((signal.Signals(signum), time.monotonic()))
        _silence([each for each in terminals if not os.isatty(each)])
        cancel()

    before = signal.getsignal(signal.SIGINT)
    heard = [each for each in FROM_OUTSIDE if signal.getsignal(each) == signal.SIG_DFL]
    with _counting() as presses:
        try:
            signal.signal(signal.SIGINT, on_interrupt)
            for each in heard:
                signal.signal(each, on_end)
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            for each in heard if not _asked else ():
                signal.signal(each, signal.SIG_DFL)


@contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    """Tells how often Ctrl-C was pressed since it was last asked. A handler cannot: a pass of a large model is one native call, behind
    which Python calls the handler once for all signals of a kind. But for each it writes a byte, at once."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)

    def presses() -> int:
        try:
            return os.read(reading, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield presses
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def _silence(descriptors: list[int]) -> None:
    """What is written to terminals that are gone may not fail: there is something to be kept first."""
    with suppress(OSError):
        void = os.open(os.devnull, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(void, descriptor)
        os.close(void)


def asked_to_end() -> str:
    """The name of the signal that ended an answer; empty if none did."""
    return _asked[0][0].name if _asked else ""


def end_if_asked() -> None:
    """Raises EndedFromOutside where a signal ended an answer: all that was to be kept is."""
    if _asked:
        raise EndedBySignal


@contextmanager
def without_echo(stream: TextIO) -> Iterator[None]:
    """Keep what is typed during an answer out of the answer, also after Ctrl-Z and `fg`; it waits for the next prompt. Nothing to do where
    `stream` is no terminal."""
    if not stream.isatty():
        yield
        return
    import termios

    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    changed = [*before]
    changed[3] &= ~termios.ECHO

    def on_continue(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # a terminal is another's in the background: to set it would stop this again
                termios.tcsetattr(descriptor, termios.TCSANOW, changed)

    shell_gave_it_back = signal.getsignal(signal.SIGCONT) or signal.SIG_DFL  # as the shell keeps it for itself
    try:
        signal.signal(signal.SIGCONT, on_continue)
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        yield
    finally:
        signal.signal(signal.SIGCONT, shell_gave_it_back)
        with suppress(termios.error):  # a terminal that is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def silence_unraisable() -> None:
    """What Python writes of an exception that a destructor raised is for nobody: a library's object that Ctrl-C left half made falls apart.
    A Ctrl-C that arrived in a destructor itself was lost there, and is sent once more: to the thread that waits, which a note for the
    interpreter would leave waiting until whatever it waits for has come."""

    def on_unraisable(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            from threading import Timer, main_thread

            again = Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT))  # not now: it would be lost in here too
            again.daemon = True
            again.start()

    sys.unraisablehook = on_unraisable
