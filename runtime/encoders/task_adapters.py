"""Task-specific LoRA adapters inside an encoder's weights (Jina Embeddings v3, Sturua et al. 2024), beside every matrix and embedding
table.

A tensor holds all tasks: for a matrix A [tasks, r, K] and B [tasks, N, r], for a table A [tasks, rows, r] and B [tasks, r, D]. Adapters are
not merged: a task costs its low-rank factors in memory, and two narrow matmuls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError, Keys, show
from ..images.tower_ops import Float32Matrix, to_float32

if TYPE_CHECKING:
    from .encoder_config import EncoderConfig
    from .layers import Layer, Stack
    from .weights import Tensors

MOST_TASKS, MOST_RANK = 64, 1024
MATRICES = {"qkv": "mixer.Wqkv", "out": "mixer.out_proj", "up": "mlp.fc1", "down": "mlp.fc2"}  # of a layer, as Jina's code has them
WORDS, TYPES = "embeddings.word_embeddings", "embeddings.token_type_embeddings"
PART = "{}.parametrizations.weight.0.lora_{}"


@dataclass(frozen=True)
class AdaptedMatrix(Float32Matrix):
    """A matrix [K, N] with low-rank factors `down` [K, r] and `up` [r, N]."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = super().__call__(x)
        y += (x @ self.down) @ self.up
        return y

    def columns(self, which: slice) -> AdaptedMatrix:
        plain = super().columns(which)
        return AdaptedMatrix(plain.weight, plain.bias, plain.limits, self.down, self.up[:, which])


def read_tasks(keys: Keys) -> dict[str, str]:
    """Tasks with their instruction prefixes; empty for a model without adapters. Raises ConfigError."""
    if not keys.has("lora_adaptations") or (named := keys.raw["lora_adaptations"]) is None:
        return {}
    if not isinstance(named, list) or not 0 < len(named) <= MOST_TASKS or not all(isinstance(each, str) for each in named):
        raise ConfigError(f"config.json: lora_adaptations is {show(named)}, expected names of tasks")
    before = keys.section("task_instructions") or {}
    if not all(isinstance(before.get(each, ""), str) for each in named):
        raise ConfigError("config.json: task_instructions are not texts")
    return {each: before.get(each, "") for each in named}


def task_stacks(config: EncoderConfig, tensors: Tensors, stack: Stack) -> dict[str, Stack]:
    """The encoder of each task. Raises CheckpointError."""
    rank = Keys(config.raw).integer("lora_rank", 4, high=MOST_RANK)
    share, count = np.float32(Keys(config.raw).number("lora_alpha", 1.0) / rank), len(config.tasks)

    def pair(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """A as stored, and B in float32."""
        return tensors.table(PART.format(name, "A"), count, *first), tensors.numbers(PART.format(name, "B"), count, *second)

    words = pair(WORDS, (config.vocab_size, rank), (rank, config.hidden_size))
    types = pair(TYPES, (config.type_rows, rank), (rank, config.hidden_size)) if config.type_rows else None
    matrices = [{part: pair(f"encoder.layers.{number}.{name}", (rank, len(matrix.weight)), (matrix.weight.shape[1], rank))
                 for part, name in MATRICES.items() for matrix in (getattr(layer, part),)} for number, layer in enumerate(stack.layers)]

    def adapted(layer: Layer, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], task: int) -> Layer:
        made = {}
        for part, (a, b) in pairs.items():
            own = getattr(layer, part)
            made[part] = AdaptedMatrix(own.weight, own.bias, own.limits, np.ascontiguousarray(to_float32(a[task]).T), b[task].T * share)
        return replace(layer, **made)

    def of(task: int) -> Stack:
        layers = tuple(adapted(*each, task) for each in zip(stack.layers, matrices, strict=True))
        own = None if types is None else to_float32(stack.types) + to_float32(types[0][task]) @ types[1][task] * share
        return replace(stack, layers=layers, types=own, beside=(words[0][task], words[1][task] * share))

    return {name: of(task) for task, (name, _) in enumerate(config.tasks)}
