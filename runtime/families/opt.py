"""OPT: layer norms with biases, learned positions, and an ungated MLP with ReLU.

The first token's position embedding is row 2. The original scales queries rather than scores, which differs by rounding. opt-350m, the only
one with post-norms and a projected embedding, is refused.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..layer import Layer
from . import TensorRule
from .llama import attention, decoder_block

# Keys of other families that transformers ignores in this one.
KEYS_HARMLESS = frozenset({
    "activation_dropout", "dropout", "head_dim", "hidden_act", "init_std", "intermediate_size", "layerdrop", "num_key_value_heads",
    "original_max_position_embeddings", "output_projection", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
})
REFUSED_UNLESS = {"_remove_final_layer_norm": False, "do_layer_norm_before": True, "layer_norm_elementwise_affine": True}
POSITION_OFFSET = 2


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=2048, bos=2, eos=(2,), tied=True, act=("activation_function", "relu"), rotary=False,
                    grouped=False, eps_key=None, norm_eps=1e-5, ffn_key="ffn_dim")  # torch's epsilon
    bias = keys.flag("enable_bias", True)
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=bias, norm_kind="layer", position_offset=POSITION_OFFSET)
    width = keys.integer("word_embed_proj_dim", config.hidden_size)
    if width != config.hidden_size:
        raise ConfigError(f"config.json: word_embed_proj_dim = {width} is not supported for opt models",
                          f"this family runs only with that of hidden_size: {config.hidden_size}")
    return config


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` as stored."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    linears = {"q": ("self_attn.q_proj", hidden, hidden), "k": ("self_attn.k_proj", hidden, hidden),
               "v": ("self_attn.v_proj", hidden, hidden), "o": ("self_attn.out_proj", hidden, hidden), "up": ("fc1", ffn, hidden),
               "down": ("fc2", hidden, ffn)}
    prefix = f"decoder.layers.{layer}."
    rules = _norm("input_norm", f"{prefix}self_attn_layer_norm", hidden) | _norm("post_norm", f"{prefix}final_layer_norm", hidden)
    for role, (name, out, width) in linears.items():
        rules[role] = _rule(f"{prefix}{name}.weight", (out, width))
        if config.qkv_bias:
            rules[f"{role}_bias"] = _rule(f"{prefix}{name}.bias", (out,))
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, positions, final norm and, unless tied to the embedding, the head."""
    table, positions = (config.vocab_size, config.hidden_size), (config.max_position_embeddings + POSITION_OFFSET, config.hidden_size)
    rules = {"embed": _rule("decoder.embed_tokens.weight", table), "positions": _rule("decoder.embed_positions.weight", positions),
             **_norm("norm", "decoder.final_layer_norm", config.hidden_size)}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def feed_forward(x: object, at: Layer) -> object:
    """The MLP half of a block, without a gate."""
    ops, w, config = at.ops, at.w, at.config
    at.tap("mlp_in", x)
    observer = at.observer("mlp_hidden")
    if w.bundles is not None:
        x = ops.bundled_mlp(x, w.post_norm, w.up, w.bundles, config.hidden_act, observer)
    else:
        x = ops.mlp(x, w.post_norm, w.up, w.down, config.hidden_act, observer)
    at.tap("block_out", x)
    return x


def _rule(name: str, shape: tuple[int, ...]) -> TensorRule:
    """A tensor's rule; old checkpoints lack the prefix "model."."""
    return TensorRule(f"model.{name}", shape, also=(name,))


def _norm(role: str, name: str, width: int) -> dict[str, TensorRule]:
    return {role: _rule(f"{name}.weight", (width,)), f"{role}_bias": _rule(f"{name}.bias", (width,))}


block = decoder_block(attention, feed_forward)
