"""config.json of families from before rotary embeddings and grouped-query attention: what is read, and what is refused by name."""


import pytest
from config_samples import refused
from hypothesis import given
from hypothesis import strategies as st

from effllm.runtime.config import parse_config
from effllm.runtime.families import codegen
from effllm.runtime.rope import rope_table

SUMMARY = {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
           "summary_use_proj": True}
GPTJ = {"activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop":
        0.0, "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type":
        "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True,
        "rotary_dim": 64, "scale_attn_weights": True, **SUMMARY, "task_specific_params": {"text-generation": {"do_sample": True}},
        "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 50400}
PUBLISHED = {
    "gptj": GPTJ,
    "codegen": {**{key: value for key, value in GPTJ.items() if key != "rotary"}, "architectures": ["CodeGenForCausalLM"], "model_type":
                "codegen", "n_ctx": 2048, "n_embd": 1024, "n_layer": 20, "rotary_dim": 32, "vocab_size": 51200},
    "gpt_neo": {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0, "attention_layers": [
            "global", "local"] * 6, "attention_types": [[["global", "local"], 6]], "bos_token_id": 50256, "embed_dropout": 0,
        "eos_token_id": 50256, "gradient_checkpointing": False, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": None,
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 12, "num_layers": 12,
        "resid_dropout": 0, **SUMMARY, "use_cache": True, "vocab_size": 50257, "window_size": 256},
    "persimmon": {
        "architectures": ["PersimmonForCausalLM"], "bos_token_id": 71013, "eos_token_id": 71013, "hidden_act": "relu2", "hidden_dropout":
        0.0, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 16384, "model_type": "persimmon", "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 64, "partial_rotary_factor": 0.5, "qk_layernorm": True, "rope_scaling": None, "rope_theta": 25000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144},
    "gpt_bigcode": {
        "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"], "attention_softmax_in_fp32": True, "attn_pdrop": 0.1,
        "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon":
        1e-05, "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144,
        "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False,
        "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, **SUMMARY, "use_cache": True,
        "validate_runner_input": True, "vocab_size": 49152}}


@pytest.mark.parametrize("family", PUBLISHED)
def test_nothing_in_a_published_config_is_unknown(family: str) -> None:
    assert parse_config(PUBLISHED[family], strict=True).warnings == ()


def test_what_they_say() -> None:
    made = {family: parse_config(raw) for family, raw in PUBLISHED.items()}
    assert [each.intermediate_size for each in made.values()] == [16_384, 4096, 3072, 16_384, 24_576]
    assert made["persimmon"].rope.theta == 25_000.0 and made["persimmon"].rope.partial_rotary_factor == 0.5 and made["persimmon"].qk_norm
    assert made["gptj"].rope.interleaved and made["gptj"].rope.partial_rotary_factor == 0.25 and made["gptj"].head_bias
    assert made["gpt_neo"].windows == (None, 256) * 6 and made["gpt_neo"].attn_scale == 1.0
    starcoder = made["gpt_bigcode"]
    assert (starcoder.num_key_value_heads, starcoder.head_dim, starcoder.context_length, starcoder.hidden_act) == (1, 128, 8192, "gelu")


@given(st.integers(1, 128), st.data())
def test_as_many_channels_turn_as_are_stated(half: int, data: st.DataObject) -> None:
    """Whatever share of a head they are: no rounding of it takes a pair away."""
    turned = 2 * data.draw(st.integers(1, half))
    config = parse_config({**GPTJ, "n_embd": 4 * 2 * half, "n_head": 4, "rotary_dim": turned})
    assert rope_table(config.rope, config.head_dim, 64, 64).cos_sin([0])[0].shape[-1] == turned // 2


@pytest.mark.parametrize(("family", "key", "value"), [
    ("gptj", "rotary_dim", 63), ("gptj", "rotary_dim", 512), ("gptj", "sliding_window", 128), ("codegen", "n_head", 2),
    ("persimmon", "attention_bias", False), ("persimmon", "sliding_window", 128),
    ("gpt_bigcode", "multi_query", False), ("gpt_bigcode", "add_cross_attention", True), ("gpt_neo", "attention_types", [[["global"], 6]]),
    ("gpt_neo", "attention_types", [[["random"], 12]]), ("gpt_neo", "attention_types", [[["local"], 2**40]]),
    ("gpt_neo", "attention_types", {"global": 12}), ("gpt_neo", "attention_layers", ["local"] * 12)])
def test_what_they_may_not_have_is_named(family: str, key: str, value: object) -> None:
    refused({**PUBLISHED[family], key: value}, key)


def test_each_row_of_a_matrix_in_parts_is_in_one_of_three() -> None:
    """Queries of the first quarter of the heads come first, then their values, then their keys."""
    config = parse_config(PUBLISHED["codegen"])
    found = {name.split(".")[-2]: rows for name, (_, rows) in codegen.stored_rows(config, 0).items()}
    assert sorted([row for rows in found.values() for row in rows]) == list(range(3 * 1024))
    assert found["q_proj"][:256].tolist() == list(range(256)) and found["v_proj"][0] == 256 and found["k_proj"][0] == 512
