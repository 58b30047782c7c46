"""Per-text adapter scales, chosen before a prompt is read.

Cache contents depend on the scales and are never reused under others: changing them starts from an empty cache. Saved caches and shared
prefixes are keyed by them (`saved_cache.py`, `shared_prefix.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from .loaded_adapters import LARGEST

if TYPE_CHECKING:
    from ..prepare import Prepared

AdapterScales = tuple[float, ...]


class AdapterSelection:
    """An `Engine`'s adapter state. `adapter_scales`: one scale per LoRA adapter, for the cached text and what follows."""

    prepared: Prepared
    adapter_scales: AdapterScales
    reset: Callable[[], None]

    def choose(self, choice: AdapterScales) -> None:
        """From now on texts are read so. What is held was read otherwise and is forgotten, unless it was not. Raises UsageError for what
        `check_scales` refuses."""
        check_scales(choice, self.prepared.adapters.names)
        if choice != self.adapter_scales:
            self.reset()
            self.adapter_scales = choice

    @property
    def adapted_by(self) -> str:
        """A hash of what adapters add to the text that is held; empty for nothing."""
        return self.prepared.adapters.digest_of(self.adapter_scales)


def check_scales(choice: AdapterScales, names: Sequence[str]) -> None:
    """Raises UsageError for scales of unknown adapters, or that are not finite numbers."""
    if len(choice) != len(names):
        raise UsageError(f"{len(choice)} scales for {len(names)} adapters", "one for each --lora ADAPTER")
    if wrong := next((each for each in choice if not abs(each) <= LARGEST), None):
        raise UsageError(f"{wrong} is not a valid adapter scale", "0 disables it, 1 applies it fully, 0.5 half")


def scales_of(sequences: Sequence[AdapterSelection]) -> np.ndarray | None:
    """Scales for a pass over one token of each of these sequences, or over one text: float32 [sequences, adapters]; None without
    adapters."""
    made = np.array([each.adapter_scales for each in sequences], np.float32)
    return made if made.any() else None
