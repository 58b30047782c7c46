"""Maps tensor names and fused layouts of checkpoint folders to the names that families ask for.

A model saved without its head lacks the `model.` prefix. transformers 5 may fuse a layer's experts: all gates and ups [E, 2F, D] in one
tensor, all downs [E, D, F] in another; Granite always does, under other names. An expert's rows are contiguous there, so each matrix is
a byte range of the file like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo, damaged, shown
from .. import families
from ..families import gpt2
from ..families.mixtral import MAX_EXPERTS
from .native_names import TRANSLATED, translated

THINKER = "thinker."  # before all that writes, of models that speak
PARTS_BEFORE, HEAD = ("model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.backbone.",
                      "model.text_model.", "language_model."), "lm_head."
OTHER_HEAD = "output."  # of InternLM 2
# Of families whose first checkpoints are of the model without its head.
WITHOUT_BEFORE = {"bloom": ("h.", "word_embeddings", "ln_f."), "gpt2": ("h.", "wte.", "wpe.", "ln_f.")}
BASE, OLDER_BASE, INSIDE = "model.", "backbone.", ("layers.", "embed_tokens.", "embedding_projection.", "norm.", "ple.")
EXPERTS = {**dict.fromkeys(("afmoe", "axk1", "axk2", "bailing_hybrid", "bailing_moe_v2", "cohere2_moe", "deepseek_v2", "deepseek_v3",
                            "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite",
                            "glm5_next", "glm5_next_text", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "hy_v4", "kolibri1", "laguna",
                            "mellum", "mimo_v2_flash", "minimax_m3_vl", "minimax_m3_vl_text", "mistral4", "mistral_large4",
                            "mistral_large4_text", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
                            "qwen4_exp", "qwen4_exp_text", "solar_open", "deepseek_ocr2_text", "unlimited_ocr_text", "zaya"),
                            "mlp"),
           **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "kimi_linear", "minimax", "minimax_m2",
                            "mixtral", "phimoe"),
                           "block_sparse_moe"),
           **dict.fromkeys(("jamba", "lfm2_moe", "llama4_text"), "feed_forward"),
           **dict.fromkeys(("step3p5", "step3p7"), "moe"),
           **dict.fromkeys(("gemma4", "gemma4_text"), ""), "nemotron_h": "mixer"}  # family -> where it has router and experts
PARTS = {"gate_up_proj": ("gate", "up"), "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "input_linear": ("gate", "up"),
         "output_linear": ("down",)}


@dataclass(frozen=True)
class FusedExperts:
    """How a writer names the fused experts of a layer, and the router beside them."""

    experts: re.Pattern
    router: str


MIXES = re.compile(r"\.(?:attn\.(x_[rwkvagx])|attn\.r_k|ffn\.x_k)$")  # of RWKV 7
BEFORE_O = ".attn.wo_a.weight"  # of DeepSeek V4, a matrix of which each group of heads has some rows
MOE = "block_sparse_moe"
# Molmo 2's names -> those of Llama, in this order.
OF_MOLMO = {"model.transformer.": BASE, "model.blocks.": "model.layers.", "model.ln_f.": "model.norm.", ".attn_norm.": ".input_layernorm.",
            ".ff_norm.": ".post_attention_layernorm.", ".attn_out.": ".o_proj.", ".ff_out.": ".down_proj."}
# family -> where its corrections of scores lie beside experts that are stored together, and where else
CORRECTIONS = {"ernie4_5_moe": (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
               "exaone_moe": (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
               "minimax_m2": (".mlp.e_score_correction_bias", f".{MOE}.e_score_correction_bias")}
USUAL = FusedExperts(re.compile(r"(.+\.)(?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)"), "mlp.gate.weight")
GRANITE = FusedExperts(re.compile(rf"(.+\.){MOE}\.(input_linear|output_linear)\.weight"), f"{MOE}.router.layer.weight")
GEMMA = FusedExperts(re.compile(r"(.+\.layers\.\d+\.)experts\.(gate_up_proj|down_proj)"), "")  # its router is called what it is
WITHOUT_GATES = FusedExperts(re.compile(r"(.+\.)mixer\.experts\.(up_proj|down_proj)"), "")
STEP = FusedExperts(re.compile(r"(.+\.)moe\.(gate_proj|up_proj|down_proj)\.weight"), "")  # its router too
LATER_GRANITE = FusedExperts(re.compile(rf"(.+\.){MOE}\.experts\.(gate_up_proj|down_proj)"), f"{MOE}.router.weight")


def canonicalize_text_names(store: TensorStore) -> None:
    """Rename the tensors of a multimodal model's text part as if it were published alone; others keep their names."""
    names = ((alone(name), info) for name, info in store.tensors.items())
    store.tensors = {name: replace(info, name=name) for name, info in names}


def alone(name: str) -> str:
    own = name.removeprefix(THINKER)
    before = next((each for each in PARTS_BEFORE if own.startswith(each)), None)
    if before is None:
        return own if own.startswith((*(BASE + each for each in INSIDE), HEAD)) else name
    rest = own.removeprefix(before)
    return rest if rest.startswith((HEAD, OTHER_HEAD)) else BASE + rest.removeprefix(OLDER_BASE)


