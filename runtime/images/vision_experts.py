"""Expert routing by modality: which tokens of a pass go to the vision experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..moe_config import MoEConfig
    from .media import MediaEmbeddings


def vision_routing(own: MoEConfig | None, ids: np.ndarray, shown: MediaEmbeddings | None) -> dict[int, tuple[bool, ...]] | None:
    """By layer with text and vision experts, for each token of a pass whether it goes to the vision experts; None where none does."""
    if own is None or not own.vision_token_ids:
        return None
    seen = np.isin(ids, [*own.vision_token_ids])
    if shown is not None:
        seen[shown.places] = True
    return dict.fromkeys(own.layers, tuple(seen.tolist())) if seen.any() else None
