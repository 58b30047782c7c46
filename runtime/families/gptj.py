"""GPT-J (6B, GPT4All-J, Dolly 1): parallel attention and ungated MLP under one layer norm, partial interleaved RoPE, and a head with
bias."""

from __future__ import annotations

import math

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig
from . import TensorRule, cohere
from .gpt2 import PREFIX, with_gpt2_sizes
from .stablelm import bias_rule

LIKE = cohere
# Of training and of classifiers; what other families call by these names, transformers passes over in this one.
KEYS_HARMLESS = frozenset({
    "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "head_dim", "hidden_act", "n_ctx", "num_key_value_heads",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "rotary", "scale_attn_weights",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"})
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
SIZES = {"hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16, "max_position_embeddings": 2048}
THETA = 10_000.0  # of every model
MATRICES = {**{role: f"attn.{role}_proj" for role in "qkv"}, "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    rotary = keys.integer("rotary_dim", 64)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        if rotary % 2 or rotary > head_dim:
            raise ConfigError(f"config.json: rotary_dim = {rotary} is not supported for heads of {head_dim} channels",
                              "rotary_dim must be even, and at most the head dimension")
        share = rotary / head_dim
        share = share if int(head_dim * share) == rotary else math.nextafter(share, 1.0)
        return (RopeConfig(THETA, "default", {}, share, interleaved=True),) * keys.integer("num_hidden_layers")

    base = Defaults(max_position_embeddings=2048, bos=50_256, eos=(50_256,), act=("activation_function", "gelu_new"), grouped=False,
                    eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 50_400})
    return decoder_config(with_gpt2_sizes(keys, SIZES), base, ropes, mlp_bias=True, norm_kind="layer", head_bias=True)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: one norm for both branches."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"{PREFIX}h.{layer}."
    shapes = {"up": (ffn, hidden), "down": (hidden, ffn)}
    rules = {role: TensorRule(f"{prefix}{name}.weight", shapes.get(role, (hidden, hidden))) for role, name in MATRICES.items()}
    rules["input_norm"] = TensorRule(f"{prefix}ln_1.weight", (hidden,))
    return rules | {f"{role}_bias": bias_rule(rules[role]) for role in ("input_norm", "up", "down")}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, norm = (config.vocab_size, config.hidden_size), TensorRule(f"{PREFIX}ln_f.weight", (config.hidden_size,))
    rules = {"embed": TensorRule(f"{PREFIX}wte.weight", table), "norm": norm, "norm_bias": bias_rule(norm),
             "head_bias": TensorRule("lm_head.bias", (config.vocab_size,))}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}
