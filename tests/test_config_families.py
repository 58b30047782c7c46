"""config.json, family by family: biases, windows, heads, rotary embeddings, multipliers, and what each refuses."""

import copy
import json
from collections.abc import Callable

import numpy as np
import pytest
from config_samples import LLAMA, keys_read, refused
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig

from effllm import EffllmError
from effllm.runtime import families
from effllm.runtime.config import Defaults, ModelConfig, decoder_config, parse_config
from effllm.runtime.config_reader import Keys
from effllm.runtime.gguf.architectures import architecture


def test_biases() -> None:
    def biased(**changes: object) -> set[str]:
        config = parse_config({**LLAMA, **changes})
        return {role for role in families.get(config.family).layer_tensors(config, 0) if role.endswith("_bias")}

    assert biased() == set()
    assert biased(attention_bias=True) == {"q_bias", "k_bias", "v_bias", "o_bias"}
    assert biased(mlp_bias=True) == {"gate_bias", "up_bias", "down_bias"}
    assert biased(model_type="qwen2") == {"q_bias", "k_bias", "v_bias"}
    assert biased(model_type="qwen3", attention_bias=True) == {"q_bias", "k_bias", "v_bias", "o_bias"}
    assert biased(model_type="mistral") == set()


def test_a_family_says_which_keys_its_config_has() -> None:
    """The key of the norms' epsilon, grouped heads and rotary positions are three things: a family may lack any of them."""
    raw = {**LLAMA, "norm_epsilon": 0.5, "rms_norm_eps": 0.25}

    def made(**own: object) -> ModelConfig:
        return decoder_config(Keys(raw), Defaults(max_position_embeddings=512, norm_eps=0.125, **own))

    assert [made().norm_eps, made(eps_key="norm_epsilon").norm_eps, made(eps_key=None).norm_eps] == [0.25, 0.5, 0.125]
    assert made(rotary=False).ropes == (None,) * 4 and made(rotary=False).num_key_value_heads == 2 and made(rotary=False).norm_eps == 0.25
    assert made(grouped=False).num_key_value_heads == 6 and None not in made(grouped=False).ropes
    assert parse_config({**raw, "model_type": "opt", "ffn_dim": 88}).norm_eps == 1e-5


def windows(**changes: object) -> tuple[int | None, ...]:
    return parse_config({**LLAMA, **changes}).windows


def test_windows() -> None:
    assert windows() == (None,) * 4
    assert windows(model_type="mistral", sliding_window=32) == (32,) * 4
    assert windows(model_type="mistral", sliding_window=None) == (None,) * 4
    assert windows(model_type="mistral") == (4096,) * 4
    qwen = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 3}
    assert windows(**qwen) == (None,) * 4  # switched off unless asked for
    assert windows(**qwen, use_sliding_window=True) == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "attention"]
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == (32, None, 32, None)
    refused({**LLAMA, **qwen, "layer_types": kinds}, "sliding_attention", "no sliding window")
    refused({**LLAMA, **qwen, "layer_types": ["linear_attention"] * 4}, "linear_attention")
    refused({**LLAMA, **qwen, "layer_types": ["full_attention"] * 3}, "layer_types")


def test_windows_of_the_newer_families() -> None:
    assert windows(model_type="phi3", sliding_window=32) == (32,) * 4 and windows(model_type="phi3") == (None,) * 4
    assert windows(model_type="gemma2", sliding_window=32) == (32, None, 32, None)
    assert windows(model_type="gemma3_text", sliding_window=32) == (32,) * 4
    assert windows(model_type="gemma3_text", sliding_window=32, sliding_window_pattern=3) == (32, 32, None, 32)
    assert windows(model_type="gemma3_text", sliding_window=None, layer_types=["full_attention"] * 4) == (None,) * 4
    refused({**LLAMA, "model_type": "gemma2", "sliding_window": None}, "sliding_attention", "no sliding window")
    smol = {"model_type": "smollm3", "sliding_window": 32}
    assert windows(**smol) == (None,) * 4 and windows(**smol, use_sliding_window=True) == (None, None, None, 32)
    assert windows(**smol, use_sliding_window=True, no_rope_layers=[0, 1, 1, 0]) == (32, None, None, 32)
    refused({**LLAMA, **smol, "layer_types": ["sliding_attention"] * 4}, "no sliding window")


