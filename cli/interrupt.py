"""Interrupts during an answer: the first Ctrl-C stops the answer, a second one ends the program. SIGTERM (`kill`, `timeout`, a shutdown)
and SIGHUP (a closed terminal) stop the answer too; then the session is saved, and the program dies of the signal as it would have.

Handlers only set a flag, because they run in the middle of whatever the main thread does; the session checks it between tokens and prompt
chunks, and ends the answer cleanly, keeping its text."""

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
    """A signal stopped an answer; the session is saved, and the program ends."""

    def die(self) -> int:
        """Die of the signal; returns the exit code that a shell would show if that is impossible."""
        (number, _), *_ = _asked
        _asked.clear()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return 128 + number


@contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` at the first Ctrl-C, or at a signal, after which `end_if_asked` ends the program. Raises SecondInterrupt at the second
    Ctrl-C, also if both came during one long forward pass. A signal that comes more than ONE_SIGNAL_S after the first ends the program at
    once, even while a session is saved. Ignored signals (`nohup`) stay ignored."""
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
    """A function that counts Ctrl-Cs since its last call. A handler cannot: a forward pass is one native call, after which Python calls the
    handler once for all signals of a kind, while it writes a byte to the wakeup descriptor for each."""
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
    """Writes to lost terminals must not fail while a session is still to be saved."""
    with suppress(OSError):
        void = os.open(os.devnull, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(void, descriptor)
        os.close(void)


def asked_to_end() -> str:
    """The name of the signal that stopped an answer; empty if none did."""
    return _asked[0][0].name if _asked else ""


def end_if_asked() -> None:
    """Raises EndedBySignal if a signal stopped an answer; call it once everything is saved."""
    if _asked:
        raise EndedBySignal


@contextmanager
def without_echo(stream: TextIO) -> Iterator[None]:
    """Turn echo off during an answer, also after Ctrl-Z and `fg`; what is typed waits for the next prompt. Does nothing if `stream` is no
    terminal."""
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
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # in the background, setting the terminal would stop this process again
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
    """Suppress Python's reports of exceptions in destructors, from library objects that Ctrl-C left unfinished. A Ctrl-C that arrived in a
    destructor was lost, and is sent again, to the waiting thread, which a flag for the interpreter would leave waiting."""

    def on_unraisable(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            from threading import Timer, main_thread

            again = Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT))  # not now: it would be lost in here too
            again.daemon = True
            again.start()

    sys.unraisablehook = on_unraisable
