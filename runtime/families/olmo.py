"""OLMo (1B, 7B, of 2024): the Llama block with layer norms without weights and biases; in some models q, k and v are clipped before
RoPE."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, llama

KEYS_HARMLESS = frozenset({"rms_norm_eps"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, eos=(50_279,), eps_key="layer_norm_eps", norm_eps=1e-5, sizes=SIZES)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, norm_kind="layer", unweighted_norms=True,
                          clip_qkv=keys.number("clip_qkv", None))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: no norms."""
    return {role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("input_norm", "post_norm")}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return {role: rule for role, rule in llama.outer_tensors(config).items() if role != "norm"}
