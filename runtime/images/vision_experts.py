"""Expert routing by modality: which tokens of a pass go to the vision experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..moe_config import MoEConfig
    from .media_embeddings import MediaEmbeddings


def vision_routing(own: MoEConfig | None, ids: np.ndarray, media: MediaEmbeddings | None) -> dict[int, tuple[bool, ...]] | None:
    """By layer with text and vision experts, for each token of a pass whether it goes to the vision experts; None where none does."""
    if own is None or not own.vision_token_ids:
        return None
    is_vision = np.isin(ids, [*own.vision_token_ids])
    if media is not None:
        is_vision[media.positions] = True
    return dict.fromkeys(own.layers, tuple(is_vision.tolist())) if is_vision.any() else None
