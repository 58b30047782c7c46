"""A layer on one backend: its weights, and everything else that a family's block gets beside its input rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ..quant.compressed_attention_weights import CompressedAttention, GatedResidual
    from ..quant.recurrent_weights import NgramWeights
    from ..quant.weight import (
        AltUp,
        Bundles,
        Expert,
        Indexer,
        Linear,
        LowRank,
        MlaWeights,
        Norm,
        ParallelExperts,
        PerLayerInput,
        ResidualScale,
        RouterMlp,
        SharedBlockUse,
        SharedExpert,
        XieluParams,
    )
    from .block_ops import BlockOps
    from .cache import LayerCache
    from .config import ModelConfig
    from .kv.cross_attention_cache import CrossAttentionLayer
    from .kv.states import LayerStates, ShiftedStates
    from .rope import RopeTable
    from .weights.state_weights import StateWeights


@dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters on one backend; None for what the layer does not have. Biases sit in their `Linear`. H query heads, KVH
    key-value heads, E experts, D the model's width."""

    input_norm: Norm  # of kind none where the family has no such norm
    q: Linear | None
    k: Linear | None
    v: Linear | None
    q_norm: Norm | None  # over head_dim, or over all heads
    k_norm: Norm | None
    o: Linear | None
    post_norm: Norm  # what the MLP reads
    gate: Linear | None  # None: the MLP has no gate. A layer with experts has neither gate, up nor down
    up: Linear | None
    down: Linear | None

    # Attention
    v_norm: Norm | None = None  # over head_dim
    sinks: object | None = None  # float32 [H]
    attn_gate: Linear | None = None
    attn_sub_norm: Norm | None = None  # of the input of `o`
    query_scaling: tuple[object, object] | None = None  # scales and offsets [H] of queries by their position
    alibi_channels: tuple[object, object] | None = None  # constant channels in front of queries [H, F] and keys [KVH, F]
    dynamic_mask: tuple[Linear, object] | None = None  # makes a key's bias from its value; a rate for each head
    differential_lambda: float = 0.0  # share of the second half of the heads that is subtracted from the first
    mla: MlaWeights | None = None  # in place of q, k and v
    indexer: Indexer | None = None
    compressed_attention: CompressedAttention | None = None  # in place of q; also mixes the residual streams
    cross_attention_gates: tuple[float, float] | None = None  # of attention to images, and of that layer's MLP
    recurrent: StateWeights | None = None  # in place of q, k, v and o
    shared_block: SharedBlockUse | None = None

    # MLP and experts
    ffn_sub_norm: Norm | None = None  # of the input of `down`
    xielu: XieluParams | None = None
    bundles: Bundles | None = None  # in place of down, and with a gate of up
    router: Linear | None = None
    router_mlp: RouterMlp | None = None  # precedes the router
    correction_bias: object | None = None  # [E]
    experts: tuple[Expert, ...] = ()
    shared_expert: SharedExpert | None = None
    parallel_experts: ParallelExperts | None = None  # experts beside an MLP
    latent_projections: LowRank | None = None  # to the width that experts read, and back
    vision_experts: tuple[Linear, tuple[Expert, ...], object | None] | None = None  # router, experts and correction of image rows

    # Norms and the residual stream
    o_norm: Norm | None = None
    down_norm: Norm | None = None
    entry_norm: Norm | None = None  # replaces the stream that enters the layer by its norm
    middle_norm: Norm | None = None  # ... the stream between the two branches
    norm_gates: tuple[LowRank | None, LowRank | None] = (None, None)  # of the outputs of input_norm and post_norm, channel by channel
    input_scale: ResidualScale | None = None  # of the first layer's input
    residual_scales: tuple[ResidualScale, ResidualScale] | None = None  # how the stream takes in both branches
    layer_scalar: float | None = None  # multiplies the layer's output
    low_rank: LowRank | None = None
    per_layer_input: PerLayerInput | None = None
    altup: AltUp | None = None
    gated_residuals: tuple[GatedResidual, GatedResidual] | None = None  # how attention (or a state) and the MLP read and write the streams
    ngrams: NgramWeights | None = None


Tap = Callable[[str, int, object], None]


def no_tap(name: str, layer: int, value: object) -> None:
    """The tap of a run that records nothing."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a block runs with: backend, weights, cache or state, positions and rotary table; `watch` taps intermediate values."""

    ops: BlockOps
    w: LayerWeights
    kv: LayerCache | LayerStates | ShiftedStates | CrossAttentionLayer
    positions: np.ndarray
    rope: RopeTable | None
    config: ModelConfig
    number: int
    watch: Tap = no_tap

    def tap(self, name: str, value: object) -> None:
        self.watch(name, self.number, value)

    def tap_heads(self, q: object, k: object, v: object) -> None:
        for name, value in (("q", q), ("k", k), ("v", v)):
            self.watch(name, self.number, value)

    def observer(self, name: str) -> Callable[[object], None]:
        """A tap of this name, for ops that produce the value."""
        return partial(self.watch, name, self.number)


Block = Callable[..., object]  # x, where it runs, and what the family's layers are given beside
NARROWING: set[Block] = set()


def narrowing(block: Block) -> Block:
    """Mark a block that continues with as many tokens as attention returned: only the last ones, if no others matter."""
    NARROWING.add(block)
    return block


def last_of(rows: object, count: int) -> object:
    """The last `count` of rows [T, N]; the array itself if it has no more."""
    return rows if len(rows) == count else rows[-count:]
