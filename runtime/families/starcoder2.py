"""StarCoder 2: layer norms with biases, an ungated GELU MLP, biases everywhere, and one sliding window for all layers.

The block is OPT's with rotary positions.
"""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama, opt, stablelm
from .stablelm import with_norm_biases

LIKE = opt
outer_tensors = stablelm.outer_tensors
KEYS_HARMLESS = frozenset({"embedding_dropout", "residual_dropout", "rms_norm_eps"})
REFUSED_UNLESS = {"layer_types": None, "mlp_type": "default", "norm_type": "layer_norm"}
MLP_NAMES = {"up": "mlp.c_fc", "down": "mlp.c_proj"}  # role -> name in checkpoints


def config(keys: Keys) -> ModelConfig:
    bias, layers = keys.flag("use_bias", True), keys.integer("num_hidden_layers", high=MAX_LAYERS)
    base = Defaults(max_position_embeddings=4096, num_key_value_heads=2, bos=50_256, eos=(50_256,), tied=True, eps_key="norm_epsilon",
                    norm_eps=1e-5, act=("hidden_act", "gelu_pytorch_tanh"))
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=bias, norm_kind="layer",
                          windows=(keys.integer("sliding_window", None),) * layers)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: no gate, and norms with biases."""
    rules, prefix = llama.layer_tensors(config, layer), f"model.layers.{layer}."
    for role in ("gate", "gate_bias"):
        rules.pop(role, None)
    for role, name in MLP_NAMES.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", rules[role].shape)
        if config.mlp_bias:
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", rules[role].shape[:1])
    return with_norm_biases(rules)
