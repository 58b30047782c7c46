"""What attention costs a token, for the speed forecast: bytes of keys and values, products and windows, by layer where layers differ."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.layout import PAGE
from ...quant.kv import codec
from ..config import ModelConfig
from ..kv.cache_shape import index_type, page_sizes
from ..prepare import Prepared


def attention_work(prepared: Prepared) -> dict[str, object]:
    """Attention's fields of `Work`.

    Layers are listed individually where they differ, those that re-read another layer's keys and values included. An indexer counts as one
    more layer, which sees all tokens."""
    config = prepared.config
    kv_bytes = prepared.placement.kv_bytes_per_token // prepared.options.parallel  # per sequence
    attending = [layer for layer in range(config.num_hidden_layers) if config.has_attention(layer)]
    widths = tuple(2 * config.query_heads_of(layer) * config.kv_heads_of(layer)[1] for layer in attending)
    fields = {"attention_width": max(widths, default=0), "windows": tuple(config.windows[layer] for layer in attending),
              "kv_bytes": kv_bytes}
    if config.compressed_attention is not None:
        kv = codec(prepared.options.kv)
        pages = page_sizes(prepared.codecs, [kv.layout(*heads) for heads in config.cache_kv_heads])
        return fields | _compressed_work(config, widths, [page // PAGE for page in pages], index_type(kv))
    if config.indexer is not None:
        return fields | _indexer_work(config, attending, widths, kv_bytes, index_type(codec(prepared.options.kv)))
    if not config.layer_kv_heads and not config.kv_sources and not config.layer_query_heads:
        return fields
    pages = page_sizes(prepared.codecs, [codec(prepared.options.kv).layout(*heads) for heads in config.cache_kv_heads])
    stored = {layer: round(kv_bytes * page / sum(pages)) for layer, page in zip(config.attention_layers, pages, strict=True)}
    by_layer = tuple(stored[config.kv_sources[layer] if config.kv_sources else layer] for layer in attending)
    return {**fields, "kv_bytes": sum(by_layer), "kv_bytes_by_layer": by_layer, "attention_widths": widths}


def _indexer_work(config: ModelConfig, attending: Sequence[int], widths: tuple[int, ...], kv_bytes: int,
                  index_dtype: int) -> dict[str, object]:
    """Attention's fields for layers with sparse attention, and for their indexers."""
    indexer, shape = config.indexer, config.indexer.shape
    indexed = [layer for layer in attending if indexer.shape_of(layer) is not None]
    layer_bytes = (kv_bytes - shape.token_nbytes(index_dtype) * len(indexed)) // len(attending)
    windows = tuple(config.windows[layer] if indexer.source_layers[layer] is None else shape.dense_tokens for layer in attending)
    return {"windows": windows + (None,) * len(indexed),
            "kv_bytes_by_layer": (layer_bytes,) * len(attending) + (shape.scored_nbytes(index_dtype),) * len(indexed),
            "attention_widths": widths + (shape.heads * shape.width,) * len(indexed)}


def _compressed_work(config: ModelConfig, widths: tuple[int, ...], token_nbytes: Sequence[int],
                     index_dtype: int) -> dict[str, object]:
    """Attention's fields for layers with compressed keys in addition to a window. `token_nbytes`: bytes of an uncompressed token, by layer.

    Compressed keys count as one more layer, of as many tokens as are attended to, and their indexer as another, which sees all."""
    all_windows, all_nbytes, all_widths = list(config.windows), list(token_nbytes), list(widths)
    for layer, shape in enumerate(config.compressed_attention.shapes):
        index = None if config.indexer is None else config.indexer.shape_of(layer)
        if shape is not None:
            all_windows.append(None if index is None else index.dense_tokens)
            all_nbytes.append(shape.token_nbytes(index_dtype))
            all_widths.append(widths[layer] // shape.tokens_per_key)
        if index is not None:
            all_windows.append(None)
            all_nbytes.append(index.token_nbytes(index_dtype))
            all_widths.append(index.heads * index.width // index.tokens_per_key)
    return {"windows": tuple(all_windows), "kv_bytes_by_layer": tuple(all_nbytes), "attention_widths": tuple(all_widths),
            "kv_bytes": sum(all_nbytes)}