def test_layers_without_rotary_positions() -> None:
    def rotated(**changes: object) -> list[bool]:
        return [rope is not None for rope in parse_config({**LLAMA, "model_type": "smollm3", **changes}).ropes]

    assert rotated() == [True, True, True, False] and rotated(no_rope_layer_interval=2) == [True, False] * 2
    assert rotated(no_rope_layers=[1, 0, 0, 1], no_rope_layer_interval=2) == [True, False, False, True]
    for wrong in ([1, 0, 1], [1, 0, 1, 2], [1, 0, 1, 0.0], "1010"):
        refused({**LLAMA, "model_type": "smollm3", "no_rope_layers": wrong}, "no_rope_layers")


def test_both_dialects_of_gemma3_give_the_same_config() -> None:
    base = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}
    older = {**base, "rope_theta": 2e6, "rope_local_base_freq": 7e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {**base, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                                         "sliding_attention": {"rope_type": "default", "rope_theta": 7e3}}}
    config = parse_config(older, strict=True)
    assert config == parse_config(newer, strict=True)
    assert [(rope.kind, rope.theta) for rope in config.ropes] == [("default", 7e3), ("linear", 2e6)] * 2
    assert config.rope.kind == "linear"
    written = json.loads(Gemma3TextConfig(**{key: value for key, value in older.items() if key != "model_type"}).to_json_string())
    assert parse_config(written, strict=True).ropes == config.ropes
    for wrong in ({"rope_type": "linear"}, {"full_attention": 3}, {"full_attention": {}, "other": {}}):
        refused({**base, "rope_parameters": wrong}, "rope_parameters")
    unknown = {**newer, "rope_parameters": {**newer["rope_parameters"], "sliding_attention": {"rope_theta": 7e3, "warp": 9}}}
    assert "rope_parameters.sliding_attention.warp" in parse_config(unknown).warnings[0]


def test_a_model_that_takes_images_is_read_as_its_text_part() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"sliding_window": 32}
    written = json.loads(Gemma3Config(text_config=text, eos_token_id=[1, 106]).to_json_string())
    config = parse_config({**written, "architectures": ["Gemma3ForConditionalGeneration"]}, strict=True)
    assert config.family == "gemma3_text" and config.eos_token_ids == (1, 106) and config.tie_word_embeddings
    assert "images" in config.warnings[0]
    # The published ones state of the text model only what differs from its defaults.
    sparse = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34},
              "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {}, "transformers_version": "4.50.0.dev0"}
    config = parse_config(sparse, strict=True)
    assert (config.hidden_size, config.vocab_size, config.num_attention_heads, config.head_dim) == (2560, 262_208, 8, 256)
    assert config.dtype == "bfloat16" and config.eos_token_ids == (1, 106) and config.embedding_multiplier == 50.5
    refused({**sparse, "text_config": {"model_type": "qwen2"}}, "qwen2", "gemma3_text")
    refused({**sparse, "architectures": ["Gemma3ForCausalLM"]}, "ForConditionalGeneration")
    refused({**sparse, "flux_capacity": 2}, "flux_capacity", strict=True)
    refused({**sparse, "quantization_config": {"bits": 4}}, "quantization_config")


