"""Maps tensor names and fused layouts of checkpoint folders to the names that families ask for.

A model saved without its head lacks the `model.` prefix. transformers 5 may fuse a layer's experts: all gates and ups [E, 2F, D] in one
tensor, all downs [E, D, F] in another; Granite always does, under other names. An expert's rows are contiguous there, so each matrix is
a byte range of the file like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo, damaged, shown
from .. import families
from ..families import gpt2
from ..families.mixtral import MAX_EXPERTS
from .native_names import TRANSLATED, translated

THINKER_PREFIX = "thinker."  # of the text generator in models with speech output
HEAD, INTERNLM2_HEAD = "lm_head.", "output."
TEXT_PREFIXES = ("model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.backbone.",
                 "model.text_model.", "language_model.")
# Families whose first checkpoints were saved without the head -> beginnings of the names that lack the prefix there.
UNPREFIXED_NAMES = {"bloom": ("h.", "word_embeddings", "ln_f."), "gpt2": ("h.", "wte.", "wpe.", "ln_f.")}
BASE, OLDER_BASE = "model.", "backbone."
BASE_PARTS = ("layers.", "embed_tokens.", "embedding_projection.", "norm.", "ple.")
# Family -> module of a layer that holds the router and the experts.
EXPERT_PREFIXES = {
    **dict.fromkeys(("afmoe", "axk1", "axk2", "bailing_hybrid", "bailing_moe_v2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
                     "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite",
                     "glm5_next", "glm5_next_text", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "hy_v4", "kolibri1", "laguna", "lara_mini",
                     "mellum", "mimo_v2_flash", "minimax_m3_vl", "minimax_m3_vl_text", "mistral4", "mistral_large4",
                     "mistral_large4_text", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
                     "qwen4_exp", "qwen4_exp_text", "solar_open", "deepseek_ocr2_text", "unlimited_ocr_text", "zaya"),
                     "mlp"),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "kimi_linear", "minimax", "minimax_m2",
                     "mixtral", "phimoe"),
                           "block_sparse_moe"),
    **dict.fromkeys(("jamba", "lfm2_moe", "llama4_text"), "feed_forward"),
    **dict.fromkeys(("step3p5", "step3p7"), "moe"),
    **dict.fromkeys(("gemma4", "gemma4_text"), ""), "nemotron_h": "mixer"}
# Name of a fused tensor -> the projections whose rows it holds.
FUSED_PROJECTIONS = {"gate_up_proj": ("gate", "up"), "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
                     "input_linear": ("gate", "up"), "output_linear": ("down",)}


@dataclass(frozen=True)
class FusedExperts:
    """How a writer names the fused experts of a layer, and the router beside them."""

    experts: re.Pattern
    router: str


RWKV7_VECTORS = re.compile(r"\.(?:attn\.(x_[rwkvagx])|attn\.r_k|ffn\.x_k)$")
GROUPED_O = ".attn.wo_a.weight"  # DeepSeek V4's first matrix of the output projection, the rows of all groups of heads
MOE = "block_sparse_moe"
# Parts of Molmo 2's names -> those of Llama; applied in this order.
MOLMO_NAMES = {"model.transformer.": BASE, "model.blocks.": "model.layers.", "model.ln_f.": "model.norm.",
               ".attn_norm.": ".input_layernorm.", ".ff_norm.": ".post_attention_layernorm.", ".attn_out.": ".o_proj.",
               ".ff_out.": ".down_proj."}
# Family -> (name of the score correction bias beside fused experts, its name elsewhere).
SCORE_CORRECTIONS = {"ernie4_5_moe": (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
                     "exaone_moe": (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
                     "minimax_m2": (".mlp.e_score_correction_bias", f".{MOE}.e_score_correction_bias")}
# An empty router: it has its usual name.
FUSED_LAYOUTS = (
    FusedExperts(re.compile(r"(.+\.)(?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)"), "mlp.gate.weight"),
    FusedExperts(re.compile(rf"(.+\.){MOE}\.(input_linear|output_linear)\.weight"), f"{MOE}.router.layer.weight"),  # Granite
    FusedExperts(re.compile(rf"(.+\.){MOE}\.experts\.(gate_up_proj|down_proj)"), f"{MOE}.router.weight"),  # later Granite
    FusedExperts(re.compile(r"(.+\.layers\.\d+\.)experts\.(gate_up_proj|down_proj)"), ""),  # Gemma
    FusedExperts(re.compile(r"(.+\.)mixer\.experts\.(up_proj|down_proj)"), ""),  # experts without gates
    FusedExperts(re.compile(r"(.+\.)moe\.(gate_proj|up_proj|down_proj)\.weight"), ""))  # Step


def canonicalize_text_names(store: TensorStore) -> None:
    """Rename the tensors of a multimodal model's text part as if it were published alone; others keep their names."""
    _rename(store, standalone_name)


def standalone_name(name: str) -> str:
    """The name of a text model's tensor without the prefixes of a multimodal checkpoint; any other name as it is."""
    text_name = name.removeprefix(THINKER_PREFIX)
    prefix = next((each for each in TEXT_PREFIXES if text_name.startswith(each)), None)
    if prefix is None:
        return text_name if text_name.startswith((*(BASE + part for part in BASE_PARTS), HEAD)) else name
    rest = text_name.removeprefix(prefix)
    return rest if rest.startswith((HEAD, INTERNLM2_HEAD)) else BASE + rest.removeprefix(OLDER_BASE)


