"""MiniMax Text-01 and M1: lightning attention in seven of eight layers, softmax attention in the others, and Mixtral's MoE in all.

The residual stream itself is normed, in place; then alpha times the stream plus beta times the branch replaces it (DeepNorm). It is
computed as alpha * (stream + beta / alpha * branch), so that the experts read the norm unscaled.

Checkpoints fuse q, k and v of linear attention head by head; the store reorders the rows for the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...kernels.lightning_shape import LightningShape
from ..config import Defaults, ModelConfig, decoder_config, demand_silu
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from ..layer import Layer, last_of, narrowing
from . import TensorRule
from .deepseek_v3 import check_auto_map
from .mixtral import NAMES, expert_tensors, moe_config
from .olmo_hybrid import FULL, LINEAR, demand_both_kinds

if TYPE_CHECKING:
    from ..block_ops import BlockOps

# Kind of branch -> its name in published keys. FACTOR_KEYS: (kind, alpha or beta) -> transformers' key, and that of published configs.
BRANCHES = {"full": "full_attention", "linear": "linear_attention", "mlp": "mlp"}
FACTOR_KEYS = {(kind, part): (f"{kind}_attn_{part}_factor" if kind != "mlp" else f"mlp_{part}_factor", f"layernorm_{place}_{part}")
               for kind, place in BRANCHES.items() for part in ("alpha", "beta")}
# block_size is how transformers chunks a prompt; the rest is for training.
KEYS_HARMLESS = frozenset({"block_size", "router_jitter_noise", "shared_moe_mode"})
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False, "postnorm": True, "shared_intermediate_size": 0, "sliding_window": None}
SIZES = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
CODE = r"(configuration|modeling)_minimax_(text_01\.MiniMaxText01|m1\.MiniMaxM1)\w+"  # auto_map of published checkpoints
THETA, STATE_EPS = 1e6, 1e-6
STORED_QKV, REORDERED_QKV = "self_attn.qkv_proj.weight", "self_attn.vkq_proj.weight"
RESIDUAL_FACTORS = {FULL: "kept.full", LINEAR: "kept.linear"}  # roles in `ModelConfig.multipliers`: alpha, by kind of layer
MLP_RESIDUAL_FACTOR = "kept.mlp"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    kinds = _layer_types(keys, layers)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig | None, ...]:
        # The published models rotate rotary_dim channels, which transformers ignores.
        share = keys.integer("rotary_dim", head_dim, low=2, high=head_dim) / head_dim
        rope = rope_config(keys, head_dim, positions, THETA, partial=True, share=share)
        return tuple(rope if kind == FULL else None for kind in kinds)

    factors = {kind: tuple(_deepnorm_factor(keys, kind, part) for part in ("alpha", "beta")) for kind in BRANCHES}
    branch_factors = {kind: beta / alpha for kind, (alpha, beta) in factors.items()}
    residual_factors = {RESIDUAL_FACTORS[FULL]: factors["full"][0], RESIDUAL_FACTORS[LINEAR]: factors["linear"][0],
                        MLP_RESIDUAL_FACTOR: factors["mlp"][0]}
    heads = base.size(keys, "num_attention_heads")
    head_dim = keys.integer("head_dim", base.size(keys, "hidden_size") // heads, high=1024)
    moe = moe_config(keys, 8, 2, base.size(keys, "intermediate_size"), True, range(layers), routed_scale=branch_factors["mlp"])
    multipliers = {**residual_factors, "o": branch_factors["full"], "state_out": branch_factors["linear"]}
    config = decoder_config(keys, base, ropes, moe=moe, recurrent=LightningShape(heads, head_dim), recurrent_norm_eps=STATE_EPS,
                            recurrent_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
                            multipliers=tuple(multipliers.items()))
    demand_silu(keys, config.hidden_act, "its linear attention uses it too")
    return config


def _deepnorm_factor(keys: Keys, kind: str, part: str) -> float:
    """One of DeepNorm's factors, under either of its keys. Raises ConfigError if they disagree."""
    name, published_name = FACTOR_KEYS[kind, part]
    factor, published_factor = keys.number(name, 1.0), keys.number(published_name, 1.0)
    if 1.0 not in (factor, published_factor) and factor != published_factor:
        raise ConfigError(f"config.json: {name} is {factor} and {published_name} {published_factor}, which should be the same")
    return published_factor if factor == 1.0 else factor


