"""Gemma 3n, text (E2B, E4B): Gemma 3's block with norms stored as they are, normed values, layers that share the keys and values of earlier
ones, and three things more.

A token has several residual streams (AltUp, arXiv 2301.13310), of which each layer works on the first: before the layer all are predicted
from one another, after it all are corrected by the first one's change. A low-rank branch runs beside attention (LAuReL, arXiv 2411.07501).
In the first layers only the largest gates of an MLP are active, by the mean and standard deviation of a token's gates. Per-layer inputs, as
in Gemma 4, are added to all streams but the first.
"""

from __future__ import annotations

from statistics import NormalDist

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys, is_count
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_window
from ..layer import Layer, last_of, narrowing
from . import TensorRule, gemma2, llama, with_multimodal_names
from .gemma2 import ACT, embedding_multiplier, softcap
from .gemma4_text import MAX_PER_LAYER_INPUT_DIM, absent_roles, kv_sources, per_layer_input_outer_tensors, per_layer_input_tensors
from .llama import attention, mlp_or_experts
from .qwen2 import layer_windows

# altup_coef_clip and altup_lr_multiplier are used in training only.
KEYS_HARMLESS = frozenset({"altup_coef_clip", "altup_lr_multiplier", "cache_implementation", "hidden_act",
                           "original_max_position_embeddings"})
REFUSED_UNLESS = {"altup_active_idx": 0, "altup_correct_scale": True, "mlp_bias": False, "use_bidirectional_attention": False}
SIZES = {"vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35, "num_attention_heads": 8}
PATTERN = 5  # by default every fifth layer has full attention
SPARSITY, SPARSE_LAYERS = 0.95, 10  # defaults: the share of gates that are inactive, and the number of such layers
MAX_STREAMS, MAX_RANK, MAX_WIDTH = 8, 2**16, 2**22
HALF = 0.5**0.5  # factor of two branches of the same magnitude


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=2, head_dim=256, bos=2, eos=(1,), tied=True, act=ACT, sizes=SIZES)
    layers, hidden = base.size(keys, "num_hidden_layers"), base.size(keys, "hidden_size")
    kinds = list(keys.strings("layer_types", layers) or [LOCAL if (layer + 1) % PATTERN else GLOBAL for layer in range(layers)])
    windows = layer_windows(keys.with_values(layer_types=kinds), keys.integer("sliding_window", 512), kinds)
    shared = keys.integer("num_kv_shared_layers", 15, low=0, high=layers)
    sources = kv_sources(kinds, layers - shared)
    widths, bias = _widths(keys, layers), keys.flag("attention_bias", False)
    width = keys.integer("hidden_size_per_layer_input", 256, high=MAX_PER_LAYER_INPUT_DIM)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        thetas = keys.number("rope_theta", 1_000_000.0, above=1.0), keys.number("rope_local_base_freq", 10_000.0, above=1.0)
        return ropes_by_window(keys, head_dim, positions, thetas, windows)

    return decoder_config(
        keys.with_values(intermediate_size=max(widths)), base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True,
        attn_scale=1.0, v_norm=True, embedding_multiplier=embedding_multiplier(keys, hidden),
        final_logit_softcapping=softcap(keys, "final_logit_softcapping", 30.0), kv_sources=sources if shared else (),
        layer_intermediate_sizes=widths if len(set(widths)) > 1 else (), per_layer_input_dim=width,
        per_layer_input_vocab=keys.integer("vocab_size_per_layer_input", 262_144, high=2**24),
        per_layer_input_multiplier=embedding_multiplier(keys, width),
        residual_streams=keys.integer("altup_num_inputs", 4, low=2, high=MAX_STREAMS),
        low_rank_dim=keys.integer("laurel_rank", 64, high=MAX_RANK),
        gate_cutoffs=_gate_cutoffs(keys, layers))


