"""From raw checkpoint bytes to the records that blocks and ops take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.reference import CURVE_SLOPE
from ...offload.memory import anonymous
from ...offload.neuron_pager import ResidentBundles
from ...quant.compressed_attention_weights import StreamMean
from ...quant.weight import AltUp, Bundles, Linear, Norm, PerLayerInput, Weight, XieluParams
from ..adapters.loaded_adapters import NO_ADAPTERS, LoadedAdapters
from ..families.diffllama import share_of
from ..families.mllama_text_model import GATE_ROLES
from ..layer import LayerWeights
from ..ngrams import role_of
from ..rope import alibi_channels
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..sparse.neuron_bundles import THRESHOLDS, layout_of
from ..speculation.mtp_tensors import EMBED_NORM, JOIN, LAST_NORM, MTP, STATE_NORM, mtp_model_layer
from ..tensors import ModelTensor, typed
from . import residual_weights
from .compressed_weights import LEAVES, PICKS, hash_routing, hyper_around, hyper_weights, wide_weights
from .expert_weights import mixture_weights
from .index_weights import growth, index_weights
from .latent_weights import latent_weights
from .ngram_table import NgramTable, check_numbers
from .rescale_weights import RESCALED, difference, rescale
from .role_source import RoleSource, build_norm
from .shared_block_weights import LENT_OUT, block_of_layer, blocks_of, shared_blocks
from .state_weights import state_weights

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...quant.compressed_attention_weights import GatedResidual, HyperConnection
    from ...quant.weight import SharedBlock
    from ..config import ModelConfig
    from .paged_experts import Paging
    from .streamed_weights import StreamedWeights

CURVED, CURVE = "xielu", ("curve_above", "curve_below")  # a learned activation, and the roles of its parameters
GIVEN = ("input_gate", "input_out")  # roles of a layer with per-token inputs
STREAMS = ("stream_router", "predict", "correct")  # and of one with several residual streams


@dataclass(frozen=True)
class MtpLayer:
    """The multi-token prediction layer, on the host: norms of an embedding and of a hidden state, the matrix that joins both [D, 2D], the
    layer itself and the norm before the model's head."""

    embed_norm: Norm
    state_norm: Norm
    join: Linear
    layer: LayerWeights
    norm: Norm


@dataclass(frozen=True)
class PreHead:
    """The transform between the last norm and the head, on the host: a matrix [D, D], an activation and a norm."""

    matrix: Linear
    act: str
    norm: Norm


@dataclass(frozen=True)
class OuterWeights:
    """What surrounds the layers, on the host. `positions`: learned position embeddings; `inputs`: per-layer inputs (a table if there is
    one, a matrix and a norm); `enter` and `leave`: matrices that split the residual into streams and merge them, empty for a single stream,
    or `leaves`, gates that merge them; `picks`: hash routing by layer; `mtp`: the layer that the model drafts with; `before`: what lies
    between `norm` and the head; `ngrams`: n-gram table by layer, read row by row."""

    embed: Weight
    positions: Weight | None
    norm: Norm
    head: Linear
    inputs: tuple[Weight | None, Linear, Norm] | None = None
    enter: tuple[Linear, ...] = ()
    leave: tuple[Linear, ...] = ()
    mtp: MtpLayer | None = None
    leaves: HyperConnection | GatedResidual | None = None
    picks: Mapping[int, np.ndarray] = field(default_factory=dict)
    before: PreHead | None = None
    ngrams: Mapping[int, Weight] = field(default_factory=dict)

    @property
    def is_job(self) -> bool:
        """Whether embedding lookup is a kernel that reads its ids when it runs, so that a recorded pass may contain it."""
        return not self.embed.spec.is_raw and self.embed.fetch is None and self.positions is None and self.inputs is None


def curve_of(found: RoleSource) -> XieluParams | None:
    """The activation of a layer with learned parameters, which are stored before a softplus."""
    if found.config.hidden_act != CURVED:
        return None
    stored = found.config.activation_params[found.layer] if found.config.activation_params else map(found.number, CURVE)
    above, below = (float(np.logaddexp(0.0, each)) for each in stored)
    return XieluParams(above, CURVE_SLOPE + below)


