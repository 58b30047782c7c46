"""Gemma 4, text: Gemma 3's block with norms stored as they are, normed values, and two kinds of layers that differ in more than their
window.

Layers with full attention have larger heads, fewer KV heads, keys that may be values too, and partial RoPE on a quarter of each head. The
last layers may attend to the keys and values of the last earlier layer of their type; in the smallest models their MLPs are twice as wide,
and every layer has a per-layer input from an embedding table of its own. In the MoE, experts run beside the MLP under norms of their own,
and each has a learned scale. Scores are not scaled: the QK norms do that.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import REQUIRED, ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_layer_type
from ..layer import Layer, last_of, narrowing
from ..moe_config import MoEConfig
from . import TensorRule, expert_role, gemma2, llama, with_multimodal_names
from .gemma2 import ACT, embedding_multiplier, softcap
from .llama import attention, mlp_or_experts
from .mixtral import MAX_EXPERTS
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

# The patterns repeat layer_types, which they generated; expert_intermediate_size is an older name of moe_intermediate_size.
KEYS_HARMLESS = frozenset({"_sliding_window_pattern", "cache_implementation", "expert_intermediate_size", "hidden_act",
                           "sliding_window_pattern"})
REFUSED_UNLESS = {"mlp_bias": False}
SIZES = {"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8}
PATTERN = 6  # by default every sixth layer has full attention
ROPES = {GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
         LOCAL: {"rope_type": "default", "rope_theta": 10_000.0}}
MAX_PER_LAYER_INPUT_DIM = 4096


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, head_dim=256, bos=2, eos=(1,), tied=True, act=ACT,
                    sizes=SIZES)
    if (seen := keys.text("use_bidirectional_attention", None)) not in (None, "vision"):  # "vision" is about images only
        raise ConfigError(f"config.json: use_bidirectional_attention = {show(seen)} is not supported for {keys.text('model_type')} models",
                          "a bidirectional model cannot generate text")
    layers, hidden = base.size(keys, "num_hidden_layers"), base.size(keys, "hidden_size")
    kinds = list(keys.strings("layer_types", layers) or [LOCAL if (layer + 1) % PATTERN else GLOBAL for layer in range(layers)])
    kinds[-1] = GLOBAL  # whatever the config lists
    windows = layer_windows(keys.with_values(layer_types=kinds), keys.integer("sliding_window", 512), kinds)
    heads = _heads(keys, kinds)
    shared = keys.integer("num_kv_shared_layers", 0, low=0, high=layers)
    sources = kv_sources(kinds, layers - shared)
    doubled = keys.flag("use_double_wide_mlp", False) and shared > 0
    ffn, bias = base.size(keys, "intermediate_size"), keys.flag("attention_bias", False)
    width = keys.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_PER_LAYER_INPUT_DIM)
    rows = keys.integer("vocab_size_per_layer_input", SIZES["vocab_size"], high=2**24)
    if width and rows < (tokens := base.size(keys, "vocab_size")):
        raise ConfigError(f"config.json: vocab_size_per_layer_input = {rows} is not supported for a vocabulary of {tokens} tokens",
                          "per-layer embeddings need a row for every token")
    as_values, routed = keys.flag("attention_k_eq_v", False), keys.flag("enable_moe_block", False)
    mixture = _moe_config(keys, layers, routed)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        made = ropes_by_layer_type(keys, kinds, ROPES, {kind: size for kind, (_, size) in zip(kinds, heads)}, positions)
        if stray := sorted((keys.section("rope_parameters") or {}).keys() - {GLOBAL, LOCAL}):
            raise ConfigError(f"config.json: rope_parameters holds {show(stray[0])}", f"known: {GLOBAL}, {LOCAL}")
        return made

    return decoder_config(
        keys, base, ropes, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True, attn_scale=1.0, v_norm=True,
        embedding_multiplier=embedding_multiplier(keys, hidden), final_logit_softcapping=softcap(keys, "final_logit_softcapping", None),
        layer_kv_heads=heads if set(heads) != {_usual(keys)} else (), kv_sources=sources if shared else (),
        layer_intermediate_sizes=tuple(ffn * (1 + (layer >= layers - shared)) for layer in range(layers)) if doubled else (),
        per_layer_input_dim=width,
        per_layer_input_vocab=rows if width else 0, per_layer_input_multiplier=embedding_multiplier(keys, width) if width else 1.0,
        layer_scalars=True,
        k_eq_v_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == GLOBAL) if as_values else (),
        moe=mixture)


def _usual(keys: Keys) -> tuple[int, int]:
    return keys.integer("num_key_value_heads", 4, high=4096), keys.integer("head_dim", 256, high=1024)


def _heads(keys: Keys, kinds: list[str]) -> tuple[tuple[int, int], ...]:
    usual, fewer = _usual(keys), keys.integer("num_global_key_value_heads", None, high=4096)
    wide = (keys.flag("attention_k_eq_v", False) and fewer) or usual[0], keys.integer("global_head_dim", 512, high=1024)
    return kv_heads_by_layer_type(keys, kinds, usual, wide, SIZES["num_attention_heads"])


def kv_heads_by_layer_type(keys: Keys, kinds: list[str], usual: tuple[int, int], wide: tuple[int, int],
                           queries: int) -> tuple[tuple[int, int], ...]:
    """(key-value heads, their size) by layer: one of its own that `per_layer_config` has, where there is none what is stated of layers
    without windows, `wide`, else `usual`. `queries`: how many query heads there are where a config is silent."""
    query, own = keys.integer("num_attention_heads", queries, high=4096), keys.section("per_layer_config")
    if own is None:
        found = [wide if kind == GLOBAL else usual for kind in kinds]
    else:
        found = [usual] * len(kinds)
        for name, stated in own.items():
            is_layer = name.isdecimal() and len(name) < 5 and int(name) < len(kinds) and isinstance(stated, dict)
            stray = sorted(stated.keys() - {"head_dim", "num_key_value_heads"}) if is_layer else ()
            if stray or not is_layer:
                said = f" of {show(name)}: {show(stray[0])}" if stray else f": {show(name)}"
                raise ConfigError(f"config.json: per_layer_config{said} is not supported",
                                  "known: head_dim and num_key_value_heads of layers by number")
            section = Keys(stated, f"config.json: per_layer_config.{name}")
            found[int(name)] = section.integer("num_key_value_heads", usual[0], high=4096), section.integer("head_dim", usual[1], high=1024)
    for kind in (GLOBAL, LOCAL):
        if len({each for each, is_of in zip(found, kinds) if is_of == kind}) > 1:
            raise ConfigError(f"config.json: layers of {kind} differ in their heads", "layers of one type must have the same heads")
    for kv_heads, size in found:
        if query % kv_heads or size % 2:
            raise ConfigError(f"config.json: {query} query heads for {kv_heads} key-value heads of {size} in a layer are not supported",
                              "the first must be a multiple of the second, and heads of an even size")
    return tuple(found)


def kv_sources(kinds: list[str], first: int) -> tuple[int, ...]:
    """ModelConfig.kv_sources, where the layers from `first` on use the keys and values of the last layer of their type before `first`."""
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if missing := sorted(set(kinds) - last.keys()):
        raise ConfigError(f"config.json: num_kv_shared_layers = {len(kinds) - first} leaves no layer of {missing[0]} with keys and values",
                          "lower num_kv_shared_layers")
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _moe_config(keys: Keys, layers: int, routed: bool) -> MoEConfig | None:
    experts, per_token, width = (keys.integer(name, REQUIRED if routed else None, high=most) for name, most in (
        ("num_experts", MAX_EXPERTS), ("top_k_experts", MAX_EXPERTS), ("moe_intermediate_size", 2**22)))
    if not routed:
        return None
    if per_token > experts:
        raise ConfigError(f"config.json: top_k_experts {per_token} is more than the {experts} experts there are")
    return MoEConfig(experts, per_token, width, True, frozenset(range(layers)), parallel_to_mlp=True)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    rules, prefix, hidden, moe = gemma2.layer_tensors(config, layer), f"model.layers.{layer}.", config.hidden_size, config.moe
    for role in absent_roles(config, layer):
        rules.pop(role, None)
    more = {"layer_scale": ("layer_scalar", 1), **(per_layer_input_tensors(config) if config.per_layer_input_dim else {})}
    if moe is not None:
        more |= {"router": ("router.proj.weight", moe.num_experts, hidden), "router_scale": ("router.scale", hidden),
                 "expert_scales": ("router.per_expert_scale", moe.num_experts),
                 "expert_norm": ("pre_feedforward_layernorm_2.weight", hidden),
                 "experts_after": ("post_feedforward_layernorm_2.weight", hidden),
                 "mlp_after": ("post_feedforward_layernorm_1.weight", hidden)}
    rules |= {role: TensorRule(prefix + name, tuple(shape)) for role, (name, *shape) in more.items()}
    for expert in range(moe.num_experts if moe else 0):
        for role, name in NAMES.items():
            shape = (hidden, moe.expert_dim) if role == "down" else (moe.expert_dim, hidden)
            rules[expert_role(expert, role)] = TensorRule(f"{prefix}experts.{expert}.{name}.weight", shape)
    return with_multimodal_names(rules)


def absent_roles(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Roles of attention that a layer does not have."""
    if config.kv_sources and config.kv_sources[layer] != layer:
        return "k", "v", "k_norm", "k_bias", "v_bias"
    return ("v", "v_bias") if layer in config.k_eq_v_layers else ()


