"""Mixtral: the Mistral block with eight experts in place of the MLP, two per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..moe_config import MoEConfig
from . import TensorRule, expert_role, llama

KEYS_HARMLESS = frozenset({"router_jitter_noise"})  # of training
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False}
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
MAX_EXPERTS = 4096
MAX_GATE_LIMIT = 1e6  # of gates, as large as none gets


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    moe = moe_config(keys, 8, 2, keys.integer("intermediate_size", high=2**22), True, range(layers))
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=1, eos=(2,), norm_eps=1e-5, theta=1e6)
    return decoder_config(keys, base, windows=(keys.integer("sliding_window", None),) * layers, moe=moe)


def moe_config(keys: Keys, experts: int, per_token: int, width: int, renormalise: bool, layers: Iterable[int], name: str = "num_experts",
               **features: object) -> MoEConfig:
    """The experts that a config states under either of the two names of their number, of which `name` is the family's; `experts` and
    `per_token` are the defaults, `features` other fields of a MoEConfig."""
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
    """How far gates of experts, and of what every token visits, go in each layer, as two lists say: 0 and null stand for no bound; empty
    where none has one. Lists may go on for as many layers `behind`. Raises ConfigError."""
    limits_by_name = []
    for name in names:
        keys.knows(name)
        stated = keys.raw.get(name) or [None] * layers
        if not isinstance(stated, list) or len(stated) not in (layers, layers + extra_layers) or not all(
                each is None or type(each) in (int, float) and 0 <= each < MAX_GATE_LIMIT for each in stated):
            raise keys.fail(name, f"a number of 0 or more, or null, for each of {layers} layers")
        limits_by_name.append([float(each) if each else None for each in stated[:layers]])
        if invalid := [layer for layer in range(layers) if layer not in sparse and limits_by_name[-1][layer]]:
            raise ConfigError(f"config.json: {name} has a bound for layer {invalid[0]}, which has no experts: this is not supported")
    pairs = tuple(zip(*limits_by_name))
    if any(any(pair) for pair in pairs) and (act := keys.raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"config.json: {names[0]} goes with hidden_act silu, not with {show(act)}")
    return pairs if any(any(pair) for pair in pairs) else ()


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return expert_tensors(config, layer, "block_sparse_moe", NAMES)


def expert_tensors(config: ModelConfig, layer: int, place: str, names: Mapping[str, str], shared: str = "shared_experts",
                   correction: str = "gate.e_score_correction_bias") -> dict[str, TensorRule]:
    """A layer's tensors with router and experts at `place` where the layer has them. `names`: an expert's gate, up and down there;
    `shared`: what the one that all tokens visit is called."""
    rules = llama.layer_tensors(config, layer)
    if layer not in config.moe.layers:
        return rules
    for role in names:
        del rules[role]
    return rules | moe_tensors(config, f"model.layers.{layer}.{place}.", names, shared, correction)


def moe_tensors(config: ModelConfig, prefix: str, names: Mapping[str, str], shared: str = "shared_experts",
                correction: str = "gate.e_score_correction_bias") -> dict[str, TensorRule]:
    """Router and experts alone, which have the matrices that have `names`."""
    moe, hidden = config.moe, config.hidden_size

    def matrices(width: int, input_width: int = hidden) -> dict[str, tuple[int, int]]:
        return {role: (input_width, width) if role == "down" else (width, input_width) for role in names}

    rules = {"router": TensorRule(f"{prefix}gate.weight", (moe.num_experts, hidden))}
    if moe.correction_bias:
        rules["correction"] = TensorRule(prefix + correction, (moe.num_experts,))
    for role, shape in matrices(moe.shared_expert_dim).items() if moe.shared_expert_dim else ():
        rules[f"shared.{role}"] = TensorRule(f"{prefix}{shared}.{names[role]}.weight", shape)
    if moe.shared_expert_gate:
        rules["shared.scale"] = TensorRule(f"{prefix}{shared}_gate.weight", (1, hidden))
    for expert in range(moe.num_experts):
        for role, shape in matrices(moe.expert_dim, moe.latent_dim or hidden).items():
            rules[expert_role(expert, role)] = TensorRule(f"{prefix}experts.{expert}.{names[role]}.weight", shape)
    return rules
