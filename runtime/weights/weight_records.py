"""Makes the weights of layers, and of what surrounds them, from raw checkpoint bytes."""

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
from .compressed_weights import (
    FINAL_MIX,
    HASH_TABLE,
    compressed_attention_weights,
    hash_routing,
    hyper_connection,
    layer_hyper_connections,
)
from .expert_weights import mixture_weights
from .index_weights import indexer_weights, query_scaling
from .latent_weights import mla_weights
from .ngram_table import NgramTable, check_numbering
from .rescale_weights import RESIDUAL_SCALE_ROLE, differential_lambda, residual_scale
from .role_source import RoleSource, build_norm
from .shared_block_weights import OUT_ROLE, block_of_layer, blocks_of, shared_blocks
from .state_weights import state_weights

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ...quant.compressed_attention_weights import GatedResidual, HyperConnection
    from ...quant.weight import SharedBlock
    from ..config import ModelConfig
    from .paged_experts import Paging
    from .streamed_weights import StreamedWeights

XIELU, XIELU_ROLES = "xielu", ("curve_above", "curve_below")  # a learned activation, and the roles of its parameters
PER_LAYER_INPUT_ROLES = ("input_gate", "input_out")
ALTUP_ROLES = ("stream_router", "predict", "correct")


@dataclass(frozen=True)
class MtpLayer:
    """The multi-token prediction layer, on the host."""

    embed_norm: Norm  # of the token's embedding
    state_norm: Norm  # of the last layer's hidden state
    eh_proj: Linear  # [D, 2D], joins both to the layer's input
    layer: LayerWeights
    norm: Norm  # before the model's head


@dataclass(frozen=True)
class PreHead:
    """The transform between the last norm and the head, on the host; its steps in order."""

    matrix: Linear  # [D, D]
    act: str
    norm: Norm


@dataclass(frozen=True)
class OuterWeights:
    """The weights outside the layers, on the host."""

    embed: Weight
    positions: Weight | None  # learned position embeddings
    norm: Norm  # after the last layer
    head: Linear
    per_layer_inputs: tuple[Weight | None, Linear, Norm] | None = None  # of all layers: table (None if there is none), projection, norm
    stream_inputs: tuple[Linear, ...] = ()  # make the other residual streams of the first (AltUp); empty: they are copies of it
    stream_outputs: tuple[Linear, ...] = ()  # ... and take part in merging them after the layers
    mtp: MtpLayer | None = None  # None: the model has none, or does not draft with it
    stream_merge: HyperConnection | GatedResidual | StreamMean | None = None  # merges the residual streams after the layers
    hash_routing: Mapping[int, np.ndarray] = field(default_factory=dict)  # by layer: the experts of every token id, [V, experts per token]
    pre_head: PreHead | None = None
    ngrams: Mapping[int, Weight] = field(default_factory=dict)  # by layer: the n-gram table, whose rows are read from disk

    @property
    def embeds_by_kernel(self) -> bool:
        """Whether embedding lookup is a kernel that reads its ids when it runs, so that a recorded pass may contain it."""
        return not self.embed.spec.is_raw and self.embed.fetch_rows is None and self.positions is None and self.per_layer_inputs is None


def xielu_params(source: RoleSource) -> XieluParams | None:
    """The parameters of a layer's activation, if it has learned ones; checkpoints store them before a softplus."""
    if source.config.hidden_act != XIELU:
        return None
    stored = source.config.activation_params[source.layer] if source.config.activation_params else map(source.scalar, XIELU_ROLES)
    alpha_p, alpha_n = (float(np.logaddexp(0.0, value)) for value in stored)
    return XieluParams(alpha_p, CURVE_SLOPE + alpha_n)