def _widths(keys: Keys, layers: int) -> tuple[int, ...]:
    """The intermediate size of every layer; a config states one for all, or a list."""
    stated = keys.raw.get("intermediate_size") if keys.has("intermediate_size") else None
    if not isinstance(stated, list):
        return (keys.integer("intermediate_size", SIZES["intermediate_size"], high=MAX_WIDTH),) * layers
    if len(stated) != layers or not all(is_count(each) and 0 < each <= MAX_WIDTH for each in stated):
        raise keys.fail("intermediate_size", f"a width, or one for each of {layers} layers")
    return tuple(stated)


def _gate_cutoffs(keys: Keys, layers: int) -> tuple[float | None, ...]:
    """ModelConfig.gate_cutoffs: by layer how many standard deviations above the mean a gate must be, from the share of inactive gates."""
    shares = keys.raw.get("activation_sparsity_pattern") if keys.has("activation_sparsity_pattern") else None
    if shares is None:
        count = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        shares = [SPARSITY] * count + [0.0] * (layers - count)
    if not isinstance(shares, list) or len(shares) != layers or any(type(each) not in (int, float) or not 0 <= each < 1 for each in shares):
        raise keys.fail("activation_sparsity_pattern", f"a share of gates from 0 to 1 for each of {layers} layers")
    return tuple(NormalDist().inv_cdf(each) if each else None for each in shares) if any(shares) else ()


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    rules, prefix, hidden = gemma2.layer_tensors(config, layer), f"model.layers.{layer}.", config.hidden_size
    for role in absent_roles(config, layer):
        rules.pop(role, None)
    count, rank = config.residual_streams, config.low_rank_dim
    more = {"low_in": ("laurel.linear_left.weight", rank, hidden), "low_out": ("laurel.linear_right.weight", hidden, rank),
            "low_norm": ("laurel.post_laurel_norm.weight", hidden), "stream_norm": ("altup.router_norm.weight", hidden),
            "stream_scale": ("altup.correct_output_scale", hidden), **per_layer_input_tensors(config)}
    small = {"stream_router": ("altup.modality_router.weight", count, hidden),
             "predict": ("altup.prediction_coefs.weight", count**2, count), "correct": ("altup.correction_coefs.weight", count, count)}
    rules |= {role: TensorRule(prefix + name, tuple(shape)) for role, (name, *shape) in more.items()}
    rules |= {role: TensorRule(prefix + name, tuple(shape), coefficients=True) for role, (name, *shape) in small.items()}
    return with_multimodal_names(rules)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    square = (config.hidden_size, config.hidden_size)
    names = {"enter": "altup_projections", "leave": "altup_unembed_projections"}
    rules = {f"streams.{i}.{role}": TensorRule(f"model.{name}.{i - 1}.weight", square)
             for role, name in names.items() for i in range(1, config.residual_streams)}
    return with_multimodal_names(llama.outer_tensors(config) | per_layer_input_outer_tensors(config) | rules)


@narrowing
def block(x: object, at: Layer, inputs: object) -> object:
    """As `gemma4_text.block`, of streams x [T, S * D]. Taps see the one that the layer works on where they see x of other families, but for
    block_out; before `low_out` low_hidden."""
    ops, w, config = at.ops, at.w, at.config
    own = ops.altup_predict(x, w.altup)
    beside = ops.low_rank_branch(own, w.input_norm, w.low_rank, at.observer("low_hidden"))
    own = attention(own, at)
    x, beside, inputs = (last_of(each, len(own)) for each in (x, beside, inputs))
    own = ops.add_scaled(ops.scale_in_place(own, HALF), beside, HALF)
    cut = config.gate_cutoff_of(at.number)
    if cut is None:
        own = mlp_or_experts(own, at)
    else:
        at.tap("mlp_in", own)
        own = ops.cutoff_mlp(own, w.post_norm, w.gate, w.up, w.down, config.hidden_act, cut, at.observer("mlp_hidden"), w.down_norm)
    own = ops.altup_correct(x, own, w.altup)
    at.tap("inputs_in", own)
    x = ops.altup_add_input(x, own, w.per_layer_input, inputs, config.hidden_act, at.observer("inputs_hidden"))
    at.tap("block_out", x)
    return x
