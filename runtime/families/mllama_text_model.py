"""The text part of Llama 3.2 Vision: Llama 3.1 with cross-attention layers, which attend only to images.

Both branches of such a layer have learned gates. Tokens with no image before them pass unchanged, so these layers are skipped in a text
without images. Their keys and values are computed once per image (`runtime/kv/cross_attention_cache.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..layer import Layer, narrowing
from . import TensorRule, llama

KEYS_HARMLESS = frozenset({"dropout"})
REFUSED_UNLESS = {"attention_bias": False, "mlp_bias": False, "layer_types": None, "sliding_window": None}
EXTRA_EMBEDDINGS = 8  # the first is the image placeholder
GATE_ROLES = ("cross_attn_gate", "cross_mlp_gate")  # roles; the gates are their tanh
SIZES = {"vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "intermediate_size": 14_336}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, norm_eps=1e-5, theta=500_000.0, num_key_value_heads=8, bos=128_000, eos=(128_001,),
                    sizes=SIZES)
    config = decoder_config(keys, base)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(f"config.json: head_dim = {config.head_dim} is not supported for {config.family} models",
                          f"heads split the width evenly: {config.hidden_size // config.num_attention_heads}")
    layers, default_layers = config.num_hidden_layers, (each for each in range(3, 40, 5) if each < config.num_hidden_layers)
    layers_listed = keys.layers("cross_attention_layers", layers)
    if keys.raw.get("cross_attention_layers") is None:
        layers_listed = frozenset(default_layers)
    if len(layers_listed) == layers:
        raise ConfigError("config.json: cross_attention_layers names every layer", "at least one layer must have attention to the text")
    # The head is a tensor of its own, whatever tie_word_embeddings says.
    return replace(config, cross_attention_layers=tuple(sorted(layers_listed)), tie_word_embeddings=False,
                   extra_embeddings=EXTRA_EMBEDDINGS)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = llama.layer_tensors(config, layer)
    if layer not in config.cross_attention_layers:
        return rules
    prefix = f"model.layers.{layer}."
    for role in ("q", "k", "v", "o"):
        rules[role] = TensorRule(f"{prefix}cross_attn.{role}_proj.weight", rules[role].shape)
    for role in ("q_norm", "k_norm"):
        rules[role] = TensorRule(f"{prefix}cross_attn.{role}.weight", (config.head_dim,))
    return rules | {role: TensorRule(f"{prefix}cross_attn_{name}_gate", (1,))
                    for role, name in zip(GATE_ROLES, ("attn", "mlp"), strict=True)}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, with rows for tokens that are never generated, final norm and head."""
    rules = llama.outer_tensors(config)
    embed = TensorRule(rules["embed"].name, (config.vocab_size + config.extra_embeddings, config.hidden_size))
    return rules | {"embed": embed}


@narrowing
def block(x: object, at: Layer) -> object:
    """`llama.block`, or cross-attention. In the latter, taps see the inputs of all matrices but k and v, for tokens that see an image."""
    ops, w, kv, config = at.ops, at.w, at.kv, at.config
    if w.cross_attention_gates is None:
        return llama.block(x, at)
    for span in kv.spans:
        with kv.within(span, w):
            rows = x[span.rows]
            at.tap("block_in", rows)
            q = ops.norm_linear(rows, w.input_norm, [w.q])[0]
            q = ops.rope_heads(q, config.num_attention_heads, config.head_dim, at.positions, None, w.q_norm)
            attended = kv.attend(q, span.images)
            at.tap("attn_out", attended)
            rows = ops.linear_add(attended, w.o, rows, None, w.cross_attention_gates[0])
            at.tap("mlp_in", rows)
            ops.gated_mlp(rows, w.post_norm, w.gate, w.up, w.down, config.hidden_act, at.observer("mlp_hidden"), None,
                          w.cross_attention_gates[1])
    at.tap("block_out", x)
    return x
