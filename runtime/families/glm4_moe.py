"""GLM MoE (4.5, 4.5-Air, 4.6, 4.7): the Llama block with RoPE on half of each head, corrected sigmoid routing and a shared expert in all
layers but the first."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import REQUIRED, Keys
from ..moe_config import MoEConfig
from . import TensorRule
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"num_mtp_layers"})
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "n_group": 1, "sliding_window": None, "topk_group": 1}
ROTARY_FACTOR = 0.5  # default share of a head that is rotated


def config(keys: Keys) -> ModelConfig:
    sizes = {"vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46, "num_attention_heads": 96}
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, norm_eps=1e-5, sizes=sizes,
                    rope={"partial": True, "share": ROTARY_FACTOR})
    return decoder_config(keys, base, qkv_bias=keys.flag("attention_bias", False), qk_norm=keys.flag("use_qk_norm", False),
                          moe=deepseek_moe_config(keys, base.size(keys, "num_hidden_layers"), 128, 8, 1, True),
                          mtp_layers=keys.integer("num_nextn_predict_layers", 1, low=0, high=MAX_LAYERS))


def deepseek_moe_config(keys: Keys, layers: int, experts: object, per_token: object, dense: int, renormalise: bool, factor: float = 1.0,
                        width: int = 1408) -> MoEConfig:
    """The MoEConfig of DeepSeek V3 (arXiv:2412.19437): sigmoid routing with a correction bias, here in one group of experts. The arguments
    after `layers` are defaults, as of `shared_moe_config`."""
    moe = shared_moe_config(keys, layers, experts, per_token, dense, keys.flag("norm_topk_prob", renormalise), width,
                             REQUIRED if experts is REQUIRED else 1, factor)
    return replace(moe, sigmoid=True, correction_bias=True)


def shared_moe_config(keys: Keys, layers: int, experts: object, per_token: object, dense: int, renormalise: bool, width: int,
                      shared: object,
                      factor: float = 1.0) -> MoEConfig:
    """Routed experts in all layers but the first ones, and a shared one. REQUIRED may stand for a default that the family lacks.

    experts, per_token: routed experts, and those that a token visits.
    dense: number of the first layers, which have no experts.
    renormalise: whether weights of a token's experts add up to 1.
    width: intermediate size of a routed expert.
    shared: number of shared experts, which are loaded as one that is as wide as all of them.
    factor: of the routed experts' output.
    """
    width = keys.integer("moe_intermediate_size", width, high=2**22)
    first = keys.integer("first_k_dense_replace", dense, low=0, high=layers)
    shared = keys.integer("n_shared_experts", shared, high=MAX_EXPERTS)
    return moe_config(keys, experts, per_token, width, renormalise, range(first, layers), "n_routed_experts",
                      routed_scale=keys.number("routed_scaling_factor", factor), shared_expert_dim=width * shared)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "mlp", NAMES)
