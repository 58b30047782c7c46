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
        Latent,
        Linear,
        LowRank,
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
    """A layer's parameters on one backend. Biases sit in their `Linear`; `q_norm` and `k_norm` are over head_dim, or over all heads.

    A norm of kind none stands for an input_norm that the family lacks, post_norm is the one that the MLP reads. `gate` None: the MLP has
    none. A layer with experts has neither gate, up nor down. `attn_sub_norm`, `ffn_sub_norm`: of what goes into o and down. `sinks`:
    float32 [H]; `correction`: [E]. `bundles` take the place of down, and with a gate of up; `state` that of q, k, v and o, `latent` that of
    q, k and v. `v_norm`: over head_dim, of values; `scale`: a number that multiplies what leaves the layer; `curve`: an activation with
    numbers of the layer's own; `fronts`: what stands in front of queries [H, F] and keys [KVH, F] whose scores grow with a
    place; `entry_norm`: of what enters the first layer, or
    each, in its place, as `middle_norm` is of what lies between the branches. `index`: what chooses the tokens that are seen. `wide`:
    attention with keys of several tokens, in the place of q, and what mixes streams. `shares`: of a layer that attends to pictures, what
    its attention and its MLP are multiplied by. `around`: how attention, or a state, and the MLP meet the streams of a token; `ngrams`:
    what is made of rows of n-grams. `grows`: scales and offsets [H] by which queries grow with their place. `entered`: what enters the
    first layer, and `rescales` how the stream meets both branches, where channels are multiplied and moved; `path`: what stands before the
    router. `difference`: how much of what the second half of the heads attends to is taken from what the first does. `mark`: what makes
    the number of a key of its value, and a rate for each head. `norm_gates`: what says, of what input_norm and what post_norm gives,
    how much of each channel is read; None for one that has no such gates. `seen`: router, experts and correction of rows of pictures, where
    words have others. `between`: what makes of a token the numbers that experts read, and widens what they give.
    """

    input_norm: Norm
    q: Linear | None
    k: Linear | None
    v: Linear | None
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear | None
    post_norm: Norm
    gate: Linear | None
    up: Linear | None
    down: Linear | None
    o_norm: Norm | None = None
    down_norm: Norm | None = None
    sinks: object | None = None
    router: Linear | None = None
    experts: tuple[Expert, ...] = ()
    correction_bias: object | None = None
    shared_expert: SharedExpert | None = None
    bundles: Bundles | None = None
    recurrent: StateWeights | None = None
    mla: Latent | None = None
    v_norm: Norm | None = None
    layer_scalar: float | None = None
    xielu: XieluParams | None = None
    per_layer_input: PerLayerInput | None = None
    parallel_experts: ParallelExperts | None = None
    attn_gate: Linear | None = None
    altup: AltUp | None = None
    low_rank: LowRank | None = None
    attn_sub_norm: Norm | None = None
    ffn_sub_norm: Norm | None = None
    shared_block: SharedBlockUse | None = None
    alibi_channels: tuple[object, object] | None = None
    entry_norm: Norm | None = None
    middle_norm: Norm | None = None
    indexer: Indexer | None = None
    compressed_attention: CompressedAttention | None = None
    cross_attention_gates: tuple[float, float] | None = None
    gated_residuals: tuple[GatedResidual, GatedResidual] | None = None
    ngrams: NgramWeights | None = None
    query_scaling: tuple[object, object] | None = None
    input_scale: ResidualScale | None = None
    residual_scales: tuple[ResidualScale, ResidualScale] | None = None
    router_mlp: RouterMlp | None = None
    differential_lambda: float = 0.0
    dynamic_mask: tuple[Linear, object] | None = None
    norm_gates: tuple[LowRank | None, LowRank | None] = (None, None)
    vision_experts: tuple[Linear, tuple[Expert, ...], object | None] | None = None
    latent_projections: LowRank | None = None


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

    def see(self, name: str) -> Callable[[object], None]:
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
