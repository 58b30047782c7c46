"""Folders of families that transformers lacks, derived from those of a family that computes the same."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BASE_FAMILY = {"bailing_moe_v2": "glm4_moe", "exaone": "llama", "internlm2": "llama", "mimo": "qwen2", "minicpm": "granite",
               "nanbeige": "llama", "nemotron_nas": "llama", "ouro": "llama", "minimax_text_01": "minimax", "phi4mm": "phi4_multimodal"}


def as_internlm2(folder: Path) -> None:
    """A folder of Llama as InternLM 2: q, k and v fused per KV head, under other names."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    groups, depth = raw["num_key_value_heads"], raw["head_dim"]
    names = {"embed_tokens": "tok_embeddings", "lm_head": "output", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
             "mlp.down_proj": "feed_forward.w2", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
             "post_attention_layernorm": "ffn_norm"}
    renamed = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            joined = torch.cat([part.view(groups, -1, depth, *part.shape[1:]) for part in parts], 1)
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = joined.flatten(0, 2)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old_name = next((old for old in names if old in name), "")
            renamed[name.replace(old_name, names[old_name]) if old_name else name] = tensor
    save_file(renamed, path)
    bias = raw.pop("attention_bias")
    for key in ("mlp_bias", "head_dim"):
        del raw[key]
    raw |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": bias}
    (folder / "config.json").write_text(json.dumps(raw))


def as_exaone(folder: Path) -> None:
    """A folder of Llama as EXAONE 3, under other names."""
    names = {r"model\.layers\.(\d+)\.": r"transformer.h.\1.", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
             r"self_attn\.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", r"mlp\.gate_proj": "mlp.c_fc_0",
             r"mlp\.up_proj": "mlp.c_fc_1", r"mlp\.down_proj": "mlp.c_proj", r"model\.embed_tokens": "transformer.wte",
             r"model\.norm": "transformer.ln_f"}
    _rename(folder, names)
    _rewrite_config(folder, "exaone", "ExaoneForCausalLM", {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon",
                                                            "hidden_act":
                                                            "activation_function"}, ("mlp_bias", "attention_bias"))


def as_mimo(folder: Path) -> None:
    """A folder of Qwen 2 with a layer after it for multi-token prediction."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    save_file({**tensors, "model.mtp_layers.0.token_layernorm.weight": torch.ones(8)}, path)
    _rewrite_config(folder, "mimo", "MiMoForCausalLM", {}, (), {"attention_bias": True, "num_nextn_predict_layers": 1})


def as_minicpm(folder: Path) -> None:
    """A folder of Granite, whose multipliers have other names."""
    raw = json.loads((folder / "config.json").read_text())
    multipliers = {"dim_model_base": int(raw["hidden_size"] / raw.pop("logits_scaling")), "scale_emb": raw["embedding_multiplier"],
                   "scale_depth": raw["residual_multiplier"] * raw["num_hidden_layers"] ** 0.5}
    _rewrite_config(folder, "minicpm", "MiniCPMForCausalLM", {}, ("attention_multiplier", "embedding_multiplier", "residual_multiplier",
                                                                  "logits_scaling", "mlp_bias"), multipliers)


def as_nanbeige(folder: Path) -> None:
    """A folder of Llama whose layers are looped."""
    _rewrite_config(folder, "nanbeige", "NanbeigeForCausalLM", {}, (), {"loop_loss_weights": [], "skip_loop_final_norm": False})


def as_ouro(folder: Path) -> None:
    """The same with the gate that would end loops early, and never does."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    save_file({**tensors, "model.early_exit_gate.weight": torch.ones(1, 64), "model.early_exit_gate.bias": torch.ones(1)}, path)
    _rewrite_config(folder, "ouro", "OuroForCausalLM", {"num_loops": "total_ut_steps"}, ("mlp_bias",), {
        "early_exit_step": None, "early_exit_threshold": 1.0, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3,
        "layer_types": ["full_attention"] * json.loads((folder / "config.json").read_text())["num_hidden_layers"]})


