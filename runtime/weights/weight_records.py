"""Raw bytes of a checkpoint as the records that blocks and ops take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.reference import CURVE_SLOPE
from ...kernels.reference_moe import ranks
from ...offload.memory import anonymous
from ...offload.neurons import ResidentBundles
from ...quant.weight import Apart, Bundles, Curve, Expert, Inputs, Linear, LowRank, Norm, RouterPath, SharedExpert, Streams, Weight
from ...quant.wide_weights import Mean
from ..adapters.adapted import NOTHING, Adapted
from ..families import SEEN, SHARED, LayerWeights, expert_roles
from ..families.diffllama import share_of
from ..families.mllama_text_model import SHARES
from ..ngrams import role_of
from ..rope import place_fronts
from ..sparse.bundles import ROLE as BUNDLES
from ..sparse.bundles import THRESHOLDS, layout_of
from ..speculation.mtp_tensors import EMBED_NORM, JOIN, LAST_NORM, MTP, STATE_NORM, like
from ..tensors import ModelTensor, as_float32, typed
from . import residual_weights
from .compressed_weights import LEAVES, PICKS, hyper_around, hyper_weights, picks_of, wide_weights
from .index_weights import growth, index_weights
from .latent_weights import latent_weights
from .lent_weights import LENT_OUT, blocks_of, lent, shared_blocks
from .ngram_table import NgramTable, check_numbers
from .rescale_weights import RESCALED, difference, rescale
from .state_weights import Source, state_weights

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...quant.weight import SharedBlock
    from ...quant.wide_weights import Hyper, Residual
    from ..config import ModelConfig
    from .paged_experts import Paging
    from .streamed import StreamedWeights

CURVED, CURVE = "xielu", ("curve_above", "curve_below")  # an activation, and roles of what a layer has of it
GIVEN = ("input_gate", "input_out")  # roles of a layer that takes what it is given of a token
BEHIND = ("o_norm", "down_norm")  # roles of norms behind attention and MLP
STREAMS = ("stream_router", "predict", "correct")  # and of one that meets several streams of it


@dataclass(frozen=True)
class OwnLayer:
    """The layer for multi-token prediction, on the host: norms of an embedding and of a state of the model, the matrix that joins both
    [D, 2D], the layer itself and the norm before the model's head."""

    embed_norm: Norm
    state_norm: Norm
    join: Linear
    layer: LayerWeights
    norm: Norm


@dataclass(frozen=True)
class BeforeHead:
    """What lies between the last norm and the head, on the host: a matrix [D, D], an activation and the norm behind it."""

    matrix: Linear
    act: str
    norm: Norm


@dataclass(frozen=True)
class OuterWeights:
    """What surrounds the layers, on the host. `positions`: the table of learned ones; `inputs`: what makes what layers are given of a token
    beside the stream, a table where there is one, a matrix and a norm; `enter` and `leave`: matrices that make streams of one and one of
    them, none where there is one, or `leaves` what mixes them into it; `picks`: by layer which experts the tokens of a word visit; `mtp`:
    the layer that the model drafts by; `before`: what lies between `norm` and the head; `ngrams`: by layer its table of n-grams, which
    brings rows."""

    embed: Weight
    positions: Weight | None
    norm: Norm
    head: Linear
    inputs: tuple[Weight | None, Linear, Norm] | None = None
    enter: tuple[Linear, ...] = ()
    leave: tuple[Linear, ...] = ()
    mtp: OwnLayer | None = None
    leaves: Hyper | Residual | None = None
    picks: Mapping[int, np.ndarray] = field(default_factory=dict)
    before: BeforeHead | None = None
    ngrams: Mapping[int, Weight] = field(default_factory=dict)

    @property
    def is_job(self) -> bool:
        """Is the lookup of embeddings a kernel, which reads its ids when it runs? Then a recorded pass may hold it."""
        return not self.embed.spec.is_raw and self.embed.fetch is None and self.positions is None and self.inputs is None


def curve_of(config: ModelConfig, key: int, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray]) -> Curve | None:
    """The activation of a layer that has numbers of its own: what is stored goes through a softplus."""
    if config.hidden_act != CURVED:
        return None
    stored = config.curves[key] if config.curves else tuple(float(as_float32(roles[role], raw)[0]) for role in CURVE)
    above, below = (float(np.logaddexp(0.0, each)) for each in stored)
    return Curve(above, CURVE_SLOPE + below)


