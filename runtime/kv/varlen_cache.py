"""Variable-length batches: one pass over several concatenated sequences, each attending only to itself; for embeddings and reranking.

Nothing is kept after the pass, so all sequences use the same cache positions in turn: in each layer a sequence's keys and values overwrite
those of the one before, and its queries see them alone, from position 0 on. Everything else in a pass is per token, so a sequence gets
bit-identical results to a pass of its own, provided both lengths use the same kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ...quant.kv import codec
from ..prefill_chunks import FEW
from .bidirectional import Ends, attention_ends

if TYPE_CHECKING:
    from ..cache import KVCache, LayerCache
    from ..config import ModelConfig
    from ..engine import Engine
    from .cache_components import Step

MAX_DECODE = 8  # tokens up to which a sequence uses decode kernels for any weights; with low-bit weights, up to FEW


@dataclass(frozen=True)
class VarlenStep:
    """`positions` int64 [T]: of each token within its sequence. No pass repeats, so `blocks` is None."""

    positions: np.ndarray
    position: int = 0
    blocks: None = None


@dataclass(frozen=True)
class VarlenLayer:
    """A block's view of the cache: one layer, sequence by sequence."""

    layer: LayerCache
    batch: VarlenCache

    def attend(self, q: object, k: object, v: object, sinks: object | None = None) -> object:
        """As `LayerCache.attend`, within each sequence."""
        cache, out = self.batch.cache, self.layer.pages.attended(q)
        for rows, step, ends in self.batch.parts:
            cache.step, cache.ends = step, ends
            self.layer.attend(q[rows], k[rows], v[rows], sinks, out[rows])
        return out


class VarlenCache:
    """Takes the place of `cache`, which is and stays empty, in one pass over sequences of these lengths, on the CPU."""

    ends: Ends | None = None  # `Model.forward` computes some for a single sequence; here they are per sequence, in `parts`
    probes: None = None
    n = 0

    def __init__(self, cache: KVCache, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.cache = cache
        begins = accumulate(lengths, initial=0)
        # Per sequence: its rows of the pass, and its step.
        self.parts: list[tuple[slice, Step, Ends | None]] = [
            (slice(begin, begin + length), cache.begin(length, True), attention_ends(config, cache, length, None))
            for begin, length in zip(begins, lengths)]
        self.step = VarlenStep(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]))

    def begin(self, tokens: int, prompt: bool = False) -> VarlenStep:
        """The step of the pass. Raises ValueError unless the number of tokens matches the lengths."""
        if tokens != len(self.step.positions):
            raise ValueError(f"{tokens} tokens for texts of {len(self.step.positions)}")
        return self.step

    def layer(self, index: int) -> VarlenLayer:
        """The view of layer `index`."""
        return VarlenLayer(self.cache.layer(index), self)


def supports_varlen(engine: Engine) -> bool:
    """Whether this engine's passes may hold several sequences: everything is on the CPU, and layers cache nothing but keys and values of
    their own sequence."""
    config, cache = engine.config, engine.cache
    beyond_pages = config.recurrent is not None or config.kv_sources or cache.token_selections or engine.model.predictors is not None
    has_policy_or_disk = codec(engine.options.kv).policy or cache.pool is not None and cache.pool.stream is not None
    has_mrope = engine.media is not None and engine.media.axes is not None
    return not ("cuda" in engine.placement.devices or beyond_pages or has_policy_or_disk or has_mrope)


def kernel_boundaries(engine: Engine) -> tuple[int, ...]:
    """The sequence lengths, ascending, beyond which other kernels may be used."""
    matrices = (tensor for roles in engine.model.tensors.values() for tensor in roles.values() if len(tensor.shape) > 1)
    is_raw = not engine.prepared.adapters.names and all(tensor.spec.is_raw for tensor in matrices)
    return (MAX_DECODE,) if is_raw else (MAX_DECODE, FEW)


def plan_batches(lengths: Sequence[int], max_tokens: int, bounds: Sequence[int]) -> list[list[int]]:
    """Sequences by index, in batches of at most `max_tokens`, shortest first. Those up to one of `bounds` are only batched with others
    between the same two bounds, and with no more tokens in all."""
    batches: list[list[int]] = []
    num_left = bucket = -1
    for sequence in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[sequence]
        own_bucket = bisect_left(bounds, length)
        if own_bucket != bucket or length > num_left:
            bucket, num_left = own_bucket, (*bounds, max_tokens)[own_bucket]
            batches.append([])
        batches[-1].append(sequence)
        num_left -= length
    return batches
