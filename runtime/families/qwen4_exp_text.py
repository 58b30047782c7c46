"""Qwen 4 Exp (Qwen 3.8 Flash Next), text: the layers of Qwen 3.5's MoE without norms, with several residual streams per token.

A branch reads the streams through gates per channel, and is added to each stream with weights of the token
(`kernels/reference_gated_residuals.py`). Attention layers select blocks of tokens by their mean keys (QSA, `kernels/indexer_shape.py`).
Some linear-attention layers first add embeddings of the last n-grams, rows of a large table (`kernels/reference_ngrams.py`,
`runtime/ngrams.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.indexer_shape import IndexShape
from ...kernels.ngram_shape import NgramShape
from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, is_count, show
from ..indexer_config import IndexerConfig
from ..layer import Layer, last_of, narrowing
from ..ngrams import NgramConfig, role_of
from ..weights.index_weights import choose
from . import TensorRule, llama, qwen3_5_moe_text
from .deepseek_v4 import stream_mlp, write_branch
from .mixtral import expert_tensors, moe_config
from .qwen3_5_text import FULL, LINEAR, hybrid_config, hybrid_tensors
from .qwen3_moe import NAMES

# Training, MTP layers, which are not loaded, and a buffer count of transformers.
KEYS_HARMLESS = qwen3_5_moe_text.KEYS_HARMLESS | {"number_of_conv_states"}
REFUSED_UNLESS = {key: value for key, value in qwen3_5_moe_text.REFUSED_UNLESS.items() if key not in ("norm_topk_prob", "output_gate_type")}
SIZES = {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "moe_intermediate_size": 512}
INDEXED_ATTENTION = "indexed_attention"  # transformers' name of what published configs call full_attention
SIGMOID_GATES = {"silu": False, "swish": False, "sigmoid": True}  # output_gate_type -> whether the gate is a plain sigmoid
MAX_NGRAM_ROWS, MAX_NGRAM_TABLES = 2**28, 4096  # rows of an n-gram table, and tables
NGRAM_TABLE = "ple.ple_embedding.ngram_embedding"


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=2, head_dim=256, ffn_key="moe_intermediate_size", sizes=SIZES)
    layers, high = base.size(keys, "num_hidden_layers"), 2**22
    moe = moe_config(keys, 512, 10, base.size(keys, "moe_intermediate_size"), keys.flag("norm_topk_prob", True), range(layers),
                     parallel_to_mlp=True,
                     shared_expert_dim=keys.integer("shared_expert_intermediate_size", 512, high=high), shared_expert_gate=True)
    kinds = keys.layer_types("layer_types", layers, (FULL, LINEAR, INDEXED_ATTENTION))
    if kinds is not None:
        keys = keys.with_values(layer_types=[FULL if kind == INDEXED_ATTENTION else kind for kind in kinds])
    gate_type = keys.text("output_gate_type", None) or "silu"
    if gate_type not in SIGMOID_GATES:
        raise keys.fail("output_gate_type", " or ".join(SIGMOID_GATES))
    config = hybrid_config(keys.with_values(num_hidden_layers=layers), base, rotated_share=1.0, moe=moe, final_norm_kind="none",
                           residual_streams=keys.integer("hc_count", 4, low=2, high=16),
                           residual_gate_rank=keys.integer("hc_lowrank", 320, high=2**16))
    config = replace(config, recurrent=replace(config.recurrent, sigmoid_gate=SIGMOID_GATES[gate_type]), mtp_layers=0)
    return replace(config, indexer=_indexer_config(keys, config), ngrams=_ngram_config(keys, config))


def _indexer_config(keys: Keys, config: ModelConfig) -> IndexerConfig:
    """The indexer, whose keys have no defaults. Raises ConfigError."""
    heads, kv_heads, width, budget, rate = (keys.integer(f"indexer_{name}", high=high) for name, high in (
        ("n_heads", 1024), ("kv_heads", 1024), ("head_dim", 1024), ("budget", 2**27), ("compress_ratio", 4096)))
    rope = int(config.head_dim * next(rope for rope in config.ropes if rope is not None).partial_rotary_factor)
    if kv_heads != 1 or budget % rate or rate < 2 or width % rate or not rope <= width:
        raise ConfigError(f"config.json: indexer_kv_heads {kv_heads}, indexer_head_dim {width}, indexer_budget {budget} and "
                          f"indexer_compress_ratio {rate} are not supported together",
                          f"one head of keys at least {rope} wide, blocks of two tokens or more that divide its width and the budget")
    shape = IndexShape(heads, width, rope, budget // rate, tokens_per_key=rate, pooled=True)
    sources = tuple(None if layer in config.recurrent_layers else layer for layer in range(config.num_hidden_layers))
    return IndexerConfig(shape, sources, False, ("rms+1", config.norm_eps))


def _ngram_config(keys: Keys, config: ModelConfig) -> NgramConfig | None:
    """The n-gram embeddings, None if no layer has any. Raises ConfigError."""
    keys.mark_known("ple_layer_ids")
    stated = keys.raw.get("ple_layer_ids") or []
    ngram_size, heads = keys.integer("ngram_size", 3, low=2, high=16), keys.integer("heads_per_ngram", 8, high=64)
    shape = NgramShape(config.residual_streams, config.hidden_size, keys.integer("ple_conv_kernel_size", 4, low=2, high=64), ngram_size,
                       keys.integer("ple_embed_dim", config.hidden_size, high=2**20))
    hashing = (keys.integer("ngram_vocab_size_base", 20_000_000, low=2, high=MAX_NGRAM_ROWS),
               keys.integer("make_ngram_vocab_size_divisible_by", 128, high=2**20), keys.integer("seed", 1234, low=0, high=2**62))
    shards = keys.integer("split_ngram_parts", 512, high=2**16)
    if not isinstance(stated, list) or not all(is_count(number) and 1 <= number <= config.num_hidden_layers for number in stated):
        raise keys.fail("ple_layer_ids", f"layer indices from 1 to {config.num_hidden_layers}")
    if not stated:
        return None
    layers = tuple(sorted({number - 1 for number in stated}))
    if (invalid := next((layer for layer in layers if layer not in config.recurrent_layers), None)) is not None:
        raise ConfigError(f"config.json: ple_layer_ids holds {invalid + 1}, a layer of another kind than {LINEAR}: this is not supported")
    if len(layers) * heads * ngram_size > MAX_NGRAM_TABLES:
        raise ConfigError(f"config.json: ple_layer_ids and heads_per_ngram ask for more than {MAX_NGRAM_TABLES} tables of n-grams")
    if shape.rows % ((ngram_size - 1) * heads):
        raise ConfigError(f"config.json: ple_embed_dim {shape.rows} is not a multiple of the {(ngram_size - 1) * heads} rows of n-grams "
                          "that a token has", "(ngram_size - 1) times heads_per_ngram")
    eos_ids = keys.raw.get("eos_token_id")
    eos_id = eos_ids[0] if isinstance(eos_ids, list) and eos_ids else eos_ids
    if not is_count(eos_id) or eos_id >= config.vocab_size:
        raise ConfigError(f"config.json: eos_token_id {show(eos_ids)} with ple_layer_ids is not supported",
                          "n-grams restart after the first token that it names")
    return NgramConfig(layers, shape, heads, *hashing, eos_id, config.vocab_size, shards)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    prefix, hidden, wide = f"model.layers.{layer}.", config.hidden_size, config.residual_streams * config.hidden_size
    rules = hybrid_tensors(config, layer, expert_tensors(config, layer, "mlp", NAMES, shared="shared_expert"))
    for role in ("input_norm", "post_norm"):
        del rules[role]
    for role, name in (("attn_mix", "attn"), ("mlp_mix", "mlp")):
        rules |= _gated_residual_tensors(config, role, f"{prefix}{name}_hyper_connection.")
    if config.indexer is not None and (index := config.indexer.shape_of(layer)) is not None:
        indexer_prefix, query_rows = f"{prefix}self_attn.indexer.", index.heads * index.width
        fused, fused_rows = f"{indexer_prefix}index_qk_proj.weight", query_rows + index.width
        rules |= {"index_q": TensorRule(f"{indexer_prefix}index_q_proj.weight", (query_rows, hidden), part_of=(fused, 0, fused_rows),
                                        plain=True),
                  "index_k": TensorRule(f"{indexer_prefix}index_k_proj.weight", (index.width, hidden),
                                        part_of=(fused, query_rows, fused_rows), plain=True),
                  "index_q_norm": TensorRule(f"{indexer_prefix}q_layernorm.weight", (index.width,)),
                  "index_k_norm": TensorRule(f"{indexer_prefix}k_layernorm.weight", (index.width,))}
    if config.ngrams is not None and (shape := config.ngrams.shape_of(layer)) is not None:
        for role, (name, *dims) in {"ngram_key": ("key_proj", wide, shape.rows), "ngram_value": ("value_proj", hidden, shape.rows),
                                    "ngram_conv": ("conv1d", wide, 1, shape.kernel), "ngram_key_norm": ("norm_key", wide),
                                    "ngram_query_norm": ("norm_query", wide), "ngram_conv_norm": ("norm_conv", wide)}.items():
            rules[role] = TensorRule(f"{prefix}ple.{name}.weight", tuple(dims))
    return rules


def _gated_residual_tensors(config: ModelConfig, role: str, prefix: str) -> dict[str, TensorRule]:
    """Tensors of the gated residual connection of a branch, `role`, under `prefix`."""
    wide, rank = config.residual_streams * config.hidden_size, config.residual_gate_rank
    return {f"{role}.mix_norm": TensorRule(f"{prefix}hc_norm.weight", (wide,)),
            f"{role}.mix_down": TensorRule(f"{prefix}input_mix_weight_down.weight", (rank, wide)),
            f"{role}.mix_up": TensorRule(f"{prefix}input_mix_weight_up.weight", (wide, rank)),
            f"{role}.mix_in": TensorRule(f"{prefix}block_inject_weight.weight", (config.residual_streams, wide), plain=True)}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config) | _gated_residual_tensors(config, "leave_mix", "model.hyper_connection_mixer.")
    for role in ("norm", "leave_mix.mix_in"):
        del rules[role]
    ngrams = config.ngrams
    for layer in () if ngrams is None else ngrams.layers:
        rules[role_of(layer)] = TensorRule(f"model.layers.{layer}.{NGRAM_TABLE}.weight", (ngrams.num_rows(layer), ngrams.width), plain=True)
    return rules


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """A layer's n-gram table -> the shards that store it, with their rows."""
    ngrams = config.ngrams
    if ngrams is None or layer not in ngrams.layers:
        return {}
    prefix = f"model.layers.{layer}.{NGRAM_TABLE}."
    return {f"{prefix}weight": tuple((f"{prefix}shard_{part}.weight", rows) for part, rows in enumerate(ngrams.shard_rows(layer)))}


