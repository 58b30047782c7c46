"""StableLM (3B, 2 1.6B, 2 12B, Zephyr): the Llama block with biased layer norms, and RoPE on a quarter of each head.

StableLM 2 12B has parallel attention and MLP, and bias-free QK norms with weights for each head, stored as a tensor per head; the store
stacks them (`tensor_views.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..layer import Layer, narrowing
from . import TensorRule, cohere, llama

KEYS_HARMLESS = frozenset({"rms_norm_eps"})
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32}
HEAD_NORMS = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}  # names of the stacked tensors
ROTATED_SHARE = 0.25  # default partial_rotary_factor


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=4096, num_key_value_heads=32, bos=0, eos=(0,), eps_key="layer_norm_eps", norm_eps=1e-5,
                    sizes=SIZES, rope={"partial": True, "share": ROTATED_SHARE})
    qk_norm = keys.flag("qk_layernorm", False)
    return decoder_config(keys, base, qkv_bias=keys.flag("use_qkv_bias", False), norm_kind="layer", qk_norm=qk_norm,
                          qk_norm_per_head=qk_norm, parallel_block=keys.flag("use_parallel_residual", False))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = llama.layer_tensors(config, layer)
    if config.parallel_block:
        del rules["post_norm"]
    for role, name in HEAD_NORMS.items() if config.qk_norm_per_head else ():
        rules[role] = TensorRule(f"model.layers.{layer}.self_attn.{name}.weight", rules[role].shape)
    return with_norm_biases(rules)


def stacked_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """Names of a layer's stacked QK norms -> the stored tensors, one per head."""
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    prefixes = {role: f"model.layers.{layer}.self_attn.{name}" for role, name in HEAD_NORMS.items()}
    return {f"{prefix}.weight": tuple(f"{prefix}.norms.{head}.weight" for head in range(heads[role]))
            for role, prefix in prefixes.items()} if config.qk_norm_per_head else {}


@narrowing
def block(x: object, at: Layer) -> object:
    """Llama's block, or Cohere's if attention and MLP are parallel."""
    run = cohere.block if at.config.parallel_block else llama.block
    return run(x, at)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    rules = llama.outer_tensors(config)
    return rules | {"norm_bias": bias_rule(rules["norm"])}


def with_norm_biases(rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """`rules` with biases of the norms before attention and MLP."""
    return {**rules, **{f"{role}_bias": bias_rule(rules[role]) for role in ("input_norm", "post_norm") if role in rules}}


def bias_rule(norm: TensorRule) -> TensorRule:
    """The bias of a norm, or of a matrix."""
    return TensorRule(norm.name.removesuffix("weight") + "bias", norm.shape[:1])