def made_norm(config: ModelConfig, weight: object, bias: object | None, kind: str | None = None, eps: float | None = None) -> Norm:
    """A norm of the model's kind and epsilon, unless another is given; kernels know none that takes the mean off and has weights stored
    less one."""
    kind, eps = kind or config.norm_kind, config.norm_eps if eps is None else eps
    return Norm("layer", weight + 1, bias, eps) if kind == "layer+1" else Norm(kind, weight, bias, eps)


def unit_norm(config: ModelConfig, ops: object, size: int) -> Norm:
    """A norm of the model's kind that multiplies by nothing."""
    return Norm(config.norm_kind, ops.put(np.ones(size, np.float32), "f32"), None, config.norm_eps)


class WeightRecords:
    """Makes records of a model's tensors by role: `tensors`, layers by number and what surrounds them as "outer". `host`: the ops of the
    CPU, whose matrices may be `streamed` and whose experts `paging` reads, both None where all weights stay in memory. `adapted`: what
    adapters add."""

    def __init__(self, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore, host: object,
                 pager: object, streamed: StreamedWeights | None, paging: Paging | None, adapted: Adapted = NOTHING) -> None:
        self.config, self.tensors, self.store, self.host = config, tensors, store, host
        self.pager, self.streamed, self.paging, self.adapted = pager, streamed, paging, adapted
        self._blocks: dict[str, tuple[SharedBlock, ...]] = {}  # by the name of a backend

    def layer(self, key: int, raw: Mapping[str, np.ndarray], ops: object, place: Callable[[ModelTensor], object] | None = None,
              looked_up: Collection[str] = ()) -> LayerWeights:
        """What a block takes, of raw bytes by name; `place` says where a matrix lies that was brought to its backend otherwise, `looked_up`
        which lie in lookup order."""
        config, roles = self.config, self.tensors[key]

        def vector(role: str) -> object | None:
            return None if role not in roles else ops.put(as_float32(roles[role], raw), "f32")

        def linear(role: str) -> Linear | None:
            if role not in roles:
                return None
            tensor, lora = roles[role], self.adapted.beside(key, role, ops)
            if self.streamed is not None and self.streamed.holds(tensor):
                return Linear(self.streamed.matrix(tensor, raw), vector(f"{role}_bias"), lora)
            data = ops.put(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme) if place is None else place(tensor)
            shaped = data.reshape(tensor.shape) if tensor.spec.is_raw else data
            return Linear(Weight(tensor.spec, tensor.shape, {"data": shaped}, tensor.name in looked_up), vector(f"{role}_bias"), lora)

        def norm(role: str) -> Norm | None:
            if role not in roles:
                return None
            weight = vector(role)
            if len(roles[role].shape) > 1:  # one for each head
                weight = weight.reshape(roles[role].shape)
            return made_norm(config, weight, vector(f"{role}_bias"), eps=config.behind_eps if role in BEHIND else None)

        def shaped(role: str) -> object:
            return vector(role).reshape(roles[role].shape)

        def ones(size: int, factors: np.ndarray | float = 1.0) -> Norm:
            return Norm("rms", ops.put(np.ones(size, np.float32) * np.float32(factors), "f32"), None, config.norm_eps)

        router, correction = linear("router"), vector("correction")
        if router is not None and correction is None and config.mixture.corrected:  # by nothing, as groups are chosen all the same
            correction = ops.put(np.zeros(config.mixture.experts, np.float32), "f32")
        input_norm = norm("input_norm") or (unit_norm(config, ops, config.hidden_size) if config.norms_unit else Norm("none"))
        post_norm = norm("post_norm") or norm("mlp_norm") or input_norm
        if (factor := config.factor("post_norm")) != 1.0:
            post_norm = replace(post_norm, weight=ops.put(as_float32(roles["post_norm"], raw) * np.float32(factor), "f32"))
        apart = None
        if config.mixture is not None and config.mixture.apart and router is not None and "router_scale" not in roles:
            made, handed = config.mixture.experts, config.mixture.handed
            scales = np.repeat(np.float32([1, not config.mixture.idle]), [made, handed])
            read = Norm("none") if config.norms_gated or config.mixture.latent else post_norm  # of what is made of a norm beforehand
            apart = Apart(read, read, None, None, ops.put(scales, "f32"))
        elif config.mixture is not None and config.mixture.apart and router is not None:
            root = np.float32(config.hidden_size**-0.5)
            apart = Apart(ones(config.hidden_size, as_float32(roles["router_scale"], raw) * root), norm("expert_norm"),
                          norm("experts_after"), norm("mlp_after"), vector("expert_scales"))
        if router is not None and self.paging is not None and ops is self.host:
            experts = self.paging.layer(key, roles, lambda role: vector(f"{role}_bias"), apart.router_norm if apart else post_norm,
                                        None if config.router_rank or config.norms_gated or config.mixture.latent else router,
                                        lambda logits: ranks(logits, config.mixture.routing, correction))
        else:
            experts = tuple(Expert(*map(linear, expert_roles(e))) for e in range(config.mixture.experts)) if router else ()
        seen = None
        if f"{SEEN}router" in roles:
            own = tuple(Expert(*(linear(SEEN + role) for role in expert_roles(e))) for e in range(config.mixture.experts))
            seen = linear(f"{SEEN}router"), own, vector(f"{SEEN}correction")
        curve = curve_of(config, key, roles, raw)
        unit = ones(config.heads_of(key)[1]) if config.qk_norm_unit and (config.ropes[key] or config.qk_norm_still) else None
        entered = ones(config.hidden_size) if config.embedding_normed and key == 0 else None
        added = config.residual_multiplier * config.factor(SHARED[2])
        shared = SharedExpert(*map(linear, SHARED), added, config.act_of(key, shared=True)) if SHARED[1] in roles else None
        return LayerWeights(input_norm=input_norm, q=linear("q"), k=linear("k"), v=linear("v"), o=linear("o"),
                            q_norm=norm("q_norm") or unit, k_norm=norm("k_norm") or unit, post_norm=post_norm, gate=linear("gate"),
                            up=linear("up"), down=linear("down"), o_norm=norm("o_norm"), down_norm=norm("down_norm"), sinks=vector("sinks"),
                            router=router, experts=experts, bundles=self._bundles(roles, raw, ops, vector),
                            correction=correction, shared=shared, seen=seen,
                            between=LowRank(linear("experts_in"), linear("experts_out")) if "experts_in" in roles else None,
                            state=state_weights(Source(config, key, roles, raw, ops, linear, vector)),
                            latent=latent_weights(config, roles, linear, vector), index=index_weights(config, roles, linear, vector),
                            grows=growth(roles, vector), entered=rescale(roles, "entry", vector),
                            rescales=tuple(rescale(roles, what, vector) for what in ("attn", "mlp")) if RESCALED in roles else None,
                            path=RouterPath(linear("router_in"), vector("router_share"), norm("router_norm"), linear("router_first"),
                                            linear("router_second")) if "router_in" in roles else None,
                            v_norm=ones(config.heads_of(key)[1]) if config.values_normed and "k" in roles else None,
                            scale=float(as_float32(roles["layer_scale"], raw)[0]) if "layer_scale" in roles else None, curve=curve,
                            inputs=Inputs(*map(linear, GIVEN), norm("input_after")) if GIVEN[0] in roles else None, apart=apart,
                            attn_gate=linear("attn_gate"),
                            streams=Streams(config.streams, norm("stream_norm"), *map(shaped, STREAMS), vector("stream_scale"))
                            if STREAMS[0] in roles else None,
                            low_rank=LowRank(linear("low_in"), linear("low_out"), norm("low_norm")) if "low_in" in roles else None,
                            difference=difference(roles, raw, key) if config.differs else 0.0,
                            attn_sub_norm=ones(config.head_dim, 1 - share_of(key)) if config.differs else norm("attn_sub_norm"),
                            ffn_sub_norm=norm("ffn_sub_norm"),
                            lent=lent(config, key, linear, self.blocks(ops)) if LENT_OUT in roles else None,
                            fronts=self._fronts(ops) if config.slopes or config.keys_marked else None,
                            mark=(linear("mark"), vector("mark_rate")) if "mark" in roles else None,
                            norm_gates=tuple(LowRank(linear(f"{role}_in"), linear(f"{role}_out")) if f"{role}_in" in roles else None
                                             for role in ("input_norm", "post_norm")),
                            entry_norm=norm("entry_norm") or entered, middle_norm=norm("middle_norm"),
                            wide=wide_weights(config, key, linear, vector, lambda values: ops.put(values, "f32")),
                            around=residual_weights.residuals_around(config, roles, linear, vector)
                            or hyper_around(config, linear, vector, lambda values: ops.put(values, "f32")),
                            ngrams=residual_weights.ngram_weights(config, roles, linear, vector,
                                                                  lambda taps: ops.put(np.ascontiguousarray(taps.T), "f32")),
                            shares=tuple(math.tanh(as_float32(roles[role], raw)[0]) for role in SHARES) if SHARES[0] in roles else None)

    def _fronts(self, ops: object) -> tuple[object, object]:
        """What queries and keys have in front whose scores grow with a key's place, on a backend."""
        config = self.config
        if config.keys_marked:
            ones = np.zeros((config.num_attention_heads, config.head_dim - config.made_dim), np.float32)
            ones[:, 0] = 1 / config.attn_scale
            return ops.put(ones, "f32").reshape(ones.shape), None
        fronts = place_fronts(config.slopes, config.num_key_value_heads, config.attn_scale, config.head_dim - config.made_dim)
        return tuple(ops.put(each, "f32") for each in fronts)

    def blocks(self, ops: object, raw: Mapping[str, np.ndarray] | None = None) -> tuple[SharedBlock, ...]:
        """The blocks that layers share, on a backend, made once; without their bytes these are read."""
        if ops.name not in self._blocks:
            roles = blocks_of(self.tensors["outer"])
            if raw is None:
                raw = {tensor.name: anonymous(tensor.nbytes) for tensor in roles.values()}
                for tensor in roles.values():
                    self.store.read_into(tensor.info, raw[tensor.name])
            self._blocks[ops.name] = shared_blocks(self.config, roles, raw, ops, self.adapted)
        return self._blocks[ops.name]

    def _bundles(self, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], ops: object,
                 vector: Callable[[str], object | None]) -> Bundles | None:
        if BUNDLES not in roles:
            return None
        tensor = roles[BUNDLES]
        layout = layout_of(tensor, self.config, "gate" in roles)
        if ops is not self.host:
            holder = ops.put(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme).reshape(tensor.shape)
        elif tensor.name in raw:
            holder = ResidentBundles(raw[tensor.name], layout.stride, tensor.shape[0])
        else:
            holder = self.pager.layers[next(key for key, own in self.tensors.items() if own is roles)]
        biases = vector("up_bias") if layout.has_up else None, vector("down_bias")
        return Bundles(layout.scheme, layout.width, layout.has_up, holder, *biases, vector(THRESHOLDS))

    def last_norm(self, raw: Mapping[str, np.ndarray]) -> Norm:
        """The norm before the head, on the host."""
        roles, host = self.tensors["outer"], self.host
        if self.config.last_norm == "none":
            return Norm("none")
        if self.config.norms_unit:
            return unit_norm(self.config, host, self.config.hidden_size)
        weight, bias = (host.put(as_float32(roles[role], raw), "f32") if role in roles else None for role in ("norm", "norm_bias"))
        return made_norm(self.config, weight, bias, self.config.last_norm)

    def before_head(self, raw: Mapping[str, np.ndarray]) -> BeforeHead | None:
        """What lies between the last norm and the head, if anything does."""
        roles = self.tensors["outer"]
        if "head_in" not in roles:
            return None
        weight, bias, own_bias = (self.host.put(as_float32(roles[role], raw), "f32") if role in roles else None
                                  for role in ("head_norm", "head_norm_bias", "head_in_bias"))
        tensor = roles["head_in"]
        make, stored = (Weight.raw, tensor.spec.scheme) if tensor.spec.is_raw else (Weight.low_bit, tensor.spec)
        matrix = Linear(make(stored, tensor.shape, raw[tensor.name]), own_bias)
        return BeforeHead(matrix, self.config.head_act, made_norm(self.config, weight, bias))

    def head_bias(self, raw: Mapping[str, np.ndarray]) -> object | None:
        """The bias of the head, on the host."""
        tensor = self.tensors["outer"].get("head_bias")
        return None if tensor is None else self.host.put(as_float32(tensor, raw), "f32")

    def outer(self, raw: Mapping[str, np.ndarray]) -> OuterWeights:
        """What surrounds the layers, of raw bytes by name."""
        roles = self.tensors["outer"]

        def weight(role: str) -> Weight | None:
            if role not in roles:
                return None
            tensor = roles[role]
            if self.streamed is not None and self.streamed.holds(tensor):
                return self.streamed.matrix(tensor, raw)
            make = Weight.raw if tensor.spec.is_raw else Weight.low_bit
            return make(tensor.spec.scheme if tensor.spec.is_raw else tensor.spec, tensor.shape, raw[tensor.name])

        def fetched(role: str) -> bool:
            return self.streamed is not None and roles[role].name in self.streamed.parts.tables

        def table(role: str) -> Weight:
            return self.streamed.table(roles[role], self.store.place(roles[role].info), raw) if fetched(role) else weight(role)

        embed, inputs = table("embed"), None
        head = weight("head") or (weight("embed") if fetched("embed") else embed)
        if self.config.shared_blocks:
            self.blocks(self.host, raw)  # which layers take from there
        if "layer_proj" in roles:
            own = Norm("rms", self.host.put(as_float32(roles["layer_norm"], raw), "f32"), None, self.config.norm_eps)
            inputs = table("layer_embed") if "layer_embed" in roles else None, Linear(weight("layer_proj")), own
        return OuterWeights(embed, weight("positions"), self.last_norm(raw), Linear(head, self.head_bias(raw)), inputs,
                            *(tuple(Linear(weight(f"streams.{i}.{role}")) for i in range(1, self.config.streams)
                                    if f"streams.{i}.{role}" in roles) for role in ("enter", "leave")), self._own_layer(raw),
                            self._leaves(raw, weight), self._picks(raw), self.before_head(raw), self._ngrams())

    def _ngrams(self) -> dict[int, Weight]:
        own = self.config.ngrams
        if own is None:
            return {}
        check_numbers(self.config, self.store)
        return {layer: NgramTable(self.tensors["outer"][role_of(layer)], self.store).weight for layer in own.layers}

    def _leaves(self, raw: Mapping[str, np.ndarray], weight: Callable[[str], Weight]) -> Hyper | Residual | Mean | None:
        roles = self.tensors["outer"]
        if self.config.mix_rank:
            return residual_weights.residual(self.config, residual_weights.LEAVES, roles, lambda role: Linear(weight(role)),
                                             lambda role: self.host.put(as_float32(roles[role], raw), "f32"))
        if self.config.mix_rounds:
            return Mean(self.config.streams)
        if LEAVES not in roles:
            return None

        def vector(role: str) -> object:
            return self.host.put(as_float32(roles[role], raw), "f32")

        def linear(role: str) -> Linear:
            return Linear(Weight.raw(roles[role].spec.scheme, roles[role].shape, raw[roles[role].name]))

        return hyper_weights(self.config, LEAVES, linear, vector, lambda values: self.host.put(values, "f32"))

    def _picks(self, raw: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
        found = {int(role.removeprefix(PICKS)): tensor for role, tensor in self.tensors["outer"].items() if role.startswith(PICKS)}
        return picks_of(self.config, {layer: (tensor, as_float32(tensor, raw)) for layer, tensor in found.items()})

    def _own_layer(self, raw: Mapping[str, np.ndarray]) -> OwnLayer | None:
        """The layer for multi-token prediction, which stays in memory wherever it is read."""
        config, host = self.config, self.host
        roles = {role.removeprefix(MTP): tensor for role, tensor in self.tensors["outer"].items() if role.startswith(MTP)}
        if not roles:
            return None

        def norm(role: str) -> Norm:
            return Norm(config.norm_kind, host.put(as_float32(roles[role], raw), "f32"), None, config.norm_eps)

        join = roles[JOIN]
        make, stored = (Weight.raw, join.spec.scheme) if join.spec.is_raw else (Weight.low_bit, join.spec)
        own = WeightRecords(config, {like(config): roles}, self.store, host, self.pager, None, None)
        return OwnLayer(norm(EMBED_NORM), norm(STATE_NORM), Linear(make(stored, join.shape, raw[join.name])),
                        own.layer(like(config), raw, host), norm(LAST_NORM) if LAST_NORM in roles else self.last_norm(raw))
