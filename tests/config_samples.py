"""Small configs, and checks of refused ones, for tests of config.json."""

import pytest

from effllm import EffllmError
from effllm.runtime import families
from effllm.runtime.config import ModelConfig, parse_config
from effllm.runtime.config_reader import Keys
from effllm.runtime.stores.tensor_views import concatenated_parts, gathered_rows, stacked_vectors

SMALL = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **SMALL}
# What of four layers attends, of families of which it has to be said, their heads, and how some choose experts.
PARTED = {"bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 6, "num_experts": 16}, "mamba2": {"num_heads": 3, "n_groups": 1},
          "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10_000.0}}},
          "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4}, "jamba": {"attn_layer_offset": 1},
          "kimi_linear": {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}, "num_key_value_heads": 6},
          "codegen": {"n_head": 4, "rotary_dim": 8}, "gptj": {"rotary_dim": 8}, "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
          **dict.fromkeys(("deepseek_ocr2_text", "unlimited_ocr_text"), {
              "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "layer_types": ["full_attention"] * 4}),
          "longcat_flash": {"num_key_value_heads": 6},
          "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64,
                             "indexer_compress_ratio": 4},
          "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32}, "rwkv7": {"head_dim": 16},
          "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}}

LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "mistral4",
          "mistral_large4_text", "youtu", "minicpm3", "axk2", "hy_v4")
DOTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1}
SOME = {"granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0}, "nemotron_h": {"hybrid_override_pattern": "M*-M"},
        **dict.fromkeys(LATENT, {"num_key_value_heads": 6, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}),
        "bailing_moe_v2": {"moe_intermediate_size": 48}, "gemma3n_text": {"num_kv_shared_layers": 0},
        "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2}, "hunyuan_v1_moe": {"num_experts": 4}, **PARTED,
        "nemotron_nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 4}}


def small_config(family: str) -> dict[str, object]:
    """A config of any family that reads all keys that it knows."""
    return {**LLAMA, "ffn_dim": 88, **DOTS, **SOME.get(family, {}), "model_type": family}


def keys_read(family: str) -> set[str]:
    """The keys that a family knows."""
    keys = Keys(small_config(family))
    keys.text("model_type")
    families.get(family).config(keys)
    return keys.accessed


def refused(raw: dict[str, object], *words: str, strict: bool = False) -> EffllmError:
    """Asserts that the config is refused with a one-line message containing `words`."""
    with pytest.raises(EffllmError) as caught:
        parse_config(raw, strict)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message and "\n" not in caught.value.hint and len(caught.value.message) < 400
    return caught.value


def in_a_file(family: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """A transformers tensor under our name and shape: experts are separate, and Mixtral has names of its own."""
    if family == "ernie4_5_moe":
        name = name.replace(".gate.moe_statics.", ".moe_statics.")
    if family == "granitemoe":
        name = name.replace(".router.", ".gate.")
    if family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name:
        return [(name, shape)]
    place, stacked = name.rsplit(".", 1)
    if family == "gpt_oss":  # inputs before outputs, and biases
        kind, shape = ("bias", shape) if stacked.endswith("_bias") else ("weight", (shape[0], shape[2], shape[1]))
        parts = ("gate_proj", "up_proj") if stacked.startswith("gate_up") else ("down_proj",)
        return [(f"{place}.{expert}.{part}.{kind}", (shape[1] // len(parts), *shape[2:])) for expert in range(shape[0]) for part in parts]
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[stacked]
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family in ("mixtral", "lfm2_moe") else {part: part for part in parts}
    return [(f"{place}.{expert}.{names[part]}.weight", (shape[1] // len(parts), shape[2])) for expert in range(shape[0]) for part in parts]


def in_one(shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same tensors with those that are stored row by row in one combined."""
    joined: dict[str, tuple[int, ...]] = {}
    for name, (whole, rows) in gathered_rows(config).items():
        width = () if name.endswith(".bias") else (config.hidden_size,)
        assert shapes[name] == (len(rows), *width)
        joined[whole] = joined.get(whole, (0, 0))[0] + len(rows), *width
    apart = {row: shapes[name][1:] for name, rows in stacked_vectors(config).items() for row in rows}
    apart |= {part: (rows, *shapes[name][1:]) for name, named in concatenated_parts(config).items() for part, rows in named}
    made = {*gathered_rows(config), *stacked_vectors(config), *concatenated_parts(config)}
    return {name: shape for name, shape in shapes.items() if name not in made} | joined | apart
