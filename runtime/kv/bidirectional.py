"""Bidirectional attention: tokens that attend to later ones, over the whole sequence or within a window on either side.

Such a sequence is read in one pass, so a chunk is as long as the context. Later tokens are read from exact pages in memory, on the CPU
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ...kernels.layout import PAGE
from ...offload.demand import AUTO_CTX
from ...quant.kv import codec
from .kv_setting import AUTO

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..images.media_embeddings import MediaEmbeddings
    from ..prepare import EngineOptions

WHOLE = "32bit"  # keys and values live for one pass only, so fewer bits would save little
LONGEST = 8192  # default tokens of context: a pass over all that some models support would not fit in memory
# Families in which all images of a text see each other.
TOGETHER = ("molmo2_text",)
Ends = Mapping["int | None", tuple[np.ndarray, "np.ndarray | None"]]


def attention_ends(config: ModelConfig, cache: KVCache, tokens: int, media: MediaEmbeddings | None) -> Ends | None:
    """By window (None: full attention), the last position int64 [T] that each token of the pass attends to, and which tokens those before
    them see, int64 [T] or None for all. A window that is missing, or None for everything, means causal attention."""
    if config.bidirectional:
        last = cache.n + tokens - 1
        at = np.arange(cache.n, last + 1, dtype=np.int64)
        return {window: (np.full(tokens, last, np.int64) if window is None else np.minimum(at + window - 1, last), None)
                for window in {None, *config.windows}}
    if media is None or (found := media.attention_ends(cache.n)) is None:
        return None
    ends, sliding_window_only = found
    return {window: (ends, media.attention_groups) for window in {None, *config.windows} if window is not None or not sliding_window_only}


def single_pass_options(config: ModelConfig, options: EngineOptions) -> EngineOptions:
    """The options of a model with bidirectional attention over all tokens, or over those of a prompt or of its images: chunks as long as
    the context. Raises UsageError for options that this rules out, unless they are the user's settings for all models."""
    if (config.prefix_lm or config.family in TOGETHER) and options.encoder_path is not None:
        longest = min(config.context_length, AUTO_CTX) if options.ctx is None else options.ctx
        return replace(options, chunk=max(options.chunk, -(-longest // PAGE) * PAGE))
    if not config.bidirectional:
        return options
    packed = options.kv != AUTO and codec(options.kv).is_packed
    found = {"kv": (WHOLE, f"--kv {options.kv}", packed), "kv_ram": (None, "--kv-ram", options.kv_ram is not None),
             "device": ("cpu", "--device cuda", options.device == "cuda"),
             "gpu_layers": (None, f"-ngl {options.gpu_layers}", bool(options.gpu_layers)), "vram": (None, "--vram", bool(options.vram))}
    for name, (without, flag, is_asked) in found.items():
        if is_asked and name not in options.from_settings:
            raise UsageError(f"{flag}: this model uses bidirectional attention, on the CPU, with an unpacked cache in memory",
                             f"leave {flag} out")
        if is_asked:
            options = replace(options, **{name: without})
    if options.ctx is None and config.context_length > LONGEST:
        options = replace(options, ctx=LONGEST)
    longest = config.context_length if options.ctx is None else options.ctx
    return replace(options, device="cpu", kv=WHOLE, chunk=-(-longest // PAGE) * PAGE, spec="off")


def require_text_generation(config: ModelConfig) -> None:
    """Raises UsageError for a model that does not generate text."""
    if config.listwise_reranker:
        raise UsageError("this is a reranker, which does not generate text", "effllm serve MODEL answers /v1/rerank")
    if config.bidirectional:
        raise UsageError("this is an embedding model, which does not generate text",
                         'effllm embed MODEL "a text"')
