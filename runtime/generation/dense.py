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
from ..gguf.tensor_sources import RAW_TYPES
from ..hub import DENSE, NESTED

# Activation by the last word of the class name in a module's config.
ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "Identity": None, "Tanh": np.tanh, "ReLU": lambda x: np.maximum(x, 0), "Sigmoid": lambda x: 1 / (1 + np.exp(-x))}
MISMATCH_HINT = "its files belong to different models: download it again"
WEIGHT, BIAS = "linear.weight", "linear.bias"


@dataclass(frozen=True)
class Dense:
    """One dense layer: activation(matrix @ x + bias)."""

    matrix: np.ndarray  # float32 [N, K]
    bias: np.ndarray | None = None
    activation: Callable[[np.ndarray], np.ndarray] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.matrix @ x if self.bias is None else self.matrix @ x + self.bias
        return y if self.activation is None else self.activation(y)


def dense_layers_of_folder(path: Path, modules: Sequence[str], width: int) -> tuple[Dense, ...]:
    """The dense layers that modules.json lists, for a pooled vector of `width` numbers. Raises UsageError, ConfigError, CheckpointError."""
    from .embedding import read_json

    layers, configs = [], []
    for name in modules:
        config, file = (_nested_file(path, f"{name}/{file_name}") for file_name in ("config.json", "model.safetensors"))
        module_config = read_json(config)
        if not isinstance(module_config, dict) or not file.is_file():
            raise UsageError(f"{path} has no {name}/model.safetensors with its config.json, which its embeddings go through",
                             "the download may be incomplete: effllm pull gets it")
        activation = str(module_config.get("activation_function", "Tanh")).rpartition(".")[2]
        if activation not in ACTIVATIONS:
            raise UsageError(f"{config}: activation_function {show(activation)} is not supported", f"known: {', '.join(ACTIVATIONS)}")
        layers.append(Dense(*_read_matrix(file), ACTIVATIONS[activation]))
        configs.append((config, module_config))
    shapes = [layer.matrix.shape for layer in _check_shapes(path, layers, width)]
    for (config, module_config), (rows, inputs) in zip(configs, shapes, strict=True):
        if (module_config.get("out_features", rows), module_config.get("in_features", inputs)) != (rows, inputs):
            raise ConfigError(f"{config} states sizes that do not match its matrix, which takes {inputs} inputs", MISMATCH_HINT)
    return tuple(layers)


def dense_layers_of_gguf(path: Path, tensors: Mapping[str, GgufTensor], width: int) -> tuple[Dense, ...]:
    """The dense layers of a GGUF file. Raises CheckpointError."""
    layers = []
    for tensor in (tensors[name] for name in DENSE.values() if name in tensors):
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            data = np.frombuffer(file.read(tensor.nbytes), np.uint8)
        if tensor.type in RAW_TYPES:
            matrix = _to_float32(data, tensor.type)
        elif tensor.type in DECODERS:
            matrix = dequantize(data, tensor.type, tensor.shape[-1])
        else:
            raise CheckpointError(f"{path} has tensor {tensor.name} of type {tensor.type}, which is not supported",
                                  f"known: {', '.join((*RAW_TYPES, *DECODERS))}")
        layers.append(Dense(matrix.reshape(tensor.shape)))
    return _check_shapes(path, layers, width)


def _nested_file(path: Path, nested: str) -> Path:
    """Path of a nested file, in a downloaded folder or in one that effllm made."""
    effllm_name = NESTED.get(nested)
    return path / nested if effllm_name is None or not (path / effllm_name).is_file() else path / effllm_name


def _read_matrix(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Matrix and bias of a safetensors file."""
    with TensorStore.of_file(file) as store:
        tensors = {name: info for name, info in store.tensors.items() if name in (WEIGHT, BIAS)}
        if WEIGHT not in tensors:
            raise CheckpointError(f"{file} holds no tensor {WEIGHT}", "the download may be incomplete")
        for info in tensors.values():
            if info.dtype not in RAW_TYPES:
                raise CheckpointError(f"{file} has tensor {info.name} of type {show(info.dtype)}, which is not supported",
                                      f"known: {', '.join(RAW_TYPES)}")
        arrays = {name: _to_float32(store.read(info), info.dtype).reshape(info.shape) for name, info in tensors.items()}
    return arrays[WEIGHT], arrays.get(BIAS)


def _to_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bytes as float32."""
    scheme = dtype.lower()
    return to_f32(data.view(RAW_NUMPY[scheme]), scheme)


def _check_shapes(path: Path, layers: Sequence[Dense], width: int) -> tuple[Dense, ...]:
    """The layers. Raises ConfigError if a layer's input width is not the output width of the one before."""
    for layer in layers:
        shape = layer.matrix.shape
        if len(shape) != 2 or shape[1] != width or layer.bias is not None and layer.bias.shape != shape[:1]:
            raise ConfigError(f"{path}: a dense layer has the shape {list(shape)}, but embeddings have {width} dimensions",
                              MISMATCH_HINT)
        width = shape[0]
    return tuple(layers)
