"""GGUF metadata of models with multi-head latent attention (MLA): widths under other names, and the KV up-projection stored as two
halves.

Files of deepseek2 are DeepSeek V2 or V3 depending on the expert scoring function; GLM-4.7-Flash, Moonlight and Kimi K2 are of V3's kind.
mistral4 is Mistral Small 4, with the same keys and query scaling by position. Newer files store `attn_k_b`, a head's key rows
transposed, and `attn_v_b`; older ones the checkpoint's matrix. Either is reassembled in 16 or 32 bits. yarn states the score multiplier
as a tenth of the checkpoint's mscale_all_dim, and assumes the same mscale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...kernels.latent_shape import LatentShape
from ...offload.gguf_header import GgufTensor, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from ..config_rope import QUERY_SCALING_BETA
from . import sparse_indexer
from .family_context import FamilyContext, drop_mtp_layers

NAME, MISTRAL4, MISTRAL4_FAMILY = "deepseek2", "mistral4", "mistral4"
KEYS = {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank", "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group", "nextn_predict_layers": "num_nextn_predict_layers"}
REQUIRED = ("attention.kv_lora_rank", "rope.dimension_count", "attention.key_length", "attention.value_length")
MLA_LENGTHS = ("attention.key_length_mla",
               "attention.value_length_mla")  # of the expanded heads; without `_mla` the keys are the cache's
OTHER_KEYS = frozenset(MLA_LENGTHS)
NAMES = {"attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
         "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
         **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj")}
ROLES = {"q_a": "attn_q_a", "q_a_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa", "kv_a_norm": "attn_kv_a_norm",
         "kv_b": "attn_kv_b"}
KV_B_HALVES = (".attn_k_b.weight", ".attn_v_b.weight")
FAMILY_BY_GATING = {1: "deepseek_v2", 2: "deepseek_v3"}  # expert_gating_func -> family
# Architectures of a single family: name -> expert_gating_func -> family.
SINGLE_FAMILY = {MISTRAL4: {1: MISTRAL4_FAMILY}, **{name: {2: family} for name, family in sparse_indexer.FAMILIES.items()}}
MLA_ARCHITECTURES = (NAME, *SINGLE_FAMILY)
# Layers and vocabulary of a model (Kanana) that llama.cpp expects to project queries directly, as it does with 26 or 27 layers.
DIRECT_QUERY_SHAPE = 48, 128_256
NO_GATING_FUNC, CORRECTION_SUFFIX = 0, ".exp_probs_b.bias"
TEMPERATURE_SCALE = "attention.temperature_scale"
LOG_MULTIPLIER_PER_MSCALE = 0.1  # yarn_log_multiplier = 0.1 * mscale_all_dim


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header = context.header
    path, data = header.path, header.metadata
    name = data["general.architecture"]
    families = SINGLE_FAMILY.get(name, FAMILY_BY_GATING)
    gating_func = raw.pop("scoring_func", NO_GATING_FUNC)
    # Files of V2 state no function, and neither do those of GLM-4.7-Flash, whose scores have a correction bias and weights sum to 1.
    if gating_func == NO_GATING_FUNC and type(gating_func) is int:
        gating_func = 2 if raw.get("norm_topk_prob") is True or any(tensor.endswith(CORRECTION_SUFFIX) for tensor in header.tensors) else 1
        gating_func = 1 if name == MISTRAL4 else gating_func
    if gating_func not in families:
        raise CheckpointError(f"{path} states {name}.expert_gating_func {shown_value(gating_func)}, which is not supported",
                              f"known: {', '.join(map(str, families))}")
    raw["model_type"] = families[gating_func]
    if name == NAME and data.get(f"{NAME}.{TEMPERATURE_SCALE}"):  # Mistral Large 3
        raise CheckpointError(f"{path} states {NAME}.{TEMPERATURE_SCALE}: queries scaled by position are not supported for this "
                              "architecture", "models of Mistral's whose architecture is mistral3 run")
    is_legacy = f"{name}.{MLA_LENGTHS[0]}" not in data
    keys = ("attention.key_length", "attention.value_length") if is_legacy else MLA_LENGTHS
    key_length, value_length, rope_dims = (data.get(f"{name}.{key}") for key in (*keys, "rope.dimension_count"))
    for key, width in zip((*keys, "rope.dimension_count"), (key_length, value_length, rope_dims)):
        if type(width) is not int or not 0 < width < 1 << 16:
            damaged(path, f"states {name}.{key} {shown_value(width)}, expected a width")
    if rope_dims >= key_length:
        damaged(path, f"states {name}.rope.dimension_count {rope_dims} of heads of {key_length}")
    raw |= {"qk_rope_head_dim": rope_dims, "qk_nope_head_dim": key_length - rope_dims, "v_head_dim": value_length,
            "num_key_value_heads": raw["num_attention_heads"]}
    raw.pop("head_dim", None)
    raw.setdefault("q_lora_rank", None)
    raw.setdefault("norm_topk_prob", False)  # llama.cpp's defaults, also below
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("routed_scaling_factor", 1.0)
    raw.setdefault("rope_theta", 10_000.0)
    raw.setdefault("n_group", 1)
    raw.setdefault("topk_group", 1)
    if raw["model_type"] == "deepseek_v2":
        raw["topk_method"] = "group_limited_greedy" if raw["n_group"] != 1 else "greedy"
        raw.pop("num_nextn_predict_layers", None)
        return
    if name == MISTRAL4:
        raw.pop("num_nextn_predict_layers", None)
        return
    layers = raw["num_hidden_layers"]  # including MTP layers
    drop_mtp_layers(raw)
    sparse_indexer.add_layer_types(header, name, raw, layers)


def with_mscale(prefix: str, data: Mapping[str, Value], section: dict[str, object]) -> dict[str, object]:
    """Complete the `rope_scaling` of an MLA file: the multiplier scales attention scores, not cos and sin."""
    multiplier = data.get(f"{prefix}yarn_log_multiplier")
    if multiplier is None or multiplier == 0:
        return section | {"attention_factor": 1.0}
    return section | dict.fromkeys(("mscale", "mscale_all_dim"), round(float(multiplier) / LOG_MULTIPLIER_PER_MSCALE, 6))


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of latent attention, without the architecture's prefix."""
    mla, moe = config.mla, config.moe
    keys: dict[str, Value] = {
        "attention.kv_lora_rank": mla.rank, "attention.value_length": mla.rank, "attention.key_length_mla": mla.query,
        "attention.value_length_mla": mla.value, "rope.dimension_count": mla.rope}
    if mla.query_rank is not None:
        keys["attention.q_lora_rank"] = mla.query_rank
    if moe.top_groups < moe.num_groups:
        keys |= {"expert_group_count": moe.num_groups, "expert_group_used_count": moe.top_groups}
    if (all_dim := config.rope.params.get("mscale_all_dim")) is not None:
        keys["rope.scaling.yarn_log_multiplier"] = LOG_MULTIPLIER_PER_MSCALE * all_dim
    if config.rope.params.get(QUERY_SCALING_BETA):  # without it llama.cpp aborts
        keys["attention.temperature_length"] = int(config.rope.params["original_max_position_embeddings"])
    return keys | sparse_indexer.export_keys(config)


