"""MiniCPM 1, 2 and 4 (0.5B to 8B): the Llama block with multipliers of the embedding, branches and logits.

MiniCPM 4.1's config describes block-sparse attention over long texts. Its published code has that for some GPUs only and uses full
attention elsewhere, as is done here.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from .deepseek_v3 import check_auto_map
from .minicpm3 import mup_multipliers

KEYS_HARMLESS = frozenset({"mup_denominator"})  # training only
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "num_experts": 0, "sliding_window": None}
CODE = r"(configuration|modeling)_minicpm\.MiniCPM(Config|Model|ForCausalLM|ForSequenceClassification)"
SIZES = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,), tied=True, sizes=SIZES)
    bias = keys.flag("attention_bias", False)
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, **mup_multipliers(keys, base, 1.0, 1.0, 1))
    if keys.section("sparse_config") is None:
        return config
    warning = "config.json: sparse_config describes sparse attention over long texts: effllm uses full attention"
    return replace(config, warnings=(*config.warnings, warning))