def test_the_factor_of_the_embedding_is_rounded_to_the_type_of_the_weights() -> None:
    def factor(dtype: str) -> float:
        return parse_config({**LLAMA, "model_type": "gemma2", "hidden_size": 3072, "dtype": dtype}).embedding_multiplier

    assert factor("bfloat16") == 55.5 and factor("float16") == 55.4375 and factor("float32") == float(np.float32(3072**0.5))


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if "layer_types" in families.get(name).REFUSED_UNLESS])
def test_full_attention_may_be_said_of_every_layer(family: str) -> None:
    """Newer writers say it of families that know nothing else; not where it contradicts a window."""
    latent, used = {"num_key_value_heads": LLAMA["num_attention_heads"], "num_experts_per_tok": 2}, keys_read(family)
    own = {"bailing_moe_v2": {"moe_intermediate_size": 48}, "codegen": {"rotary_dim": 8, "num_attention_heads": 8},
           "deepseek_ocr2_text": {"num_experts_per_tok": 2},
           "nemotron_nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 48}}] * 4},
           "gptj": {"rotary_dim": 8}, "gpt_neo": {"attention_types": [[["global"], 4]]}}.get(family, {})
    plain = {**LLAMA, "model_type": family, "sliding_window": None, **own,
             **{key: value for key, value in latent.items() if "kv_lora_rank" in used and (key in used or key in LLAMA)}}
    named = {**plain, "layer_types": ["full_attention"] * 4}
    assert parse_config(named, strict=True) == parse_config(plain, strict=True)
    refused({**named, "layer_types": ["full_attention"] * 3}, "layer_types")
    refused({**named, "layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types")
    refused({**named, "sliding_window": 32}, "is not supported")


def test_a_section_of_mlx_says_nothing_of_the_model() -> None:
    """It writes the same one under two names."""
    section = {"group_size": 64, "bits": 4}
    for more in ({}, {"quantization_config": section}):
        assert parse_config({**LLAMA, "quantization": section, **more}, strict=True) == parse_config(LLAMA)


@pytest.mark.parametrize("inside", [None, 64, 8192])
def test_phi_was_trained_with_4096_positions_unless_it_says_otherwise(inside: int | None) -> None:
    """As in transformers, where a value beside the rotary section goes before one in it, also if it is the default."""
    section = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    section |= {} if inside is None else {"original_max_position_embeddings": inside}
    raw = {**LLAMA, "model_type": "phi3", "max_position_embeddings": 131_072, "rope_scaling": section}
    for outer in ({}, {"original_max_position_embeddings": 2048}):
        theirs = AutoConfig.for_model(**copy.deepcopy({**raw, **outer})).rope_parameters
        ours = parse_config({**raw, **outer}, strict=True).rope.params
        assert ours["original_max_position_embeddings"] == theirs["original_max_position_embeddings"] == (2048 if outer else 4096)


def test_a_part_of_every_head_may_be_rotated() -> None:
    phi = {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.75}
    assert parse_config(phi, strict=True).rope.partial_rotary_factor == 0.75
    section = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}  # 12 of 16 channels
    config = parse_config({**phi, "rope_scaling": section, "original_max_position_embeddings": 64}, strict=True)
    assert config.rope.kind == "longrope" and config.rope.params["long_factor"] == (2.0,) * 6
    refused({**phi, "rope_scaling": {**section, "short_factor": [1.0] * 8}}, "short_factor", "6")
    for wrong in (0.05, 1.5, 0.7):
        refused({**phi, "partial_rotary_factor": wrong}, "rotated")
    theirs = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
              "AutoTokenizer": "Someone/else"}
    assert parse_config({**phi, "auto_map": theirs}, strict=True).warnings == ()
    refused({**phi, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Phi3ForCausalLM"}}, "auto_map", "modeling_evil")


@pytest.mark.parametrize(("family", "key", "value"), [
    ("opt", "do_layer_norm_before", False), ("opt", "word_embed_proj_dim", 48), ("opt", "_remove_final_layer_norm", True),
    ("opt", "layer_norm_elementwise_affine", False), ("gemma3_text", "attn_logit_softcapping", 50.0), ("olmo2", "clip_qkv", 8.0),
    ("gemma2", "use_bidirectional_attention", True), ("gemma3_text", "mlp_bias", True), ("phi3", "lm_head_bias", True),
    ("phi3", "auto_map", {"AutoModel": "evil.py"}), ("granite", "attn_logit_softcapping", 50.0), ("smollm3", "logits_scaling", 2.0),
    ("olmo2", "partial_rotary_factor", 0.5), ("gemma2", "query_pre_attn_scalar", -1)])
def test_what_a_newer_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "ffn_dim": 88, "model_type": family, key: value}, key)


