"""GGUF metadata of Hy 4: hyper-connection streams and the magnitude of their updates, gate clamps as a list; indexer queries and
keys keep the checkpoint's row order, with the rotated channels of a head last.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...kernels.layout import SILU_LIMIT
from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..families.hy_v4 import REFUSED_UNLESS, stored_rows
from . import latent_attention, sparse_indexer
from .family_context import FamilyContext

FAMILY = NAME = "hy_v4"
SWIGLU_CLAMP, MAGNITUDE = "swiglu_clamp_exp", "hc_magnitude"
KEYS = {**sparse_indexer.KEYS, "hyper_connection.count": "hc_mult", "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.magnitude": MAGNITUDE}
_INDEXER, _PARTS = "self_attn.indexer.", ("fn", "base", "scale")
NAMES = {**latent_attention.NAMES, **sparse_indexer.NAMES, "attn_gate": "self_attn.gate_proj", "indexer.attn_q_b": f"{_INDEXER}turned_q",
         "indexer.attn_k": f"{_INDEXER}turned_k", "indexer.k_norm": f"{_INDEXER}turned_k_norm"}
FULL_NAMES = {"attn_sinks.weight": "self_attn.sinks",
              **{f"hc_{branch}_{part}.weight": f"{branch}_hc.{part}" for branch in ("attn", "ffn") for part in _PARTS}}
OUTER = {f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in _PARTS}
ROLES = {**sparse_indexer.ROLES, "sinks": "attn_sinks", **{
    f"{role}{end}": f"{target}_{part}" for role, target in (("attn_mix", "hc_attn"), ("mlp_mix", "hc_ffn"), ("leave_mix", "output_hc"))
    for end, part in zip(("", "_base", "_scale"), _PARTS, strict=True)}}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    latent_attention.complete_config(context, raw)
    raw["rope_interleave"] = True  # as llama.cpp rotates them
    clamps = [each for each in context.numbers(SWIGLU_CLAMP, SILU_LIMIT) if each != SILU_LIMIT]
    raw["swiglu_limit"] = clamps[0] if clamps else SILU_LIMIT  # the config reader refuses another value


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of hyper-connections, without the architecture's prefix."""
    return {"hyper_connection.count": config.residual_streams, "hyper_connection.epsilon": float(config.sinkhorn_eps),
            "hyper_connection.magnitude":
            float(REFUSED_UNLESS[MAGNITUDE]), SWIGLU_CLAMP: np.full(config.num_hidden_layers, SILU_LIMIT, np.float32)}


def gguf_row_order(config: ModelConfig, name: str) -> np.ndarray | None:
    """The file's row for each row of an indexer tensor, whose rotated channels come first here; None for other tensors."""
    if config.family != FAMILY or not name.startswith("model.layers."):
        return None
    return stored_rows(config, int(name.split(".")[2])).get(name, (name, None))[1]


def checkpoint_rows(name: str, config: ModelConfig, _metadata: Mapping[str, Value]) -> np.ndarray | None:
    """The model's row for each row of a tensor of the file; None for the same order."""
    _, layer, part = name.split(".", 2) if name.startswith("blk.") else ("", "", "")
    part, _, kind = part.rpartition(".")
    order = gguf_row_order(config, f"model.layers.{layer}.{NAMES[part]}.{kind}") if part in NAMES else None
    return None if order is None else np.argsort(order)
