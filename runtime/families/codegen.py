"""CodeGen 1 and 2 (350M to 16B): GPT-J with fused QKV (in the order q, v, k), in four parts because it was trained on four devices.

`tensor_views.py` splits them.
"""

from __future__ import annotations

import numpy as np

from ..config import ModelConfig
from ..config_reader import ConfigError, Keys
from . import gptj
from .gpt2 import PREFIX

LIKE = gptj
PARTS, ORDER = 4, ("q", "v", "k")  # parts of the fused matrix, and their order within each


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    config = gptj.config(keys)
    if config.num_attention_heads % PARTS:
        raise ConfigError(f"config.json: n_head = {config.num_attention_heads} is not supported for codegen models",
                          f"this family fuses queries, keys and values in {PARTS} parts of equally many heads")
    return config


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a layer's q, k or v -> (fused matrix, rows)."""
    prefix = f"{PREFIX}h.{layer}.attn."
    rows = np.arange(3 * config.hidden_size).reshape(PARTS, len(ORDER), -1)
    return {f"{prefix}{role}_proj.weight": (f"{prefix}qkv_proj.weight", rows[:, i].reshape(-1)) for i, role in enumerate(ORDER)}
