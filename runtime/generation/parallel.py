"""What `--parallel` demands of a run: a KV cache per slot, counted in the plan, and none of the features that work on a single sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.notes import Fallback
from ..speculation.drafts import PLACES_NBYTES

if TYPE_CHECKING:
    from ..prepare import EngineOptions

MOST = 64  # answers at once: more would wait for one another longer than in a line
# Options that are for one text at a time -> what they are without, the flag as it was given, and why it is not for several. Drafts from the
# text itself are not among them: a sequence has them while no other one writes.
ALONE = {"draft": (None, "--draft", "a draft model follows one sequence"),
         "kv_ram": (None, "--kv-ram", "the caches of parallel sequences stay in memory"),
         "disk": (None, "--disk", "the caches of parallel sequences stay in memory"),
         "kv_read": ("exact", "--kv-read sparse", "the caches of parallel sequences stay in memory"),
         "spec": ("auto", "--spec {}", "the drafting layer follows one sequence")}


def drafts_nbytes(texts: int) -> int:
    """Bytes of the n-gram lookup tables of each further slot."""
    return (texts - 1) * PLACES_NBYTES


def fitted(options: EngineOptions, notices: list[str]) -> EngineOptions:
    """The options as they hold for so many texts at once. Raises UsageError for what is for one text alone; where that stands in a person's
    settings, for all models, it is left out, with a notice."""
    if options.parallel == 1:
        return options
    if options.parallel > MOST:
        raise UsageError(f"--parallel {options.parallel} is more than {MOST} parallel slots", "use fewer: further requests are queued")
    for name, (without, flag, why) in ALONE.items():
        value = getattr(options, name)
        if value == without or value in ("off", "lookup"):
            continue
        said = f"{flag.format(value)} does not go with --parallel {options.parallel}: {why}"
        if name not in options.from_settings:
            raise UsageError(said, "leave one of them out")
        options = replace(options, **{name: without})
        notices.append(Fallback(f"{said}; ignored, since it is a setting for all models"))
    return options
