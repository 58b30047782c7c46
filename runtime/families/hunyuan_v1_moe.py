"""Hunyuan MoE (A13B): the dense block with routed experts and a shared one, all of one width."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, ModelConfig
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, hunyuan_v1_dense
from .deepseek_v3 import check_auto_map
from .hunyuan_v1_dense import attention_names
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

LIKE = hunyuan_v1_dense
# Of training, and of choices among groups, which the published ones do not make.
KEYS_HARMLESS = hunyuan_v1_dense.KEYS_HARMLESS - {"routed_scaling_factor"} | {
    "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "n_group", "n_routed_experts", "n_shared_experts",
    "topk_group", "topk_method"}
REFUSED_UNLESS = {
    **{key: value for key, value in hunyuan_v1_dense.REFUSED_UNLESS.items() if key != "num_experts"}, "group_limited_greedy": False,
    "moe_layer_num_skipped": 0, "moe_router_enable_expert_bias": False, "moe_router_use_sigmoid": False, "norm_topk_prob": True,
    "qk_nope_head_dim": None, "qk_rope_head_dim": None, "use_mixed_mlp_moe": True, "use_mla": False, "v_head_dim": None}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, r"(configuration_hunyuan|modeling_hunyuan|hunyuan)\.HunYuan\w+")
    factor = keys.raw.get("routed_scaling_factor") if keys.has("routed_scaling_factor") else None
    if factor and factor != 1.0:  # their first code says false for none
        raise ConfigError(f"config.json: routed_scaling_factor = {show(factor)} is not supported for hunyuan_v1_moe models",
                          "published models of this family have none")
    layers, width = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("intermediate_size", high=2**22)
    for name, only in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if (stated := same_for_all(keys, name, layers, only)) != only:
            raise ConfigError(f"config.json: {name} is {stated}, which is not supported for hunyuan_v1_moe models",
                              "published models have one shared expert, and experts as wide as intermediate_size")
    moe = moe_config(keys, 1, same_for_all(keys, "moe_topk", layers, 1), width, True, range(layers), shared_expert_dim=width)
    return replace(hunyuan_v1_dense.config(keys), moe=moe)


def same_for_all(keys: Keys, name: str, layers: int, default: int) -> int:
    """A number that may be stated layer by layer. Raises ConfigError where layers differ."""
    stated = keys.raw.get(name) if keys.has(name) else None
    if not isinstance(stated, list):
        return keys.integer(name, default, high=2**22)
    if len(stated) != layers or any(type(each) is not int or each != stated[0] for each in stated):
        raise keys.fail(name, f"one number for all of {layers} layers")
    return keys.with_values(**{name: stated[0]}).integer(name, high=MAX_EXPERTS if name != "moe_intermediate_size" else 2**22)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = expert_tensors(config, layer, "mlp", NAMES, "shared_mlp")
    rules["router"] = replace(rules["router"], name=f"model.layers.{layer}.mlp.gate.wg.weight")
    return attention_names(rules, layer)
