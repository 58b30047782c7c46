"""A.X K1 as published: no router score correction, norms after dense layers, and what its configs say."""

from pathlib import Path

import pytest
import torch
from config_samples import refused
from family_models import CASES, Case, assert_logits_match, our_logits, text, written
from safetensors.torch import load_file, save_file

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import parse_config

PUBLISHED = {
    "architectures": ["AXK1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_axk1.AXK1Config", "AutoModelForCausalLM": "modeling_axk1.AXK1ForCausalLM"}, "bos_token_id": 163_691,
    "eos_token_id": 163_691, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size":
    18_432, "kv_lora_rank": 512, "max_position_embeddings": 131_072, "model_type": "AXK1", "moe_intermediate_size": 2048, "moe_layer_freq":
    1, "n_group": 8, "n_routed_experts": 192, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10_000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 163_840}


def test_the_published_config() -> None:
    made = parse_config(PUBLISHED, strict=True)
    own = made.moe
    assert (own.num_experts, own.experts_per_token, own.num_groups, own.top_groups, own.layers) == (192, 8, 8, 4, frozenset(range(1, 61)))
    assert own.parallel_to_mlp and own.correction_bias and own.sigmoid and own.shared_expert_dim is None
    assert made.layer_intermediate_sizes == (18_432, *[2048] * 60) and made.mla.query_rank == 1536 and made.rope.interleaved


@pytest.mark.parametrize(("key", "value"), [
    ("moe_layer_freq", 2), ("scoring_func", "softmax"), ("n_group", 7), ("auto_map", {"AutoModel": "modeling_other.Other"}),
    ("mlp_layer_types", ["moe"] * 61), ("num_key_value_heads", 8)])
def test_what_it_may_not_have_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)


def test_without_corrections_groups_are_chosen_by_their_two_best(tmp_path: Path) -> None:
    """As transformers has it, which takes corrections of zero for none; a norm behind a layer without experts means nothing."""
    model = written(Case("axk1", CASES["axk1"].changes), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, ids = load_file(path), text(model, 70)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) == len(tensors) - 2
    corrected = our_logits(tmp_path, ids)
    save_file({**kept, "model.layers.0.post_mlp_layernorm.weight": torch.ones(64)}, path)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.zero_()
    assert_logits_match(tmp_path, model, ids)
    assert abs(corrected - our_logits(tmp_path, ids)).max() > 0.01 * abs(corrected).max()
    save_file({name: tensor for name, tensor in kept.items() if "post_mlp_layernorm" not in name}, path)
    with pytest.raises(CheckpointError, match="post_mlp_layernorm.weight is missing"):
        our_logits(tmp_path, ids)
