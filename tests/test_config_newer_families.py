"""config.json of the families that came last: what is read of it, as transformers reads it, and what is refused by name."""

import sys
from pathlib import Path

import pytest

from effllm.runtime.config import parse_config
from effllm.runtime.mixture import Mixture

sys.path.insert(0, str(Path(__file__).parent))
from config_samples import LLAMA, refused

# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
                   "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
                   "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                   "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
                   "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, "output_router_logits": False,
                   "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
                   "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
                   "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({**LLAMA, "eos_token_id": 7, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize(("family", "key", "value"), [
    ("qwen3_next", "mlp_only_layers", [1]), ("qwen3_next", "decoder_sparse_step", 2), ("qwen3_next", "norm_topk_prob", False),
    ("qwen3_next", "use_sliding_window", True), ("qwen3_next", "hidden_act", "gelu")])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, **PUBLISHED.get(family, {}), key: value}, key)


def test_qwen3_next_has_a_layer_to_draft_by_whatever_its_config_says() -> None:
    base = {**LLAMA, "model_type": "qwen3_next"}
    config = parse_config(base)
    assert config.mtp_layers == 1
    assert config.mixture == Mixture(512, 10, 512, True, frozenset(range(4)), shared_width=512, shared_scaled=True)
    assert config.attention_layers == (3,) and config.rope.partial_rotary_factor == 0.25
    assert parse_config({**base, "mtp_num_hidden_layers": 0}).mtp_layers == 0
