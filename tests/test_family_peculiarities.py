"""Features unique to a family, removed while the tensors stay: the comparison with transformers must then fail."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from family_models import CASES, TOLERANCE, oracle, text, written

from effllm.runtime.config import read_config
from effllm.runtime.engine import open_prepared
from effllm.runtime.prepare import EngineOptions, prepare_with
from effllm.runtime.source import open_store

# Case -> what of its config can be taken away while the tensors stay as they are.
PECULIAR = {
    "minimax": [{"multipliers": {role: 1.0}} for role in ("o", "state_out", "kept.full", "kept.linear", "kept.mlp")] + [
        {"moe": {"routed_scale": 1.0}}, {"moe": {"renormalise": False}}, {"norm_eps": 1e-5}, {"recurrent_norm_eps": 1.0}],
    "dbrx": [{"clip_qkv": None}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}] + [
        {"moe": each} for each in ({"renormalise": False}, {"experts_per_token": 1})],
    "molmo2, norms behind, stretched in a layer, bfloat16": [{"ropes": 0}, {"ropes": 1}],
    "phi3": [{"windows": (None,) * 3}],
    "phi4_multimodal": [{"ropes": {"partial_rotary_factor": 1.0}}, {"norm_eps": 1e-1}],
    "cohere_compass_text": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"norm_kind": "rms"}, {"logits_scaling": 1.0}],
    "arcee": [{"hidden_act": "relu"}],
    "nanbeige": [{"num_hidden_layers": 3, "loops": 1}, {"norm_eps": 1e-1}],
    "bitnet": [{"hidden_act": "relu"}, {"norm_eps": 1e-1}],
    "ernie4_5": [{"ropes": {"interleaved": False}}],
    "exaone4": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "gemma": [{"embedding_multiplier": 1.0}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "gemma, bfloat16": [{"embedding_multiplier": 90**0.5}],
    "gemma2": [{"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"attn_scale": None}, {"embedding_multiplier": 1.0},
               {"windows": (None,) * 3}, {"windows": (40,) * 3}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "gemma2, bfloat16": [{"embedding_multiplier": 90**0.5}],
    "gemma3_text": [{"attn_scale": None}, {"final_logit_softcapping": None}, {"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "gemma3": [{"embedding_multiplier": 1.0}, {"ropes": 1}],
    "glm": [{"ropes": {"interleaved": False}}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "glm4": [{"ropes": {"interleaved": False}}],
    "mistral, images": [{"windows": (None,) * 3}],
    "bamba": [{"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "hyperclovax": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "granite_swa": [{"windows": (None,) * 4}, {"windows": (40,) * 4}, {"ropes": 0}, {"ropes": 1}, {"ropes": 3}, {"attn_scale": None},
                    {"residual_multiplier": 1.0}],
    "granitemoe_swa": [{"windows": (None,) * 4}, {"moe": {"shared_expert_dim": None}}, {"moe": {"routed_scale": 1.0}}],
    "lfm3": [{"windows": (None,) * 5}, {"qk_norm": False}, {"norm_eps": 1e-1}],
    "ministral": [{"windows": (None,) * 3}, {"windows": (40,) * 3}],
    "flex_olmo": [{"moe": {"experts_per_token": 2}}, {"norm_eps": 1e-1}],  # a norm undoes sums
    "gpt_bigcode": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}, {"attn_scale": 1.0}],
    "gpt_neo": [{"windows": (None,) * 3}, {"windows": (None, 41, 41)}, {"attn_scale": None}, {"hidden_act": "silu"}],
    "gptj": [{"ropes": {"interleaved": False}}, {"ropes": {"partial_rotary_factor": 1.0}}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}],
    "persimmon": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "relu"}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "longcat_flash": [{"moe": each} for each in ({"renormalise": True}, {"sigmoid": True}, {"routed_scale": 1.0},
                                                 {"correction_bias": False})] + [
        {"multipliers": {"q_a_norm": 1.0}}, {"multipliers": {"kv_a_norm": 1.0}}, {"norm_eps": 1e-1}, {"ropes": (None,) * 4},
        {"attn_scale": 1.0}],
    "modernbert_decoder": [{"windows": (None,) * 3}, {"windows": (None, 80, 80)}, {"ropes": 0}, {"norm_eps": 1e-1}, {"norm_kind": "rms"},
                           {"head_transform_act": "gelu"}],
    "nanochat": [{"ropes": {"backwards": False}}, {"final_logit_softcapping": None}, {"qk_norm_unweighted": False}, {"norm_eps": 1e-1},
                 {"hidden_act": "relu"}],
    "hy_v3": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0}, {"correction_bias": False},
                                             {"shared_expert_dim": None})] + [{"qk_norm": False}],
    "cohere2_moe": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0},
                                               {"shared_expert_dim": None})] + [
        {"multipliers": {"shared.down": 1.0}}, {"windows": (None,) * 5}, {"ropes": 4}, {"ropes": 0}, {"norm_kind": "layer"},
        {"logits_scaling": 1.0}],
    "minicpm3": [{"residual_multiplier": 1.0}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}, {"ropes": {"interleaved": True}}],
    "minicpm": [{"residual_multiplier": 1.0}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "mimo": [{"qkv_bias": False}],
    "bailing_moe_v2": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"num_groups": 1, "top_groups": 1},
                                                      {"correction_bias": False}, {"routed_scale": 1.0}, {"shared_expert_dim": None})] + [
        {"ropes": {"partial_rotary_factor": 1.0}}],
    "gpt2": [{"hidden_act": "silu"}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"attn_scale": 1.0}],
    "falcon": [{"hidden_act": "silu"}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"ropes": (None,) * 3}],
    "cwm": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"ropes": {"factor": 1.0}}],
    "vaultgemma": [{"windows": (None,) * 3}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"attn_scale": None}],
    "helium": [{"ropes": {"interleaved": False}}, {"norm_eps": 1e-1}],
    "jais2": [{"hidden_act": "relu"}, {"norm_eps": 1e-1}, {"ropes": (None,) * 3}],
    "bailing_hybrid": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"num_groups": 1, "top_groups": 1},
                                                      {"correction_bias": False}, {"routed_scale": 1.0})] + [
        {"norm_eps": 1e-1}, {"attn_scale": 0.3}, {"recurrent": {"decay_bound": None}}, {"recurrent": {"decay_bound": -5.0}}],
    "beam": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"num_groups": 1, "top_groups": 1},
                                        {"correction_bias": False}, {"routed_scale": 1.0})] + [
        {"windows": (None,) * 4}, {"ropes": 1}, {"ropes": 0}, {"norm_eps": 1e-1}, {"nope_query_scaling": None},
        {"depth_scaled_residual": False}, {"final_logit_softcapping": None}],
    "flint": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"shared_expert_dim": None})] + [
        {"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 2}, {"norm_eps": 1e-1}],
    "lara_mini": [{"moe": each} for each in ({"renormalise": False}, {"shared_expert_dim": None})] + [
        {"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 1}, {"norm_kind": "rms+1"}],
    "kolibri1": [{"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 4}, {"norm_eps": 1e-1}] + [
        {"moe": each} for each in ({"correction_on_logits": False}, {"correction_bias": False}, {"renormalise": True},
                                   {"experts_per_token": 2})],
    "muse_glimmer": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"attn_scale": None}, {"qk_norm_unweighted": False},
                     {"qk_norm_without_rope": False}, {"embedding_norm": False}, {"final_norm_kind": None}, {"post_norm_eps": None},
                     {"norm_eps": 1e-5},
                     {"norm_kind": "rms"}, {"logits_scaling": 1.0}, {"final_logit_softcapping": None}],
    "step3p7": [{"windows": (None,) * 5}, {"ropes": 0}, {"ropes": 1}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"gate_limits": ()},
                {"gate_limits": ((None, 0.5), (None, 0.5), (0.4, 0.3), (0.7, None), (0.4, None))},
                {"gate_limits": ((None, None), (None, None), (0.4, 0.4), (0.7, None), (None, None))}] + [
        {"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0}, {"shared_expert_dim": None})],
    "hy_v4": [{"moe": each} for each in ({"renormalise": False}, {"correction_bias": False}, {"routed_scale": 1.0},
                                         {"shared_expert_dim": None})] + [
        {"norm_eps": 1e-1}, {"ropes": {"interleaved": True}}, {"attn_scale": 1 / 4}],
    "hy_v4, three streams, other layers, groups, tied, bfloat16": [{"sinkhorn_eps": 0.0}],
    "axk2": [{"moe": each} for each in ({"renormalise": False}, {"correction_bias": False}, {"routed_scale": 1.0},
                                        {"shared_expert_dim": None})] + [
        {"norm_eps": 1e-1}, {"ropes": {"interleaved": False}}, {"attn_scale": 1 / 4}],
    "axk1": [{"moe": each} for each in ({"sigmoid": False}, {"num_groups": 1, "top_groups": 1}, {"correction_bias": False})] + [
        {"norm_eps": 1e-5}, {"ropes": {"interleaved": False}}, {"attn_scale": 1 / 4}],
    "bloom": [{"alibi_slopes": (0.25,) * 4}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "mimo_v2_flash": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"multipliers": {"v": 1.0}}, {"norm_eps": 1e-1}] + [
        {"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"correction_bias": False})],
    "mpt": [{"alibi_slopes": (0.25,) * 4}, {"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "silu"}],
    "zamba2": [{"norm_eps": 1e-1}, {"recurrent_norm_eps": 1.0}, {"attn_scale": None}, {"hidden_act": "silu"}, {"ropes": (None,) * 6}],
    "laguna": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"output_gate_softplus": False}, {"moe": {"renormalise": False}},
               {"moe": {"correction_bias": False}}, {"moe": {"routed_scale": 1.0}}, {"moe": {"shared_expert_dim": None}}],
    "afmoe": [{"windows": (None,) * 4}, {"ropes": 0}, {"ropes": 3}, {"embedding_multiplier": 1.0}, {"norm_eps": 1e-1}] + [
        {"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"experts_per_token": 2})],
    "gpt_neox": [{"parallel_block": False}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "silu"},
                 {"ropes": {"partial_rotary_factor": 1.0}}],
    "phi": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "mellum": [{"windows": (None,) * 3}, {"ropes": 0}, {"ropes": 1}, {"moe": {"renormalise": False}}],
    "mistral4": [{"ropes": {"llama_4_scaling_beta": 0.1}}, {"ropes": {"interleaved": False}}, {"moe": {"sigmoid": True}},
                 {"moe": {"renormalise": False}}],
    "ministral3": [{"ropes": {"llama_4_scaling_beta": 0.1}}, {"ropes": {"mscale": None}}],
    "olmo": [{"clip_qkv": None}, {"norm_kind": "rms"}, {"norm_eps": 1e-1}],
    "phimoe": [{"moe": {"sparsemixer_margin": None}}, {"moe": {"sparsemixer_margin": 0.02}}, {"norm_kind": "rms"},
               {"windows": (None,) * 3}],
    "olmo_hybrid": [{"norm_eps": 1e-1}, {"recurrent_norm_eps": 1e-1}, {"norm_kind": "rms+1"}],
    "kimi_linear": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"num_groups": 1, "top_groups": 1},
                                                   {"correction_bias": False}, {"routed_scale": 1.0})] + [
                                                       {"norm_eps": 1e-1}, {"attn_scale": 0.3}],
    "jamba": [{"moe": {"renormalise": True}}, {"moe": {"experts_per_token": 1}}, {"norm_eps": 1e-1}, {"recurrent_norm_eps": 1.0}],
    "mamba": [{"norm_eps": 1e-1}, {"recurrent": {"normed": True}}],
    "mamba2": [{"norm_eps": 1e-1}, {"recurrent": {"normed": False}}],
    "falcon_mamba": [{"norm_eps": 1e-1}, {"recurrent_norm_eps": 1.0}, {"recurrent": {"normed": False}}],
    "rwkv7": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}, {"hidden_act": "relu"}, {"recurrent": {"eps": 1.0}}],
    "olmo3": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"ropes": 0}, {"ropes": 1}],
    "qwen3_5_moe_text": [{"moe": each} for each in ({"renormalise": False}, {"shared_expert_gate": False}, {"shared_expert_dim": None})],
    "qwen3_next": [{"moe": each} for each in ({"renormalise": False}, {"shared_expert_gate": False})] + [{"norm_kind": "rms"}],
    "llama4_text": [{"moe": each} for each in ({"weights_scale_inputs": False}, {"sigmoid": False}, {"shared_expert_dim": None},
                                               {"experts_per_token": 2})] + [
        {"ropes": 0}, {"ropes": 1}, {"qk_norm_unweighted": False}],
    "lfm2": [{"qk_norm": False}, {"ropes": (None,) * 3}, {"norm_eps": 1e-1}],
    "lfm2_moe": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0}, {"correction_bias": False})],
    "qwen3_5_text": [{"norm_kind": "rms"}, {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "smollm3": [{"ropes": 0}, {"ropes": 1}],
    "smollm3, windows": [{"windows": (None,) * 3}, {"ropes": 0}],
    "starcoder2": [{"windows": (None,) * 3}, {"norm_eps": 1e-1}, {"hidden_act": "silu"}],
    "granite": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0}],
    "mixtral": [{"moe": {"renormalise": False}}, {"moe": {"experts_per_token": 1}}, {"hidden_act": "silu"}],
    "qwen3_moe": [{"moe": {"renormalise": False}}, {"moe": {"experts_per_token": 4}}],
    "olmoe": [{"moe": {"renormalise": True}}, {"moe": {"experts_per_token": 3}}],
    "granitemoe": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"logits_scaling": 1.0},
                   {"moe": {"routed_scale": 1.0}}, {"moe": {"renormalise": False}}],
    "granitemoehybrid, state spaces": [{"residual_multiplier": 1.0}, {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "granitemoehybrid, experts, bfloat16": [{"moe": {"routed_scale": 1.0}}, {"residual_multiplier": 1.0}],
    "granitemoehybrid": [{"attn_scale": None}, {"residual_multiplier": 1.0}, {"ropes": (None,) * 3}],
    "ernie4_5_vl_moe": [{"moe": each} for each in ({"renormalise": False}, {"correction_bias": False}, {"shared_expert_dim": None})] + [
        {"ropes": {"interleaved": False}}],
    "ernie4_5_moe": [{"moe": each} for each in ({"renormalise": False}, {"correction_bias": False}, {"shared_expert_dim": None})],
    "qwen2_moe": [{"moe": {"renormalise": True}}, {"moe": {"shared_expert_gate": False}}, {"moe": {"shared_expert_dim": None}}],
    "glm4_moe": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0}, {"correction_bias": False},
                                                {"shared_expert_dim": None})] + [{"qk_norm": False}],
    "deepseek_v2": [{"moe": each} for each in ({"routed_scale": 1.0}, {"num_groups": 1, "top_groups": 1}, {"shared_expert_dim": None},
                                                   {"renormalise": True})] + [{"attn_scale": 1 / 6}, {"ropes": {"interleaved": False}}],
    "deepseek_v3": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"num_groups": 1, "top_groups": 1},
                                                   {"correction_bias": False})] + [
                                                       {"attn_scale": 1 / 6}, {"ropes": {"interleaved": False}}],
    "glm4_moe_lite": [{"norm_eps": 1e-5}, {"ropes": {"interleaved": False}}, {"moe": {"routed_scale": 1.0}}],
    "deepseek_v32": [{"moe": each} for each in ({"renormalise": False}, {"num_groups": 1, "top_groups": 1}, {"correction_bias": False})] + [
        {"ropes": {"interleaved": False}}],
    "deepseek_v4": [{"moe": each} for each in ({"renormalise": False}, {"sqrt_softplus": False}, {"routed_scale": 1.0},
                                               {"correction_bias": False})] + [
        {"hidden_act": "silu"}, {"windows": (39,) * 4}, {"ropes": 0}, {"ropes": 1}, {"norm_eps": 1e-1}],
    "qwen4_exp_text": [{"moe": {"renormalise": False}}, {"recurrent": {"sigmoid_gate": True}}, {"ngrams": {"eos_token_id": 8}},
                       {"ropes": (None,) * 4}, {"norm_eps": 1e-1}],
    "doge": [{"norm_eps": 1e-1}, {"qk_norm": False}, {"attn_scale": 0.1}, {"ropes": (None,) * 3}],
    "diffllama": [{"norm_eps": 1e-1}, {"attn_scale": 0.1}, {"ropes": (None,) * 3}],
    "zaya": [{"moe": {"renormalise": True}}, {"norm_eps": 1e-1}, {"ropes": (None,) * 3}],
    "glm5_next": [{"moe": {"renormalise": False}}, {"moe": {"correction_bias": False}}, {"norm_eps": 1e-1},
                  {"sinkhorn_iterations": 1}, {"recurrent": {"decay_bound": None}}],
    "mistral_large4": [{"ropes": {"interleaved": False}}, {"norm_eps": 1e-1}, {"final_logit_softcapping": 3.0},
                       {"learned_rope_alpha": False}, {"moe": {"renormalise": False}}],
    "dots1": [{"moe": {"renormalise": False}}, {"moe": {"correction_bias": False}}, {"windows": (None,) * 3}],
    "gemma3n_text": [{"windows": (None,) * 6}, {"ropes": 0}, {"v_norm": False}, {"attn_scale": None}, {"per_layer_input_multiplier": 1.0},
                     {"gate_cutoffs": ()}, {"gate_cutoffs": (0.0,) * 6}, {"kv_sources": (0, 1, 2, 3, 0, 1)}],
    "gemma4_text": [{"windows": (None,) * 6}, {"ropes": 0}, {"ropes": 1}, {"v_norm": False}, {"per_layer_input_multiplier": 1.0},
                    {"final_logit_softcapping": None}, {"attn_scale": None}, {"kv_sources": (0, 1, 2, 3, 0, 1)}],
    "gemma4_text, mixture": [{"moe": {"experts_per_token": 1}}, {"v_norm": False}, {"attn_scale": None}],  # a norm undoes sums
    "gpt_oss": [{"windows": (None,) * 3}, {"windows": (40,) * 3}, {"hidden_act": "silu"}, {"moe": {"renormalise": False}},
                {"moe": {"experts_per_token": 1}}],
    "nemotron_h, experts": [{"moe": each} for each in ({"renormalise": False}, {"sigmoid": False}, {"routed_scale": 1.0},
                                                           {"correction_bias": False},
                                                       {"shared_expert_dim": None})] + [{"hidden_act": "relu"}],
    "nemotron_h, experts of fewer numbers": [{"moe": {"routed_scale": 1.0}}, {"moe": {"correction_bias": False}}, {"hidden_act": "relu"}],
    "nemotron_nas": [{"ropes": (None,) * 6}, {"norm_eps": 1e-1}],
    "falcon_h1": [{"attn_scale": None}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0}, {"ropes": (None,) * 3},
                  *({"multipliers": {role: 1.0}} for role in ("o", "state_out", "post_norm", "down", "state_gate", "state_in.values",
                                                          "state_in.b", "state_in.c", "state_rate"))],
    "cohere, norms of every head": [{"norm_eps": 1e-1}, {"norm_kind": "rms"}],
    "hunyuan_v1_moe": [{"moe": each} for each in ({"renormalise": False}, {"shared_expert_dim": None}, {"experts_per_token": 2})],
    "nemotron": [{"norm_kind": "layer"}, {"hidden_act": "relu"}, {"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "stablelm": [{"norm_kind": "rms"}, {"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "stablelm, side by side": [{"norm_eps": 1e-1}, {"ropes": {"partial_rotary_factor": 1.0}}],
    "deepseek_ocr2_text": [{"moe": each} for each in ({"renormalise": True}, {"sigmoid": True}, {"routed_scale": 1.0},
                                                          {"shared_expert_dim": None}, {"experts_per_token": 2})] + [{"norm_eps": 1e-1}],
    "opt": [{"position_offset": 0}, {"position_offset": 1}, {"hidden_act": "gelu"}, {"norm_eps": 1e-1}],
}


@pytest.mark.slow  # it asks whether the tests above could fail
@pytest.mark.parametrize("name", PECULIAR)
def test_every_peculiarity_of_a_family_shows(name: str, tmp_path: Path) -> None:
    """A comparison that could not fail would show nothing: without any one of them the logits are clearly others."""
    model = written(CASES[name], tmp_path)
    config, ids = read_config(tmp_path), text(model, 200)
    expected = oracle(model, ids)
    for taken in PECULIAR[name]:
        if isinstance(taken.get("ropes"), int):  # this layer's positions for all
            taken = {"ropes": (config.ropes[taken["ropes"]],) * config.num_hidden_layers}
        if isinstance(taken.get("ropes"), dict):  # other numbers in all layers' positions, or another order
            own = {field: value for field, value in taken["ropes"].items() if hasattr(config.rope, field)}
            other = replace(config.rope, **(own or {"params": {**config.rope.params, **taken["ropes"]}}))
            taken = {"ropes": (other,) * 3}
        if "multipliers" in taken:
            taken = {"multipliers": tuple((dict(config.multipliers) | taken["multipliers"]).items())}
        for part in ("recurrent", "moe", "ngrams"):
            if part in taken:
                taken = {part: replace(getattr(config, part), **taken[part])}
        asked = EngineOptions(kv="32bit", device="cpu", ctx=256)
        *_, engine = open_prepared(partial(prepare_with, tmp_path, replace(config, **taken), open_store(tmp_path), asked), ("raw",))
        ours = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
        engine.close()
        assert np.abs(ours - expected).max() > 10 * TOLERANCE * np.abs(expected).max(), taken