def as_bailing(folder: Path) -> None:
    """A folder of GLM 4 MoE as Ling 2: fused queries, keys and values, under other names."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    save_file(tensors, path)
    _rename(folder, {r"self_attn\.o_proj": "attention.dense", r"self_attn\.q_norm": "attention.query_layernorm", r"self_attn\.k_norm":
                     "attention.key_layernorm", "self_attn": "attention", "e_score_correction_bias": "expert_bias", r"model\.embed_tokens":
                     "model.word_embeddings"})
    raw = json.loads((folder / "config.json").read_text())
    share = raw["rope_parameters"].pop("partial_rotary_factor")
    changes = {"partial_rotary_factor": share, "rope_theta": raw["rope_parameters"]["rope_theta"], "score_function": "sigmoid",
               "moe_router_enable_expert_bias": True}
    _rewrite_config(folder, "bailing_moe_v2", "BailingMoeV2ForCausalLM", {"n_routed_experts": "num_experts", "n_shared_experts":
                                                                          "num_shared_experts"},
                    ("attention_bias", "num_mtp_layers", "rope_parameters", "router_aux_loss_coef"), changes)


def as_kimi(folder: Path) -> None:
    """A folder of Kimi K2.5 with the published tensor names of the text model, which transformers saves under those of a vision-language
    model."""
    _rename(folder, {r"language_model\.model\.blocks\.": "language_model.model.layers."})


def as_nemotron_omni(folder: Path) -> None:
    """config.json of a Nemotron vision model as it is published, with other names for its sections."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    names = {"text_config": "llm_config", "audio_config": "sound_config", "image_token_id": "img_context_token_id",
             "vision_hidden_size": "vit_hidden_size"}
    raw = {names.get(key, key): value for key, value in raw.items()}
    path.write_text(json.dumps(raw | {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3", "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "ps_version": "v2",
        "auto_map": {"AutoConfig": "configuration.NemotronH_Nano_Omni_Reasoning_V3_Config"}}))


def as_hyperclovax_vision(folder: Path) -> None:
    """A folder of HyperCLOVA X with vision as published, under a less specific name."""
    _rename(folder, {r"^model\.language_model\.": "model.language_model.model.", r"^lm_head": "model.language_model.lm_head"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "vlm", "architectures": ["HCXVisionV2ForCausalLM"],
                                "auto_map": {"AutoConfig": "configuration_vlm.HCXVisionConfig"}}))


def as_qianfan(folder: Path) -> None:
    """As `as_kimi`, for Qianfan-OCR."""
    _rename(folder, {r"language_model\.model\.encoder\.layers\.": "language_model.model.layers."})


def as_minimax_text_01(folder: Path) -> None:
    """A folder of MiniMax as it was published first, under other names of its config's numbers."""
    names = {f"{kind}_{part}_factor": f"layernorm_{kind.replace('attn', 'attention')}_{part}"
             for kind in ("full_attn", "linear_attn", "mlp") for part in ("alpha", "beta")}
    kinds = json.loads((folder / "config.json").read_text())["layer_types"]
    _rewrite_config(folder, "minimax_text_01", "MiniMaxText01ForCausalLM", names, ("layer_types", "block_size"), {
        "attn_type_list": [int(kind == "full_attention") for kind in kinds], "postnorm": True, "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid"})
    path = folder / "model.safetensors"
    stored = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # computed, not stored in published checkpoints
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.endswith(stored)}, path)


def zero_pruned_parts(model: torch.nn.Module) -> None:
    """Make a Llama compute what its pruned version does, as its `block_configs` describe it: attention or FFN of a layer that add nothing,
    FFN channels that are zero, equal KV heads."""
    for layer, block in zip(model.model.layers, model.config.block_configs, strict=True):
        attention, ffn = block["attention"], block["ffn"]
        if attention["no_op"]:
            layer.self_attn.o_proj.weight.zero_()
        elif copies := attention["n_heads_in_group"] // model.model.layers[0].self_attn.num_key_value_groups - 1:
            for matrix in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = matrix.weight.view(-1, copies + 1, layer.self_attn.head_dim, matrix.in_features)
                heads[:, 1:] = heads[:, :1]
        if ffn["no_op"]:
            layer.mlp.down_proj.weight.zero_()
        else:
            layer.mlp.down_proj.weight[:, ffn["intermediate_size"] :] = 0


