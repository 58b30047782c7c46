"""GGUF metadata of Llama Nemotron (llama.cpp's `deci`): heads and widths per layer, 0 where a layer has none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from ..families.nemotron_nas import ATTENTION, FFN
from .family_context import FamilyContext

NAME, FAMILY = "deci", "nemotron_nas"
PER_LAYER_KEYS = QUERY_HEADS, KV_HEADS, MLP_WIDTHS = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
KEY_LENGTH, ROPE_DIMS = "attention.key_length", "rope.dimension_count"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled: the blocks of each layer. Raises CheckpointError."""
    header = context.header
    layers, path = raw["num_hidden_layers"], header.path
    query_heads, kv_heads, mlp_widths = (_per_layer(header, f"{NAME}.{key}", layers) for key in PER_LAYER_KEYS)
    heads = sorted({each for each in query_heads if each})
    if len(heads) != 1 or any(query_count and not kv_count for query_count, kv_count in zip(query_heads, kv_heads)):
        raise CheckpointError(f"{path} states {NAME}.{QUERY_HEADS} or {NAME}.{KV_HEADS} of layers with a matrix in the place of attention, "
                              "which is not supported", "Nemotron Super 49B and Ultra 253B run, not the 51B")
    raw |= {"num_attention_heads": heads[0], "block_configs": [
        {ATTENTION: {"no_op": not query_count, "num_key_value_heads": count}, FFN: {"no_op": not mlp_width, "intermediate_size": mlp_width}}
        for query_count, count, mlp_width in zip(query_heads, kv_heads, mlp_widths)]}
    head_dim, rope_dims = raw.setdefault("head_dim", raw["hidden_size"] // heads[0]), header.metadata.get(f"{NAME}.{ROPE_DIMS}")
    if rope_dims not in (None, head_dim):
        damaged(path, f"states {NAME}.{ROPE_DIMS} {shown_value(rope_dims)} for heads of {head_dim}")


def _per_layer(header: GgufHeader, key: str, layers: object) -> list[int]:
    value = header.metadata.get(key)
    if type(value) is int and type(layers) is int and 0 < layers <= 4096:
        value = np.full(layers, value)  # one value for all layers
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != layers or (value < 0).any():
        damaged(header.path, f"states {key} that is not a number for each of {shown_value(layers)} layers")
    return value.tolist()


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield any(config.has_attention(layer)
              for layer in config.layers_without_mlp), "has attention in a layer without an MLP, which llama.cpp leaves out"


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of this family, without the architecture's prefix."""
    layers = range(config.num_hidden_layers)
    return {QUERY_HEADS: np.array([config.has_attention(layer) and config.num_attention_heads for layer in layers], np.int32),
            KV_HEADS: np.array([config.has_attention(layer) and config.kv_heads_of(layer)[0] for layer in layers], np.int32),
            MLP_WIDTHS: np.array([layer not in config.layers_without_mlp and config.intermediate_size_of(layer) for layer in layers],
                                 np.int32)}
