"""VaultGemma (1B, trained with differential privacy): Gemma 2 without the norms behind its branches."""

from __future__ import annotations

from ..config import ModelConfig
from . import TensorRule, gemma2
from .gemma2 import KEYS_HARMLESS, KEYS_USED, REFUSED_UNLESS, block, config, outer_tensors

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "REFUSED_UNLESS", "block", "config", "layer_tensors", "outer_tensors"]


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = gemma2.layer_tensors(config, layer)
    return {role: rule for role, rule in rules.items() if role not in ("o_norm", "down_norm")}
