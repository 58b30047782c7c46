"""Which tokens of a pass visit the experts of pictures, where words have others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..moe_config import Mixture
    from .media import MediaEmbeddings


def vision_routing(own: Mixture | None, ids: np.ndarray, shown: MediaEmbeddings | None) -> dict[int, tuple[bool, ...]] | None:
    """By layer with two sorts of experts, of each token of a pass whether it visits those of pictures; None where none does."""
    if own is None or not own.seen_words:
        return None
    seen = np.isin(ids, [*own.seen_words])
    if shown is not None:
        seen[shown.places] = True
    return dict.fromkeys(own.layers, tuple(seen.tolist())) if seen.any() else None
