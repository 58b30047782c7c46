"""config.json: files that transformers writes are read with transformers' meaning, and unsupported settings are named."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from config_samples import DOTS, LLAMA, SMALL, in_a_file, in_one, keys_read, refused
from transformers import (
    ArceeConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from effllm import UsageError
from effllm.runtime import config as config_module
from effllm.runtime import families
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError

# What transformers has no numbers for.
GRANITE_4 = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_heads": 4}


def granite_4(**changes: object) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(**GRANITE_4, layer_types=["full_attention"] * changes.get("num_hidden_layers", 32), **changes)


WRITERS = {"arcee": ArceeConfig, "dots1": partial(Dots1Config, **DOTS), "ernie4_5": Ernie4_5Config, "ernie4_5_moe": Ernie4_5_MoeConfig,
           "exaone4": Exaone4Config, "gemma": GemmaConfig, "gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig, "glm": GlmConfig,
           "glm4": Glm4Config, "glm4_moe": partial(Glm4MoeConfig, head_dim=128), "gpt_oss": GptOssConfig, "granite": GraniteConfig,
           "granitemoe": GraniteMoeConfig, "granitemoehybrid": granite_4, "lfm2": partial(Lfm2Config, block_auto_adjust_ff_dim=False),
           "lfm2_moe": partial(Lfm2MoeConfig, layer_types=None), "llama": LlamaConfig, "ministral3": Ministral3Config,
           "mistral": MistralConfig, "mixtral": MixtralConfig, "olmo2": Olmo2Config, "olmo3": Olmo3Config, "olmoe": OlmoeConfig,
           "opt": OPTConfig, "phi3": Phi3Config, "qwen2": Qwen2Config, "qwen2_moe": Qwen2MoeConfig, "qwen3": Qwen3Config,
           "qwen3_5_moe_text": Qwen3_5MoeTextConfig, "qwen3_5_text": Qwen3_5TextConfig, "qwen3_moe": Qwen3MoeConfig,
           "qwen3_next": Qwen3NextConfig,
           "seed_oss": SeedOssConfig, "smollm3": SmolLM3Config, "starcoder2": Starcoder2Config}
# Our names for what a family's config calls otherwise.
OTHER_NAMES = {"granitemoehybrid": {"intermediate_size": "shared_intermediate_size"},
               **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), {"intermediate_size": "moe_intermediate_size"}),
               "gemma2": {"hidden_act": "hidden_activation"}, "gemma3_text": {"hidden_act": "hidden_activation"},
               "opt": {"hidden_act": "activation_function", "intermediate_size": "ffn_dim", "num_key_value_heads": "num_attention_heads"}}
OTHER_ACTS = {"gelu_pytorch_tanh": "gelu_tanh"}


# ---- against transformers


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("changes", [
    {}, {**SMALL, "rope_theta": 5e5}, {**SMALL, "head_dim": 32, "tie_word_embeddings": True, "eos_token_id": [7, 9], "bos_token_id": None},
], ids=["defaults", "small", "own head_dim"])
def test_what_transformers_writes(family: str, changes: dict[str, object]) -> None:
    written, names = WRITERS[family](**changes), OTHER_NAMES.get(family, {})
    config = parse_config(json.loads(written.to_json_string()), strict=True)
    outside = [name for name in ("bos_token_id", "eos_token_id")
               if (own := getattr(written, name)) is not None and np.max(own) >= written.vocab_size]
    assert config.family == family and [name for name in outside if any(name in said for said in config.warnings)] == outside
    assert outside or config.warnings == ()
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "max_position_embeddings", "tie_word_embeddings", "hidden_act", "bos_token_id"):
        theirs = getattr(written, names.get(name, name), "silu")  # LFM2 does not state what every model of it has
        if (family, name) == ("gpt_oss", "hidden_act"):  # which does not say that its experts clamp it
            theirs = "clamped_swish"
        assert getattr(config, name) == (None if name in outside else OTHER_ACTS.get(theirs, theirs)), name
    assert config.norm_eps == getattr(written, "norm_epsilon" if family == "starcoder2" else "rms_norm_eps", 1e-5)
    head_dim = None if family == "opt" else getattr(written, "head_dim", None)
    assert config.head_dim == (head_dim or written.hidden_size // written.num_attention_heads)
    eos = written.eos_token_id
    if "eos_token_id" not in outside:
        assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    if family == "opt":
        assert set(config.ropes) == {None} and config.rope is None and config.position_offset == 2
    else:
        kind = "full_attention" if None in config.windows else "sliding_attention"
        theta = written.rope_parameters.get(kind, written.rope_parameters)["rope_theta"]
        assert config.rope.theta == theta and config.rope.kind == written.rope_parameters.get("rope_type", "default")
    assert config.qk_norm == (family.startswith(("qwen3", "lfm2")) or
                              family in ("dots1", "exaone4", "gemma3_text", "olmo2", "olmo3", "olmoe"))
    assert config.qkv_bias == (family in ("glm", "glm4", "gpt_oss", "opt", "qwen2", "qwen2_moe", "seed_oss", "starcoder2"))


@pytest.mark.parametrize("family", WRITERS)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    """Old configs leave out what was the default when they were written."""
    full = json.loads(WRITERS[family]().to_json_string())
    shape = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    bare = {key: full[key] for key in shape if key in full}
    bare |= {"llama": {"num_key_value_heads": None}, "dots1": DOTS, "glm4_moe": {"head_dim": 128},
             "lfm2": {"block_auto_adjust_ff_dim": False},
             "granitemoehybrid": {key: full.get(key) for key in (*GRANITE_4, "layer_types")}}.get(family, {})
    assert replace(parse_config(bare), warnings=()) == replace(parse_config(full), warnings=())


def test_the_packaged_model_is_known_to_the_last_key() -> None:
    folder = Path(__file__).resolve().parent.parent / "models" / "fable"
    config = read_config(folder, strict=True)
    raw = json.loads((folder / "config.json").read_text())
    assert config.warnings == () and config.hidden_size == raw["hidden_size"] and config.dtype == "bfloat16"


def test_both_dialects_give_the_same_config() -> None:
    older = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}, "torch_dtype": "float16"}
    newer = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "float16"}
    assert parse_config(older, strict=True) == parse_config(newer, strict=True)
    assert parse_config(older).rope == config_module.RopeConfig(5e5, "linear", {"factor": 2.0})
    assert parse_config({**newer, "torch_dtype": "float32"}).dtype == "float16"  # the newer key wins, as in transformers


# ---- the lists of keys


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_key_that_a_family_reads_is_on_none_of_its_lists(family: str) -> None:
    """Nor does one stand on both."""
    module, read = families.get(family), keys_read(family)
    assert read >= {"model_type", "vocab_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype"}
    harmless, refused_keys = module.KEYS_HARMLESS, module.REFUSED_UNLESS.keys()
    assert not read & (harmless | refused_keys) and not harmless & refused_keys
    assert not harmless & config_module.KEYS_HARMLESS and not config_module.KEYS_HARMLESS & config_module.REFUSED_UNLESS.keys()


def test_what_some_families_read_is_refused_of_the_others() -> None:
    """What none reads is refused before a family is asked."""
    read = set().union(*map(keys_read, families.FAMILIES))
    assert config_module.READ_BY_SOME.keys() <= read and not config_module.REFUSED_UNLESS.keys() & read


def test_the_families_are_the_files_of_their_folder() -> None:
    folder = Path(families.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__") == sorted(families.FAMILIES)


def test_an_unknown_family_is_named_with_where_others_are_found() -> None:
    error = refused({**LLAMA, "model_type": "gpt2\x1b[2J"}, "'gpt2\\x1b[2J'")
    assert error.hint == families.UNKNOWN_FAMILY_HINT
    refused(SMALL, "model_type is missing")
    refused({**LLAMA, "model_type": "../cache"}, "not supported")
    refused({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification")


def test_an_unlisted_key_warns_once_and_strict_refuses() -> None:
    raw = {**LLAMA, "zeta_\x1b": 1, "flux_capacity": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "warp": 9}}
    (warning,) = parse_config(raw).warnings
    for name in ("flux_capacity", "'zeta_\\x1b'", "rope_parameters.warp"):
        assert name in warning
    assert isinstance(refused(raw, "flux_capacity", strict=True), UsageError)
    (many,) = parse_config({**LLAMA, **{f"key{i}": i for i in range(500)}}).warnings
    assert len(many) < 300 and "more" in many


@pytest.mark.parametrize(("key", "value"), [
    ("quantization_config", {"quant_method": "gptq"}), ("auto_map", {"AutoModel": "evil.py"}), ("num_local_experts", 8),
    ("partial_rotary_factor", 0.5), ("attn_logit_softcapping", 50.0), ("is_encoder_decoder", True), ("sliding_window", 4096),
    ("layer_types", ["sliding_attention"] * 4), ("is_causal", "no"), ("quantization", {"group_size": 64, "bits": 7}),
    ("residual_multiplier", 0.22), ("pruned_heads", {"0": [1]})])
def test_a_feature_that_is_not_supported_is_refused_by_name(key: str, value: object) -> None:
    error = refused({**LLAMA, key: value}, key, "not supported")
    assert isinstance(error, ConfigError) and error.hint
    assert parse_config({**LLAMA, key: None}, strict=True).warnings == ()


@pytest.mark.parametrize("key", ["partial_rotary_factor", "is_encoder_decoder", "residual_multiplier", "pruned_heads", "rope_interleaved"])
def test_such_a_feature_at_its_default_is_fine(key: str) -> None:
    usual = {**config_module.REFUSED_UNLESS, **config_module.READ_BY_SOME}[key]
    assert parse_config({**LLAMA, key: usual}, strict=True).warnings == ()


# ---- tokens, lengths, tensors


def test_special_tokens() -> None:
    def eos(value: object) -> tuple[int, ...]:
        return parse_config({**LLAMA, "eos_token_id": value}).eos_token_ids

    assert eos(5) == (5,) and eos([5, 7, 5]) == (5, 7) and eos([]) == () and eos(None) == ()
    assert parse_config(LLAMA).eos_token_ids == (2,) and parse_config(LLAMA).bos_token_id == 1
    outside = parse_config({**LLAMA, "eos_token_id": [2, 300], "bos_token_id": -1})
    assert outside.eos_token_ids == (2,) and outside.bos_token_id is None and len(outside.warnings) == 2
    refused({**LLAMA, "eos_token_id": "</s>"}, "eos_token_id")
    refused({**LLAMA, "eos_token_id": [True]}, "eos_token_id")


def test_the_context_counts_what_yarn_adds() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert parse_config({**LLAMA, "max_position_embeddings": 1000, "rope_parameters": yarn}).context_length == 4000
    assert parse_config({**LLAMA, "max_position_embeddings": 4096, "rope_parameters": yarn}).context_length == 4096
    assert parse_config({**LLAMA, "max_position_embeddings": 3000, "rope_parameters": yarn}).context_length == 3000
    assert parse_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}).context_length == 2048


def test_tensors_have_the_names_and_shapes_that_transformers_gives_them() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    both, one = {"attention_bias": True, "mlp_bias": True}, {"attention_bias": True}
    features = {"llama": both, "granite": both, "smollm3": both, "qwen3": one, "olmo2": one, "olmo3": one, "gemma2": one,
                "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}, "gemma": one,
                "glm": {"attention_bias": False}, "glm4": {"attention_bias": False}, "arcee": both, "ernie4_5": {"use_bias": True},
                "starcoder2": {"use_bias": False}, "gemma3_text": one, "opt": {"enable_bias": False},
                "gpt_oss": {"attention_bias": False, "num_local_experts": 5},
                "olmoe": {**one, "num_experts": 9}, "granitemoe": {**one, "num_local_experts": 3}, "granitemoehybrid": one,
                "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 7, "moe_num_shared_experts": 1},
                "dots1": {**one, **DOTS, "first_k_dense_replace": 2},
                "glm4_moe": {**one, "use_qk_norm": True, "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2},
                "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
                "qwen2_moe": {"qkv_bias": False, "num_experts": 5, "mlp_only_layers": [3]}, "mixtral": {"num_local_experts": 3},
                "qwen3_moe": {**one, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2,
                              "mlp_only_layers": [3]}}
    for family, writer in WRITERS.items():
        plain = ("ernie4_5_moe", "granitemoe", "granitemoehybrid", "olmoe", "phi3")  # which have no head_dim of their own
        width = {"layer_types": ["full_attention", "conv"] * 2} if family == "lfm2_moe" else {}
        width |= {"ffn_dim": 88} if family == "opt" else {} if family in plain else {"head_dim": 32}
        for changes in ({"tie_word_embeddings": False}, {"tie_word_embeddings": True, **features.get(family, {})}):
            written = writer(**{**SMALL, **width, "pad_token_id": None, **changes})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(written)
            config = parse_config(json.loads(written.to_json_string()))
            module = families.get(family)
            rules = [*module.outer_tensors(config).values()]
            rules += [rule for layer in range(4) for rule in module.layer_tensors(config, layer).values()]
            there = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied head is listed once
            there |= {name: tuple(own.shape) for name, own in model.named_buffers()
                      if name.endswith(("e_score_correction_bias", "expert_bias"))}
            there = dict(part for name, shape in there.items() for part in in_a_file(family, name, shape))
            whole = {rule.part_of[0]: (rule.part_of[2], *rule.shape[1:]) for rule in rules if rule.part_of}
            alone = in_one({rule.name: rule.shape for rule in rules if not rule.part_of}, config)
            assert alone | whole == there
            parts = sorted((*rule.part_of, rule.shape[0]) for rule in rules if rule.part_of)
            for name, (rows, _) in whole.items():  # the parts of a tensor follow one another and fill it
                mine = [(first, size) for stored, first, _, size in parts if stored == name]
                assert [first for first, _ in mine] == [sum(size for _, size in mine[:i]) for i in range(len(mine))]
                assert sum(size for _, size in mine) == rows


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_mixtures(family: str) -> None:
    small = {**LLAMA, "model_type": family, "eos_token_id": 7}
    for name in ("num_experts", "num_local_experts"):  # transformers 5 writes the second where 4 wrote the first
        config = parse_config({**small, name: 6, "num_experts_per_tok": 3}, strict=True)
        assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.layers) == (6, 3, frozenset(range(4)))
        assert config.moe.renormalise == (family == "mixtral")
    refused({**small, "num_experts": 6, "num_local_experts": 5, "num_experts_per_tok": 3}, "num_local_experts 5", "6")
    refused({**small, "num_experts": 6, "num_experts_per_tok": 7}, "num_experts_per_tok 7", "6 experts")
    refused({**small, "num_experts": 0}, "num_experts")
    refused({**small, "num_experts": 1 << 20}, "num_experts")
    refused({**small, "mlp_bias": True}, "mlp_bias", "not supported")
    if family != "mixtral":
        assert parse_config({**small, "norm_topk_prob": True}).moe.renormalise
        refused({**small, "norm_topk_prob": 1}, "norm_topk_prob")


def test_layers_without_experts() -> None:
    def layers(**changes: object) -> set[int]:
        return set(parse_config({**LLAMA, "model_type": "qwen3_moe", **changes}, strict=True).moe.layers)

    assert layers() == {0, 1, 2, 3} and layers(mlp_only_layers=None) == {0, 1, 2, 3}
    assert layers(decoder_sparse_step=2) == {1, 3} and layers(mlp_only_layers=[0, 3]) == {1, 2}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == {3} and layers(decoder_sparse_step=9) == set()
    for value in ([4], [-1], [True], "0", [0.0], {"0": 1}):
        refused({**LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": value}, "mlp_only_layers")
    refused({**LLAMA, "model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step")


def test_what_the_families_of_mixtures_refuse() -> None:
    refused({**LLAMA, "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv", "not supported")
    refused({**LLAMA, "model_type": "olmoe", "sliding_window": 40}, "sliding_window")
    refused({**LLAMA, "model_type": "qwen3_moe", "layer_types": ["sliding_attention"] * 4}, "layer_types")
    windowed = {**LLAMA, "model_type": "qwen3_moe", "sliding_window": 40}
    assert parse_config(windowed).windows == (None,) * 4
    assert parse_config({**windowed, "use_sliding_window": True}).windows == (40,) * 4
    assert parse_config({**LLAMA, "model_type": "mixtral"}).windows == (None,) * 4