def per_layer_input_tensors(config: ModelConfig) -> dict[str, tuple[str | int, ...]]:
    """Tensors of a layer's per-layer input: role -> (name, shape...)."""
    width, hidden = config.per_layer_input_dim, config.hidden_size
    return {"input_gate": ("per_layer_input_gate.weight", width, hidden), "input_out": ("per_layer_projection.weight", hidden, width),
            "input_after": ("post_per_layer_input_norm.weight", hidden)}


def per_layer_input_outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Tensors outside the layers that make the per-layer inputs."""
    every = config.num_hidden_layers * config.per_layer_input_dim
    return {"layer_embed": TensorRule("model.embed_tokens_per_layer.weight", (config.per_layer_input_vocab, every)),
            "layer_proj": TensorRule("model.per_layer_model_projection.weight", (every, config.hidden_size)),
            "layer_norm": TensorRule("model.per_layer_projection_norm.weight", (config.per_layer_input_dim,))}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.outer_tensors(config)
                                 | (per_layer_input_outer_tensors(config) if config.per_layer_input_dim else {}))


@narrowing
def block(x: object, at: Layer, inputs: object | None = None) -> object:
    """As `llama.block`. `inputs` [T, P]: the per-layer input. Taps also get inputs_in, the input of `input_gate`, and inputs_hidden, that
    of `input_out`."""
    ops, w = at.ops, at.w
    x = attention(x, at)
    x = mlp_or_experts(x, at)
    if w.per_layer_input is not None:
        at.tap("inputs_in", x)
        x = ops.add_per_layer_input(x, w.per_layer_input, last_of(inputs, len(x)), at.config.hidden_act, at.observer("inputs_hidden"))
    if w.layer_scalar != 1.0:
        x = ops.scale_in_place(x, w.layer_scalar)
    at.tap("block_out", x)
    return x
