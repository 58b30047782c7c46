"""Configs of Step 3.5 Flash and 3.7 Flash, with the keys of the checkpoints' own code and with those of transformers."""

from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from transformers import CONFIG_MAPPING

from effllm.offload.gguf_header import GgufHeader
from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.config import parse_config
from effllm.runtime.gguf import step35
from effllm.runtime.gguf.family_context import FamilyContext

GLOBAL, LOCAL = "full_attention", "sliding_attention"
KINDS = [GLOBAL, LOCAL, LOCAL, LOCAL] * 12  # of 45 layers and three that guess ahead
STEP = {
    "architectures": ["Step3p5ForCausalLM"], "attention_other_setting": {
        "attention_type": LOCAL, "head_dim": 128, "num_attention_groups": 8, "num_attention_heads": 96, "true_head_dim": 128}, "auto_map": {
        "AutoConfig": "configuration_step3p5.Step3p5Config", "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
    "bos_token_id": 0, "eos_token_id": [1, 2, 128_007], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11_264, "layer_types":
    KINDS, "max_position_embeddings": 262_144, "max_seq_len": 262_144, "model_type": "step3p5", "moe_every_n_layer": 1,
    "moe_intermediate_size": 1280, "moe_layer_offset": 0, "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True, "norm_expert_weight":
    True, "num_attention_groups": 8, "num_attention_heads": 64, "num_hidden_layers": 45, "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5 if kind == GLOBAL else 1.0 for kind in KINDS], "rope_scaling": {
        "factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 131_072, "rope_type":
        "llama3"},
    "rope_theta": [5e6 if kind == GLOBAL else 1e4 for kind in KINDS], "share_expert_dim": 1280, "sink": False, "sliding_window": 512,
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3, "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3, "torch_dtype":
    "bfloat16",
    "use_head_wise_attn_gate": True, "use_mfa": False, "use_moe": True, "use_moe_router_bias": True, "use_qk_norm": True, "vocab_size":
    128_896, "yarn_only_types": [GLOBAL], "zero_centered": True}


def test_step_3_5() -> None:
    made = parse_config(STEP, strict=True)
    assert made.windows == tuple(None if kind == GLOBAL else 512 for kind in KINDS[:45])
    assert made.layer_query_heads == tuple(64 if kind == GLOBAL else 96 for kind in KINDS[:45]) and made.num_key_value_heads == 8
    wide, near = made.ropes[0], made.ropes[1]
    assert (wide.kind, wide.theta, wide.partial_rotary_factor, wide.params["high_freq_factor"]) == ("llama3", 5e6, 0.5, 32.0)
    assert (near.kind, near.theta, near.partial_rotary_factor) == ("default", 1e4, 1.0)
    own = made.moe
    assert (own.num_experts, own.experts_per_token, own.routed_scale, own.layers) == (288, 8, 3.0, frozenset(range(3, 45)))
    assert own.correction_bias and own.sigmoid
    assert made.gate_limits == ((None, None),) * 43 + ((7.0, None), (7.0, 16.0)) and made.mtp_layers == 3
    assert made.output_gate and made.output_gate_per_head and made.norm_kind == "rms+1" and made.qk_norm


def test_what_transformers_makes_of_it_is_the_same() -> None:
    theirs = CONFIG_MAPPING["step3p5"](**{key: value for key, value in STEP.items() if key not in ("auto_map", "model_type")}).to_dict()
    outer = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "vision_config": {}, "dtype": "bfloat16"}
    made, plain = parse_config({**outer, "text_config": theirs}), parse_config(STEP)
    for name in ("windows", "ropes", "layer_query_heads", "moe", "gate_limits", "max_position_embeddings", "norm_eps", "vocab_size"):
        assert getattr(made, name) == getattr(plain, name), name


@pytest.mark.parametrize(("key", "value"), [
    ("attention_other_setting", {"num_attention_heads": 96, "num_attention_groups": 4}), ("attention_other_setting", {"head_dim": 64}),
    ("attention_other_setting", {"rank": 4}), ("moe_layers_enum", "3-44"), ("moe_layers_enum", 3), ("swiglu_limits", [7.0] * 48),
    ("swiglu_limits_shared", [1.0] * 44), ("swiglu_limits", [0.0] * 44 + [-1.0]), ("hidden_act", "gelu"), ("sink", True),
    ("moe_router_activation", "softmax"), ("use_head_wise_attn_gate", False), ("zero_centered", False), ("norm_expert_weight", False),
    ("per_layer_config", {"1": {"head_dim": 64}}), ("num_sliding_attention_heads", 90), ("sliding_window", 0), ("auto_map", {
        "AutoModel": "modeling_other.Other"}), ("rope_theta", "many")])
def test_what_step_3_5_may_not_have_is_named(key: str, value: object) -> None:
    refused({**STEP, key: value}, {"num_sliding_attention_heads": "num_key_value_heads", "rope_theta": "rope_theta"}.get(key, key))


def file_says(**keys: object) -> dict[str, object]:
    """What a file of three layers and one that guesses ahead becomes, of which the last two have experts."""
    stated = {"general.architecture": "step35", "step35.attention.sliding_window_pattern": np.array([0, 1, 1, 1]),
              "step35.swiglu_clamp_exp": np.array([0.0, 0.0, 7.0, 0.0], np.float32), "step35.rope.freq_base_swa": 1e4, **keys}
    tensors = dict.fromkeys(f"blk.{layer}.ffn_gate_inp.weight" for layer in (1, 2))
    header = GgufHeader(Path("m.gguf"), stated, tensors)
    raw = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, "num_attention_heads": 64, "head_dim": 128, "rope_theta": 5e6,
           "num_attention_heads_per_layer": [64, 96, 96, 96], "rope_scaling": {
               "rope_type": "longrope", "short_factor": [2.0] * 64, "long_factor": [2.0] * 64}}
    step35.complete_config(FamilyContext(header, 512, 512), raw)
    step35.split_rope_tables(header, raw)
    return raw


def test_lists_of_a_file_continue_for_the_layers_behind() -> None:
    raw = file_says()
    assert raw["num_hidden_layers"] == 3 and len(raw["layer_types"]) == 4 and raw["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert (raw["num_attention_heads"], raw["num_sliding_attention_heads"], raw["swiglu_limits"]) == (64, 96, [0.0, 0.0, 7.0, 0.0])
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 88, "n_routed_experts": 8, "num_key_value_heads": 8}
    made = parse_config({**raw, **sizes, "norm_expert_weight": True, "model_type": "step3p5"}, strict=True)
    assert made.layer_query_heads == (64, 96, 96) and made.mtp_layers == 1 and made.gate_limits[2] == (7.0, None)
    assert len(made.ropes[0].params["long_factor"]) == 32 and (made.ropes[1].theta, made.ropes[1].partial_rotary_factor) == (1e4, 1.0)


def test_heads_of_one_kind_of_layers_are_alike() -> None:
    stated = {"general.architecture": "step35", "step35.attention.sliding_window_pattern": np.array([0, 1, 1])}
    of = FamilyContext(GgufHeader(Path("m.gguf"), stated, {}), 512, 512)
    for heads, said in (([64, 96, 64], "differ among layers of one kind"), ([64, 96], "for 2 of 3 layers")):
        with pytest.raises(CheckpointError, match=said):
            step35.complete_config(of, {"num_hidden_layers": 3, "num_attention_heads": 64, "num_attention_heads_per_layer": heads})
