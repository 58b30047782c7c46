"""Bidirectional attention: tokens that attend to later ones, over the whole sequence or within a window on either side.

Such a sequence is processed in one pass, so a chunk is as long as the context. Later tokens are read from exact pages in memory, on the CPU
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

SINGLE_PASS_KV = "32bit"  # keys and values live for one pass only, so fewer bits would save little
MAX_DEFAULT_CTX = 8192  # tokens: a pass over the full context of some models would not fit in memory
# Families whose images attend to each other.
JOINT_IMAGE_FAMILIES = ("molmo2_text",)
Ends = Mapping["int | None", tuple[np.ndarray, "np.ndarray | None"]]


def attention_ends(config: ModelConfig, cache: KVCache, tokens: int, media: MediaEmbeddings | None) -> Ends | None:
    """What each token of the pass attends to, by attention window (None: full attention); None if all attention is causal.

    For each window that is not causal: the last position that a token attends to, int64 [T], and the attention group of each token,
    int64 [T], or None if there are no groups.
    """
    if config.bidirectional:
        last = cache.n + tokens - 1
        positions = np.arange(cache.n, last + 1, dtype=np.int64)
        return {window: (np.full(tokens, last, np.int64) if window is None else np.minimum(positions + window - 1, last), None)
                for window in {None, *config.windows}}
    if media is None or (media_ends := media.attention_ends(cache.n)) is None:
        return None
    ends, sliding_window_only = media_ends
    return {window: (ends, media.attention_groups) for window in {None, *config.windows} if window is not None or not sliding_window_only}


def single_pass_options(config: ModelConfig, options: EngineOptions) -> EngineOptions:
    """The options of a model, with chunks as long as the context if a prompt or its images have bidirectional attention.

    Raises UsageError for options that exclude this, unless they are settings for all models.
    """
    if (config.prefix_lm or config.family in JOINT_IMAGE_FAMILIES) and options.encoder_path is not None:
        longest = min(config.context_length, AUTO_CTX) if options.ctx is None else options.ctx
        return replace(options, chunk=max(options.chunk, -(-longest // PAGE) * PAGE))
    if not config.bidirectional:
        return options
    is_packed = options.kv != AUTO and codec(options.kv).is_packed
    conflicts = {"kv": (SINGLE_PASS_KV, f"--kv {options.kv}", is_packed), "kv_ram": (None, "--kv-ram", options.kv_ram is not None),
                 "device": ("cpu", "--device cuda", options.device == "cuda"),
                 "gpu_layers": (None, f"-ngl {options.gpu_layers}", bool(options.gpu_layers)), "vram": (None, "--vram", bool(options.vram))}
    for name, (replacement, flag, is_given) in conflicts.items():
        if is_given and name not in options.from_settings:
            raise UsageError(f"{flag}: this model uses bidirectional attention, on the CPU, with an unpacked cache in memory",
                             f"leave {flag} out")
        if is_given:
            options = replace(options, **{name: replacement})
    if options.ctx is None and config.context_length > MAX_DEFAULT_CTX:
        options = replace(options, ctx=MAX_DEFAULT_CTX)
    longest = config.context_length if options.ctx is None else options.ctx
    return replace(options, device="cpu", kv=SINGLE_PASS_KV, chunk=-(-longest // PAGE) * PAGE, spec="off")


def require_text_generation(config: ModelConfig) -> None:
    """Raises UsageError for a model that does not generate text."""
    if config.listwise_reranker:
        raise UsageError("this is a reranker, which does not generate text", "effllm serve MODEL answers /v1/rerank")
    if config.bidirectional:
        raise UsageError("this is an embedding model, which does not generate text",
                         'effllm embed MODEL "a text"')
