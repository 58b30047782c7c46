"""Interrupts during an answer: the first Ctrl-C stops the answer, a second one ends the program. SIGTERM (`kill`, `timeout`, a shutdown)
and SIGHUP (a closed terminal) stop the answer too; then the session is saved, and the signal is raised again with its default action.

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

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Signals within this time count as one: the shell and the kernel both send SIGHUP, `timeout` signals the program and its group.
ONE_SIGNAL_S = 1.0
_received: list[tuple[signal.Signals, float]] = []  # termination signals and their times (time.monotonic)


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed a second time: the program ends."""


class EndedBySignal(BaseException):
    """A signal stopped an answer; the session is saved, and the program ends."""

    def die(self) -> int:
        """End the process by the signal. Returns the exit code that a shell would show, if the process survives."""
        (number, _), *_ = _received
        _received.clear()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return 128 + number


@contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """A context in which Ctrl-C and termination signals call `cancel`.

    The second Ctrl-C raises SecondInterrupt, also if both came during one long forward pass. After a termination signal the caller saves
    what it has, and calls `exit_if_terminated`; another one more than ONE_SIGNAL_S later ends the program at once, even while a session is
    saved. Ignored signals (`nohup`) stay ignored.
    """
    count = 0
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        previous_count, count = count, count + (new := presses())
        if previous_count == 0 < new:
            cancel()
        if new and count > 1:
            raise SecondInterrupt

    def on_end(signum: int, frame: FrameType | None) -> None:
        if _received and time.monotonic() - _received[0][1] > ONE_SIGNAL_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        _received.append((signal.Signals(signum), time.monotonic()))
        _redirect_to_null([item for item in terminals if not os.isatty(item)])
        cancel()

    previous_handler = signal.getsignal(signal.SIGINT)
    handled = [item for item in TERMINATION_SIGNALS if signal.getsignal(item) == signal.SIG_DFL]
    with _interrupt_counter() as presses:
        try:
            signal.signal(signal.SIGINT, on_interrupt)
            for item in handled:
                signal.signal(item, on_end)
            yield
        finally:
            signal.signal(signal.SIGINT, previous_handler)
            for item in handled if not _received else ():
                signal.signal(item, signal.SIG_DFL)


@contextmanager
def _interrupt_counter() -> Iterator[Callable[[], int]]:
    """A context that yields a function which counts the Ctrl-Cs since its last call. A signal handler cannot count them: a forward pass is
    one native call, after which Python calls the handler once for all signals of a kind. The wakeup descriptor gets a byte for each."""
    read_end, write_end = os.pipe()
    for descriptor in (read_end, write_end):
        os.set_blocking(descriptor, False)

    def new_interrupts() -> int:
        try:
            return os.read(read_end, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield new_interrupts
    finally:
        signal.set_wakeup_fd(previous)
        os.close(read_end)
        os.close(write_end)


def _redirect_to_null(descriptors: list[int]) -> None:
    """Redirect the descriptors of a closed terminal to the null device, so that writes do not fail while a session is saved."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(null, descriptor)
        os.close(null)


def termination_signal() -> str:
    """The name of the termination signal that stopped an answer; empty if none did."""
    return _received[0][0].name if _received else ""


def exit_if_terminated() -> None:
    """Raises EndedBySignal if a termination signal stopped an answer; to be called when everything is saved."""
    if _received:
        raise EndedBySignal


@contextmanager
def without_echo(stream: TextIO) -> Iterator[None]:
    """A context in which the terminal does not echo, also after Ctrl-Z and `fg`; typed characters wait for the next prompt. Does nothing if
    `stream` is no terminal."""
    if not stream.isatty():
        yield
        return
    import termios

    descriptor = stream.fileno()
    attributes = termios.tcgetattr(descriptor)
    without_echo_attributes = [*attributes]
    without_echo_attributes[3] &= ~termios.ECHO

    def on_continue(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # in the background, setting the terminal would stop this process again
                termios.tcsetattr(descriptor, termios.TCSANOW, without_echo_attributes)

    previous_handler = signal.getsignal(signal.SIGCONT) or signal.SIG_DFL  # None if it was not installed from Python
    try:
        signal.signal(signal.SIGCONT, on_continue)
        termios.tcsetattr(descriptor, termios.TCSANOW, without_echo_attributes)
        yield
    finally:
        signal.signal(signal.SIGCONT, previous_handler)
        with suppress(termios.error):  # a terminal that is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, attributes)


def silence_unraisable() -> None:
    """Suppress Python's reports of exceptions in destructors, which come from library objects that Ctrl-C left unfinished. A Ctrl-C that
    arrives in a destructor would be lost: it is sent again, to the main thread, because only a real signal interrupts a blocking call."""

    def on_unraisable(report: Any) -> None:
        if issubclass(report.exc_type, KeyboardInterrupt):
            from threading import Timer, main_thread

            timer = Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT))  # at once, it would be lost in here too
            timer.daemon = True
            timer.start()

    sys.unraisablehook = on_unraisable