def _rename(store: TensorStore, new_name: Callable[[str], str]) -> None:
    renamed = ((new_name(name), info) for name, info in store.tensors.items())
    store.tensors = {name: replace(info, name=name) for name, info in renamed}


def canonicalize_names(store: TensorStore, model_type: object) -> None:
    """Rename a store's tensors as the family of a `model_type` names them. Raises CheckpointError."""
    model_type = families.MODEL_TYPE_ALIASES.get(str(model_type), str(model_type))
    if model_type in TRANSLATED:
        _rename(store, lambda name: translated(name, model_type))
    if any(name.startswith(BASE_PARTS) for name in store.tensors) and not any(name.startswith(BASE) for name in store.tensors):
        _rename(store, lambda name: BASE + name if name.startswith(BASE_PARTS) else name)
    if model_type in UNPREFIXED_NAMES:
        _rename(store, lambda name: gpt2.PREFIX + name if name.startswith(UNPREFIXED_NAMES[model_type]) else name)
    if model_type in ("falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        _rename(store, lambda name: BASE + name.removeprefix(OLDER_BASE) if name.startswith(OLDER_BASE) else name)
    if model_type == "deepseek_v4":  # its FP8 scales have a name of their own
        _rename(store, lambda name: f"{name.removesuffix('.scale')}.weight_scale_inv" if name.endswith(".scale") else name)
    if model_type == "molmo2_text":
        _rename(store, _molmo_name)
    if model_type == "rwkv7":
        store.tensors = {name: _flattened(info) for name, info in store.tensors.items()}
    if model_type == "phi4_multimodal":  # matrices that have adapters
        _rename(store, lambda name: name.replace(".base_layer.", "."))
    fused_bias, usual_bias = SCORE_CORRECTIONS.get(model_type, ("", ""))
    if fused_bias and any(fused_bias in name for name in store.tensors):
        _rename(store, lambda name: name.replace(fused_bias, usual_bias))
    for layout in FUSED_LAYOUTS if model_type in EXPERT_PREFIXES else ():
        if any(layout.experts.fullmatch(name) for name in store.tensors):
            store.tensors = {info.name: info for info in _split_experts(store.tensors, model_type, layout)}


def _molmo_name(name: str) -> str:
    if name.startswith("model.transformer."):
        for theirs, ours in MOLMO_NAMES.items():
            name = name.replace(theirs, ours)
    return name


def _flattened(info: TensorInfo) -> TensorInfo:
    """RWKV 7's token-shift weights (one vector each, or all six in one tensor, as in early checkpoints) and bonus vectors, without the
    dimensions of size 1 that some writers add."""
    found = RWKV7_VECTORS.search(info.name)
    if found is None or not info.shape:
        return info
    width = info.shape[-1] if found[1] else prod(info.shape)
    return replace(info, shape=(prod(info.shape) // width, width) if found[1] else (width,)) if width else info


def split_groups(store: TensorStore, groups: object) -> None:
    """Split FP8 matrices GROUPED_O and their scales into one tensor per group of heads, so that each can stay packed. Those of other dtypes
    are read by row range instead."""
    count = groups if type(groups) is int and groups > 0 else 1
    tensors, cut = dict(store.tensors), [name for name in store.tensors if name.endswith(GROUPED_O) and count > 1]
    for name in cut:
        parts = [tensors.get(name), tensors.get(f"{name}_scale_inv")]
        if None in parts or any(len(part.shape) != 2 or part.shape[0] % count or part.nbytes % count for part in parts):
            continue
        for part in parts:
            del tensors[part.name]
            tensors |= {own.name: own for own in _split_rows(part, count)}
    store.tensors = tensors


def _split_rows(info: TensorInfo, count: int) -> Iterator[TensorInfo]:
    base, _, ending = info.name.rpartition(".")
    rows, nbytes = info.shape[0] // count, info.nbytes // count
    for group in range(count):
        yield TensorInfo(f"{base}.{group}.{ending}", info.dtype, (rows, info.shape[1]), info.file, info.offset + group * nbytes, nbytes)


def _split_experts(tensors: Mapping[str, TensorInfo], family: str, layout: FusedExperts) -> Iterator[TensorInfo]:
    """All tensors, with fused ones split into the matrices of single experts, and the routers beside them renamed."""
    module = EXPERT_PREFIXES[family] and f"{EXPERT_PREFIXES[family]}."
    names = families.get(families.COMPOSITE.get(family, (family,))[0]).NAMES
    fused_layers = {match.group(1) for name in tensors if (match := layout.experts.fullmatch(name))}
    for name, info in tensors.items():
        match = layout.experts.fullmatch(name)
        if match is None:
            layer = name.removesuffix(layout.router)
            is_router = layer != name and layer in fused_layers
            yield replace(info, name=f"{layer}{module}gate.weight") if is_router else info
            continue
        projections, shape = FUSED_PROJECTIONS[match.group(2)], info.shape
        count = len(projections)
        if len(shape) != 3 or 0 in shape or shape[0] > MAX_EXPERTS or shape[1] % count or info.nbytes % (shape[0] * shape[1]):
            damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(shape)}")
        rows, nbytes = shape[1] // count, info.nbytes // (shape[0] * count)
        for i in range(shape[0] * count):
            weight = f"{match.group(1)}{module}experts.{i // count}.{names[projections[i % count]]}.weight"
            yield TensorInfo(weight, info.dtype, (rows, shape[2]), info.file, info.offset + i * nbytes, nbytes)
