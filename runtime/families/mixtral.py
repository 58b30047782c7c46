"""Mixtral: the Mistral block with eight experts in place of the MLP, two per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..moe_config import MoEConfig
from . import TensorRule, expert_role, llama

KEYS_HARMLESS = frozenset({"router_jitter_noise"})  # used in training only
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False}
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
MAX_EXPERTS = 4096
MAX_GATE_LIMIT = 1e6  # no gate gets as large


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    moe = moe_config(keys, 8, 2, keys.integer("intermediate_size", high=2**22), True, range(layers))
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, theta=1e6)
    return decoder_config(keys, base, windows=(keys.integer("sliding_window", None),) * layers, moe=moe)


def moe_config(keys: Keys, experts: int, per_token: int, width: int, renormalise: bool, layers: Iterable[int], name: str = "num_experts",
               **features: object) -> MoEConfig:
    """The MoEConfig of a config. Raises ConfigError.

    experts, per_token: defaults of the number of experts and of those that a token visits.
    width: intermediate size of an expert.
    layers: those with experts.
    name: the family's key for the number of experts; `num_local_experts` is read too.
    features: further fields of the MoEConfig.
    """
    local = keys.integer("num_local_experts", None, high=MAX_EXPERTS)
    experts = keys.integer(name, local or experts, high=MAX_EXPERTS)
    if local not in (None, experts):
        raise ConfigError(f"config.json: {name} is {experts} and num_local_experts {local}, which should be the same")
    per_token = keys.integer("num_experts_per_tok", per_token, high=MAX_EXPERTS)
    if per_token > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {per_token} is more than the {experts} experts there are")
    return MoEConfig(experts, per_token, width, renormalise, frozenset(layers), **features)


def gate_limits(keys: Keys, names: tuple[str, str], sparse: frozenset[int], layers: int,
                extra_layers: int = 0) -> tuple[tuple[float | None, float | None], ...]:
    """ModelConfig.gate_limits: by layer the limit of the gates of routed experts, and of the shared one; empty if there is none.

    names: keys of the two lists, with an entry for every layer, and perhaps for `extra_layers` MTP layers. 0 and null: no limit.
    sparse: the layers with experts. Raises ConfigError for a limit in another layer.
    """
    columns = []
    for name in names:
        keys.mark_known(name)
        limits = keys.raw.get(name) or [None] * layers
        if not isinstance(limits, list) or len(limits) not in (layers, layers + extra_layers) or not all(
                limit is None or type(limit) in (int, float) and 0 <= limit < MAX_GATE_LIMIT for limit in limits):
            raise keys.fail(name, f"a number of 0 or more, or null, for each of {layers} layers")
        column = [float(limit) if limit else None for limit in limits[:layers]]
        if dense := [layer for layer in range(layers) if layer not in sparse and column[layer]]:
            raise ConfigError(f"config.json: {name} has a bound for layer {dense[0]}, which has no experts: this is not supported")
        columns.append(column)
    pairs = tuple(zip(*columns))
    if not any(any(pair) for pair in pairs):
        return ()
    if (act := keys.raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"config.json: {names[0]} goes with hidden_act silu, not with {show(act)}")
    return pairs


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "block_sparse_moe", NAMES)


def expert_tensors(config: ModelConfig, layer: int, place: str, names: Mapping[str, str], shared: str = "shared_experts",
                   correction: str = "gate.e_score_correction_bias") -> dict[str, TensorRule]:
    """Llama's tensors of a layer, with router and experts in place of the MLP in layers that have them.

    place: prefix of router and experts within the layer.
    names: role of an expert's matrix -> its name; a family without gates has no gate.
    shared: name of the shared expert.
    correction: name of the bias of the router's scores.
    """
    rules = llama.layer_tensors(config, layer)
    if layer not in config.moe.layers:
        return rules
    for role in names:
        del rules[role]
    return rules | moe_tensors(config, f"model.layers.{layer}.{place}.", names, shared, correction)


def moe_tensors(config: ModelConfig, prefix: str, names: Mapping[str, str], shared: str = "shared_experts",
                correction: str = "gate.e_score_correction_bias") -> dict[str, TensorRule]:
    """Router, routed and shared experts under `prefix`; other arguments as of `expert_tensors`."""
    moe, hidden = config.moe, config.hidden_size

    def shapes(width: int, inputs: int = hidden) -> dict[str, tuple[int, int]]:
        return {role: (inputs, width) if role == "down" else (width, inputs) for role in names}

    rules = {"router": TensorRule(f"{prefix}gate.weight", (moe.num_experts, hidden))}
    if moe.correction_bias:
        rules["correction"] = TensorRule(prefix + correction, (moe.num_experts,))
    if moe.shared_expert_dim:
        for role, shape in shapes(moe.shared_expert_dim).items():
            rules[f"shared.{role}"] = TensorRule(f"{prefix}{shared}.{names[role]}.weight", shape)
    if moe.shared_expert_gate:
        rules["shared.scale"] = TensorRule(f"{prefix}{shared}_gate.weight", (1, hidden))
    for expert in range(moe.num_experts):
        for role, shape in shapes(moe.expert_dim, moe.latent_dim or hidden).items():
            rules[expert_role(expert, role)] = TensorRule(f"{prefix}experts.{expert}.{names[role]}.weight", shape)
    return rules
