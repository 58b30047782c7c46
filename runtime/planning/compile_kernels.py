"""Compiling the kernels that a job needs, and checking that this processor can run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import DoesNotFit, UsageError
from ..events import Progress

if TYPE_CHECKING:
    from ..prepare import Prepared


def check_before_compiling(kinds: Sequence[str], prepare: Callable[[], Prepared]) -> None:
    """Report errors of a request, by rehearsing its plan with `prepare`, before kernels are compiled for it; except for memory, which is
    measured with them. Does nothing if everything is compiled."""
    from ...kernels import warm

    if not warm.is_cold(kinds):
        return
    with suppress(DoesNotFit):
        prepared = prepare()
        for opened in (prepared, prepared.speculation.draft):
            if opened is not None:
                opened.store.close()


def compile_needed(kinds: Sequence[str]) -> Iterator[Progress]:
    """Compile missing kernels of `kinds` (`warm.KINDS`). Raises UsageError for a forced target that this processor cannot run, since its
    first kernel would kill the process silently."""
    from ...kernels import target_check, warm

    if warm.is_cold(kinds):
        for done, total in warm.warm(kinds):
            yield Progress("compiling kernels (once, then cached)", done, total, "kernels")
    elif warm.cache_folder() is None:  # compiled in this process, for this run only
        for done, total in warm.load_each(kinds):
            yield Progress("compiling kernels (not cached)", done, total, "kernels")
    if (target := target_check.forced_target()) and not target_check.target_runs(kinds):
        raise UsageError(f"{target}: this processor lacks instructions of that target",
                         "unset it, and kernels are compiled for this processor")