@narrowing
def block(x: object, at: Layer, rows: object | None = None) -> object:
    """`llama.block` over streams x [T, S * D]; `rows` [T, E]: the tokens' rows of the n-gram table. Taps see the branches' inputs where
    they see x in other families, except block_out."""
    ops, w, kv = at.ops, at.w, at.kv
    around_attention, around_mlp = w.gated_residuals
    if w.ngrams is not None:
        at.tap("ngrams_in", rows)
        x = kv.add_ngrams(x, ops.ngram_products(rows, w.ngrams), w.ngrams)
    hidden = ops.read_streams(x, around_attention)
    at.tap("block_in", hidden)
    if w.recurrent is not None:
        branch, out_linear = kv.mix(ops.norm_linear(hidden, None, w.recurrent.projections), w.recurrent.params), w.recurrent.out_proj
        at.tap("state_out", branch)
    else:
        branch, out_linear = attention(hidden, at), w.o
        at.tap("attn_out", branch)
    x = write_branch(ops, x, branch, out_linear, around_attention)
    return stream_mlp(x, at, around_mlp, at.config.hidden_act)


def attention(x: object, at: Layer) -> object:
    """Attention of the branch input x: the input of `o`, [T, H * head_dim]."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    heads, (kv_heads, head_dim) = config.num_attention_heads, config.kv_heads_of(at.number)
    index_linears = () if w.indexer is None else (w.indexer.q, w.indexer.k)
    q_and_gates, k, v, *index_products = ops.norm_linear(x, None, [w.q, w.k, w.v, *index_linears])
    if index_products:
        choose(ops, w.indexer, *index_products, None, kv, positions, rope, config.indexer.shape)
    q = ops.rope_heads(ops.split_query_gates(q_and_gates, heads, head_dim), heads, head_dim, positions, rope, w.q_norm)
    k = ops.rope_heads(k, kv_heads, head_dim, positions, rope, w.k_norm)
    at.tap_heads(q, k, v)
    attended = kv.attend(q, k, v)
    return ops.gate_heads(attended, last_of(q_and_gates, len(attended)), heads, head_dim)
