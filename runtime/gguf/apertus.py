"""GGUF metadata of Apertus: the xIELU activation parameters of each layer are lists of metadata, not tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.reference import CURVE_EDGE, CURVE_SLOPE
from ...offload.gguf_header import GgufHeader, Value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from ..tensors import as_float32
from ..weights.weight_records import XIELU_ROLES
from .family_context import DEFAULT_ROPE_THETA, FamilyContext

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..tensors import ModelTensor

FAMILY = "apertus"
LAYER_LISTS = {"xielu.alpha_p": "xielu_alpha_p", "xielu.alpha_n": "xielu_alpha_n"}  # key of the file -> key of config.json
FIXED_LISTS = {"xielu.beta": CURVE_SLOPE, "xielu.eps": CURVE_EDGE}  # lists whose values are the same in every model
NAMES = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
BF16_TOLERANCE = 3e-2  # the file's values went through bfloat16


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled: the activation parameters of all layers, and unscaled RoPE where no key
    scales it. Raises CheckpointError."""
    header = context.header
    raw |= {"sliding_window": context.window, "attention_bias": context.has("attn_q.bias")}
    raw.setdefault("rope_theta", DEFAULT_ROPE_THETA)
    layers = raw["num_hidden_layers"]
    if raw.get("rope_scaling") is None and "rope_theta" in raw:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    for key, expected in FIXED_LISTS.items():
        if key in header.metadata and not np.allclose(_layer_values(header, key, layers), expected, rtol=BF16_TOLERANCE, atol=0):
            raise CheckpointError(f"{header.path} states {key} that is not {expected:g} in every layer, which is not supported",
                                  "no published model has others")
    raw |= {config_key: _layer_values(header, gguf_key, layers) for gguf_key, config_key in LAYER_LISTS.items()}


def _layer_values(header: GgufHeader, key: str, layers: object) -> list[float]:
    value = header.metadata.get(key)
    if isinstance(value, int | float) and type(layers) is int and 0 < layers < 1 << 16:  # one for all
        return [float(value)] * layers
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or len(value) != layers or not np.isfinite(value).all():
        damaged(header.path, f"states {key} that is not a number for each of {layers} layers")
    return [float(each) for each in value]


def extract_activations(config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]],
                        store: TensorStore) -> tuple[ModelConfig, dict[int | str, dict[str, ModelTensor]]]:
    """Move the activation parameters from tensors to the config; returns both."""
    if config.family != FAMILY:
        return config, dict(tensors)
    layers = range(config.num_hidden_layers)
    read_scalar = lambda tensor: float(as_float32(tensor, {tensor.name: store.read(tensor.info)})[0])  # noqa: E731
    params = config.activation_params or tuple(tuple(read_scalar(tensors[layer][role]) for role in XIELU_ROLES) for layer in layers)
    remaining = {key: {role: tensor for role, tensor in roles.items() if role not in XIELU_ROLES} for key, roles in tensors.items()}
    return replace(config, activation_params=params), remaining


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the activation parameters, which have no architecture prefix."""
    if config.family != FAMILY:
        return {}
    columns = [np.array(column, np.float32) for column in zip(*config.activation_params)]
    fixed = {key: np.full(config.num_hidden_layers, value, np.float32) for key, value in FIXED_LISTS.items()}
    return dict(zip(LAYER_LISTS, columns, strict=True)) | fixed
