"""VaultGemma (1B, trained with differential privacy): Gemma 2 without post-norms."""

from __future__ import annotations

from ..config import ModelConfig
from . import TensorRule, gemma2

LIKE = gemma2


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = gemma2.layer_tensors(config, layer)
    return {role: rule for role, rule in rules.items() if role not in ("o_norm", "down_norm")}
