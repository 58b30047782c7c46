"""GGUF metadata of models with gated-delta linear attention, with defaults for the text model.

Value heads are ordered around key heads here (`DeltaShape.tiled`); their rows and columns stay in place, because columns of
block-quantized matrices cannot be moved. Files of Qwen 3 Next are ordered as its checkpoints, which fuse matrices by key head: betas and
decays in all files, everything in early ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from ..families import qwen3_next
from . import mrope_sections
from .family_context import FamilyContext

RECURRENT_LAYERS = "attention.recurrent_layers"
V_HEAD_REORDERED = "ssm.v_head_reordered"  # written by Ollama; false if value heads have the checkpoint's order
OTHER_KEYS = frozenset({mrope_sections.KEY, RECURRENT_LAYERS, V_HEAD_REORDERED})
# Key below the architecture's name -> key of config.json.
KEYS = {"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads", "ssm.inner_size": "linear_value_head_dim",
        "full_attention_interval": "full_attention_interval", "nextn_predict_layers": "mtp_num_hidden_layers"}
REQUIRED = tuple(key for key in KEYS if key.startswith("ssm."))
LAYER_TYPES = ("full_attention", "linear_attention")
FAMILY, QWEN3_NEXT = "qwen3_next", "qwen3next"  # family and architecture whose matrices are fused by key head
BETA_ALPHA_SUFFIX = ".ssm_ba.weight"
FUSED, LEGACY_FUSED = {"ssm_ba": ("ssm_beta", "ssm_alpha")}, {"ssm_in": ("attn_qkv", "attn_gate")}
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
NAMES = {"post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
         "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
         "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"}
FULL_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# Role -> tensor of a layer in the file, without kind; the last two with kind.
ROLES = {"state_in": "attn_qkv", "state_gate": "attn_gate", "state_beta": "ssm_beta", "state_rate": "ssm_alpha", "state_conv": "ssm_conv1d",
         "state_norm": "ssm_norm", "state_out": "ssm_out", "state_decay": "ssm_a", "state_dt": "ssm_dt.bias"}
DECAY, GATED_NORM = ".linear_attn.A_log", ".linear_attn.norm."


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    header, name, raw["sliding_window"] = context.header, context.name, context.window
    path, data = header.path, header.metadata
    value_heads, key_heads, inner_size = (raw[key] for key in ("linear_num_value_heads", "linear_num_key_heads", "linear_value_head_dim"))
    if type(value_heads) is type(inner_size) is int and value_heads > 0:
        if inner_size % value_heads:
            raise CheckpointError(f"{path} states {name}.ssm.inner_size {inner_size} for {value_heads} heads, which it is not a "
                                  "multiple of",
                                  "the file is damaged or was converted wrongly: download it again, or use another one")
        raw["linear_value_head_dim"] = inner_size // value_heads
    reordered = data.get(f"{name}.{V_HEAD_REORDERED}", True)
    if not isinstance(reordered, bool):
        damaged(path, f"states {name}.{V_HEAD_REORDERED} {shown_value(reordered)}, expected true or false")
    raw["linear_value_heads_tiled"] = reordered and value_heads != key_heads and name != QWEN3_NEXT
    num_heads = raw["num_attention_heads"]
    raw.setdefault("num_key_value_heads", num_heads)  # llama.cpp's defaults, which differ from transformers'
    raw.setdefault("rope_theta", 10_000.0)
    raw.setdefault("partial_rotary_factor", 1.0)
    if isinstance(num_heads, int) and num_heads > 0:
        raw.setdefault("head_dim", raw["hidden_size"] // num_heads)
    mtp_layers, blocks = raw.setdefault("mtp_num_hidden_layers", 0), raw["num_hidden_layers"]
    if type(mtp_layers) is type(blocks) is int and 0 < mtp_layers <= MAX_LAYERS:
        _check_mtp_blocks(header, f"{name}.nextn_predict_layers", blocks - mtp_layers, blocks)
        raw["num_hidden_layers"] = blocks - mtp_layers  # the file's count includes them
    if (recurrent := data.get(f"{name}.{RECURRENT_LAYERS}")) is not None and type(blocks) is int and 0 < blocks <= MAX_LAYERS:
        if not isinstance(recurrent, np.ndarray) or len(recurrent) != blocks or not np.isin(recurrent, (0, 1)).all():
            damaged(path, f"states {name}.{RECURRENT_LAYERS} {shown_value(recurrent)}, expected a boolean for each of {blocks} layers")
        kinds = [LAYER_TYPES[int(each)] for each in recurrent]
        if raw.setdefault("layer_types", kinds) != kinds:
            damaged(path, f"states {name}.{RECURRENT_LAYERS} for other layers than those without KV heads")
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][: raw["num_hidden_layers"]]
    if type(width := raw.get("head_dim")) is int:
        mrope_sections.check(header, name, round(width * raw["partial_rotary_factor"]) // 2, interleaved=True)


def _check_mtp_blocks(header: GgufHeader, key: str, first: int, blocks: int) -> None:
    """Raises CheckpointError if the blocks from `first` on, which are skipped, are not MTP layers as `key` states."""
    if first < 1:
        damaged(header.path, f"states {key} {blocks - first} of {blocks} blocks")
    held = {int(index) for kind, index, *_ in (name.split(".") for name in header.tensors) if kind == "blk" and index.isdecimal()}
    for block in held & set(range(first, blocks)):
        if not any(name.startswith(f"blk.{block}.nextn.") for name in header.tensors):
            damaged(header.path, f"states {key} {blocks - first}, and its tensors of blk.{block} are of another kind of block")


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of linear attention, without the architecture's prefix."""
    state, pairs = config.recurrent, int(config.head_dim * config.rope.partial_rotary_factor) // 2
    return {"ssm.conv_kernel": state.taps, "ssm.state_size": state.key_dim, "ssm.group_count": state.key_heads,
            "ssm.time_step_rank": state.value_heads, "ssm.inner_size": state.values,
            "full_attention_interval": full_attention_interval(config),
            **({} if config.family == FAMILY else
               {mrope_sections.KEY: np.array([*(len(range(first, pairs, 3)) for first in range(3)), 0], np.int32)})}


