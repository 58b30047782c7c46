"""Kernels that a piece of work needs, compiled for this processor and able to run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import DoesNotFit, UsageError
from ..events import Progress

if TYPE_CHECKING:
    from ..prepare import Prepared


def check_before_compiling(kinds: Sequence[str], prepare: Callable[[], Prepared]) -> None:
    """What is wrong with a request, of which `prepare` rehearses the plan, is said before kernels are compiled for it; but for memory,
    which is weighed with them, and what hangs on it. Nothing is done where none would be compiled."""
    from ...kernels import warm

    if not warm.is_cold(kinds):
        return
    with suppress(DoesNotFit):
        prepared = prepare()
        for opened in (prepared, prepared.speculating.draft):
            if opened is not None:
                opened.store.close()


def compile_needed(kinds: Sequence[str]) -> Iterator[Progress]:
    """Compile what is cold of `kinds` (`warm.KINDS`). Raises UsageError where a target is forced that this processor cannot run: the first
    kernel would end the process without a word."""
    from ...kernels import target_check, warm

    if warm.is_cold(kinds):
        for done, total in warm.warm(kinds):
            yield Progress("compiling kernels (once, then kept)", done, total, "kernels")
    elif warm.cache_folder() is None:  # in this process, and so for this run alone
        for done, total in warm.load_each(kinds):
            yield Progress("compiling kernels (nothing keeps them)", done, total, "kernels")
    if (target := target_check.forced_target()) and not target_check.target_runs(kinds):
        raise UsageError(f"{target}: this processor lacks instructions of that target",
                         "unset it, and kernels are compiled for this processor")
