"""The GGUF architecture that each family is exported as."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import (
    cohere2_moe,
    deci,
    glm5_next,
    gpt_oss,
    granite_swash,
    kimi_delta_attention,
    latent_attention,
    linear_attention,
    mamba,
    mimo2,
    minimax3,
    muse_glimmer,
    nemotron_h,
    qwen4,
    rwkv7,
    sparse_indexer,
    step35,
)

if TYPE_CHECKING:
    from ..config import ModelConfig

ARCHITECTURE_BY_FAMILY = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), latent_attention.NAME) | {
    "cohere": "command-r", "bailing_moe_v2": "bailingmoe2", "mimo": "qwen2", deci.FAMILY: deci.NAME,
    latent_attention.MISTRAL4_FAMILY: latent_attention.MISTRAL4, cohere2_moe.FAMILY: cohere2_moe.NAME,
    "ernie4_5_moe": "ernie4_5-moe", "exaone_moe": "exaone-moe", "falcon_h1": "falcon-h1", "gemma3_text": "gemma3", "gemma4_text": "gemma4",
    "glm": "chatglm", "glm4_moe": "glm4moe", "gpt_neox": "gptneox", "granitemoehybrid": "granite", "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe", "internlm3": "llama", "iquestcoder": "llama",
    "lfm2_moe": "lfm2moe", "llama4_text": "llama4", "minimax_m2": "minimax-m2", "ministral3": "mistral3", "mistral": "llama",
    "mixtral": "llama", "olmo3": "olmo2", "phi": "phi2", "qwen2_moe": "qwen2moe", "qwen3_5_moe_text": "qwen35moe", "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe", "qwen3_next": linear_attention.QWEN3_NEXT, "solar_open": "glm4moe", granite_swash.MOE: granite_swash.NAME,
    kimi_delta_attention.KIMI_FAMILY: kimi_delta_attention.KIMI, kimi_delta_attention.LING_FAMILY: kimi_delta_attention.LING,
    glm5_next.FAMILY: glm5_next.NAME, gpt_oss.FAMILY: gpt_oss.NAME, **{family: name for name, family in sparse_indexer.FAMILIES.items()},
    qwen4.FAMILY: qwen4.NAME, mamba.FALCON_MAMBA: mamba.NAME, muse_glimmer.FAMILY: muse_glimmer.NAME, step35.FAMILY: step35.NAME,
    "gpt_bigcode": "starcoder", mimo2.FAMILY: mimo2.NAME, minimax3.FAMILY: minimax3.NAME} | {
    name: name for name in ("afmoe", "apertus", "arcee", "bitnet", "bloom", "cohere2", "dbrx", "dots1", "ernie4_5", "exaone", "exaone4",
                            "falcon", "gemma", "gemma2", "glm4", "gpt2", "granite", "granite_swa", "granitemoe", "hy_v3", "internlm2",
                            "jais2", "jamba", "kolibri1", "laguna", "lfm2", "llama", "mamba", "mamba2", "mellum", "minicpm", "minicpm3",
                            "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen3", rwkv7.FAMILY, "seed_oss",
                            "smollm3", "stablelm", "starcoder2")}


def file_architecture(config: ModelConfig) -> str:
    """The `general.architecture` that a model is exported as. Raises KeyError for a family that is not exported."""
    if config.family == nemotron_h.FAMILY and config.moe is not None:
        return nemotron_h.MOE
    if config.family == "granitemoehybrid" and config.recurrent is not None:
        return "granitehybrid"
    return ARCHITECTURE_BY_FAMILY[config.family]
