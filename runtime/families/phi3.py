"""Phi 3, 3.5 and 4: the Llama block with fused QKV and fused gate and up.

Each part is read as a range of rows, under its name in Llama; converted folders hold the parts separately.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, fused, llama
from .deepseek_v3 import check_auto_map

KEYS_HARMLESS = frozenset({"embd_pdrop"})
REFUSED_UNLESS = {"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "layer_types": None, "lm_head_bias": False,
                  "mlp_bias": False}
FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
ORIGINAL_POSITIONS = 4096  # transformers' default, which takes precedence over a rotary section
LONGROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}  # older names of longrope


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=4096, bos=1, eos=(32_000,), norm_eps=1e-5)
    return phi3_config(keys, base, r"(configuration|modeling)_phi3\.Phi3\w+")


def phi3_config(keys: Keys, base: Defaults, code: str) -> ModelConfig:
    """The config of a Phi 3 model. `code`: pattern that auto_map must match."""
    check_auto_map(keys, code)
    base = replace(base, rope={"partial": True, "aliases": LONGROPE_ALIASES, "trained": ORIGINAL_POSITIONS})
    return decoder_config(keys, base, windows=(keys.integer("sliding_window", None),) * base.size(keys, "num_hidden_layers"))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return fused(llama.layer_tensors(config, layer), layer, FUSED)