def as_nemotron_nas(folder: Path) -> None:
    """A folder of Llama without the parts that `zero_pruned_parts` zeroed, and with block_configs as published."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    usual = raw["num_attention_heads"] // raw["num_key_value_heads"]
    for number, block in enumerate(raw["block_configs"]):
        attention, ffn, prefix = block["attention"], block["ffn"], f"model.layers.{number}."
        removed = ("self_attn.", "input_layernorm") * attention["no_op"] + ("mlp.", "post_attention_layernorm") * ffn["no_op"]
        for name in [name for name in tensors if name.startswith(tuple(prefix + suffix for suffix in removed))]:
            del tensors[name]
        for part in "kv" if not attention["no_op"] else "":
            name, copies = f"{prefix}self_attn.{part}_proj.weight", attention["n_heads_in_group"] // usual
            tensors[name] = tensors[name].view(-1, copies, raw["head_dim"], raw["hidden_size"])[:, 0].flatten(0, 1).clone()
        for part in ("gate", "up", "down") if not ffn["no_op"] else ():
            name, width = f"{prefix}mlp.{part}_proj.weight", ffn["intermediate_size"]
            tensors[name] = (tensors[name][:, :width] if part == "down" else tensors[name][:width]).clone()
        defaults = {"num_sink_tokens": None, "replace_with_linear": False, "sparsify": None, "unshifted_sink": False,
                    "use_prefill_window_in_sink_attention": False, "window_length": None}
        block["attention"], block["ffn"] = {**attention, **defaults}, {**ffn, "replace_with_linear": False, "sparsify": None}
    save_file(tensors, path)
    _rewrite_config(folder, "nemotron-nas", "DeciLMForCausalLM", {}, (), {
        "block_configs": raw["block_configs"], "intermediate_size": None, "num_key_value_heads": None,
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"}})


def as_phi4mm(folder: Path) -> None:
    """A folder of Phi 4 multimodal as first published: LoRA adapters next to each matrix."""
    _rename(folder, {rf"(model\.layers\.\d+\..+{name}_proj)\.weight": r"\1.base_layer.weight" for name in ("qkv", "o", "gate_up", "down")})
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    matrices = [name.removesuffix("base_layer.weight") for name in tensors if name.endswith("base_layer.weight")]
    save_file(tensors | {f"{name}lora_{part}.{modality}.weight": torch.ones(8, 8) for name in matrices for part in "AB" for modality in (
        "speech", "vision")}, path)
    _rewrite_config(folder, "phi4mm", "Phi4MMForCausalLM", {}, ("vision_config", "audio_config"), {
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"}, "embd_layer": {}, "img_processor": None, "speech_lora": {"r": 8},
        "vision_lora": {"r": 8}})


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    path, renamed = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    save_file(renamed, path)


def _rewrite_config(folder: Path, kind: str, architecture: str, renamed: Mapping[str, str], removed: tuple[str, ...],
                    changes: Mapping[str, object] | None = None) -> None:
    """Rewrite config.json: keys `renamed` or `removed`, then `changes` applied."""
    raw = json.loads((folder / "config.json").read_text())
    raw = {renamed.get(key, key): value for key, value in raw.items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": kind, "architectures": [architecture], **(changes or {})}))


PUBLISHED_LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    "bailing_moe_v2": as_bailing, "exaone": as_exaone, "hyperclovax_vision_v2": as_hyperclovax_vision,
    "internlm2": as_internlm2, "kimi_k25": as_kimi, "qianfan_ocr": as_qianfan,
    "mimo": as_mimo, "minicpm": as_minicpm, "minimax_text_01": as_minimax_text_01, "nanbeige": as_nanbeige,
    "nemotron_h_omni": as_nemotron_omni, "nemotron_nas": as_nemotron_nas, "ouro": as_ouro, "phi4mm": as_phi4mm}
