"""Zamba 2 (1.2B, 2.7B, 7B): Mamba 2 in every layer, some preceded by a shared block of attention and MLP.

There are one or two shared blocks, used in turn. A block reads the residual stream concatenated with the embedding, so the embedding is a
second stream (`ModelConfig.residual_streams`). Its output goes through a matrix of the layer and is added to the state space's input, not
to the stream. Each layer has low-rank adapters of the block's matrices; they, and the blocks, are stored under the first layer that uses
the block. dt is not clamped to time_step_min, as in `nemotron_h.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer
from ..weights.shared_block_weights import MLP_UP_ROLES, QKV, block_of, block_role
from . import TensorRule, llama
from .granitemoehybrid import mamba_tensors

# Training and runtime settings, and keys that follow from others.
KEYS_HARMLESS = frozenset({
    "attention_hidden_size", "chunk_size", "ffn_hidden_size", "hybrid_layer_ids", "kv_channels", "layer_types", "num_logits_to_keep",
    "num_query_groups", "time_step_floor", "time_step_max", "time_step_min", "use_conv_bias", "use_mamba_kernels", "use_mem_eff_path"})
REFUSED_UNLESS = {"add_bias_linear": False, "sliding_window": None, "use_long_context": False, "use_shared_mlp_adapter": True}
SIZES = {"vocab_size": 32_000, "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32}
MAMBA, HYBRID = ("linear_attention", "mamba"), "hybrid"
STREAMS = 2  # the residual stream, and the embedding
NORM_EPS = 1e-5  # default, and always that of the state space's output norm
DEFAULT_KINDS = (MAMBA[0], *((*[MAMBA[0]] * 5, HYBRID) * 7), *[MAMBA[0]] * 4, HYBRID, *[MAMBA[0]] * 3, HYBRID, *[MAMBA[0]] * 2)


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=4096, bos=1, eos=(2,), norm_eps=NORM_EPS, tied=True, act=("hidden_act", "gelu"), sizes=SIZES)
    hidden, layers, heads = (base.size(keys, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    head_dim = _divided(keys, "attention_head_dim", 2 * hidden, heads, "num_attention_heads")
    ffn = keys.integer("intermediate_size", 4 * hidden, high=2**22)
    uses_rope, hybrid = keys.flag("use_mem_rope", False), _hybrid_layers(keys, layers)
    rotated = [uses_rope and layer in hybrid for layer in range(layers)]

    all_layers = tuple(range(layers))
    shared_blocks = min(keys.integer("num_mem_blocks", 1, high=len(all_layers)), len(hybrid))
    config = decoder_config(
        keys.with_values(head_dim=head_dim, intermediate_size=ffn), base, rotary_layers=rotated, attn_scale=(head_dim / 2) ** -0.5,
        recurrent_layers=all_layers, layers_without_mlp=all_layers, hybrid_layers=hybrid, num_shared_blocks=shared_blocks,
        shared_attention_lora=keys.flag("use_shared_attention_adapter", False), residual_streams=STREAMS,
        low_rank_dim=keys.integer("adapter_rank", 128, high=2**16))
    if not config.tie_word_embeddings:  # in transformers the layers share nothing then
        raise ConfigError("config.json: tie_word_embeddings = false is not supported for zamba2 models",
                          "published models of this family tie their output head")
    if config.shared_attention_lora and config.num_key_value_heads != heads:
        raise ConfigError(f"config.json: num_key_value_heads {config.num_key_value_heads} is not supported with "
                          "use_shared_attention_adapter",
                          f"its adapters are for {heads}, the number of query heads")
    return replace(config, recurrent=_shape(keys, hidden), recurrent_norm_eps=None if config.norm_eps == NORM_EPS else NORM_EPS)


def _divided(keys: Keys, name: str, total: int, parts: int, parts_key: str) -> int:
    """`total / parts`, which the config may state as `name`. Raises ConfigError if it does not divide or is stated otherwise."""
    stated = keys.integer(name, None, high=2**20)
    if total % parts or stated not in (None, total // parts):
        also_stated = "" if stated is None else f", and stated as {stated}"
        raise ConfigError(f"config.json: {name} is {total / parts:g} by {parts_key}{also_stated}",
                          "the config was changed: use that of the published model")
    return total // parts


def _shape(keys: Keys, hidden: int) -> Mamba2Shape:
    """The state of a layer. Raises ConfigError."""
    heads, values = keys.integer("n_mamba_heads", 8, high=4096), keys.integer("mamba_expand", 2, high=64) * hidden
    shape = Mamba2Shape(heads, _divided(keys, "mamba_headdim", values, heads, "n_mamba_heads"), keys.integer("mamba_ngroups", 1, high=4096),
                        keys.integer("mamba_d_state", 64, high=4096), keys.integer("mamba_d_conv", 4, high=64))
    if heads % shape.groups:
        raise ConfigError(f"config.json: n_mamba_heads {heads} is not a multiple of mamba_ngroups {shape.groups}")
    return shape


def _hybrid_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """The layers with a shared block. Raises ConfigError if there are none, and for unknown kinds of layers."""
    kinds = keys.strings("layers_block_type", layers) or (DEFAULT_KINDS if layers == len(DEFAULT_KINDS) else ())
    if unknown := next((kind for kind in kinds if kind not in (*MAMBA, HYBRID)), None):
        raise ConfigError(f"config.json: layers_block_type holds {show(unknown)}, which is not supported",
                          f"known: {', '.join((*MAMBA, HYBRID))}")
    hybrid_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == HYBRID)
    if not hybrid_layers:
        raise ConfigError("config.json: layers_block_type names no layer with attention", "at least one is required")
    return hybrid_layers


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    inner = f"{prefix}mamba_decoder." if layer in config.hybrid_layers else prefix
    rules = {"input_norm": TensorRule(f"{inner}input_layernorm.weight", (hidden,))} | mamba_tensors(config, f"{inner}mamba.")
    if layer not in config.hybrid_layers:
        return rules
    number, rank, ffn = config.hybrid_layers.index(layer), config.low_rank_dim, config.intermediate_size
    block_prefix = _shared_block_prefix(config, block_of(config, layer))
    rules["lent_out"] = TensorRule(f"{prefix}linear.weight", (hidden, hidden))
    adapter = f"{block_prefix}feed_forward.gate_up_proj_adapter_list.{number}."
    rules["mlp_low"] = TensorRule(f"{adapter}0.weight", (rank, hidden))
    for i, role in enumerate(MLP_UP_ROLES):
        rules[role] = TensorRule(f"{adapter}{role}.weight", (ffn, rank), part_of=(f"{adapter}1.weight", i * ffn, 2 * ffn))
    for role in QKV if config.shared_attention_lora else ():
        adapter = f"{block_prefix}self_attn.linear_{role}_adapter_list.{number}."
        rules |= {f"{role}_low": TensorRule(f"{adapter}0.weight", (rank, 2 * hidden)),
                  f"{role}_wide": TensorRule(f"{adapter}1.weight", (config.num_attention_heads * config.head_dim, rank))}
    return rules


def _shared_block_prefix(config: ModelConfig, block: int) -> str:
    """The prefix of a shared block's tensors: in the first layer that uses it."""
    return f"model.layers.{config.hybrid_layers[block]}.shared_transformer."


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules, hidden, ffn = llama.outer_tensors(config), config.hidden_size, config.intermediate_size
    rules["norm"] = replace(rules["norm"], name="model.final_layernorm.weight")
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    for block in range(config.num_shared_blocks):
        prefix = _shared_block_prefix(config, block)
        fused = f"{prefix}feed_forward.gate_up_proj.weight"
        tensors = {"input_norm": TensorRule(f"{prefix}input_layernorm.weight", (2 * hidden,)),
                   "post_norm": TensorRule(f"{prefix}pre_ff_layernorm.weight", (hidden,)),
                   **{role: TensorRule(f"{prefix}self_attn.{role}_proj.weight", (rows, 2 * hidden))
                      for role, rows in zip(QKV, (q, kv, kv))},
                   "o": TensorRule(f"{prefix}self_attn.o_proj.weight", (hidden, q)),
                   **{role: TensorRule(f"{prefix}feed_forward.{role}_proj.weight", (ffn, hidden), part_of=(fused, i * ffn, 2 * ffn))
                      for i, role in enumerate(("gate", "up"))},
                   "down": TensorRule(f"{prefix}feed_forward.down_proj.weight", (hidden, ffn))}
        rules |= {block_role(block, role): rule for role, rule in tensors.items()}
    return rules