class WeightRecords:
    """Creates records of a model's tensors by role: `tensors`, layers by number and the rest as "outer". `host`: the CPU's ops, whose
    matrices may be `streamed` and whose experts may be handled by `paging` (both None if all weights stay in memory). `adapters`:
    adapters."""

    def __init__(self, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore, host: object,
                 pager: object, streamed: StreamedWeights | None, paging: Paging | None, adapters: LoadedAdapters = NO_ADAPTERS) -> None:
        self.config, self.tensors, self.store, self.host = config, tensors, store, host
        self.pager, self.streamed, self.paging, self.adapters = pager, streamed, paging, adapters
        self._blocks: dict[str, tuple[SharedBlock, ...]] = {}  # by backend

    def layer(self, key: int, raw: Mapping[str, np.ndarray], ops: object, place: Callable[[ModelTensor], object] | None = None,
              looked_up: Collection[str] = ()) -> LayerWeights:
        """A block's weights, from raw bytes by name; `place`: where a matrix is that was copied to its backend separately; `looked_up`:
        tensors in lookup layout."""
        config, roles = self.config, self.tensors[key]
        found = RoleSource(config, key, roles, raw, ops, self.streamed, self.adapters, place, looked_up)
        linear, vector, norm = found.linear, found.vector, found.norm
        input_norm = norm("input_norm") or (found.ones(config.hidden_size,
                                                       kind=config.norm_kind) if config.unweighted_norms else Norm("none"))
        post_norm = norm("post_norm") or norm("mlp_norm") or input_norm
        if (factor := config.multiplier("post_norm")) != 1.0:
            post_norm = replace(post_norm, weight=found.put(found.values("post_norm") * np.float32(factor)))
        mixture = mixture_weights(found, post_norm, self.paging if ops is self.host else None)
        unit = found.ones(config.kv_heads_of(key)[1]) if config.qk_norm_unweighted and (config.ropes[key]
                                                                                        or config.qk_norm_without_rope) else None
        entered = found.ones(config.hidden_size) if config.embedding_norm and key == 0 else None
        return LayerWeights(
            **vars(mixture), input_norm=input_norm, post_norm=post_norm, q=linear("q"), k=linear("k"), v=linear("v"), o=linear("o"),
            q_norm=norm("q_norm") or unit, k_norm=norm("k_norm") or unit, gate=linear("gate"), up=linear("up"), down=linear("down"),
            o_norm=norm("o_norm"), down_norm=norm("down_norm"), sinks=vector("sinks"), bundles=self._bundles(found),
            recurrent=state_weights(found), mla=latent_weights(found), indexer=index_weights(found), query_scaling=growth(found),
            input_scale=rescale(found, "entry"),
            residual_scales=tuple(rescale(found, what) for what in ("attn", "mlp")) if RESCALED in roles else None,
            v_norm=found.ones(config.kv_heads_of(key)[1]) if config.v_norm and "k" in roles else None,
            layer_scalar=found.number("layer_scale") if "layer_scale" in roles else None, xielu=curve_of(found),
            per_layer_input=PerLayerInput(*map(linear, GIVEN), norm("input_after")) if GIVEN[0] in roles else None,
            attn_gate=linear("attn_gate"),
            altup=AltUp(config.residual_streams, norm("stream_norm"), *map(found.shaped, STREAMS), vector("stream_scale"))
            if STREAMS[0] in roles else None,
            low_rank=found.low_rank("low_in", "low_out", "low_norm"),
            differential_lambda=difference(found) if config.differential_attention else 0.0,
            attn_sub_norm=found.ones(config.head_dim, 1 - share_of(key)) if config.differential_attention else norm("attn_sub_norm"),
            ffn_sub_norm=norm("ffn_sub_norm"), shared_block=block_of_layer(found, self.blocks(ops)) if LENT_OUT in roles else None,
            alibi_channels=self._fronts(ops) if config.alibi_slopes or config.dynamic_mask else None,
            dynamic_mask=(linear("mark"), vector("mark_rate")) if "mark" in roles else None,
            norm_gates=tuple(found.low_rank(f"{role}_in", f"{role}_out") for role in ("input_norm", "post_norm")),
            entry_norm=norm("entry_norm") or entered, middle_norm=norm("middle_norm"), compressed_attention=wide_weights(found),
            gated_residuals=residual_weights.residuals_around(found) or hyper_around(found), ngrams=residual_weights.ngram_weights(found),
            cross_attention_gates=tuple(math.tanh(found.number(role)) for role in GATE_ROLES) if GATE_ROLES[0] in roles else None)

    def _fronts(self, ops: object) -> tuple[object, object]:
        """Per-head query and key prefixes of position-dependent scores, on a backend."""
        config = self.config
        if config.dynamic_mask:
            ones = np.zeros((config.num_attention_heads, config.head_dim - config.projected_head_dim), np.float32)
            ones[:, 0] = 1 / config.attn_scale
            return ops.put(ones, "f32").reshape(ones.shape), None
        fronts = alibi_channels(config.alibi_slopes, config.num_key_value_heads, config.attn_scale,
                                config.head_dim - config.projected_head_dim)
        return tuple(ops.put(each, "f32") for each in fronts)

    def blocks(self, ops: object, raw: Mapping[str, np.ndarray] | None = None) -> tuple[SharedBlock, ...]:
        """The shared blocks on a backend, created once; read from the store if `raw` is not given."""
        if ops.name not in self._blocks:
            roles = blocks_of(self.tensors["outer"])
            if raw is None:
                raw = {tensor.name: anonymous(tensor.nbytes) for tensor in roles.values()}
                for tensor in roles.values():
                    self.store.read_into(tensor.info, raw[tensor.name])
            self._blocks[ops.name] = shared_blocks(RoleSource(self.config, "outer", roles, raw, ops, adapters=self.adapters))
        return self._blocks[ops.name]

    def _bundles(self, found: RoleSource) -> Bundles | None:
        if BUNDLES not in found.roles:
            return None
        tensor, ops = found.roles[BUNDLES], found.ops
        layout = layout_of(tensor, self.config, "gate" in found.roles)
        if ops is not self.host:
            holder = ops.put(typed(found.raw[tensor.name], tensor.spec), tensor.spec.scheme).reshape(tensor.shape)
        elif tensor.name in found.raw:
            holder = ResidentBundles(found.raw[tensor.name], layout.stride, tensor.shape[0])
        else:
            holder = self.pager.layers[found.layer]
        biases = found.vector("up_bias") if layout.has_up else None, found.vector("down_bias")
        return Bundles(layout.scheme, layout.width, layout.has_up, holder, *biases, found.vector(THRESHOLDS))

    def _outside(self, raw: Mapping[str, np.ndarray]) -> RoleSource:
        """What is outside the layers and stays in memory, on the host."""
        return RoleSource(self.config, "outer", self.tensors["outer"], raw, self.host)

    def last_norm(self, raw: Mapping[str, np.ndarray]) -> Norm:
        """The final norm, on the host."""
        config, found = self.config, self._outside(raw)
        if config.final_norm_kind == "none":
            return Norm("none")
        if config.unweighted_norms:
            return found.ones(config.hidden_size, kind=config.norm_kind)
        return build_norm(config, found.vector("norm"), found.vector("norm_bias"), config.final_norm_kind)

    def before_head(self, raw: Mapping[str, np.ndarray]) -> PreHead | None:
        """What lies between the last norm and the head, if anything."""
        found = self._outside(raw)
        return PreHead(found.linear("head_in"), self.config.head_transform_act,
                       found.norm("head_norm")) if "head_in" in found.roles else None

    def head_bias(self, raw: Mapping[str, np.ndarray]) -> object | None:
        """The bias of the head, on the host."""
        return self._outside(raw).vector("head_bias")

    def outer(self, raw: Mapping[str, np.ndarray]) -> OuterWeights:
        """What surrounds the layers, from raw bytes by name."""
        config, found = self.config, replace(self._outside(raw), streamed=self.streamed)
        roles, weight = found.roles, found.weight

        def fetched(role: str) -> bool:
            return self.streamed is not None and roles[role].name in self.streamed.parts.tables

        def table(role: str) -> Weight:
            return self.streamed.table(roles[role], self.store.place(roles[role].info), raw) if fetched(role) else weight(role)

        embed, inputs = table("embed"), None
        head = weight("head") or (weight("embed") if fetched("embed") else embed)
        if config.num_shared_blocks:
            self.blocks(self.host, raw)  # which layers use from there
        if "layer_proj" in roles:
            own = Norm("rms", found.vector("layer_norm"), None, config.norm_eps)
            inputs = table("layer_embed") if "layer_embed" in roles else None, Linear(weight("layer_proj")), own
        streams = (tuple(Linear(weight(each)) for i in range(1, config.residual_streams) if (each := f"streams.{i}.{role}") in roles)
                   for role in ("enter", "leave"))
        return OuterWeights(embed, weight("positions"), self.last_norm(raw), Linear(head, self.head_bias(raw)), inputs, *streams,
                            self._own_layer(raw), self._leaves(found), self._picks(found), self.before_head(raw), self._ngrams())

    def _ngrams(self) -> dict[int, Weight]:
        own = self.config.ngrams
        if own is None:
            return {}
        check_numbers(self.config, self.store)
        return {layer: NgramTable(self.tensors["outer"][role_of(layer)], self.store).weight for layer in own.layers}

    def _leaves(self, found: RoleSource) -> HyperConnection | GatedResidual | StreamMean | None:
        if self.config.residual_gate_rank:
            return residual_weights.residual(found, residual_weights.LEAVES)
        if self.config.sinkhorn_iterations:
            return StreamMean(self.config.residual_streams)
        return hyper_weights(found, LEAVES) if LEAVES in found.roles else None

    def _picks(self, found: RoleSource) -> dict[int, np.ndarray]:
        return hash_routing(self.config, {int(role.removeprefix(PICKS)): (tensor, found.values(role))
                                          for role, tensor in found.roles.items() if role.startswith(PICKS)})

    def _own_layer(self, raw: Mapping[str, np.ndarray]) -> MtpLayer | None:
        """The multi-token prediction layer, which always stays in memory."""
        config, host = self.config, self.host
        roles = {role.removeprefix(MTP): tensor for role, tensor in self.tensors["outer"].items() if role.startswith(MTP)}
        if not roles:
            return None
        found = RoleSource(config, mtp_model_layer(config), roles, raw, host)

        def norm(role: str) -> Norm:
            return Norm(config.norm_kind, found.vector(role), None, config.norm_eps)

        own = WeightRecords(config, {mtp_model_layer(config): roles}, self.store, host, self.pager, None, None)
        return MtpLayer(norm(EMBED_NORM), norm(STATE_NORM), Linear(found.weight(JOIN)), own.layer(mtp_model_layer(config), raw, host),
                        norm(LAST_NORM) if LAST_NORM in roles else self.last_norm(raw))
