"""Dense layers after pooling, as EmbeddingGemma and a few encoders have: loading and applying them.

A folder has each in a subfolder (`2_Dense`), as sentence-transformers writes it; folders that effllm made have them beside the weights
(`dense_2.weight`); a GGUF file has them among its tensors. They are read once and multiplied in the vector's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.checkpoint import TensorStore
from ...offload.gguf_header import GgufTensor
from ...offload.safetensors_header import CheckpointError
from ...quant.imports.gguf import DECODERS, dequantize
from ...quant.weight import RAW_NUMPY, to_f32
from ..config_reader import ConfigError, show
from ..gguf.tensor_sources import RAW
from ..hub import DENSE, NESTED

# By the last word of what a module states.
CURVES: Mapping[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "Identity": None, "Tanh": np.tanh, "ReLU": lambda x: np.maximum(x, 0), "Sigmoid": lambda x: 1 / (1 + np.exp(-x))}
OTHERS = "its files belong to different models: download it again"
WEIGHT, BIAS = "linear.weight", "linear.bias"


@dataclass(frozen=True)
class Dense:
    """activation(matrix @ x + bias): matrix float32 [N, K]."""

    matrix: np.ndarray
    bias: np.ndarray | None = None
    curve: Callable[[np.ndarray], np.ndarray] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.matrix @ x if self.bias is None else self.matrix @ x + self.bias
        return y if self.curve is None else self.curve(y)


def dense_of_folder(path: Path, modules: Sequence[str], width: int) -> tuple[Dense, ...]:
    """The dense layers that modules.json lists, for a pooled vector of `width` numbers. Raises UsageError, ConfigError, CheckpointError."""
    from .embedding import read_json

    found, sizes = [], []
    for name in modules:
        config, file = (_at(path, f"{name}/{each}") for each in ("config.json", "model.safetensors"))
        stated = read_json(config)
        if not isinstance(stated, dict) or not file.is_file():
            raise UsageError(f"{path} has no {name}/model.safetensors with its config.json, which its embeddings go through",
                             "the download may be incomplete: effllm pull gets it")
        curve = str(stated.get("activation_function", "Tanh")).rpartition(".")[2]
        if curve not in CURVES:
            raise UsageError(f"{config}: activation_function {show(curve)} is not supported", f"known: {', '.join(CURVES)}")
        found.append(Dense(*_read(file), CURVES[curve]))
        sizes.append((config, stated))
    for (config, stated), (rows, given) in zip(sizes, [each.matrix.shape for each in _fitting(path, found, width)], strict=True):
        if (stated.get("out_features", rows), stated.get("in_features", given)) != (rows, given):
            raise ConfigError(f"{config} states sizes that do not match its matrix, which takes {given} inputs", OTHERS)
    return tuple(found)


def dense_of_gguf(path: Path, tensors: Mapping[str, GgufTensor], width: int) -> tuple[Dense, ...]:
    """The dense layers of a GGUF file. Raises CheckpointError."""
    found = []
    for tensor in (tensors[name] for name in DENSE.values() if name in tensors):
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            raw = np.frombuffer(file.read(tensor.nbytes), np.uint8)
        if tensor.type in RAW:
            matrix = _wide(raw, tensor.type)
        elif tensor.type in DECODERS:
            matrix = dequantize(raw, tensor.type, tensor.shape[-1])
        else:
            raise CheckpointError(f"{path} has tensor {tensor.name} of type {tensor.type}, which is not supported",
                                  f"known: {', '.join((*RAW, *DECODERS))}")
        found.append(Dense(matrix.reshape(tensor.shape)))
    return _fitting(path, found, width)


def _at(path: Path, nested: str) -> Path:
    """Path of a nested file, in a downloaded folder or in one that effllm made."""
    kept = NESTED.get(nested)
    return path / nested if kept is None or not (path / kept).is_file() else path / kept


def _read(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Matrix and bias of a safetensors file."""
    with TensorStore.of_file(file) as store:
        found = {name: info for name, info in store.tensors.items() if name in (WEIGHT, BIAS)}
        if WEIGHT not in found:
            raise CheckpointError(f"{file} holds no tensor {WEIGHT}", "the download may be incomplete")
        for info in found.values():
            if info.dtype not in RAW:
                raise CheckpointError(f"{file} has tensor {info.name} of type {show(info.dtype)}, which is not supported",
                                      f"known: {', '.join(RAW)}")
        made = {name: _wide(store.read(info), info.dtype).reshape(info.shape) for name, info in found.items()}
    return made[WEIGHT], made.get(BIAS)


def _wide(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw bytes as float32."""
    scheme = kind.lower()
    return to_f32(raw.view(RAW_NUMPY[scheme]), scheme)


def _fitting(path: Path, found: Sequence[Dense], width: int) -> tuple[Dense, ...]:
    """Raises ConfigError if a layer's input width is not the output width of the one before."""
    for each in found:
        shape = each.matrix.shape
        if len(shape) != 2 or shape[1] != width or each.bias is not None and each.bias.shape != shape[:1]:
            raise ConfigError(f"{path}: a dense layer has the shape {list(shape)}, but embeddings have {width} dimensions",
                              OTHERS)
        width = shape[0]
    return tuple(found)
