"""GGUF metadata of Qwen 4: compression ratios of the layers that compress keys, and n-gram hashing.

Where a config has a seed, the file has the numbers derived from it, which are checked against those of the usual seed. Its single n-gram
table is outside the layers. Otherwise as Qwen 3.5 (`linear_attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from ..families.qwen4_exp_text import NGRAM_TABLE
from . import linear_attention
from .family_context import FamilyContext

FAMILY, NAME = "qwen4_exp_text", "qwen4exp"
SEED = 1234
COMPRESS_RATIOS, NGRAM_LAYERS = "attention.compress_ratios", "ple.layers"
NGRAM_WIDTH, EOS_TOKEN = "embedding_length_per_layer_input", "ple.eos_token_id"
HASH_MULTIPLIERS, TABLE_OFFSETS, TABLE_SIZES = "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"
IMAGE_TOKEN = "ple.image_token_id"  # an ordinary token in text
NGRAM_TENSOR = "per_layer_token_embd"
KEYS = {"hyper_connection.count": "hc_count", "hyper_connection.low_rank": "hc_lowrank",
        "attention.indexer.head_count": "indexer_n_heads", "attention.indexer.key_length": "indexer_head_dim",
        "attention.indexer.top_k": "indexer_budget",
        "ple.ngram_size": "ngram_size", "ple.heads_per_ngram": "heads_per_ngram", "ple.conv_kernel": "ple_conv_kernel_size",
        **linear_attention.KEYS}
REQUIRED = (*linear_attention.REQUIRED, *(key for key in KEYS if key.startswith(("hyper", "attention.indexer"))), COMPRESS_RATIOS)
OTHER_KEYS = linear_attention.OTHER_KEYS | {COMPRESS_RATIOS, NGRAM_LAYERS, NGRAM_WIDTH, EOS_TOKEN, HASH_MULTIPLIERS, TABLE_OFFSETS,
                                            TABLE_SIZES, IMAGE_TOKEN}
# Tensor of a layer in the file -> in the checkpoint, without kind.
_HYPER_CONNECTION = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight"}
_BRANCHES = {"attn": "attn", "ffn": "mlp"}  # branches of a layer as files call them, and as checkpoints do
_INDEXER = {"q_proj": "index_q_proj", "k_proj": "index_k_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
NAMES = {**{f"hc_{branch}_{part}": f"{ours}_hyper_connection.{target}" for branch, ours in _BRANCHES.items()
            for part, target in _HYPER_CONNECTION.items()},
         **{f"indexer.{part}": f"self_attn.indexer.{target}" for part, target in _INDEXER.items()},
         **{f"ple_{part}": f"ple.{part}" for part in ("conv1d", "norm_key", "norm_query", "norm_conv")},
         "ple_key": "ple.key_proj", "ple_value": "ple.value_proj",
         **{part: target for part, target in linear_attention.NAMES.items() if part != "post_attention_norm"}}
OUTER = {f"output_hc_{part}.weight": f"model.hyper_connection_mixer.{target}.weight"
         for part, target in _HYPER_CONNECTION.items() if part != "inject"}
# Role -> tensor in the file.
_MIX_ROLES = {"mix_norm": "norm", "mix_down": "down", "mix_up": "up", "mix_in": "inject"}
_MIX_PREFIXES = {"attn_mix": "hc_attn", "mlp_mix": "hc_ffn", "leave_mix": "output_hc"}
ROLES = {**{f"{role}.{part}": f"{prefix}_{name}" for role, prefix in _MIX_PREFIXES.items() for part, name in _MIX_ROLES.items()},
         "index_q": "indexer.q_proj", "index_k": "indexer.k_proj", "index_q_norm": "indexer.q_norm", "index_k_norm": "indexer.k_norm",
         "ngram_key": "ple_key", "ngram_value": "ple_value", "ngram_conv": "ple_conv1d", "ngram_key_norm": "ple_norm_key",
         "ngram_query_norm": "ple_norm_query", "ngram_conv_norm": "ple_norm_conv"}
ORIGINAL_HINT = "give the folder of the original checkpoint"
MAX_PADDING_MULTIPLE = 1 << 20


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, name = context.header, context.name
    data, blocks = header.metadata, raw["num_hidden_layers"]
    linear_attention.complete_config(context, raw)
    ratios, layers = data[f"{name}.{COMPRESS_RATIOS}"], raw["num_hidden_layers"]
    if type(blocks) is not int or not 0 < blocks <= MAX_LAYERS or not isinstance(ratios, np.ndarray) or ratios.dtype.kind not in "iu" \
            or len(ratios) not in (layers, blocks):
        damaged(header.path,
                f"states {name}.{COMPRESS_RATIOS} {shown_value(ratios)}, expected a number for each of {shown_value(blocks)} layers")
    distinct_ratios = {int(value) for value in ratios[:layers]} - {0}
    if len(distinct_ratios) != 1:
        raise CheckpointError(f"{header.path} states {name}.{COMPRESS_RATIOS} {sorted(distinct_ratios)} for layers with attention, "
                              "which is not supported",
                              ORIGINAL_HINT)
    raw |= {"indexer_kv_heads": 1, "indexer_compress_ratio": distinct_ratios.pop(), "output_gate_type": "sigmoid", "norm_topk_prob": True}
    raw.setdefault("layer_types", [linear_attention.LAYER_TYPES[int(not ratio)] for ratio in ratios[:layers]])
    _add_ngrams(header, name, raw)


def _add_ngrams(header: GgufHeader, name: str, raw: dict[str, object]) -> None:
    data, path = header.metadata, header.path
    stated = data.get(f"{name}.{NGRAM_LAYERS}")
    if stated is None or not len(np.atleast_1d(stated)):
        return
    layers, (table_sizes, offsets) = np.atleast_1d(stated), (data.get(f"{name}.{key}") for key in (TABLE_SIZES, TABLE_OFFSETS))
    ngram_size, heads_per_ngram, width = raw.get("ngram_size"), raw.get("heads_per_ngram"), data.get(f"{name}.{NGRAM_WIDTH}")
    if len(layers) != 1:
        raise CheckpointError(f"{path} states {name}.{NGRAM_LAYERS} {layers[:8].tolist()}: n-grams in several layers are not supported",
                              ORIGINAL_HINT)
    are_sizes = all(type(value) is int and 0 < value < 1 << 16 for value in (ngram_size, heads_per_ngram, width))
    if not are_sizes or not isinstance(table_sizes, np.ndarray) \
            or len(table_sizes) != (ngram_size - 1) * heads_per_ngram or not (table_sizes.astype(np.float64) > 1).all() \
            or not np.array_equal(offsets, np.concatenate([[0], np.cumsum(table_sizes)[:-1]])):
        damaged(path, f"states {name}.{TABLE_SIZES} {shown_value(table_sizes)} for n-grams of {shown_value(ngram_size)} words")
    tensor = header.tensors.get(f"{NGRAM_TENSOR}.weight")
    if tensor is None:
        damaged(path, f"holds no tensor {NGRAM_TENSOR}.weight")
    total_rows, multiple = int(table_sizes.sum()), 1
    while -(-total_rows // multiple) * multiple != tensor.shape[0] and multiple <= MAX_PADDING_MULTIPLE:
        multiple *= 2
    if multiple > MAX_PADDING_MULTIPLE:
        damaged(path, f"has tensor {NGRAM_TENSOR}.weight of {tensor.shape[0]} rows, its keys say {total_rows}")
    raw |= {"ple_layer_ids": [int(layers[0]) + 1], "ple_embed_dim": width * (ngram_size - 1) * heads_per_ngram,
            "ngram_vocab_size_base": int(table_sizes[0]),
            "make_ngram_vocab_size_divisible_by": multiple, "split_ngram_parts": 1, "seed": SEED}


def add_eos_token(header: GgufHeader, name: str, raw: dict[str, object]) -> None:
    """Put the token that ends n-grams first among the end tokens of `raw`."""
    if (ngram_eos := header.metadata.get(f"{name}.{EOS_TOKEN}")) is not None and raw.get("ple_layer_ids"):
        eos = raw.get("eos_token_id")
        raw["eos_token_id"] = [ngram_eos, *([] if eos in (None, ngram_eos) else [eos])]


def check_hashing(header: GgufHeader, name: str, config: ModelConfig) -> None:
    """Raises CheckpointError if the file's hash multipliers or table sizes do not follow from SEED."""
    ngrams = config.ngrams
    for layer in () if ngrams is None else ngrams.layers:
        for key, expected in ((HASH_MULTIPLIERS, ngrams.multipliers(layer)), (TABLE_SIZES, ngrams.table_sizes(layer))):
            if not np.array_equal(np.atleast_1d(header.metadata.get(f"{name}.{key}", 0)).astype(object), np.array(expected, object)):
                raise CheckpointError(f"{header.path} states {name}.{key} that do not follow from the seed {SEED}, which is not supported",
                                      ORIGINAL_HINT)


