"""Rotary positions of several numbers, as files of models that take images state them: one for time and two for places in an image, which
are the same number in a text. A pair of channels in none of their sections would not turn.
"""

from __future__ import annotations

import numpy as np

from ...offload.gguf import GgufHeader, shown_value
from ...offload.header import CheckpointError, damaged

KEY = "rope.dimension_sections"
MOST = 1 << 16  # pairs of channels
# Architectures of such models whose text parts are of families that run -> whether sections take turns.
IN_TURN = {"glm4moe": False, "qwen2vl": False, "qwen3vl": True, "qwen3vlmoe": True}


def check(header: GgufHeader, name: str, pairs: int, in_turn: bool) -> None:
    """Raises CheckpointError where text would not turn as if there were no sections, of so many pairs of channels. `in_turn`: every third
    pair is of a section as long as that has some left; else sections follow one another."""
    key, path = f"{name}.{KEY}", header.path
    stated = header.metadata.get(key)
    if stated is None:
        return
    if not isinstance(stated, np.ndarray) or stated.dtype.kind not in "iu" or not 3 <= len(stated) <= 4 \
            or (stated < 0).any() or (stated > MOST).any():
        damaged(path, f"states {key} {shown_value(stated)}, expected three or four whole numbers")
    whole = int(stated.sum())
    places, own = np.arange(min(pairs, MOST)) % max(whole, 1), stated[:3].astype(np.int64)
    if not whole or (places >= (3 * own[places % 3] if in_turn else own.sum())).any():
        raise CheckpointError(f"{path} states {key} {stated.tolist()} for {pairs} pairs of channels, which is not supported",
                              "give the folder of the original checkpoint")
