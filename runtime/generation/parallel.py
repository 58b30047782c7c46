"""What `--parallel` requires of a run: a KV cache per slot, counted in the plan, and no feature that works on a single sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.notes import Fallback
from ..speculation.drafts import TABLE_NBYTES

if TYPE_CHECKING:
    from ..prepare import EngineOptions

MAX_SLOTS = 64  # more answers at once would take longer than one after the other
# Option that works on a single sequence -> (its default, the flag, why it does not work on several). Prompt lookup is not listed: a
# sequence uses it while it is the only one.
SINGLE_SEQUENCE_OPTIONS = {"draft": (None, "--draft", "a draft model follows one sequence"),
         "kv_ram": (None, "--kv-ram", "the caches of parallel sequences stay in memory"),
         "disk": (None, "--disk", "the caches of parallel sequences stay in memory"),
         "kv_read": ("exact", "--kv-read sparse", "the caches of parallel sequences stay in memory"),
         "spec": ("auto", "--spec {}", "the drafting layer follows one sequence")}


def drafts_nbytes(slots: int) -> int:
    """Bytes of the n-gram lookup tables of each further slot."""
    return (slots - 1) * TABLE_NBYTES


def check_options(options: EngineOptions, notices: list[str]) -> EngineOptions:
    """Options as they apply to parallel slots.

    Raises UsageError for an option that works on a single sequence; one from a user's settings for all models is reset instead, with a
    notice.
    """
    if options.parallel == 1:
        return options
    if options.parallel > MAX_SLOTS:
        raise UsageError(f"--parallel {options.parallel} is more than {MAX_SLOTS} parallel slots", "use fewer: further requests are queued")
    for name, (default, flag, reason) in SINGLE_SEQUENCE_OPTIONS.items():
        value = getattr(options, name)
        if value == default or value in ("off", "lookup"):
            continue
        message = f"{flag.format(value)} does not go with --parallel {options.parallel}: {reason}"
        if name not in options.from_settings:
            raise UsageError(message, "leave one of them out")
        options = replace(options, **{name: default})
        notices.append(Fallback(f"{message}; ignored, since it is a setting for all models"))
    return options
