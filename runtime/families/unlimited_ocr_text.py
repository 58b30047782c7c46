"""Unlimited OCR's text part: DeepSeek-OCR 2, where generated tokens attend to the whole prompt and a sliding window of the answer
(reference sliding attention)."""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys
from . import deepseek_ocr2_text
from .deepseek_ocr2_text import config_with_moe

LIKE = deepseek_ocr2_text
REFUSED_UNLESS = {key: value for key, value in deepseek_ocr2_text.REFUSED_UNLESS.items() if key not in ("layer_types", "sliding_window")}
SIZES = {"vocab_size": 129_280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10}
BY_PROMPT, FULL = "reference_sliding_attention", "full_attention"


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=32_768, num_key_value_heads=10, bos=0, eos=(1,), sizes=SIZES)
    layers, window = base.size(keys, "num_hidden_layers"), keys.integer("sliding_window", 128, high=1 << 12)
    kinds = set(keys.strings("layer_types", layers) or (BY_PROMPT,))
    if kinds not in ({BY_PROMPT}, {FULL}):
        raise ConfigError(f"config.json: layer_types holds {', '.join(sorted(kinds))}, but all layers must be of one type",
                          f"known: {BY_PROMPT} in all of them, or {FULL}")
    return config_with_moe(keys, base, 6, 896, answer_window=window if kinds == {BY_PROMPT} else None)
