"""`ModelConfig`: what a model is, whatever its checkpoint calls it. `config.py` reads one from a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.latent_shape import LatentShape, widest
from ..kernels.layout import capped_silu
from .compressed_config import Compressed
from .config_rope import MAX_POSITIONS, RopeConfig
from .indexer_config import Indexed
from .moe_config import Mixture
from .ngrams import Ngrams

if TYPE_CHECKING:
    from ..kernels.state_shape import StateShape


@dataclass(frozen=True)
class ModelConfig:
    """Names as in config.json. Per layer: `ropes` (None: no rotary positions) and `windows` (None is full attention, else a query at p
    sees keys later than p - window).

    `qk_norm`: q and k are normed head by head, with `qk_norm_whole` all heads together, with `qk_norm_each` by weights of each head's own.
    `attn_scale` multiplies scores, None is head_dim ** -0.5. `experts_stored`: the low-bit format in which the checkpoint holds its
    experts, None for that of all else. `position_offset`: the row of the learned positions' table that position 0 has, None for no such
    table. `mtp_layers`: layers behind the last, for multi-token prediction, of which drafts need one. `state`: what `state_layers`
    remember a text in, in the place of keys and values. `gated_queries`: in each head of q a gate of what it attends to stands behind the
    query. `latent`: the widths of latent attention; num_key_value_heads and head_dim are then those of what is cached. `layer_heads`: by
    layer how many key-value heads there are and of which size, where layers differ; `layer_queries`: how many query heads. `kv_sources`:
    by layer whose keys and values it attends to, where some have none of their own. `layer_ffn`: by layer the width inside its MLP, where
    layers differ. `values_normed`: values are normed head by head, without a weight; `keys_as_values`: layers in which they are what keys
    are made of too. `input_width`: of what every layer is given of a token beside the stream, 0 for nothing, of which there is a table of
    `input_vocab` rows, 0 for none, times `input_multiplier`. `layers_scaled`: what leaves a layer is multiplied by a number of the
    layer's. `without_mlp`: layers that have none; `without_attention`: those of families with attention that have none of it, nor a state.
    `states_beside`: layers with a state have attention too, both of one input. `factors`: what a tensor's values, or what a matrix gives,
    is multiplied by, as pairs of a role and a number. `curves`: by layer the numbers of its activation as checkpoints have them, where no
    tensors hold them. `most_tokens`: of a text, beyond which the model computes what is not run here. `qk_norm_unit`: q and k are normed
    head by head without a weight, in layers that turn, with `qk_norm_still` in the others too. `gates_apart`: gates of what is attended to
    are made by a matrix of their own; `gates_softplus`: they are the softplus of what it makes, not the sigmoid; `gates_whole`: a head has
    one for all its channels. `branches_normed`: what a convolution, attention or an MLP gives is normed before it is added, of families
    with both kinds of blocks. `side_by_side`: of families with both kinds of blocks, attention and MLP read what comes into the layer.
    `norms_apart`: where they do, each reads a norm of its own. `norms_unit`: no norm has a weight. `clip_qkv`: beyond which q, k and v are
    cut off, before they are turned. `head_bias`: the head has one. `state_norm_eps`: of the norm behind a state, where it is not that of
    the others. `streams`: of how many a token has side by side each layer works on one, 0 for one as it is; `low_rank`: the width inside a
    branch of what a layer reads, 0 for none; `cuts`: by layer how many deviations beyond their mean the gates of its MLP have to be, None
    for all, where any have to. `one_scale`: ternary matrices read activations that are rounded by one scale a token, as they were trained
    (BitNet). `attends_beside`: the layers of those with a state that have attention too, where not all or none have; in front of the state
    they have one of `shared_blocks` blocks of attention and an MLP in turn, which read an embedding beside the stream, the second of two;
    with `attention_branches` what a layer adds to one is beside q, k and v too. `value_dim`: how wide a head's values are, where narrower
    than its keys, as wide as which they are cached. `slopes`: of each query head, by which a score grows with the place of its key
    (ALiBi); then heads are made as wide as `value_dim`, and head_dim is more. `indexed`: how tokens choose what they see. `both_ways`:
    they see what comes behind them too, with a window as far as before them. `embedding_normed`: an embedding goes through a norm without
    a weight; `last_norm`: the kind of the one before the head, and `behind_eps` the epsilon of those behind attention and MLP, where these
    are not the others'. `gate_bounds`: by layer how far gates of experts, and those of what every token visits, go, None for no bound.
    `compressed`: beyond a window layers see keys of several tokens, and streams are mixed by numbers of a token's own. `head_act`: between
    the last norm and the head are a matrix, with `head_in_bias` of a bias, this activation and a norm; `norms_biased`: norms of a family
    that may go without have biases. `prefixed`: in a prompt with pictures all tokens see each other, those of the answer what is before
    them. `cross_layers`: those that attend to pictures alone; `words_beside`: rows of the embedding behind those of the vocabulary, of
    words that are never written. `vector_width`: of what a matrix makes of a state that is pooled, 0 where there is none; `vector_inner`:
    how many numbers another makes before it, 0 for none. `ranks_lists`: such vectors are made of documents and a query in one text, to be
    compared. `written_window`: a token of an answer sees the whole prompt and so many of those that were written, itself among them; None
    for all. `mix_rank`: by way of so many numbers streams say, channel by channel, what a branch reads of them, 0 where they do not;
    `ngrams`: layers that are given rows of n-grams. `layer_latents`: by layer the widths of latent attention, where layers differ.
    `queries_grow`: those of each head by numbers of its own with their place; `frequencies_learned`: those of rotary positions are times
    numbers that a checkpoint holds. `latent_eps`: of norms of latents, where it is not that of most families. `mix_rounds`: where streams
    are mixed by numbers of a token's own in a model without keys of several tokens, how often what mixes them is divided by its rows and
    columns, 0 where they are not; and `mix_least`, which is added to what is divided by; what leaves them is their mean. `router_rank`:
    how many numbers a router begins with, which goes through a small network and adds those of the layer before, 0 where it is one matrix.
    `differs`: attention is the difference of that of two halves of the heads; values are twice as wide as keys then, which is `head_dim`,
    and `value_dim` how wide heads are made. `keys_marked`: every key adds a number of its own to scores, and heads are wider in attention
    by a channel for it, as with slopes. `norms_gated`: what norms give says by way of so many numbers how much of each channel is read, 0
    where it does not; queries of latent attention, and gates of what is attended to, are then made of their latent twice, normed and as it
    is. `streams_kept`: streams are read and written by numbers of a token's own, to which `mix_least` is added, and not mixed with one
    another. `loops`: how often a token goes through the layers that are stored, each time with a cache of its own: all that is said by
    layer, and `num_hidden_layers`, counts them as often.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norm_kind: str = "rms"
    attn_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    position_offset: int | None = None
    mtp_layers: int = 0
    mixture: Mixture | None = None
    experts_stored: str | None = None
    state: StateShape | None = None
    state_layers: tuple[int, ...] = ()
    gated_queries: bool = False
    latent: LatentShape | None = None
    layer_heads: tuple[tuple[int, int], ...] = ()
    layer_queries: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    layer_ffn: tuple[int, ...] = ()
    values_normed: bool = False
    keys_as_values: tuple[int, ...] = ()
    input_width: int = 0
    input_vocab: int = 0
    input_multiplier: float = 1.0
    layers_scaled: bool = False
    without_mlp: tuple[int, ...] = ()
    without_attention: tuple[int, ...] = ()
    states_beside: bool = False
    factors: tuple[tuple[str, float], ...] = ()
    qk_norm_each: bool = False
    curves: tuple[tuple[float, float], ...] = ()
    most_tokens: int | None = None
    qk_norm_unit: bool = False
    gates_apart: bool = False
    gates_softplus: bool = False
    gates_whole: bool = False
    branches_normed: bool = False
    side_by_side: bool = False
    norms_apart: bool = False
    norms_unit: bool = False
    clip_qkv: float | None = None
    head_bias: bool = False
    state_norm_eps: float | None = None
    streams: int = 0
    low_rank: int = 0
    cuts: tuple[float | None, ...] = ()
    one_scale: bool = False
    attends_beside: tuple[int, ...] = ()
    shared_blocks: int = 0
    attention_branches: bool = False
    value_dim: int = 0
    slopes: tuple[float, ...] = ()
    indexed: Indexed | None = None
    both_ways: bool = False
    embedding_normed: bool = False
    last_norm: str | None = None
    behind_eps: float | None = None
    qk_norm_still: bool = False
    gate_bounds: tuple[tuple[float | None, float | None], ...] = ()
    compressed: Compressed | None = None
    head_act: str | None = None
    head_in_bias: bool = False
    norms_biased: bool = False
    prefixed: bool = False
    cross_layers: tuple[int, ...] = ()
    words_beside: int = 0
    vector_width: int = 0
    vector_inner: int = 0
    ranks_lists: bool = False
    written_window: int | None = None
    mix_rank: int = 0
    ngrams: Ngrams | None = None
    layer_latents: tuple[LatentShape, ...] = ()
    queries_grow: bool = False
    frequencies_learned: bool = False
    latent_eps: float | None = None
    mix_rounds: int = 0
    mix_least: float = 0.0
    router_rank: int = 0
    differs: bool = False
    keys_marked: bool = False
    norms_gated: int = 0
    streams_kept: bool = False
    loops: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def stored_layers(self) -> int:
        """How many layers have tensors of their own."""
        return self.num_hidden_layers // self.loops

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that have keys and values of their own."""
        return tuple(layer for layer in range(self.num_hidden_layers)
                     if self.attends(layer) and (not self.kv_sources or self.kv_sources[layer] == layer))

    @property
    def last_to_keep(self) -> int:
        """The last layer that keeps something of the text for itself; what those behind it do matters to the next token alone."""
        return max((*self.attention_layers, *self.state_layers), default=self.num_hidden_layers)

    @property
    def mixes(self) -> tuple[int, float]:
        """By how many rounds of dividing streams are mixed, and what is added to what is divided by."""
        return (self.mix_rounds, self.mix_least) if self.compressed is None else (self.compressed.rounds, self.compressed.least)

    @property
    def says_mixes(self) -> bool:
        """Whether a token says by numbers of its own how branches meet its streams, in a model without keys of several tokens."""
        return self.mix_rounds > 0 or self.streams_kept

    @property
    def shares_by_turns(self) -> bool:
        """Whether a layer with keys and values of its own comes behind one that attends to others'."""
        return any(source != layer for layer, source in enumerate(self.kv_sources[: max(self.attention_layers, default=0)]))

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention to the text."""
        own = self.states_beside or layer not in self.state_layers or layer in self.attends_beside
        return own and layer not in (*self.cross_layers, *self.without_attention)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Key-value heads of a layer, and their size, which is that of its query heads."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_key_value_heads, self.head_dim)

    def latent_of(self, layer: int) -> LatentShape | None:
        """The widths of a layer's latent attention."""
        return self.layer_latents[layer] if self.layer_latents else self.latent

    @property
    def widest_latent(self) -> LatentShape | None:
        """What has room for the latent attention of all layers."""
        return widest(self.layer_latents) if self.layer_latents else self.latent

    def queries_of(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.layer_queries[layer] if self.layer_queries else self.num_attention_heads

    def ffn_of(self, layer: int) -> int:
        """The width inside a layer's MLP."""
        return self.layer_ffn[layer] if self.layer_ffn else self.intermediate_size

    def act_of(self, layer: int, shared: bool = False) -> str:
        """The activation of a layer's experts, or of the one that every token visits."""
        bound = self.gate_bounds[layer][shared] if self.gate_bounds else None
        return self.hidden_act if bound is None else capped_silu(bound)

    def cut_of(self, layer: int) -> float | None:
        """How many deviations beyond their mean a layer's gates have to be."""
        return self.cuts[layer] if self.cuts else None

    def factor(self, role: str) -> float:
        """What of a role is multiplied by."""
        return dict(self.factors).get(role, 1.0)

    @property
    def made_dim(self) -> int:
        """How wide the head of a query or key is made."""
        return self.value_dim if self.slopes or self.differs or self.keys_marked else self.head_dim

    @property
    def narrow(self) -> int:
        """How wide the head of a value is made where attention takes a wider one, else 0."""
        return self.value_dim

    @property
    def cache_heads(self) -> tuple[tuple[int, int], ...]:
        """`heads_of` the `attention_layers`."""
        return tuple(map(self.heads_of, self.attention_layers))

    @property
    def writes(self) -> bool:
        """Whether the model goes on with a text."""
        return not (self.both_ways or self.ranks_lists)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary positions of the layers that see furthest."""
        return next((rope for rope, window in sorted(zip(self.ropes, self.windows), key=lambda each: each[1] is not None) if rope), None)

    @property
    def rotary_width(self) -> int:
        """The width of what rotary positions turn all or a share of: a head, or the part of one that latent attention sets apart."""
        return self.made_dim if self.latent is None else self.latent.rope

    @property
    def widest(self) -> int:
        """The width inside the widest MLP, or between the last norm and the head."""
        own = self.mixture
        return max(self.intermediate_size, self.hidden_size if self.head_act else 0, own.widest if own else 0,
                   own.shared_width or 0 if own else 0, self.input_width, self.router_rank, *self.layer_ffn)

    @property
    def context_length(self) -> int:
        """Tokens the model is said to handle: yarn's extension counts where max_position_embeddings was left as it was. One that is more
        than the original length says it itself, though yarn may reach beyond. At most `most_tokens`."""
        found = self.max_position_embeddings
        if self.rope is not None and self.rope.kind == "yarn" and found <= self.rope.params["original_max_position_embeddings"]:
            extended = self.rope.params["original_max_position_embeddings"] * self.rope.params["factor"]
            found = max(found, int(min(extended, MAX_POSITIONS)))
        return found if self.most_tokens is None else min(found, self.most_tokens)