class WeightRecords:
    """Makes a model's weights from its tensors.

    tensors: by layer number, or "outer" outside the layers, and by role.
    host: the ops of the CPU.
    streamed, paging: of its matrices and of its experts, where those are not in memory; None if they are.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore, host: object,
                 pager: object, streamed: StreamedWeights | None, paging: Paging | None, adapters: LoadedAdapters = NO_ADAPTERS) -> None:
        self.config, self.tensors, self.store, self.host = config, tensors, store, host
        self.pager, self.streamed, self.paging, self.adapters = pager, streamed, paging, adapters
        self._blocks: dict[str, tuple[SharedBlock, ...]] = {}  # by backend

    def layer(self, key: int, raw: Mapping[str, np.ndarray], ops: object, place: Callable[[ModelTensor], object] | None = None,
              lut_tensors: Collection[str] = ()) -> LayerWeights:
        """The weights of a layer on the backend `ops`.

        raw: bytes by tensor name.
        place: returns a matrix that was copied to the backend separately.
        lut_tensors: names of tensors in lookup layout.
        """
        config, roles = self.config, self.tensors[key]
        source = RoleSource(config, key, roles, raw, ops, self.streamed, self.adapters, place, lut_tensors)
        linear, vector, norm = source.linear, source.vector, source.norm
        input_norm = norm("input_norm")
        if input_norm is None:
            input_norm = source.constant_norm(config.hidden_size, kind=config.norm_kind) if config.unweighted_norms else Norm("none")
        post_norm = norm("post_norm") or norm("mlp_norm") or input_norm
        if (multiplier := config.multiplier("post_norm")) != 1.0:
            post_norm = replace(post_norm, weight=source.put(source.values("post_norm") * np.float32(multiplier)))
        mixture = mixture_weights(source, post_norm, self.paging if ops is self.host else None)
        qk_norm = embedding_norm = None
        if config.qk_norm_unweighted and (config.ropes[key] or config.qk_norm_without_rope):
            qk_norm = source.constant_norm(config.kv_heads_of(key)[1])
        if config.embedding_norm and key == 0:
            embedding_norm = source.constant_norm(config.hidden_size)
        v_norm = source.constant_norm(config.kv_heads_of(key)[1]) if config.v_norm and "k" in roles else None
        attn_sub_norm = norm("attn_sub_norm")
        if config.differential_attention:
            attn_sub_norm = source.constant_norm(config.head_dim, 1 - share_of(key))
        per_layer_input = residual_scales = altup = cross_attention_gates = None
        if PER_LAYER_INPUT_ROLES[0] in roles:
            per_layer_input = PerLayerInput(*map(linear, PER_LAYER_INPUT_ROLES), norm("input_after"))
        if RESIDUAL_SCALE_ROLE in roles:
            residual_scales = tuple(residual_scale(source, branch) for branch in ("attn", "mlp"))
        if ALTUP_ROLES[0] in roles:
            altup = AltUp(config.residual_streams, norm("stream_norm"), *map(source.shaped, ALTUP_ROLES), vector("stream_scale"))
        if GATE_ROLES[0] in roles:
            cross_attention_gates = tuple(math.tanh(source.scalar(role)) for role in GATE_ROLES)
        return LayerWeights(
            **vars(mixture),
            input_norm=input_norm,
            q=linear("q"),
            k=linear("k"),
            v=linear("v"),
            q_norm=norm("q_norm") or qk_norm,
            k_norm=norm("k_norm") or qk_norm,
            o=linear("o"),
            post_norm=post_norm,
            gate=linear("gate"),
            up=linear("up"),
            down=linear("down"),
            v_norm=v_norm,
            sinks=vector("sinks"),
            attn_gate=source.gate("attn_gate"),
            attn_sub_norm=attn_sub_norm,
            query_scaling=query_scaling(source),
            alibi_channels=self._position_channels(ops) if config.alibi_slopes or config.dynamic_mask else None,
            dynamic_mask=(linear("dynamic_mask"), vector("dynamic_mask_rate")) if "dynamic_mask" in roles else None,
            differential_lambda=differential_lambda(source) if config.differential_attention else 0.0,
            mla=mla_weights(source),
            indexer=indexer_weights(source),
            compressed_attention=compressed_attention_weights(source),
            cross_attention_gates=cross_attention_gates,
            recurrent=state_weights(source),
            shared_block=block_of_layer(source, self.blocks(ops)) if OUT_ROLE in roles else None,
            ffn_sub_norm=norm("ffn_sub_norm"),
            xielu=xielu_params(source),
            bundles=self._bundles(source),
            o_norm=norm("o_norm"),
            down_norm=norm("down_norm"),
            entry_norm=norm("entry_norm") or embedding_norm,
            middle_norm=norm("middle_norm"),
            norm_gates=tuple(source.low_rank(f"{role}_in", f"{role}_out") for role in ("input_norm", "post_norm")),
            input_scale=residual_scale(source, "entry"),
            residual_scales=residual_scales,
            layer_scalar=source.scalar("layer_scale") if "layer_scale" in roles else None,
            low_rank=source.low_rank("low_in", "low_out", "low_norm"),
            per_layer_input=per_layer_input,
            altup=altup,
            gated_residuals=residual_weights.layer_gated_residuals(source) or layer_hyper_connections(source),
            ngrams=residual_weights.ngram_weights(source),
        )

    def _position_channels(self, ops: object) -> tuple[object, object | None]:
        """Constant channels in front of queries and keys, by head, that make scores depend on positions (`LayerWeights.alibi_channels`)."""
        config = self.config
        if config.dynamic_mask:
            ones = np.zeros((config.num_attention_heads, config.head_dim - config.projected_head_dim), np.float32)
            ones[:, 0] = 1 / config.attn_scale
            return ops.put(ones, "f32").reshape(ones.shape), None
        channels = alibi_channels(config.alibi_slopes, config.num_key_value_heads, config.attn_scale,
                                  config.head_dim - config.projected_head_dim)
        return tuple(ops.put(values, "f32") for values in channels)

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

    def _bundles(self, source: RoleSource) -> Bundles | None:
        if BUNDLES not in source.roles:
            return None
        tensor, ops = source.roles[BUNDLES], source.ops
        layout = layout_of(tensor, self.config, "gate" in source.roles)
        if ops is not self.host:
            bundles = ops.put(typed(source.raw[tensor.name], tensor.spec), tensor.spec.scheme).reshape(tensor.shape)
        elif tensor.name in source.raw:
            bundles = ResidentBundles(source.raw[tensor.name], layout.stride, tensor.shape[0])
        else:
            bundles = self.pager.layers[source.layer]
        biases = source.vector("up_bias") if layout.has_up else None, source.vector("down_bias")
        return Bundles(layout.scheme, layout.width, layout.has_up, bundles, *biases, source.vector(THRESHOLDS))

    def _outside(self, raw: Mapping[str, np.ndarray]) -> RoleSource:
        """The tensors outside the layers that stay in memory, on the host."""
        return RoleSource(self.config, "outer", self.tensors["outer"], raw, self.host)

    def last_norm(self, raw: Mapping[str, np.ndarray]) -> Norm:
        """The final norm, on the host."""
        config, source = self.config, self._outside(raw)
        if config.final_norm_kind == "none":
            return Norm("none")
        if config.unweighted_norms:
            return source.constant_norm(config.hidden_size, kind=config.norm_kind)
        eps = config.norm_eps * (2 * config.num_hidden_layers + 1) if config.depth_scaled_residual else None
        return build_norm(config, source.vector("norm"), source.vector("norm_bias"), config.final_norm_kind, eps)

    def before_head(self, raw: Mapping[str, np.ndarray]) -> PreHead | None:
        """The transform between the last norm and the head, if there is one."""
        source = self._outside(raw)
        if "head_in" not in source.roles:
            return None
        return PreHead(source.linear("head_in"), self.config.head_transform_act, source.norm("head_norm"))

    def head_bias(self, raw: Mapping[str, np.ndarray]) -> object | None:
        """The bias of the head, on the host."""
        return self._outside(raw).vector("head_bias")

    def outer(self, raw: Mapping[str, np.ndarray]) -> OuterWeights:
        """The weights outside the layers, from raw bytes by tensor name."""
        config, source = self.config, replace(self._outside(raw), streamed=self.streamed)
        roles, weight = source.roles, source.weight

        def fetched(role: str) -> bool:
            return self.streamed is not None and roles[role].name in self.streamed.parts.tables

        def table(role: str) -> Weight:
            return self.streamed.table(roles[role], self.store.place(roles[role].info), raw) if fetched(role) else weight(role)

        embed, per_layer_inputs = table("embed"), None
        head = weight("head") or (weight("embed") if fetched("embed") else embed)
        if config.num_shared_blocks:
            self.blocks(self.host, raw)  # so that layers need not read them from the store
        if "layer_proj" in roles:
            table_norm = Norm("rms", source.vector("layer_norm"), None, config.norm_eps)
            per_layer_inputs = table("layer_embed") if "layer_embed" in roles else None, Linear(weight("layer_proj")), table_norm

        def stream_matrices(name: str) -> tuple[Linear, ...]:
            names = (f"streams.{stream}.{name}" for stream in range(1, config.residual_streams))
            return tuple(Linear(weight(role)) for role in names if role in roles)

        return OuterWeights(
            embed=embed,
            positions=weight("positions"),
            norm=self.last_norm(raw),
            head=Linear(head, self.head_bias(raw)),
            per_layer_inputs=per_layer_inputs,
            stream_inputs=stream_matrices("enter"),
            stream_outputs=stream_matrices("leave"),
            mtp=self._mtp_layer(raw),
            stream_merge=self._stream_merge(source),
            hash_routing=self._hash_routing(source),
            pre_head=self.before_head(raw),
            ngrams=self._ngrams(),
        )

    def _ngrams(self) -> dict[int, Weight]:
        ngrams = self.config.ngrams
        if ngrams is None:
            return {}
        check_numbering(self.config, self.store)
        return {layer: NgramTable(self.tensors["outer"][role_of(layer)], self.store).weight for layer in ngrams.layers}

    def _stream_merge(self, source: RoleSource) -> HyperConnection | GatedResidual | StreamMean | None:
        if self.config.residual_gate_rank:
            return residual_weights.gated_residual(source, residual_weights.FINAL_MIX)
        if self.config.sinkhorn_iterations:
            return StreamMean(self.config.residual_streams)
        return hyper_connection(source, FINAL_MIX) if FINAL_MIX in source.roles else None

    def _hash_routing(self, source: RoleSource) -> dict[int, np.ndarray]:
        return hash_routing(self.config, {int(role.removeprefix(HASH_TABLE)): (tensor, source.values(role))
                                          for role, tensor in source.roles.items() if role.startswith(HASH_TABLE)})

    def _mtp_layer(self, raw: Mapping[str, np.ndarray]) -> MtpLayer | None:
        """The multi-token prediction layer, which always stays in memory."""
        config, host = self.config, self.host
        roles = {role.removeprefix(MTP): tensor for role, tensor in self.tensors["outer"].items() if role.startswith(MTP)}
        if not roles:
            return None
        source = RoleSource(config, mtp_model_layer(config), roles, raw, host)

        def norm(role: str) -> Norm:
            return Norm(config.norm_kind, source.vector(role), None, config.norm_eps)

        records = WeightRecords(config, {mtp_model_layer(config): roles}, self.store, host, self.pager, None, None)
        return MtpLayer(norm(EMBED_NORM), norm(STATE_NORM), Linear(source.weight(JOIN)), records.layer(mtp_model_layer(config), raw, host),
                        norm(LAST_NORM) if LAST_NORM in roles else self.last_norm(raw))
