"""Configs of the newest families: what is read of them, and what of them is refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from effllm.runtime.config import parse_config

sys.path.insert(0, str(Path(__file__).parent))
from config_samples import refused

RAMP = [1.0 + 0.1 * i for i in range(48)]
# As it is published, but for what its parts that see and hear say.
PHI_4 = {
    "architectures": ["Phi4MMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "audio_processor": {"name": "cascades"},
    "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig", "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
                 "AutoTokenizer": "Xenova/gpt-4o"},
    "bos_token_id": 199_999, "embd_layer": {"embedding_cls": "image_audio"}, "embd_pdrop": 0.0, "eos_token_id": 199_999, "full_attn_mod": 1,
    "hidden_act": "silu", "hidden_size": 3072, "img_processor": None, "initializer_range": 0.02, "intermediate_size": 8192,
    "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131_072, "mlp_bias": False, "model_type": "phi4mm",
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "pad_token_id": 199_999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": {
        "long_factor": RAMP, "short_factor": RAMP, "type": "longrope"}, "rope_theta": 10_000.0, "sliding_window": 262_144,
    "speech_lora": {"r": 320}, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vision_lora": {"r": 256},
    "vocab_size": 200_064}
WINDOW, ALL = "sliding_attention", "full_attention"
COMPASS = {
    "model_type": "cohere_compass_text", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "sliding_window": 4096, "layer_types": [WINDOW, WINDOW, WINDOW, ALL], "rope_parameters": {
        WINDOW: {"rope_type": "default", "rope_theta": 50_000, "mrope_section": [12, 10, 10], "mrope_interleaved": True}, ALL: None}}


def test_phi_4_multimodal() -> None:
    made = parse_config(PHI_4, strict=True)
    assert made.family == "phi4_multimodal" and made.head_dim == 128 and made.windows == (262_144,) * 32 and made.tie_word_embeddings
    assert made.rope.kind == "longrope" and made.rope.partial_rotary_factor == 0.75
    assert made.rope.params["original_max_position_embeddings"] == 4096


def test_north_micro() -> None:
    made = parse_config(COMPASS, strict=True)
    assert made.windows == (4096, 4096, 4096, None) and [rope is None for rope in made.ropes] == [False] * 3 + [True]
    assert made.rope.theta == 50_000 and not made.rope.neighbours and made.logits_scaling == 1.0
    inside = {"model_type": "cohere_compass", "text_config": COMPASS, "vision_config": {}, "image_token_id": 7}
    assert replace(parse_config(inside, strict=True), warnings=()) == made


def test_all_see_everything_where_north_micro_lists_no_kinds_of_layers() -> None:
    raw = {key: value for key, value in COMPASS.items() if key != "layer_types"} | {"rope_parameters": {ALL: {"rope_theta": 1e6}}}
    made = parse_config(raw, strict=True)
    assert made.windows == (None,) * 4 and {rope.theta for rope in made.ropes} == {1e6}


@pytest.mark.parametrize(("raw", "key", "value"), [
    (PHI_4, "auto_map", {"AutoModel": "modeling_other.Other"}), (PHI_4, "mlp_bias", True), (PHI_4, "full_attn_mod", 2),
    (COMPASS, "rope_parameters", {WINDOW: {}}), (COMPASS, "rope_parameters", {WINDOW: {}, ALL: 3}), (COMPASS, "use_qk_norm", True),
    (COMPASS, "layer_types", ["chunked_attention"] * 4), (COMPASS, "head_dim", 32)])
def test_what_they_may_not_have_is_named(raw: dict[str, object], key: str, value: object) -> None:
    refused({**raw, key: value}, key if value != {WINDOW: {}, ALL: 3} else "rotary positions of full_attention")
