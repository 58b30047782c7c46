"""GPT-NeoX (Pythia, GPT-NeoX 20B, Dolly 2): layer norms with biases, biases everywhere, an ungated MLP parallel to attention, each under
its own norm, or in sequence, and RoPE on a quarter of each head.

Checkpoints hold queries, keys and values in one matrix, head by head; a store of the folder takes them apart (`tensor_views.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from ..layer import Layer, narrowing
from . import TensorRule, cohere, opt
from .stablelm import bias_rule

# What other families call by these names, transformers passes over in this one.
KEYS_HARMLESS = frozenset({"attention_probs_dropout_prob", "custom_pipelines", "gradient_checkpointing", "hidden_dropout_prob",
                           "num_key_value_heads", "rms_norm_eps"})
SIZES = {"vocab_size": 50_432, "hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 44, "num_attention_heads": 64}
SHARE = 0.25  # of a head that turns, where a config does not say
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}  # once they are apart
JOINT = "attention.query_key_value"


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        theta, share = keys.number("rotary_emb_base", 10_000.0, above=1.0), keys.number("rotary_pct", SHARE)
        return (rope_config(keys, head_dim, positions, theta, partial=True, share=share),) * layers

    base = Defaults(max_position_embeddings=2048, bos=0, eos=(2,), act=("hidden_act", "gelu"), grouped=False, eps_key="layer_norm_eps",
                    norm_eps=1e-5, sizes=SIZES)
    bias = keys.flag("attention_bias", True)
    config = decoder_config(keys, base, ropes, qkv_bias=bias, o_bias=bias, mlp_bias=True, norm_kind="layer",
                            parallel_block=keys.flag("use_parallel_residual", True))
    if (stated := keys.integer("head_dim", config.head_dim)) != config.head_dim:
        raise ConfigError(f"config.json: head_dim = {stated} is not supported for gpt_neox models",
                          f"heads of this family add up to hidden_size, {config.head_dim} each")
    return config


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` as the store gives them."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}."
    matrices = {**{role: (f"attention.{name}", hidden, hidden, config.qkv_bias) for role, name in PARTS.items()},
                "o": ("attention.dense", hidden, hidden, config.o_bias), "up": ("mlp.dense_h_to_4h", ffn, hidden, True),
                "down": ("mlp.dense_4h_to_h", hidden, ffn, True)}
    norms = {"input_norm": "input_layernorm", "mlp_norm" if config.parallel_block else "post_norm": "post_attention_layernorm"}
    rules = {role: TensorRule(f"{prefix}{name}.weight", (hidden,)) for role, name in norms.items()}
    rules |= {f"{role}_bias": bias_rule(rules[role]) for role in norms}
    for role, (name, out, width, has_bias) in matrices.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", (out, width))
        if has_bias:
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", (out,))
    return published(rules)


def published(rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The same tensors, also as the checkpoints call them."""
    return {role: replace(rule, also=(*rule.also, "gpt_neox." + rule.name.removeprefix("model."))) for role, rule in rules.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, norm = (config.vocab_size, config.hidden_size), TensorRule("model.final_layer_norm.weight", (config.hidden_size,))
    rules = published({"embed": TensorRule("model.embed_in.weight", table), "norm": norm, "norm_bias": bias_rule(norm)})
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("embed_out.weight", table, also=("lm_head.weight",))}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Names of a layer's q, k and v, biases too -> that of what they lie in, and their rows there: heads have all three one by one."""
    prefix, (heads, depth) = f"gpt_neox.layers.{layer}.", (config.num_attention_heads, config.head_dim)
    rows = np.arange(heads * 3 * depth).reshape(heads, 3, depth)
    return {f"{prefix}attention.{name}.{kind}": (f"{prefix}{JOINT}.{kind}", rows[:, i].reshape(-1))
            for i, name in enumerate(PARTS.values()) for kind in ("weight", *(("bias",) if config.qkv_bias else ()))}


@narrowing
def block(x: object, at: Layer) -> object:
    """x[T, D] -> x[T, D], with the taps of `llama.block`."""
    run = cohere.block if at.config.parallel_block else opt.block
    return run(x, at)