def canonicalize_names(store: TensorStore, model_type: object) -> None:
    """Rename a store's tensors as the family of a `model_type` names them. Raises CheckpointError."""
    model_type = families.MODEL_TYPE_ALIASES.get(str(model_type), str(model_type))
    if model_type in TRANSLATED:
        names = ((translated(name, model_type), info) for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if any(name.startswith(INSIDE) for name in store.tensors) and not any(name.startswith(BASE) for name in store.tensors):
        names = ((BASE + name if name.startswith(INSIDE) else name, info) for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if model_type in WITHOUT_BEFORE:
        names = ((gpt2.PREFIX + name if name.startswith(WITHOUT_BEFORE[model_type]) else name, info) for name, info in
                 store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if model_type in ("falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        names = ((BASE + name.removeprefix(OLDER_BASE) if name.startswith(OLDER_BASE) else name, info)
                 for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if model_type == "deepseek_v4":  # whose scales of eight-bit weights have a name of their own
        names = ((f"{name.removesuffix('.scale')}.weight_scale_inv" if name.endswith(".scale") else name, info)
                 for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if model_type == "molmo2_text":
        names = ((_of_molmo(name), info) for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    if model_type == "rwkv7":
        store.tensors = {name: _flat(info) for name, info in store.tensors.items()}
    if model_type == "phi4_multimodal":  # matrices beside which adapters lie
        names = ((name.replace(".base_layer.", "."), info) for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    later, usual = CORRECTIONS.get(model_type, ("", ""))
    if later and any(later in name for name in store.tensors):
        names = ((name.replace(later, usual), info) for name, info in store.tensors.items())
        store.tensors = {name: replace(info, name=name) for name, info in names}
    for joint in (USUAL, GRANITE, LATER_GRANITE, GEMMA, WITHOUT_GATES, STEP) if model_type in EXPERTS else ():
        if any(joint.experts.fullmatch(name) for name in store.tensors):
            store.tensors = {info.name: info for info in _apart(store.tensors, model_type, joint)}


def _of_molmo(name: str) -> str:
    if name.startswith("model.transformer."):
        for theirs, ours in OF_MOLMO.items():
            name = name.replace(theirs, ours)
    return name


def _flat(info: TensorInfo) -> TensorInfo:
    """How far rows of RWKV 7 go to those before, one way a row or all six as early checkpoints have them, and vectors of a head's bonus, of
    which some writers have more dimensions."""
    found = MIXES.search(info.name)
    if found is None or not info.shape:
        return info
    width = info.shape[-1] if found[1] else prod(info.shape)
    return replace(info, shape=(prod(info.shape) // width, width) if found[1] else (width,)) if width else info


def split_groups(store: TensorStore, groups: object) -> None:
    """Name what each group of heads has of a matrix before o where that is codes of eight bits, so that they stay such: rows and scales
    follow one another. Of other types it is found as a range of rows."""
    count = groups if type(groups) is int and groups > 0 else 1
    tensors, cut = dict(store.tensors), [name for name in store.tensors if name.endswith(BEFORE_O) and count > 1]
    for name in cut:
        parts = [tensors.get(name), tensors.get(f"{name}_scale_inv")]
        if None in parts or any(len(part.shape) != 2 or part.shape[0] % count or part.nbytes % count for part in parts):
            continue
        for part in parts:
            del tensors[part.name]
            tensors |= {own.name: own for own in _in_groups(part, count)}
    store.tensors = tensors


def _in_groups(info: TensorInfo, count: int) -> Iterator[TensorInfo]:
    base, _, ending = info.name.rpartition(".")
    rows, nbytes = info.shape[0] // count, info.nbytes // count
    for group in range(count):
        yield TensorInfo(f"{base}.{group}.{ending}", info.dtype, (rows, info.shape[1]), info.file, info.offset + group * nbytes, nbytes)


def _apart(tensors: Mapping[str, TensorInfo], family: str, joint: FusedExperts) -> Iterator[TensorInfo]:
    """Every expert's matrices by themselves, and the router beside them."""
    place, names = EXPERTS[family] and f"{EXPERTS[family]}.", families.get(families.COMPOSITE.get(family, (family,))[0]).NAMES
    layers = {found.group(1) for name in tensors if (found := joint.experts.fullmatch(name))}
    for name, info in tensors.items():
        found = joint.experts.fullmatch(name)
        if found is None:
            layer = name.removesuffix(joint.router)
            yield replace(info, name=f"{layer}{place}gate.weight") if layer != name and layer in layers else info
            continue
        parts, shape = PARTS[found.group(2)], info.shape
        if len(shape) != 3 or 0 in shape or shape[0] > MAX_EXPERTS or shape[1] % len(parts) or info.nbytes % (shape[0] * shape[1]):
            damaged(info.file, f"holds {shown(name)} as {info.dtype} {list(shape)}")
        rows, nbytes = shape[1] // len(parts), info.nbytes // (shape[0] * len(parts))
        for i in range(shape[0] * len(parts)):
            own = f"{found.group(1)}{place}experts.{i // len(parts)}.{names[parts[i % len(parts)]]}.weight"
            yield TensorInfo(own, info.dtype, (rows, shape[2]), info.file, info.offset + i * nbytes, nbytes)
