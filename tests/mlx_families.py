"""Small random models of the families that can be read from MLX folders, under the published names."""

import json
from pathlib import Path

import torch
from remapped_checkpoints import BASE_FAMILY, PUBLISHED_LAYOUTS
from safetensors.torch import load_file, save_file
from saved_tokenizers import with_words_of_fable
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "linear_conv_kernel_dim": 4}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "routed_scaling_factor": 1.75, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
LATENT = {**ROUTED, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
          "v_head_dim": 64}
SHARPENED = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                                 "mscale": 1.0, "mscale_all_dim": 0.7}}
SPACES = {"mamba_n_heads": 8, "mamba_expand": 2, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32,
          "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"}
GROUPS = {**SPACES, "mamba_n_groups": 2}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(16)],
        "long_factor": [1.0 + i / 8 for i in range(16)], "original_max_position_embeddings": 256}
TURNED = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
          "v_head_dim": 32, "rope_parameters": LONG}
JAMBA = {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 16,
         "mamba_dt_rank": 32, "num_experts_per_tok": 2, "use_mamba_kernels": False}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "num_hidden_layers": None}
# Of each family, or of one of its kinds, what it needs beside SIZES, and what mlx-lm looks for in a config by an older name.
CASES = {
    **{family: ({}, {}) for family in ("cohere", "gemma", "glm4", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
                                       "seed_oss", "smollm3", "starcoder2")},
    "cohere2": ({"num_hidden_layers": 5}, {"sliding_window_pattern": 4}),
    "gemma2": ({"query_pre_attn_scalar": 32}, {}),
    "gemma3_text": ({"query_pre_attn_scalar": 32, "num_hidden_layers": 7},
                    {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1e6}),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
             {"block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
              "block_auto_adjust_ff_dim": False, "conv_dim": 128, "conv_dim_out": 128}),
    "ministral3": ({}, {}),
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {}),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 2}, {}),
    "qwen2_moe": (SHARED, {"num_experts": 8}),
    "qwen3_moe": ({**MIXTURE, "decoder_sparse_step": 1}, {"num_experts": 8}),
    "apertus": ({"rope_parameters": LLAMA_3}, {"rope_scaling": LLAMA_3, "mlp_bias": False, "post_norm": False, "qk_norm": True}),
    "afmoe": ({**MIXTURE, "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 16}, {}),
    "exaone_moe": ({**MIXTURE, "num_shared_experts": 1, "sliding_window": 16,
                    "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, {"is_moe_layer": [False, True, True, True]}),
    "mamba": ({"state_size": 32}, {}),
    "mamba2": ({"state_size": 32, "num_heads": 8, "head_dim": 32, "n_groups": 1}, {}),
    "mamba2, groups": ({"state_size": 32, "num_heads": 8, "head_dim": 32, "n_groups": 2}, {}),
    "minicpm3": (TURNED | {"tie_word_embeddings": False}, {"rope_scaling": LONG}),
    "minicpm3, tied": (TURNED | {"tie_word_embeddings": True}, {"rope_scaling": LONG}),
    "phimoe": ({"num_local_experts": 8, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True},
               {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16, "short_mscale": 1.0,
                                 "long_mscale": 1.0, "original_max_position_embeddings": 256}}),
    "solar_open": ({**ROUTED, "first_k_dense_replace": 0}, {"partial_rotary_factor": 1.0, "use_qk_norm": False}),
    "deepseek_v2": ({**LATENT, **SHARPENED, "norm_topk_prob": False}, {"rope_scaling": {**SHARPENED["rope_parameters"], "type": "yarn"}}),
    "deepseek_v3": ({**LATENT, "n_group": 2}, {}),
    "dots1": (ROUTED, {"scoring_func": "noaux_tc"}),
    **{family: ({}, {}) for family in ("ernie4_5", "exaone", "helium", "internlm2", "internlm3", "mimo", "minicpm", "nemotron", "phi",
                                       "stablelm")},
    "ernie4_5_moe": ({"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 2,
                      "moe_layer_start_index": 1}, {}),
    "exaone4": ({"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, {"sliding_window_pattern": "LLLG"}),
    "falcon_h1": ({"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
                   "ssm_multipliers": [0.35, 0.25, 0.45, 0.5, 0.7]}, {}),
    "gemma4_text": ({"global_head_dim": 32, "sliding_window": 16, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320,
                     "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
                    {"global_head_dim": 32, "partial_rotary_factor": None, "rope_theta": None}),
    "glm": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}, {}),
    "glm4_moe": ({**ROUTED, "use_qk_norm": True, "attention_bias": True}, {}),
    "glm4_moe_lite": (LATENT, {}),
    "gpt_oss": ({"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "eos_token_id": None},
                {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                                  "original_max_position_embeddings": 4096}}),
    "granitemoe": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {}),
    "granitemoehybrid": ({**SPACES, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
                         {"layer_types": ["mamba", "attention"] * 2}),
    "granitemoehybrid, dense": ({**SPACES, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256},
                                {"layer_types": ["mamba", "attention"] * 2}),
    "granitemoehybrid, groups": ({**GROUPS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
                                 {"layer_types": ["mamba", "attention"] * 2}),
    "hunyuan_v1_dense": ({}, {"use_qk_norm": True}),
    "jamba": ({**JAMBA, "num_experts": 8}, {}),
    "jamba, dense": ({**JAMBA, "num_experts": 1, "num_experts_per_tok": 1}, {}),
    "lfm2_moe": ({**MIXTURE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}, {"conv_bias": False}),
    "minimax_m2": ({"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16}, {"shared_intermediate_size": 0}),
    "nemotron_h": ({**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]}, {}),
    "nemotron_h, experts": ({**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_routed_experts": 8,
                             "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
                             "routed_scaling_factor": 2.5}, {}),
    "qwen3_next": ({**DELTA, **SHARED}, {"num_experts": 8}),
    "qwen3_5_text": (DELTA, {}),
    "qwen3_5_moe_text": ({**DELTA, **SHARED}, {"num_experts": 8}),
}
# By curves of MLX, or halves.
ROUNDED = {"gemma": 1e-3, "gemma3_text": 1e-3, "gpt_oss": 1e-3, "granite": 3e-3, "granitemoe": 1e-3, "granitemoehybrid": 1e-3,
           "jamba": 1e-3, "qwen3_5_moe_text": 1e-3, "qwen3_next": 1e-3, "starcoder2": 1e-3}
# What mlx-lm computes otherwise than who published a family, put right before it runs, so that all else can be compared.
BY_GROUPS = """
import mlx.core as mx
from mlx_lm.models import granitemoehybrid, mamba2, nemotron_h
def normed(self, values, gate=None):
    values = nemotron_h.swiglu(gate, values) if gate is not None else values
    return self.weight * mx.fast.rms_norm(mx.unflatten(values, -1, (2, -1)), weight=None, eps=self.eps).flatten(-2)
mamba2.MambaRMSNormGated.__call__ = granitemoehybrid.GraniteMoeHybridRMSNormGated.__call__ = normed
"""
MENDED = {
    "granitemoehybrid, groups": BY_GROUPS, "mamba2, groups": BY_GROUPS,
    "jamba": """
import mlx.core as mx
from mlx_lm.models import jamba
def mixed(self, x):
    shares = mx.softmax(self.router(x), axis=-1)
    chosen = mx.argpartition(-shares, kth=self.num_experts_per_tok - 1, axis=-1)[..., : self.num_experts_per_tok]
    return (self.switch_mlp(x, chosen) * mx.take_along_axis(shares, chosen, axis=-1)[..., None]).sum(axis=-2)
jamba.JambaSparseMoeBlock.__call__ = mixed
""",
    "minicpm3, tied": """
from mlx_lm.models import minicpm3
whole = minicpm3.Model.__call__
minicpm3.Model.__call__ = lambda self, *given: whole(self, *given) / (self.args.hidden_size / self.args.dim_model_base)
"""}


def random_folder(folder: Path, case: str) -> None:
    """A model of a case of CASES as its family is published, small and random."""
    (more, older), family = CASES[case], case.split(",")[0]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(BASE_FAMILY.get(family, family), **SIZES | more)).float()
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(0, 0.06) if values.ndim > 1 else values.add_(torch.randn_like(values) * 0.1)
        for name, values in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # which start at 0
                values.add_(torch.randn_like(values) * 0.3)
    model.save_pretrained(folder)
    if family in PUBLISHED_LAYOUTS:
        PUBLISHED_LAYOUTS[family](folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or {}
    rope = rope if "rope_theta" in rope or not rope else next(iter(rope.values()))
    raw = {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None, **raw}
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope["partial_rotary_factor"]
    raw |= older
    if family.startswith("qwen3_5"):
        raw = {"model_type": family.removesuffix("_text"), "text_config": raw, "tie_word_embeddings": False,
               "architectures": [f"Qwen3_5{'Moe' * ('moe' in family)}ForConditionalGeneration"]}
        save_file(as_published(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    if family == "gpt_oss":
        raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
        save_file(in_mxfp4(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    with_words_of_fable(folder)


def in_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arbitrary codes in place of the experts' weights."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return tensors


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text model of a vision model, with a layer's experts stacked."""
    for layer in range(SIZES["num_hidden_layers"]):
        own = f"model.layers.{layer}.mlp.experts."
        if f"{own}0.up_proj.weight" in tensors:
            gates, ups, downs = ([tensors.pop(f"{own}{i}.{role}_proj.weight") for i in range(8)] for role in ("gate", "up", "down"))
            tensors[f"{own}gate_up_proj"] = torch.stack([torch.cat(each) for each in zip(gates, ups, strict=True)])
            tensors[f"{own}down_proj"] = torch.stack(downs)
    return {name.replace("model.", "model.language_model.", 1): values.contiguous() for name, values in tensors.items()}
