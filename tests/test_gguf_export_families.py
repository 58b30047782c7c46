"""Every family that llama.cpp runs, exported: the file is read back as the same model, and llama.cpp generates the same tokens."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import MODELS, exported, model, opened, scores
from family_models import GROWING, SHARPENED, Case, rope
from family_sizes import SAME_SCALES
from gguf_samples import Reader, write_model
from saved_models import saved

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.families import FAMILIES, MODEL_TYPE_ALIASES
from effllm.runtime.gguf.config_export import UNSUPPORTED_REASONS, export_architecture
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.gguf.file_architecture import ARCHITECTURE_BY_FAMILY
from effllm.runtime.rope import rope_table
from effllm.runtime.sampler import Sampler, SamplerSettings

PROMPTS, STEPS = (1, 12, 70), 24
FIRST = {case.family: name for name, case in reversed(MODELS.items())}.values()  # of each family
LIKELY = 2e-2  # llama.cpp rounds activations to 16 bits; below this share of the largest logit two tokens are as likely


def test_every_family_is_exported_or_says_why_not() -> None:
    exported_or_explained = {*ARCHITECTURE_BY_FAMILY, *UNSUPPORTED_REASONS}
    assert set(FAMILIES) == exported_or_explained, "ARCHITECTURE_BY_FAMILY of runtime/gguf/file_architecture.py, or " \
        "UNSUPPORTED_REASONS of config_export.py"
    assert {family_of(name) for name in MODELS} == set(ARCHITECTURE_BY_FAMILY), "MODELS of export_models.py"


def family_of(name: str) -> str:
    """The family that runs one of MODELS, whose `model_type` may be another name of it."""
    return MODEL_TYPE_ALIASES.get(MODELS[name].family, MODELS[name].family)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in MODELS])
def test_a_file_is_the_model_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    source = model(name, tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    ids = np.random.default_rng(3).integers(0, 4096, 100).tolist()
    expected, got = scores(source, ids), scores(path, ids)
    rounded = 10 if name == "falcon_h1, norms, tied" else 1  # once more, where its weights have been multiplied
    assert np.abs(got - expected).max() < rounded * 2e-4 * np.abs(expected).max()
    fields = Reader(path).fields
    changes = MODELS[name].changes
    hybrid = "mamba" in changes.get("layer_types", changes.get("layers_block_type", ()))
    others = {"granitemoehybrid": "granitehybrid"} if hybrid else {}
    others |= {"nemotron_h": "nemotron_h_moe"} if "n_routed_experts" in changes else {}
    assert fields["general.architecture"].contents() == {**ARCHITECTURE_BY_FAMILY, **others}[family_of(name)]
    there = scores(exported(path, tmp_path / "again.gguf"), ids)
    hybrid = hybrid or "mamba_d_ssm" in changes
    turned = hybrid or MODELS[name].family.startswith((
        "bailing_hybrid", "falcon_mamba", "glm5_next", "jamba", "kimi", "mamba", "qwen3_5", "qwen3_next"))
    within = 1e-5 if turned else 0  # whose decays are logarithms in between
    assert np.abs(there - got).max() <= within * np.abs(got).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "phi3", "gemma3_text", "glm4"])
def test_blocks_of_experts_and_of_fused_tensors(tmp_path: Path, name: str, kind: str) -> None:
    source = model(name, tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf", kind)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in Reader(path).tensors}
    vectors = {part for part in kinds if "norm" in part or part.endswith("bias")}
    assert {each for part, each in kinds.items() if "_exps" in part or "attn_q" in part and part not in vectors} == {kind}
    assert {each for part, each in kinds.items() if "gate_inp" in part or part in vectors} == {"F32"}
    assert kinds["token_embd.weight"] == "Q8_0"
    ids = list(range(5, 60))
    expected = scores(source, ids)
    assert np.abs(scores(path, ids) - expected).mean() < {"Q8_0": 0.03, "Q4_0": 0.5}[kind] * np.abs(expected).max()


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("step3p5", {"layer_types": ["full_attention"] * 5}, "layers of one kind"), ("step3p5", {"query_pre_attn_scalar": 20}, "its scores"),
    ("step3p5", {"attention_bias": True}, "biases on o"),
    ("muse_glimmer_text", {"post_norm_eps": 1e-5}, "an epsilon of 1e-05"), ("muse_glimmer_text", {"attention_bias": True}, "biases on o"),
    ("muse_glimmer_text", {"layer_rope_theta": [1e4] * 5}, "rotates other layers"),
    ("muse_glimmer_text", {"layer_types": ["full_attention"] * 5, "layer_rope_theta": [0] * 5}, "has no window"),
    ("afmoe", {"mup_enabled": False}, "another embedding multiplier"), ("afmoe", {"attention_bias": True}, "biases on o"),
    ("afmoe", {"global_attn_every_n_layers": 2}, "every 4th layer"),
    ("arcee", {"mlp_bias": True}, "biases on o"), ("arcee", {"hidden_act": "relu"}, "relu where relu2 is meant"),
    ("bitnet", {"tie_word_embeddings": False}, "untied output head"), ("bitnet", {"hidden_act": "gelu"}, "gelu where silu or relu2"),
    ("bitnet", {"attention_bias": True}, "biases on o"),
    ("ernie4_5", {"use_bias": True}, "biases on o"),
    ("glm4", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64), "kind llama3"),
    ("exaone4", {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3}, "3 layers and sliding windows"),
    ("exaone4, windows", {"sliding_window": None, "layer_types": ["full_attention"] * 64}, "64 layers and no sliding windows"),
    ("exaone4, windows", {"sliding_window_pattern": 2}, "sliding windows in its layers"),
    ("exaone4", {"head_dim": 32}, "4 heads of 32 for a width of 64"), ("olmo3", {"head_dim": 32}, "4 heads of 32"),
    ("glm", {"head_dim": 32}, "4 heads of 32"),
    ("exaone4", {"sliding_window": 24}, "has layers without rotary positions"),
    ("gemma", {"tie_word_embeddings": False}, "untied output head"), ("gemma", {"hidden_act": "silu"}, "silu where gelu_tanh is meant"),
    ("gemma", {"attention_bias": True}, "biases on o"),
    ("gemma2", {"query_pre_attn_scalar": 20}, "scales its scores"), ("gemma2", {"attn_logit_softcapping": None}, "has no softcapping"),
    ("gemma2", {"tie_word_embeddings": False}, "untied output head"),
    ("gemma3_text", {"final_logit_softcapping": 9.0}, "softcaps its logits"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "every 6th layer"), ("gemma2", {"attention_bias": True}, "biases"),
    ("ministral3", {"sliding_window": 30}, "sliding window"),
    ("ministral3", {"rope_parameters": {**GROWING, "rope_type": "default"}}, "rotary positions of kind default"),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}, "every 4th layer"),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 2e4}, "sliding_attention": {"rope_theta": 1e4}}}, "rope_theta"),
    ("seed_oss", {"attention_out_bias": True}, "biases on o"),
    ("seed_oss", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64), "kind llama3"),
    ("nemotron_nas", {"block_configs": [{"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {
        "no_op": not width, "intermediate_size": width}} for width in (64, 0, 64, 64, 64)]}, "attention in a layer without an MLP"),
    ("mellum", {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (
        ("full_attention", 9e3), ("sliding_attention", 5e2))}}, "another rope_theta in layers with a window"),
    ("mellum", {"mlp_layer_types": ["dense", *["sparse"] * 4]}, "has layers without experts"),
    ("nemotron", {"head_dim": 32}, "4 heads of 32"), ("nemotron", {"attention_bias": True}, "biases on o"),
    ("nemotron", {"hidden_act": "relu"}, "relu where relu2"), ("stablelm", {"hidden_act": "gelu"}, "gelu where silu"),
    ("phi", {"hidden_act": "gelu"}, "gelu where gelu_tanh"),
    ("cohere", {"use_qk_norm": True}, "3 layers and norms"), ("cohere", {"num_hidden_layers": 64}, "64 layers and no norms"),
    ("falcon", {"bias": True}, "biases on o"), ("falcon", {"parallel_attn": False}, "MLP after attention"),
    ("minicpm3", {"scale_emb": 5}, "another embedding multiplier"), ("minicpm3", {"scale_depth": 1.0}, "another residual multiplier"),
    ("deepseek_v2", {"q_lora_rank": 64}, "with 27 layers llama.cpp expects a direct projection"),
    ("deepseek_v3", {"q_lora_rank": None}, "layers llama.cpp requires a q_lora_rank"),
    ("mimo_v2_flash", {"layer_types": ["full_attention"] * 3}, "has no window"),
    ("mimo_v2_flash", {"routed_scaling_factor": 2.0}, "expert weights by 2"),
    ("mimo_v2_flash", {"norm_topk_prob": False}, "does not normalize"),
    ("mimo_v2_flash", {"n_group": 4, "topk_group": 2}, "chooses groups"),
    ("minimax_m3_vl_text", {"shared_intermediate_size": 64}, "an expert of 64 numbers"),
    ("minimax_m3_vl_text", {"layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"]}, "in other layers than those with experts"),
    ("mpt", {"attn_config": {"softmax_scale": 0.1}}, "scale its scores"), ("jais2", {"attention_bias": False}, "has no biases"),
    ("jais2", {"hidden_act": "gelu"}, "gelu where relu2"), ("gpt_bigcode", {"activation_function": "relu"}, "relu where gelu_tanh"),
    ("dbrx", {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}, "does not cut"),
    ("deepseek_v32", {"index_head_dim": 32}, "index keys of 32"), ("glm_moe_dsa", SAME_SCALES, "scales its index scores differently"),
    ("hy_v4", {"rope_interleave": False}, "rotates its heads by halves"),
    ("glm5_next_text", {"hc_mult": 2}, "2 streams"), ("glm5_next_text", {"linear_num_heads": 2}, "2 heads of linear attention beside 4"),
    ("kimi_linear", {"norm_topk_prob": False}, "does not normalize"), ("bailing_hybrid", {"n_shared_experts": 0}, "has no shared expert"),
    ("bailing_hybrid", {"kda_safe_gate": False}, "without a bound"),
    ("bailing_hybrid", rope("yarn", factor=8.0, original_max_position_embeddings=64), "kind yarn"),
    ("minicpm3", {"q_lora_rank": None}, "queries directly"), ("minicpm3", {"v_head_dim": 32}, "values of 32"),
    ("minicpm3", {"dim_model_base": 64}, "another logits divisor"),
    ("gpt2", {"scale_attn_weights": False}, "scale its scores by head_dim"),
    ("gpt2", {"activation_function": "relu"}, "relu where gelu_tanh"),
    ("exaone", {"head_dim": 32}, "4 heads of 32"), ("bailing_moe_v2", {"head_dim": 32}, "4 heads of 32"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, "adds the shared expert"),
    ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2}, "rotates other layers"),
    ("cohere2_moe", {"attention_bias": True}, "biases"),
    ("hy_v3", {"attention_bias": True}, "biases on o"), ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "without experts"),
    ("falcon_h1", {"mamba_conv_bias": False}, "without biases"), ("hunyuan_v1_moe", {"attention_bias": True}, "biases on o"),
    ("starcoder2", {"use_bias": False}, "has no biases"), ("starcoder2", {"hidden_act": "gelu"}, "gelu where gelu_tanh is meant"),
    ("smollm3", {"no_rope_layer_interval": 2}, "leave out RoPE"), ("qwen3_moe", {"norm_topk_prob": False}, "does not normalize"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "without experts"), ("olmoe", {"norm_topk_prob": True}, "normalizes its expert"),
    ("qwen2_moe", {"norm_topk_prob": True}, "normalizes its expert"), ("dots1", {"sliding_window": 30, "max_window_layers": 0}, "window"),
    *((family, rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64), "kind llama3")
      for family in ("cohere2_moe", "dots1", "ernie4_5_moe", "gemma2", "glm4_moe", "hy_v3", "internlm2", "mimo", "minicpm3", "olmoe",
                     "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")),
    ("qwen2_moe", {"head_dim": 32}, "4 heads of 32"),
    *((family, {"tie_word_embeddings": True}, "ties its output head")
      for family in ("dots1", "exaone_moe", "internlm2", "minimax_m2", "qwen2_moe")),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}, "without experts"),
    ("qwen3_5_text", {"attention_bias": True}, "biases on o"), ("qwen3_5_text", {"linear_value_head_dim": 16}, "values of 16 beside"),
    ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"] * 2}, "elsewhere than in every 1th layer"),
    ("llama4_text", {"no_rope_layer_interval": 2}, "every 4th layer"), ("llama4_text", {"moe_layers": []}, "no experts"),
    ("llama4_text", {"use_qk_norm": False}, "6 experts and no norms"),
    ("llama4_text", {"attention_chunk_size": 64}, "other chunks"), ("llama4_text", {"moe_layers": [1, 2]}, "every 2th layer"),
    ("qwen3_next", {"linear_value_head_dim": 16}, "values of 16 beside"), ("qwen3_next", {"attention_bias": True}, "biases on o"),
    ("qwen3_5_text, yarn", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
     "kind llama3"),
    ("granitemoehybrid, state spaces", {"mamba_conv_bias": False}, "without biases"),
    ("granitemoehybrid, state spaces", {"mamba_expand": 4, "mamba_n_heads": 8}, "256 channels for a width of 64"),
    ("qwen4_exp_text", {"output_gate_type": "silu"}, "gates that are no sigmoids"), ("qwen4_exp_text", {"seed": 5}, "another seed"),
    ("qwen4_exp_text", {"ple_embed_dim": 128}, "not as wide as the model"), ("qwen4_exp_text", {"attention_bias": True}, "biases on o"),
    ("qwen4_exp_text", {"ple_layer_ids": [1, 2]}, "n-grams in several layers"),
    ("rwkv7", {"head_dim": 32}, "an epsilon of 0.00032"), ("rwkv7", {"norm_bias": False}, "norms without biases"),
    ("mamba", {"intermediate_size": 192}, "192 channels for a width of 64"), ("mamba", {"use_conv_bias": False}, "without biases"),
    ("falcon_mamba", {"mixer_rms_eps": 1e-3}, "an epsilon of 0.001"),
    ("jamba", {"mamba_conv_bias": False}, "without biases"), ("jamba", {"mamba_expand": 4}, "256 channels for a width of 64"),
    ("jamba", {"head_dim": 32}, "4 heads of 32"), ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}, "no state space"),
    ("granitemoehybrid", {"num_local_experts": 3}, "experts but no state-space layers"),
    ("lfm2", {"layer_types": ["full_attention"] * 3}, "no convolution"), ("lfm2", {"head_dim": 32}, "4 heads of 32"),
    ("lfm2_moe", {"use_expert_bias": False}, "nothing corrects"), ("lfm2_moe", {"routed_scaling_factor": 2.0}, "expert weights by 2"),
    ("lfm2_moe", {"norm_topk_prob": False}, "does not normalize"),
    ("dots1", {"num_key_value_heads": 2}, "fewer key-value heads"),
    ("internlm2", {"attention_bias": True}, "biases on o"), ("gpt_neox", {"attention_bias": False}, "no biases"),
    ("deepseek_v3", {"attention_bias": True}, "biases on o"), ("deepseek_v3", {"rope_interleave": False}, "rotates its heads by halves"),
    ("deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}, "chooses groups"),
    ("deepseek_v3", {"rope_parameters": {**SHARPENED["rope_parameters"], "mscale": 1.0}}, "positions that are scaled by"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": None}, "layers without experts"),
    ("olmoe", {"num_key_value_heads": 2}, "fewer key-value heads"), ("mixtral", {"hidden_act": "gelu"}, "gelu"),
    ("granite", {"mlp_bias": True}, "biases"), ("qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
                                               "sliding window")])
def test_what_llamacpp_would_run_as_another_model_is_refused(tmp_path: Path, name: str, changes: dict[str, object], said: str) -> None:
    source = model(name, tmp_path / "source", **changes)
    with pytest.raises(EffllmError) as caught:
        exported(source, tmp_path / "m.gguf")
    assert said in caught.value.message and caught.value.hint and not (tmp_path / "m.gguf").exists()


def test_a_file_may_be_made_with_another_tokenizer_or_none(tmp_path: Path) -> None:
    """Random weights have none of their own; llama.cpp runs such a file on token ids."""
    source = model("olmoe", tmp_path / "source")
    (source / "tokenizer.json").unlink()
    *_, made = export_gguf(source, tmp_path / "m.gguf", "F16", "a name", tokenizer={"tokenizer.ggml.model": "no_vocab"})
    fields = Reader(made.path).fields
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab" and fields["olmoe.vocab_size"].contents() == 4096
    assert not any(key.startswith("tokenizer.") and key != "tokenizer.ggml.model" for key in fields)


def test_opt_is_refused_for_its_reason(tmp_path: Path) -> None:
    saved(Case("opt", {"ffn_dim": 88}), tmp_path)
    with pytest.raises(EffllmError, match="opt models are not exported as GGUF: llama.cpp does not support them"):
        export_architecture(read_config(tmp_path))


@pytest.mark.parametrize("name", ["mixtral", "phi3", "starcoder2"])
def test_a_window_that_llamacpp_passes_over_is_reported(tmp_path: Path, name: str) -> None:
    source = model(name, tmp_path / "source", sliding_window=40)
    said = [getattr(item, "text", "") for item in export_gguf(source, tmp_path / "m.gguf", "F16", "x")]
    assert any("without its sliding window: texts beyond 40" in each for each in said)
    assert read_config(tmp_path / "m.gguf").windows == (40,) * 3


@pytest.fixture(scope="module")
def peer() -> object:
    return pytest.importorskip("llama_cpp")


# By llama.cpp of the version that is compared with: bitnet says relu2, which newer ones alone read, and it has no Kolibri.
UNREAD = ("bitnet", "kolibri1")


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(UNREAD)])
def test_llamacpp_writes_the_same_tokens(tmp_path: Path, peer: object, name: str) -> None:
    """From prompts of one token, of some, and of more than a window. Where an answer parts, two tokens were as likely."""
    source = model(name, tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    vocabulary = read_config(source).vocab_size
    theirs = peer.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0)
    engine, same = opened(path), 0
    try:
        for length in PROMPTS:
            ids = np.random.default_rng(length).integers(5, vocabulary, length).tolist()
            theirs.reset()
            answer = []
            for token in theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
                answer.append(token)
                if len(answer) == STEPS:
                    break
            engine.reset()
            for _ in engine.prefill(ids):
                continue
            sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
            own = [step.token for step in engine.generate(sampler, STEPS, frozenset())]
            same += own == answer
            if own != answer:
                at = next(i for i, (one, two) in enumerate(zip(own, answer)) if one != two)
                engine.reset()
                rows = np.concatenate([rows.copy() for _, rows in engine.score(ids + own[:at])])[-1]
                assert rows[own[at]] - rows[answer[at]] < LIKELY * np.abs(rows).max(), (length, at)
        assert same >= 2, f"{same} of {len(PROMPTS)} answers are equal"
    finally:
        engine.close()
        theirs.close()


@pytest.mark.parametrize("stated, every", [(None, 6), (3, 3)])
def test_which_layers_of_gemma3_see_all_is_read_where_a_file_states_it(tmp_path: Path, stated: int | None, every: int) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(24)
        if stated:
            writer.add_uint32("gemma3.attention.sliding_window_pattern", stated)

    source = model("gemma3_text", tmp_path / "source")
    write_model(source, tmp_path / "model.gguf", "F32", "gemma3", change=change)
    assert read_config(tmp_path / "model.gguf").windows == tuple(None if layer % every == every - 1 else 24 for layer in range(7))


@pytest.mark.parametrize("stated", [None, 2, [True, False, False, True, False], [1, 0], [2] * 5, "all"])
def test_a_file_of_olmo2_with_a_window_is_of_olmo3(tmp_path: Path, stated: object) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(24)
        if isinstance(stated, str):
            writer.add_string("olmo2.attention.sliding_window_pattern", stated)
        elif stated:
            writer.add_sliding_window_pattern(stated)

    source = model("olmo3", tmp_path / "source")
    write_model(source, tmp_path / "model.gguf", "F32", "olmo2", change=change)
    if stated in ("all", [1, 0], [2] * 5):
        with pytest.raises(EffllmError, match="olmo2.attention.sliding_window_pattern"):
            read_config(tmp_path / "model.gguf")
        return
    config = read_config(tmp_path / "model.gguf", strict=True)
    listed = [not isinstance(stated, list) and (layer + 1) % (stated or 4) != 0 for layer in range(5)]
    assert config.family == "olmo3" and [window == 24 for window in config.windows] == (stated if isinstance(stated, list) else listed)


def test_a_file_of_mistral3_without_growing_queries_is_of_mistral(tmp_path: Path) -> None:
    source = model("mistral", tmp_path / "source")
    write_model(source, tmp_path / "model.gguf", "F32", "mistral3")
    config = read_config(tmp_path / "model.gguf", strict=True)
    assert config.family == "mistral" and config.windows == (None,) * 3
    ids = list(range(5, 90))
    np.testing.assert_array_equal(scores(tmp_path / "model.gguf", ids), scores(source, ids))


@pytest.mark.parametrize("multiplier, scale", [(None, 1.2079), (0.0, 1.2079), (1.0, 1.0), (0.5, "yarn_log_multiplier 0.5")])
@pytest.mark.parametrize("length", [None, 128, 64])
def test_how_files_of_mistral3_scale_their_positions(tmp_path: Path, multiplier: float | None, scale: float | str,
                                                     length: int | None) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_attn_temperature_scale(0.1)
        if multiplier is not None:
            writer.add_rope_scaling_yarn_log_mul(multiplier)
        if length:
            writer.add_uint32("mistral3.attention.temperature_length", length)

    path = tmp_path / "model.gguf"
    write_model(model("mistral", tmp_path / "source"), path, "F32", "mistral3", change=change)
    if isinstance(scale, str) or length == 64:
        with pytest.raises(EffllmError, match=scale if isinstance(scale, str) else "temperature_length 64 beside .* length of 128"):
            read_config(path)
        return
    config = read_config(path, strict=True)
    table = rope_table(config.rope, config.head_dim, 1024, 1024)
    assert config.family == "ministral3" and table.attention_scaling == pytest.approx(scale, abs=1e-4) and table.queries is not None


def test_a_model_whose_positions_are_scaled_travels_as_mistral3(tmp_path: Path) -> None:
    source = model("ministral3", tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    rope = raw.get("rope_parameters") or raw["rope_scaling"]
    del rope["mscale_all_dim"], rope["mscale"]
    (source / "config.json").write_text(json.dumps(raw))
    list(export_gguf(source, tmp_path / "out.gguf", "F16", "a name"))
    ids, sides = list(range(5, 90)), [read_config(each) for each in (source, tmp_path / "out.gguf")]
    scales = [rope_table(one.rope, one.head_dim, 1024, 1024).attention_scaling for one in sides]
    assert scales[0] > 1.01 and scales[0] == pytest.approx(scales[1], rel=1e-6)
    wanted = scores(source, ids)
    assert np.abs(scores(tmp_path / "out.gguf", ids) - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("stated, window", [(None, 4096), (0, None), (24, 24)])
def test_a_file_of_starcoder2_without_a_window_has_the_usual_one(tmp_path: Path, stated: int | None, window: int | None) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_layer_norm_eps(1e-5)
        if stated is not None:
            writer.add_sliding_window(stated)

    write_model(model("llama", tmp_path / "source"), tmp_path / "model.gguf", "F32", "starcoder2", change=change)
    assert set(read_config(tmp_path / "model.gguf").windows) == {window}


def test_a_starcoder2_without_a_window_stays_so(tmp_path: Path) -> None:
    source = model("starcoder2", tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    list(export_gguf(source, tmp_path / "out.gguf", "F16", "a name"))
    assert set(read_config(source).windows) == set(read_config(tmp_path / "out.gguf", strict=True).windows) == {None}


def test_an_earlier_file_of_olmo3_scales_its_positions_once(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(24)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_rope_scaling_attn_factors(1.2079441)

    write_model(model("olmo3", tmp_path / "source"), tmp_path / "model.gguf", "F32", "olmo2", change=change)
    config = read_config(tmp_path / "model.gguf", strict=True)
    stretched = [rope for rope in config.ropes if rope.kind == "yarn"]
    scales = [rope_table(rope, config.head_dim, 1024, 1024).attention_scaling for rope in stretched]
    assert scales == [pytest.approx(1.2079441, rel=1e-6)]
    assert any("it is taken once, as in the checkpoint" in said for said in config.warnings)


def test_a_file_whose_queries_grow_has_positions_of_yarn(tmp_path: Path) -> None:
    write_model(model("mistral", tmp_path / "source"), tmp_path / "model.gguf", "F32", "mistral3",
                change=lambda writer: writer.add_attn_temperature_scale(0.1))
    with pytest.raises(EffllmError, match="mistral3.attention.temperature_scale and rotary positions that are not yarn"):
        read_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("arch", ["arcee", "gemma", "seed_oss"])
def test_a_window_that_a_family_does_not_have_is_refused(tmp_path: Path, arch: str) -> None:
    case = "llama" if arch == "seed_oss" else arch
    write_model(model(case, tmp_path / "source"), tmp_path / "model.gguf", "F32", arch, change=lambda writer: writer.add_sliding_window(24))
    with pytest.raises(EffllmError, match="attention.sliding_window = 24 is not supported"):
        read_config(tmp_path / "model.gguf")
