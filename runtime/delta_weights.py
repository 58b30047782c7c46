"""The parameters of a layer of linear attention, as its kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..quant.weight import Delta, Linear, Norm
from .tensors import ModelTensor, as_float32

if TYPE_CHECKING:
    from .config import ModelConfig

MATRICES = ("delta_qkv", "delta_z", "delta_b", "delta_a")


def delta_weights(config: ModelConfig, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], ops: object,
                  linear: Callable[[str], Linear], vector: Callable[[str], object]) -> Delta | None:
    """Of a layer's tensors by role, where it has such; `linear` and `vector` make a role's matrix and vector on the backend `ops`. The
    convolution goes tap by tap along the channels there, and decays are stored as logarithms."""
    if MATRICES[0] not in roles:
        return None
    conv = as_float32(roles["delta_conv"], raw).reshape(-1, config.delta.taps).T
    decay = np.exp(as_float32(roles["delta_decay"], raw))
    norm = Norm("rms", vector("delta_norm"), None, config.norm_eps)
    return Delta(*map(linear, MATRICES), ops.put(np.ascontiguousarray(conv), "f32"), ops.put(decay, "f32"), vector("delta_dt"), norm,
                 linear("delta_out"))