def full_attention_interval(config: ModelConfig) -> int:
    """The period of layers with full attention, assuming that they are evenly spaced."""
    return config.attention_layers[0] + 1


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express of a model with linear attention."""
    period, state = full_attention_interval(config), config.recurrent
    yield config.attention_layers != tuple(range(period - 1, config.num_hidden_layers, period)), \
        f"has attention elsewhere than in every {period}th layer"
    yield state.key_dim != state.value_dim, f"has heads of values of {state.value_dim} beside heads of keys of {state.key_dim}"


def fused_rows(names: Sequence[str], config: ModelConfig) -> list[np.ndarray] | None:
    """The rows of each checkpoint matrix in a tensor that is fused by key head; None for other tensors."""
    if config.family != FAMILY or len(names) != 2 or ".linear_attn." not in names[0]:
        return None
    rows_by_name = qwen3_next.fused_rows(config.recurrent)
    return [rows_by_name[name.rpartition(".linear_attn.")[2].removesuffix(".weight")][1] for name in names]


def value_head_order(role: str, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(rows, columns): the checkpoint's row and column for each of the file's; None for the same order."""
    shape = config.recurrent
    if config.family == FAMILY or shape.tiled or shape.value_heads == shape.key_heads:
        return None, None
    heads = np.arange(shape.value_heads).reshape(shape.key_heads, -1).T.reshape(-1)
    channels = (heads[:, None] * shape.value_dim + np.arange(shape.value_dim)).reshape(-1)
    qkv_order = np.concatenate([np.arange(2 * shape.keys), 2 * shape.keys + channels])
    rows = {"state_in": qkv_order, "state_conv": qkv_order, "state_gate": channels,
            **dict.fromkeys(("state_rate", "state_beta", "state_decay", "state_dt"), heads)}
    return rows.get(role), channels if role == "state_out" else None
