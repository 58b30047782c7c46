"""GLM (GLM-4-9B in transformers' format, GLM-Edge): the Llama block with interleaved RoPE on half of each head, biases on q, k and v,
and fused gate and up."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, fused, llama

REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
FUSED = {"mlp.gate_up_proj": ("gate", "up")}
ROTARY_FACTOR = 0.5  # default share of a head that is rotated
ENDS = (151_329, 151_336, 151_338)


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, eos=ENDS, norm_eps=1.5625e-7,
                    rope={"partial": True, "share": ROTARY_FACTOR, "interleaved": True})
    return decoder_config(keys, base, qkv_bias=keys.flag("attention_bias", True))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return fused(llama.layer_tensors(config, layer), layer, FUSED)
