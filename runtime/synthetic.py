"""Random weights of a named shape, for measuring speed without a download. They say nothing about quality and are never written to disk.

A synthetic store looks like a TensorStore to the pager and the model. Its bytes are one block of small random bfloat16 numbers,
repeated: speed does not depend on the values as long as none is subnormal or NaN.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np

from .. import UsageError
from ..offload.checkpoint import TensorInfo
from ..quant.weight import from_f32
from . import families
from .config import ModelConfig, parse_config

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, object]] = {
    "tinyllama-1.1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    "llama3.2-1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
                    "tie_word_embeddings": True},
    "llama3-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False},
}
BLOCK_NBYTES = 1 << 20


class SyntheticStore:
    """The tensors that a config asks for, all bf16, made up."""

    def __init__(self, config: ModelConfig) -> None:
        family = families.get(config.family)
        layers = (family.layer_tensors(config, i) for i in range(config.num_hidden_layers))
        rules = [rule for rules in (family.outer_tensors(config), *layers) for rule in rules.values()]
        self.tensors: dict[str, TensorInfo] = {}
        offset = 0
        for rule in rules:
            nbytes = 2 * prod(rule.shape)
            self.tensors[rule.name] = TensorInfo(rule.name, "BF16", tuple(rule.shape), Path("synthetic"), offset, nbytes)
            offset += nbytes
        values = np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 2, np.float32) * 0.02
        self._block = from_f32(values, "bf16").view(np.uint8)

    def read_at(self, file: Path, offset: int, out: memoryview) -> None:
        """Fill `out` as if read from `offset`."""
        start = offset % BLOCK_NBYTES
        for at in range(0, len(out), BLOCK_NBYTES):
            part = out[at : at + BLOCK_NBYTES]
            head = min(len(part), BLOCK_NBYTES - start)
            part[:head] = memoryview(self._block[start : start + head])
            part[head:] = memoryview(self._block[: len(part) - head])

    def read(self, info: TensorInfo) -> np.ndarray:
        out = np.empty(info.nbytes, np.uint8)
        self.read_at(info.file, info.offset, memoryview(out))
        return out

    def check_unchanged(self) -> None:
        """Nothing on disk can change."""

    def close(self) -> None:
        """Nothing is open."""


def synthetic_config(shape: str) -> ModelConfig:
    """A named shape, or the path of a config.json. Raises UsageError naming the shapes that exist."""
    if shape in SHAPES:
        return parse_config(SHAPES[shape])
    path = Path(shape)
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise ValueError("it holds no JSON object")
            return parse_config(raw)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{shape} is not a config: {error}", "give a model's config.json") from None
    raise UsageError(f"no shape {shape!r}", f"known: {', '.join(SHAPES)}, or a config.json")