def ngram_table_name(name: str, config: ModelConfig) -> tuple[str, ...] | None:
    """The checkpoint's name of the n-gram table; None for other tensors."""
    return (f"model.layers.{config.ngrams.layers[0]}.{NGRAM_TABLE}.weight",) if config.ngrams and name == f"{NGRAM_TENSOR}.weight" else None


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of this family, without the architecture's prefix."""
    index, ngrams, moe = config.indexer.shape, config.ngrams, config.moe
    ratios = [0 if layer in config.recurrent_layers else index.tokens_per_key for layer in range(config.num_hidden_layers)]
    keys = {"hyper_connection.count": config.residual_streams, "hyper_connection.low_rank": config.residual_gate_rank,
            COMPRESS_RATIOS: np.array(ratios, np.uint32),
            "attention.indexer.head_count": index.heads, "attention.indexer.key_length": index.width,
            "attention.indexer.top_k": index.top_k * index.tokens_per_key, "expert_feed_forward_length": moe.expert_dim,
            "expert_shared_feed_forward_length": moe.shared_expert_dim}
    if ngrams is None:
        return keys
    layer, firsts = ngrams.layers[0], np.cumsum([0, *ngrams.table_sizes(ngrams.layers[0])[:-1]])
    return keys | {NGRAM_LAYERS: np.array([layer], np.uint32), "ple.ngram_size": ngrams.shape.size,
                   "ple.heads_per_ngram": ngrams.tables_per_order,
                   "ple.conv_kernel": ngrams.shape.kernel, NGRAM_WIDTH: ngrams.width,
                   HASH_MULTIPLIERS: np.array(ngrams.multipliers(layer), np.uint64),
                   TABLE_OFFSETS: firsts.astype(np.uint64), TABLE_SIZES: np.array(ngrams.table_sizes(layer), np.uint64),
                   EOS_TOKEN: ngrams.eos_token_id}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    ngrams = config.ngrams
    yield config.indexer is None, "has no indexer"
    yield not config.recurrent.sigmoid_gate, "has gates that are no sigmoids"
    yield ngrams is not None and len(ngrams.layers) > 1, "has n-grams in several layers"
    yield ngrams is not None and ngrams.shape.rows != config.hidden_size, "has rows of n-grams that are not as wide as the model together"
    yield ngrams is not None and ngrams.seed != SEED, f"hashes n-grams with another seed than {SEED}"


def architecture_fields(counts: Mapping[str, str], shared: Mapping[str, str]) -> dict[str, object]:
    """Fields of `Architecture` except experts; `counts` and `shared`: keys and shared-expert names of Qwen's other mixtures."""
    kinds = linear_attention.LAYER_TYPES[1], linear_attention.LAYER_TYPES[0]
    return {"keys": {**counts, **KEYS}, "layer_names": {**shared, **NAMES}, "required_keys": REQUIRED, "other_keys": OTHER_KEYS,
            "outer_names": OUTER,
            "full_names": linear_attention.FULL_NAMES, "roles": ROLES, "layer_kinds": kinds, "norm_offset": 1.0, "partial_rotary": True,
            "optional_keys": frozenset({"feed_forward_length"})}
