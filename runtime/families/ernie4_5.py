"""ERNIE 4.5 (dense): the Llama block with interleaved RoPE; biases in every matrix or in none."""

from __future__ import annotations

import re
from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show

REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "sliding_window": None}
THETA = 500_000.0


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, bos=1, eos=(2,), norm_eps=1e-5, tied=True)
    return ernie_config(keys, base, keys.flag("use_bias", False))


def ernie_config(keys: Keys, base: Defaults, bias: bool = False) -> ModelConfig:
    """The config that dense and MoE models share. Raises ConfigError."""
    check_auto_map(keys)
    return decoder_config(keys, replace(base, theta=THETA, rope={"interleaved": True}), qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def check_auto_map(keys: Keys) -> None:
    """Raises ConfigError unless auto_map names the original code of what transformers has adopted, as the first checkpoints do."""
    for task, name in (keys.section("auto_map") or {}).items():
        if task != "AutoTokenizer" and not re.fullmatch(r"(configuration|modeling)_ernie4_5(_moe)?\.Ernie4_5_\w+", str(name)):
            raise ConfigError(f"config.json: auto_map names {show(name)}, which is not ERNIE 4.5",
                              "the checkpoint brings its own code, which is never run")