def test_multipliers() -> None:
    values = {"attention_multiplier": 0.015625, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8}
    config = parse_config({**LLAMA, "model_type": "granite", **values}, strict=True)
    assert (config.attn_scale, config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == tuple(values.values())
    assert parse_config({**LLAMA, "model_type": "granite"}).attn_scale == 1.0  # not the root of the head dimension
    gemma = {**LLAMA, "model_type": "gemma2", "query_pre_attn_scalar": 64}
    assert parse_config(gemma).attn_scale == 0.125 and parse_config(LLAMA).attn_scale is None
    assert (parse_config(gemma).attn_logit_softcapping, parse_config(gemma).final_logit_softcapping) == (50.0, 30.0)
    uncapped = parse_config({**gemma, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attn_logit_softcapping, uncapped.final_logit_softcapping) == (None, None)


def test_heads() -> None:
    assert parse_config(LLAMA).head_dim == 16
    assert parse_config({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    assert parse_config({**LLAMA, "model_type": "qwen3", "head_dim": None}).head_dim == 16
    assert parse_config({**LLAMA, "num_key_value_heads": None}).num_key_value_heads == 6
    refused({**LLAMA, "num_key_value_heads": 4}, "6", "multiple", "4")
    refused({**LLAMA, "hidden_size": 97}, "97", "multiple")
    refused({**LLAMA, "head_dim": 15}, "15")


# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "phi3": {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "full_attn_mod": 1,
             "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096,
             "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rope_scaling": None, "sliding_window": 2047},
    "gemma2": {"attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
               "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
               "query_pre_attn_scalar": 224, "sliding_window": 4096, "sliding_window_size": 4096},
    "gemma3_text": {"attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
                    "sliding_window_pattern": 6},
    "olmo2": {"attention_bias": False, "rope_scaling": None, "rope_theta": 500000, "use_cache": False},
    "smollm3": {"attention_bias": False, "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
                "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rope_scaling": None,
                "sliding_window": None, "use_sliding_window": False},
    "granite": {"attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                "mlp_bias": False, "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000000.0},
    "opt": {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu", "do_layer_norm_before": True,
            "dropout": 0.1, "ffn_dim": 88, "init_std": 0.02, "layerdrop": 0.0, "prefix": "</s>", "word_embed_proj_dim": 96},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8,
                "output_router_logits": False, "router_aux_loss_coef": 0.02, "rope_theta": 1000000.0, "sliding_window": None,
                "torch_dtype": "bfloat16"},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
                  "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
                  "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0,
                  "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
              "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False, "pad_token_id": 1,
              "rope_scaling": None, "router_aux_loss_coef": 0.01, "vocab_size": 50304},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({**LLAMA, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


def test_gpt_oss_as_published() -> None:
    """The keys of the 20B model's file, in the older dialect."""
    kinds = ["sliding_attention", "full_attention"] * 12
    published = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088}
    config = parse_config(published, strict=True)
    assert config.warnings == () and config.windows == (128, None) * 12 and config.context_length == 131_072
    assert config.qkv_bias and config.o_bias and config.hidden_act == "clamped_swish" and config.expert_format == "mxfp4:32"
    own = config.moe
    assert (own.num_experts, own.experts_per_token, own.expert_dim, own.renormalise, len(own.layers)) == (32, 4, 2880, True, 24)
    assert config.rope.params["truncate"] is False and config.rope.theta == 150_000
    # without any of it, what transformers takes
    bare = {key: value for key, value in published.items() if key not in (
        "rope_scaling", "rope_theta", "layer_types", "sliding_window", "quantization_config", "attention_bias", "head_dim")}
    plain = parse_config(bare)
    assert (plain.ropes, plain.windows, plain.qkv_bias, plain.head_dim, plain.expert_format) == (
        config.ropes, config.windows, True, 64, None)
    for wrong in ({"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}, {"hidden_act": "relu"}, {"num_experts_per_tok": 33},
                  {"quantization_config": {"quant_method": "gptq", "bits": 4}}):
        refused({**published, **wrong}, next(iter(wrong)))


def test_what_qwen3_coder_states_of_every_model_of_its_family() -> None:
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    raw = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    assert parse_config({**raw, **coder}, strict=True) == parse_config(raw)
    for key, value in (("qkv_bias", True), ("shared_expert_intermediate_size", 512), ("use_qk_norm", False)):
        refused({**raw, **coder, key: value}, key)


@pytest.mark.parametrize("asked", [lambda: families.get("qwen9"), lambda: architecture("a.gguf", "qwen9")], ids=["folder", "file"])
def test_what_is_not_known_is_a_line_that_can_be_read(asked: Callable[[], object]) -> None:
    with pytest.raises(EffllmError, match="'qwen9'.* is not supported") as refusal:
        asked()
    assert "docs/models.md" in refusal.value.hint and len(refusal.value.message + refusal.value.hint) < 240