def export_limits(config: ModelConfig, scaling: float) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express of a model with latent attention.

    scaling: what the model's cos and sin are multiplied by.
    """
    yield config.rope is not None and not config.rope.interleaved, "rotates its heads by halves"
    yield not math.isclose(scaling, 1.0, rel_tol=1e-6), f"has positions that are scaled by {scaling:.4g}"
    yield not config.moe.sigmoid and config.moe.top_groups < config.moe.num_groups, "chooses groups only by their best expert"


def query_rank_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) for deepseek2: llama.cpp infers from the number of layers whether queries have a low rank."""
    layers, has_query_rank = config.num_hidden_layers, config.mla.query_rank is not None
    is_direct = layers in (26, 27) or (layers, config.vocab_size) == DIRECT_QUERY_SHAPE
    yield is_direct and has_query_rank, f"projects queries through q_lora_rank: with {layers} layers llama.cpp expects a direct projection"
    yield not is_direct and not has_query_rank, f"projects queries directly: with {layers} layers llama.cpp requires a q_lora_rank"


@dataclass(frozen=True)
class SplitKvB:
    """A layer's KV up-projection, stored as two tensors."""

    keys: GgufTensor  # [heads * rank, nope]
    values: GgufTensor  # [heads * value, rank]
    heads: int
    widths: LatentShape

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads * self.widths.kv_b_rows, self.widths.rank

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def files(self) -> frozenset[Path]:
        return frozenset((self.keys.file, self.values.file))

    def rows(self, begin: int, end: int, read: Callable[[GgufTensor, int, int], np.ndarray]) -> np.ndarray:
        """Rows [begin, end) of the checkpoint's matrix, float32; `read` returns rows [begin, end) of a tensor as float32."""
        shape, parts = self.widths, []
        for head in range(begin // shape.kv_b_rows, -(-end // shape.kv_b_rows)):
            first = head * shape.kv_b_rows
            low, high = max(begin - first, 0), min(end - first, shape.kv_b_rows)
            if low < shape.nope:
                transposed = read(self.keys, head * shape.rank, (head + 1) * shape.rank).T
                parts.append(transposed[low : min(high, shape.nope)])
            if high > shape.nope:
                first_value_row = head * shape.value - shape.nope
                parts.append(read(self.values, first_value_row + max(low, shape.nope), first_value_row + high))
        return np.concatenate(parts)


def split_kv_b(path: object, name: str, halves: Mapping[str, GgufTensor], config: ModelConfig) -> SplitKvB:
    """The two halves of a layer's KV up-projection. Raises CheckpointError for a missing half and a shape that contradicts the config."""
    mla, heads = config.mla, config.num_attention_heads
    shapes = {KV_B_HALVES[0]: (heads, mla.rank, mla.nope), KV_B_HALVES[1]: (heads, mla.value, mla.rank)}
    for part, shape in shapes.items():
        if part not in halves:
            raise CheckpointError(f"{path} holds one half of {name} without {part.strip('.')}", "the file is damaged: download it again")
        if tuple(halves[part].shape) != shape:
            raise CheckpointError(f"{path} has tensor {halves[part].name} of shape {list(halves[part].shape)}, "
                                  f"the config says {list(shape)}",
                                  "the config and the weights are of different models")
    return SplitKvB(*(_flat(halves[part]) for part in KV_B_HALVES), heads, mla)


def _flat(tensor: GgufTensor) -> GgufTensor:
    return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


def kv_b_half(values: np.ndarray, config: ModelConfig, part: str) -> np.ndarray:
    """Convert rows of whole heads, float32, to those of the file's tensor `part`: transposed key rows, or value rows."""
    mla = config.mla
    heads = values.reshape(-1, mla.kv_b_rows, mla.rank)
    half = heads[:, : mla.nope].swapaxes(1, 2) if part == KV_B_HALVES[0] else heads[:, mla.nope :]
    return np.ascontiguousarray(half).reshape(-1, half.shape[-1])