def _layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """FULL or LINEAR by layer, from layer_types or attn_type_list, in which 0 is linear attention. Raises ConfigError."""
    switches = keys.flags("attn_type_list", layers)
    stated = keys.strings("layer_types", layers)
    listed = None if switches is None else tuple(FULL if each else LINEAR for each in switches)
    if None not in (stated, listed) and tuple(stated) != listed:
        raise ConfigError("config.json: layer_types and attn_type_list disagree on which layers have attention", "one of the two is wrong")
    return demand_both_kinds(stated or listed or tuple(LINEAR if layer % 2 else FULL for layer in range(layers)))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; both norms apply to the residual stream itself."""
    rules, shape, prefix = expert_tensors(config, layer, "block_sparse_moe", NAMES), config.recurrent, f"model.layers.{layer}."
    rules["entry_norm"], rules["middle_norm"] = rules.pop("input_norm"), rules.pop("post_norm")
    if layer not in config.recurrent_layers:
        return rules
    hidden = config.hidden_size
    rules = {role: rule for role, rule in rules.items() if ".self_attn." not in rule.name}
    return rules | {"state_in": TensorRule(prefix + REORDERED_QKV, (shape.channels, hidden)),
                    "state_gate": TensorRule(f"{prefix}self_attn.output_gate.weight", (shape.values, hidden)),
                    "state_norm": TensorRule(f"{prefix}self_attn.norm.weight", (shape.values,)),
                    "state_out": TensorRule(f"{prefix}self_attn.out_proj.weight", (hidden, shape.values))}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """The layer's fused projection in the kernels' order (values, keys, queries) -> the stored one, and its rows: q, k and v head by
    head."""
    if layer not in config.recurrent_layers:
        return {}
    heads, depth, prefix = config.recurrent.heads, config.recurrent.head_dim, f"model.layers.{layer}."
    rows = np.arange(heads * 3 * depth).reshape(heads, 3, depth)
    return {prefix + REORDERED_QKV: (prefix + STORED_QKV, np.concatenate([rows[:, part].reshape(-1) for part in (2, 1, 0)]))}


@narrowing
def block(x: object, at: Layer) -> object:
    """x[T, D] -> x[T, D], with the taps of `llama.block`; block_in and mlp_in see the normed stream."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    x = ops.norm_stream(x, w.entry_norm)
    at.tap("block_in", x)
    if w.recurrent is not None:
        mixed = kv.mix(ops.norm_linear(x, w.input_norm, w.recurrent.projections), w.recurrent.params)
        at.tap("state_out", mixed)
        x = ops.linear_add(mixed, w.recurrent.out_proj, last_of(x, len(mixed)), None, config.multiplier("state_out"))
    else:
        q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])
        q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, positions, rope, None)
        k = ops.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, rope, None)
        at.tap_heads(q, k, v)
        attended = kv.attend(q, k, v)
        at.tap("attn_out", attended)
        x = ops.linear_add(attended, w.o, last_of(x, len(attended)), None, config.multiplier("o"))
    x = _scaled(ops, x, config.multiplier(RESIDUAL_FACTORS[FULL if w.recurrent is None else LINEAR]))
    x = ops.norm_stream(x, w.middle_norm)
    at.tap("mlp_in", x)
    x = ops.moe(x, w.post_norm, w.router, w.experts, config.moe.routing, config.hidden_act, at.observer("visits"))
    x = _scaled(ops, x, config.multiplier(MLP_RESIDUAL_FACTOR))
    at.tap("block_out", x)
    return x


def _scaled(ops: BlockOps, x: object, factor: float) -> object:
    return x if factor == 1.0 else ops.scale_in_place(x, factor)