def block(x: object, at: Layer) -> object:
    """Streams x[T, 2 * D] -> x[T, 2 * D]. Taps see block_in, the state space's input, and of a shared block q, k, v, attn_out and lent_in,
    the input of the layer's own matrix."""
    ops, w = at.ops, at.w
    hidden = ops.first_stream(x, at.config.residual_streams)
    if w.shared_block is not None:
        block_output = _shared_block_output(x, at)
        at.tap("lent_in", block_output)
        hidden = ops.linear_add(block_output, w.shared_block.out_proj, hidden)
    at.tap("block_in", hidden)
    mixed = at.kv.mix(ops.norm_linear(hidden, w.input_norm, w.recurrent.projections), w.recurrent.params)
    at.tap("state_out", mixed)
    x = ops.add_to_first(x, mixed, w.recurrent.out_proj)
    at.tap("block_out", x)
    return x


def _shared_block_output(x: object, at: Layer) -> object:
    """The shared block's output for both streams, [T, D]."""
    ops, w, positions, rope, config = at.ops, at.w, at.positions, at.rope, at.config
    use, block = w.shared_block, w.shared_block.block
    projections = ops.norm_linear(x, block.input_norm, [block.q, block.k, block.v])
    for low, out in zip(use.qkv_lora, projections):
        ops.add_low_rank(x, block.input_norm, low, out)
    q, k, v = projections
    q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, positions, rope, None)
    k = ops.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, rope, None)
    at.tap_heads(q, k, v)
    attended = at.kv.attend(q, k, v)
    at.tap("attn_out", attended)
    (attention_output,) = ops.norm_linear(attended, None, [block.o])
    return ops.shared_block_mlp(attention_output, block.mlp_norm, block.gate, block.up, block.down, config.hidden_act, use.gate_up_lora)
