"""Small random models with latent attention as fixtures: with widths that kernels must split, and weights for which outputs are well
conditioned."""

from pathlib import Path

from family_models import CASES, SHARPENED, Case
from saved_models import saved

CTX = 640
CALM = {"initializer_range": 0.08, "max_position_embeddings": CTX, "hidden_size": 128, "moe_intermediate_size": 64,
        "intermediate_size": 192, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT_CASES = {"deepseek_v3": Case("deepseek_v3", {**CASES["deepseek_v3"].changes, **CALM, "q_lora_rank": 64, "attention_bias": False}),
                "deepseek_v2": Case("deepseek_v2", {**CASES["deepseek_v2"].changes, **CALM, **SHARPENED, "q_lora_rank": None}),
                "glm4_moe_lite": Case("glm4_moe_lite", {**CASES["glm4_moe_lite"].changes, **CALM, "q_lora_rank": 64})}


def latent_model(name: str, folder: Path) -> Path:
    """The model of LATENT_CASES in `folder`, float32."""
    saved(LATENT_CASES[name], folder)
    return folder
