"""Task-specific LoRA adapters of every matrix and embedding table of an encoder (Jina Embeddings v3, Sturua et al. 2024).

A tensor holds all tasks: for a matrix A [tasks, r, K] and B [tasks, N, r], for a table A [tasks, rows, r] and B [tasks, r, D]. Adapters are
not merged: a task costs the memory of its low-rank factors and two narrow matmuls.
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

MAX_TASKS, MAX_RANK = 64, 1024
MATRICES = {"qkv": "mixer.Wqkv", "out": "mixer.out_proj", "up": "mlp.fc1", "down": "mlp.fc2"}  # tensor names within a layer
WORD_TABLE, TYPE_TABLE = "embeddings.word_embeddings", "embeddings.token_type_embeddings"
FACTOR_NAME = "{}.parametrizations.weight.0.lora_{}"


@dataclass(frozen=True)
class AdaptedMatrix(Float32Matrix):
    """A matrix [K, N] with a LoRA adapter: factors `down` [K, r] and `up` [r, N]."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = super().__call__(x)
        y += (x @ self.down) @ self.up
        return y

    def columns(self, which: slice) -> AdaptedMatrix:
        base = super().columns(which)
        return AdaptedMatrix(base.weight, base.bias, base.limits, self.down, self.up[:, which])


def read_tasks(keys: Keys) -> dict[str, str]:
    """Task -> instruction prefix; empty for a model without adapters. Raises ConfigError."""
    if not keys.has("lora_adaptations") or (tasks := keys.raw["lora_adaptations"]) is None:
        return {}
    if not isinstance(tasks, list) or not 0 < len(tasks) <= MAX_TASKS or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(f"config.json: lora_adaptations is {show(tasks)}, expected names of tasks")
    instructions = keys.section("task_instructions") or {}
    if not all(isinstance(instructions.get(task, ""), str) for task in tasks):
        raise ConfigError("config.json: task_instructions are not texts")
    return {task: instructions.get(task, "") for task in tasks}


def task_stacks(config: EncoderConfig, tensors: Tensors, stack: Stack) -> dict[str, Stack]:
    """The encoder of each task. Raises CheckpointError."""
    rank = Keys(config.raw).integer("lora_rank", 4, high=MAX_RANK)
    scale, count = np.float32(Keys(config.raw).number("lora_alpha", 1.0) / rank), len(config.tasks)

    def pair(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """A as stored, and B in float32."""
        return tensors.table(FACTOR_NAME.format(name, "A"), count, *first), tensors.numbers(FACTOR_NAME.format(name, "B"), count, *second)

    word_factors = pair(WORD_TABLE, (config.vocab_size, rank), (rank, config.hidden_size))
    type_factors = pair(TYPE_TABLE, (config.type_vocab_size, rank), (rank, config.hidden_size)) if config.type_vocab_size else None
    matrices = [{part: pair(f"encoder.layers.{number}.{name}", (rank, len(matrix.weight)), (matrix.weight.shape[1], rank))
                 for part, name in MATRICES.items() for matrix in (getattr(layer, part),)} for number, layer in enumerate(stack.layers)]

    def adapt_layer(layer: Layer, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], task: int) -> Layer:
        adapted = {}
        for part, (a, b) in pairs.items():
            matrix = getattr(layer, part)
            down, up = np.ascontiguousarray(to_float32(a[task]).T), b[task].T * scale
            adapted[part] = AdaptedMatrix(matrix.weight, matrix.bias, matrix.limits, down, up)
        return replace(layer, **adapted)

    def stack_of(task: int) -> Stack:
        layers = tuple(adapt_layer(*each, task) for each in zip(stack.layers, matrices, strict=True))
        type_table = None
        if type_factors is not None:
            down, up = type_factors
            type_table = to_float32(stack.types) + to_float32(down[task]) @ up[task] * scale
        return replace(stack, layers=layers, types=type_table, embedding_adapter=(word_factors[0][task], word_factors[1][task] * scale))

    return {name: stack_of(task) for task, (name, _) in enumerate(config.tasks)}
