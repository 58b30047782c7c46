"""Tensor names of mmproj files by projector type, and how their values differ from a checkpoint's.

A file has the architecture clip and states its type in `clip.projector_type`; audio has types of its own (`audio_names.py`). Names here
are those of `images/`, as `canonical_name` returns them. A new type is an entry in PROJECTORS, and its keys in `projector_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

CLIP = "clip"  # general.architecture of every mmproj file
LAYER_TENSOR = re.compile(r"([a-z_.]+)\.([0-9]{1,4})\.(.+)")
STAGE_STEP = re.compile(r"([0-9]{1,4}\.)(.+)")
DEEPSTACK_TENSOR = re.compile(r"v\.deepstack\.([0-9]{1,4})\.(norm|fc1|fc2)\.(weight|bias)")
DEEPSTACK_PARTS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
TENSOR_KINDS, CLAMP_KINDS = ("weight", "bias"), ("input_max", "input_min", "output_max", "output_min")
SECOND_FRAME_EMBD = "v.patch_embd.weight.1"  # patch embedding of the second frame; the first frame's has no number
IMAGE_NEWLINE = ("model.image_newline", "v.image_newline")
CLASS_EMBD, POST_LN = "v.class_embd", "v.post_ln"


@dataclass(frozen=True)
class Projector:
    """Tensor names of one projector type, and how its values differ from a checkpoint's.

    Tensors are named as in the file, "here" means the names of `images/` and `audio/`. Names in `layer_names` and `outer_names` are without
    their kind (weight, bias), all others with it.
    """

    layers_prefix: str  # of layers here, followed by the layer index
    layer_names: Mapping[str, str]  # part of a layer in the file -> here
    outer_names: Mapping[str, str]  # tensor outside the layers in the file -> here
    width_tensor: str  # its first dimension is the text model's hidden size
    full_names: Mapping[str, str] = field(default_factory=dict)  # names with kind, within layers and outside: in the file -> here
    has_steps: bool = False  # a layer is a stage of several numbered steps
    blocks_prefix: str = "v.blk"  # of layers in the file
    other_groups: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)  # prefix in the file -> (prefix here, names)
    fused_parts: tuple[str, ...] = ()  # parts of a layer here that are one matrix, separate in the file
    fused_name: str = ""  # the part that `fused_parts` become
    deinterleaved_qk: bool = False  # the file interleaves the halves of each head's rows of q and k
    regrouped_axes: bool = False  # the file has a head's x channels before its y channels; here they alternate in pairs
    shifted_norms: frozenset[str] = frozenset()  # the file adds 1 to these
    softplus_suffixes: tuple[str, ...] = ()  # suffixes of tensors of which the file holds the softplus
    channels_last: frozenset[str] = frozenset()  # convolutions whose channels are the second dimension in the file, the last here
    planar_colors: frozenset[str] = frozenset()  # the last dimension is one plane per color in the file, interleaved colors here
    swapped_axes: frozenset[str] = frozenset()  # the first two dimensions are swapped
    clamped_linears: frozenset[str] = frozenset()  # parts with CLAMP_KINDS beside their weight, which is named `linear.weight` here
    width_is_last: bool = False  # the last dimension of `width_tensor` is the hidden size, not the first
    text_architectures: tuple[str, ...] = ()  # GGUF architectures of the text models it fits; empty for any
    ignored: frozenset[str] = frozenset()  # tensors of the text model, or computed from others


_NORMS, _ATTENTION = {"ln1": "layer_norm1", "ln2": "layer_norm2"}, {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj"}
_SIGLIP = {**_NORMS, **_ATTENTION, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_QWEN = {"ln1": "norm1", "ln2": "norm2", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v", "attn_qkv": "attn.qkv",
         "attn_out": "attn.proj"}
_QKV = ("attn.q", "attn.k", "attn.v")
_QWEN_GATED = {**_QWEN, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN_OUTER = {"v.patch_embd": "visual.patch_embed.proj", POST_LN: "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0",
               "mm.2": "visual.merger.mlp.2"}
_GEMMA4 = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
           "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def _embeddings(tower: str) -> dict[str, str]:
    return {"v.patch_embd": f"{tower}.embeddings.patch_embedding", "v.position_embd": f"{tower}.embeddings.position_embedding",
            POST_LN: f"{tower}.post_layernorm"}


_GLM_OUTER = {"v.patch_embd": "visual.patch_embed.proj", "v.norm_embd": "visual.post_conv_layernorm",
              "v.position_embd": "visual.embeddings.position_embedding", POST_LN: "visual.post_layernorm",
              "mm.patch_merger": "visual.downsample",
              "mm.model.fc": "visual.merger.proj", "mm.post_norm": "visual.merger.post_projection_norm",
              **{f"mm.{name}": f"visual.merger.{name}_proj" for name in ("gate", "up", "down")}}
_PIXTRAL = Projector(
    "vision_tower.transformer.layers.",
    {"ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
     "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
     "ffn_down": "feed_forward.down_proj"},
    {"v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre", "mm.input_norm": "multi_modal_projector.norm",
     "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer", "mm.1": "multi_modal_projector.linear_1",
     "mm.2": "multi_modal_projector.linear_2"}, "mm.2.weight", deinterleaved_qk=True, ignored=frozenset({"v.token_embd.img_break"}))
_MERGER = "vision_tower.patch_merger."
_HUNYUAN = Projector(
    "vision_tower.layers.", {**_SIGLIP, "attn_out": "self_attn.o_proj"},
    {**{key: name for key, name in _embeddings("vision_tower").items() if key != POST_LN},
     **{f"mm.{theirs}": _MERGER + ours for theirs, ours in (("pre_norm", "before_rms"), ("0", "proj_conv"), ("2", "proj_out"), (
         "model.fc", "mlp"), ("post_norm", "after_rms"))}}, "mm.model.fc.weight",
    full_names={"v.image_newline": f"{_MERGER}image_newline", "v.view_seperator": f"{_MERGER}image_sep",
                **{f"mm.image_{end}": f"{_MERGER}image_{end}" for end in ("begin", "end")}},
    text_architectures=("hunyuan_vl",))
_MOONVIT = {"ln1": "norm0", "ln2": "norm1", "attn_out": "wo", "ffn_up": "mlp.fc0", "ffn_down": "mlp.fc1"}
_MOONVIT_OUTER = {"v.patch_embd": "vision_tower.patch_embed.proj", "v.position_embd": "vision_tower.patch_embed.pos_emb",
                  POST_LN: "vision_tower.encoder.final_layernorm"}
_MOBILENET_STEPS = ("conv_exp", "bn1", "conv_pwl", "bn2",
                    *(f"{step}.{part}" for step in ("dw_start", "dw_mid", "pw_exp", "pw_proj") for part in (
    "conv", "bn")), *(f"attn.{each}.proj" for each in ("query", "key", "value", "output")), *(f"attn.{each}.{part}" for each in (
        "key", "value") for part in ("down_conv", "norm")), "norm")
_TIMM_MODEL = "vision_tower.timm_model."
PROJECTORS: Mapping[str, Projector] = {
    "mlp": Projector(
        "vision_tower.encoder.layers.", _SIGLIP,
        {**_embeddings("vision_tower"), "v.pre_ln": "vision_tower.pre_layrnorm", "mm.0": "multi_modal_projector.linear_1",
         "mm.2": "multi_modal_projector.linear_2"}, "mm.2.weight",
        full_names={CLASS_EMBD: "vision_tower.embeddings.class_embedding", **dict.fromkeys(IMAGE_NEWLINE, "image_newline")}),
    "idefics3": Projector(
        "vision_model.encoder.layers.", _SIGLIP,
        {**_embeddings("vision_model"), "mm.model.fc": "connector.modality_projection.proj"}, "mm.model.fc.weight"),
    "pixtral": _PIXTRAL, "lightonocr": replace(_PIXTRAL, text_architectures=("qwen3",)),
    "internvl": Projector(
        "vision_tower.encoder.layer.",
        {"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
         "attn_v": "attention.v_proj", "attn_out": "attention.projection_layer", "attn_q_norm": "attention.q_norm",
         "attn_k_norm": "attention.k_norm", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {"v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection", POST_LN: "vision_tower.layernorm",
         "mm.model.mlp.0": "multi_modal_projector.layer_norm", "mm.model.mlp.1": "multi_modal_projector.linear_1",
         "mm.model.mlp.3": "multi_modal_projector.linear_2"}, "mm.model.mlp.3.weight",
        full_names={"ls1.weight": "lambda_1", "ls2.weight": "lambda_2", CLASS_EMBD: "vision_tower.embeddings.cls_token",
                    "v.position_embd.weight": "vision_tower.embeddings.position_embeddings"}),
    "gemma3": Projector(
        "vision_tower.encoder.layers.", _SIGLIP, {**_embeddings("vision_tower"),
                                                  "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm"},
        "mm.input_projection.weight", full_names={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
        shifted_norms=frozenset({"mm.soft_emb_norm.weight"}), width_is_last=True, text_architectures=("gemma3",)),
    "gemma3nv": Projector(
        f"{_TIMM_MODEL}blocks.", {step: step for step in _MOBILENET_STEPS},
        {**{f"v.{part}": _TIMM_MODEL + part for part in ("conv_stem.conv", "conv_stem.bn", "msfa.norm", *(
            f"msfa.ffn.{step}.{each}" for step in ("pw_exp", "pw_proj") for each in ("conv", "bn")))},
         "mm.input_projection": "embed_vision.embedding_projection", "mm.embedding": "embed_vision.embedding",
         **{f"mm.{kind}_emb_norm": f"embed_vision.{kind}_embedding_norm" for kind in ("hard", "soft")}},
        "mm.input_projection.weight", full_names={"layer_scale.gamma": "layer_scale.gamma"}, has_steps=True,
        text_architectures=("gemma3n",)),
    "paddleocr": Projector(
        "visual.vision_model.encoder.layers.", _SIGLIP,
        {**_embeddings("visual.vision_model"), "mm.input_norm": "projector.pre_norm",
         **{f"mm.{number}": f"projector.linear_{number}" for number in (1, 2)}}, "mm.2.weight", text_architectures=("paddleocr",)),
    "hunyuanvl": _HUNYUAN, "hunyuanocr": _HUNYUAN,
    "lfm2": Projector(
        "vision_tower.encoder.layers.", _SIGLIP,
        {**_embeddings("vision_tower"), "mm.input_norm": "multi_modal_projector.layer_norm", "mm.1": "multi_modal_projector.linear_1",
         "mm.2": "multi_modal_projector.linear_2"}, "mm.2.weight", channels_last=frozenset({"v.patch_embd.weight"}),
         text_architectures=("lfm2", "lfm2moe")),
    "qwen2vl_merger": Projector(
        "visual.blocks.", {**_QWEN, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, _QWEN_OUTER, "mm.2.weight", fused_parts=_QKV,
        fused_name="attn.qkv",
        text_architectures=("qwen2vl",)),
    "qwen2.5vl_merger": Projector(
        "visual.blocks.", _QWEN_GATED, _QWEN_OUTER, "mm.2.weight", fused_parts=_QKV, fused_name="attn.qkv",
        text_architectures=("qwen2vl",)),
    "qwen2.5o": Projector("visual.blocks.", _QWEN_GATED, _QWEN_OUTER, "mm.2.weight", text_architectures=("qwen2vl",)),
    "qwen3vl_merger": Projector(
        "visual.blocks.", {**_QWEN, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {"v.patch_embd": "visual.patch_embed.proj", "v.position_embd": "visual.pos_embed", POST_LN: "visual.merger.norm",
         "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"}, "mm.2.weight", fused_parts=_QKV, fused_name="attn.qkv",
        text_architectures=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")),
    "glm4v": Projector(
        "visual.blocks.", {**_QWEN_GATED, **{f"attn_{each}_norm": f"attn.{each}_norm" for each in "qk"}}, _GLM_OUTER, "mm.down.weight",
        text_architectures=("glm4", "glm4moe")),
    "glm5v": Projector(
        "visual.blocks.", {**_QWEN_GATED, **{f"attn_{each}_norm": f"attn.{each}_norm" for each in "qk"}}, _GLM_OUTER, "mm.down.weight",
        text_architectures=("glm5-next",)),
    "exaone4_5": Projector("visual.blocks.", _QWEN_GATED, _QWEN_OUTER, "mm.2.weight", text_architectures=("exaone4",)),
    "llama4": Projector(
        "vision_model.model.layers.",
        {"attn_post_norm": "post_attention_layernorm",  # its name since llama.cpp's converter supports Gemma 4
         "ln1": "input_layernorm", "ln2": "post_attention_layernorm", **_ATTENTION, "attn_out": "self_attn.o_proj", "ffn_up": "mlp.fc1",
         "ffn_down": "mlp.fc2"},
        {"v.patch_embd": "vision_model.patch_embedding.linear", "v.pre_ln": "vision_model.layernorm_pre",
         POST_LN: "vision_model.layernorm_post",
         **{f"mm.model.mlp.{number}": f"vision_model.vision_adapter.mlp.fc{number}" for number in (1, 2)},
         "mm.model.fc": "multi_modal_projector.linear_1"}, "mm.model.fc.weight",
        full_names={CLASS_EMBD: "vision_model.class_embedding", "v.position_embd.weight": "vision_model.positional_embedding_vlm"},
        text_architectures=("llama4",)),
    "kimik25": Projector(
        "vision_tower.encoder.blocks.", {**_MOONVIT, "attn_qkv": "wqkv"},
        {**_MOONVIT_OUTER, "mm.input_norm": "mm_projector.pre_norm", "mm.1": "mm_projector.proj.0", "mm.2": "mm_projector.proj.2"},
        "mm.2.weight", regrouped_axes=True, text_architectures=("deepseek2",)),
    "kimivl": Projector(
        "vision_tower.encoder.blocks.", {**_MOONVIT, **{f"attn_{letter}": f"w{letter}" for letter in "qkv"}},
        {**_MOONVIT_OUTER, "mm.input_norm": "multi_modal_projector.pre_norm", **{f"mm.{number}": f"multi_modal_projector.linear_{number}"
                                                                                 for number in (1, 2)}},
        "mm.2.weight", fused_parts=("wq", "wk", "wv"), fused_name="wqkv", text_architectures=("deepseek2",)),
    "minicpmv4_6": Projector(
        "vision_tower.encoder.layers.", _SIGLIP,
        {**_embeddings("vision_tower"), **{f"v.vit_merger.{theirs}": f"vision_tower.vit_merger.{ours}" for theirs, ours in {
            **_NORMS, **_ATTENTION, "ds_ln": "pre_norm", "ds_ffn_up": "linear_1", "ds_ffn_down": "linear_2"}.items() if theirs != "ln2"},
         "mm.input_norm": "merger.mlp.0.pre_norm", "mm.up": "merger.mlp.0.linear_1", "mm.down": "merger.mlp.0.linear_2"},
        "mm.down.weight", text_architectures=("qwen35",)),
    "gemma4v": Projector(
        "vision_tower.encoder.layers.",
        {**_GEMMA4, "ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
         "attn_k_norm": "self_attn.k_norm", "attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
        {"v.patch_embd": "vision_tower.patch_embedder.input_proj", "mm.input_projection": "embed_vision.embedding_projection"},
        "mm.input_projection.weight",
        full_names={"v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table", "v.std_bias": "vision_tower.std_bias",
                    "v.std_scale": "vision_tower.std_scale"},
        clamped_linears=frozenset(_GEMMA4), channels_last=frozenset({"v.patch_embd.weight"}), text_architectures=("gemma4",)),
    "gemma4uv": Projector(  # no layers
        "", {}, {"v.patch_embd": "vision_embedder.patch_dense", "v.patch_norm.1": "vision_embedder.patch_ln1",
                 "v.patch_norm.2": "vision_embedder.patch_ln2", "v.patch_norm.3": "vision_embedder.pos_norm",
                 "mm.input_projection": "embed_vision.embedding_projection"},
        "mm.input_projection.weight", full_names={"v.position_embd.weight": "vision_embedder.pos_embedding"},
        planar_colors=frozenset({"v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"}),
        swapped_axes=frozenset({"v.position_embd.weight"}), text_architectures=("gemma4",)),
}


def checkpoint_name(name: str, projector: Projector, deepstack_layers: list[int], ffn_swapped: bool = False) -> str | None:
    """The checkpoint's name of a tensor of a file; None if no file of this type has such a tensor.

    deepstack_layers: indices of the encoder layers whose features are added to early layers of the text model.
    ffn_swapped: the file names the FFN's down projection `ffn_up` and the reverse, as early writers did.
    """
    if name in projector.full_names:
        return projector.full_names[name]
    groups = {projector.blocks_prefix: (projector.layers_prefix, projector.layer_names), **projector.other_groups}
    if (match := LAYER_TENSOR.fullmatch(name)) and match[1] in groups:
        layers, layer = groups[match[1]]
        prefix, part = f"{layers}{int(match[2])}.", match[3]
        if projector.has_steps and (step := STAGE_STEP.fullmatch(part)):
            prefix, part = prefix + step[1], step[2]
        stem, _, kind = part.rpartition(".")
        if part in projector.full_names:
            return prefix + projector.full_names[part]
        if ffn_swapped:
            stem = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(stem, stem)
        if stem in projector.clamped_linears and kind in (*TENSOR_KINDS, *CLAMP_KINDS):
            return f"{prefix}{layer[stem]}.{kind if kind in CLAMP_KINDS else f'linear.{kind}'}"
        return f"{prefix}{layer[stem]}.{kind}" if stem in layer and kind in TENSOR_KINDS else None
    if (match := DEEPSTACK_TENSOR.fullmatch(name)) and int(match[1]) in deepstack_layers:
        return f"visual.deepstack_merger_list.{deepstack_layers.index(int(match[1]))}.{DEEPSTACK_PARTS[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{projector.outer_names[stem]}.{kind}" if stem in projector.outer_names and kind in TENSOR_KINDS else None
