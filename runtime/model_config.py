"""`ModelConfig`: what a model is, whatever its checkpoint calls it. `config.py` reads one from a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.latent_shape import LatentShape, widest
from ..kernels.layout import capped_silu
from .compressed_config import CompressedAttentionConfig
from .config_rope import MAX_POSITIONS, RopeConfig
from .indexer_config import IndexerConfig
from .moe_config import MoEConfig
from .ngrams import NgramConfig

if TYPE_CHECKING:
    from ..kernels.state_shape import StateShape


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the runtime knows of a model. Fields are named as in config.json where it has them. A tuple "by layer" has one
    entry for every layer, or is empty where layers do not differ in it; a tuple of "layers" holds layer numbers."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # with `mla` that of what is cached, as `head_dim` is
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig | None, ...]  # by layer; None: no rotary positions (NoPE)
    windows: tuple[int | None, ...]  # by layer: a query at p sees keys later than p - window; None: full attention
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    # Queries, keys and values
    qkv_bias: bool = False
    o_bias: bool = False
    clip_qkv: float | None = None  # q, k and v are clipped to this magnitude, before rotation
    qk_norm: bool = False  # q and k are normed head by head
    qk_norm_full_width: bool = False  # ... all heads together
    qk_norm_per_head: bool = False  # ... with weights of each head's own
    qk_norm_unweighted: bool = False  # ... without a weight, in layers with rotary positions
    qk_norm_without_rope: bool = False  # ... and in the other layers too
    v_norm: bool = False  # values are normed head by head, without a weight
    layer_query_heads: tuple[int, ...] = ()  # by layer
    layer_kv_heads: tuple[tuple[int, int], ...] = ()  # by layer: key-value heads and their size
    kv_sources: tuple[int, ...] = ()  # by layer: the layer whose keys and values it attends to, which may be itself
    k_eq_v_layers: tuple[int, ...] = ()  # layers that make values of what keys are made of
    v_head_dim: int = 0  # width of a head's values where keys are wider, to which values are padded in the cache; 0: the same

    # Attention
    attn_scale: float | None = None  # multiplies scores; None: head_dim ** -0.5
    attn_logit_softcapping: float | None = None
    alibi_slopes: tuple[float, ...] = ()  # by query head (ALiBi); heads are then projected `v_head_dim` wide and padded to `head_dim`
    # (e, n): in layers without rotary positions queries are multiplied by (1 + (p + 1) / n) ** e at position p
    nope_query_scaling: tuple[float, int] | None = None
    query_position_scaling: bool = False  # queries are scaled by their position, with learned numbers of each head
    learned_rope_alpha: bool = False  # the checkpoint holds factors of the rotary frequencies
    output_gate: bool = False  # attention output is gated, by a matrix of its own
    output_gate_in_q: bool = False  # ... by a second half of every head of q
    output_gate_per_head: bool = False  # ... with one gate for all channels of a head
    output_gate_softplus: bool = False  # ... with a softplus in place of the sigmoid
    differential_attention: bool = False  # the difference of two halves of the heads; values are projected twice as wide as keys
    dynamic_mask: bool = False  # every key adds a bias of its own to scores, in one more channel of the heads
    bidirectional: bool = False  # tokens also see what follows them, with a window as far as what precedes them
    prefix_lm: bool = False  # in a prompt with images all tokens see each other; answer tokens see what precedes them
    answer_window: int | None = None  # an answer token sees the whole prompt and this many answer tokens, itself included; None: all
    cross_attention_layers: tuple[int, ...] = ()  # layers that attend to images alone
    layers_without_attention: tuple[int, ...] = ()  # ... and without a recurrent state, of families with attention

    # Multi-head latent attention, sparse and compressed attention
    mla: LatentShape | None = None
    layer_mla: tuple[LatentShape, ...] = ()  # by layer, where they differ
    mla_norm_eps: float | None = None  # of the latents' norms, where it is not the family's default
    indexer: IndexerConfig | None = None  # selects the tokens that attention sees
    compressed_attention: CompressedAttentionConfig | None = None  # beyond a window, layers see keys made of several tokens

    # Recurrent layers (linear attention, state spaces, convolutions)
    recurrent: StateShape | None = None  # the state that `recurrent_layers` keep in place of keys and values
    recurrent_layers: tuple[int, ...] = ()
    recurrent_norm_eps: float | None = None  # of the norm behind the state, where it differs from `norm_eps`
    parallel_hybrid: bool = False  # recurrent layers have attention too, over the same input
    hybrid_layers: tuple[int, ...] = ()  # recurrent layers preceded by one of the shared blocks (Zamba 2)
    num_shared_blocks: int = 0  # blocks of attention and MLP that `hybrid_layers` use in turn, over the stream and the embedding
    shared_attention_lora: bool = False  # such a layer has low-rank branches beside the block's q, k and v too

    # MLP and experts
    mlp_bias: bool = False
    layer_intermediate_sizes: tuple[int, ...] = ()  # by layer
    layers_without_mlp: tuple[int, ...] = ()
    activation_params: tuple[tuple[float, float], ...] = ()  # by layer, where the config has them and no tensor does (xIELU)
    gate_cutoffs: tuple[float | None, ...] = ()  # by layer: gates count from this many deviations above their mean; None: all count
    gate_limits: tuple[tuple[float | None, float | None], ...] = ()  # by layer: limit of gates of experts, of the shared one; None: none
    moe: MoEConfig | None = None
    expert_format: str | None = None  # the low-bit format in which the checkpoint holds its experts; None: that of everything else
    router_mlp_dim: int = 0  # width of a router that is a small MLP and adds the previous layer's; 0: it is one matrix
    per_token_scale: bool = False  # ternary matrices read activations rounded with one scale per token, as trained (BitNet)

    # Norms, and how branches meet the residual stream
    norm_kind: str = "rms"
    norm_bias: bool = False  # norms have biases, in a family where some models go without
    unweighted_norms: bool = False  # no norm has a weight
    post_norm_eps: float | None = None  # of norms behind attention and MLP, where it differs from `norm_eps`
    final_norm_kind: str | None = None  # of the norm before the head, where it differs from `norm_kind`
    gated_norm_rank: int = 0  # width of the low-rank gates of each norm's output; 0: none
    branch_post_norms: bool = False  # a branch's output is normed before it is added, in families with both kinds of blocks
    parallel_block: bool = False  # attention and MLP both read the layer's input, in families with both kinds of blocks
    parallel_block_norms: bool = False  # ... each through a norm of its own
    residual_multiplier: float = 1.0
    depth_scaled_residual: bool = False  # branch n, from 2 on, is added as 1/sqrt(n) of the stream: the norms' epsilons grow by n instead
    layer_scalars: bool = False  # a layer's output is multiplied by a number of its own
    multipliers: tuple[tuple[str, float], ...] = ()  # (role, factor) of a tensor's values, or of a matrix' output
    low_rank_dim: int = 0  # width of low-rank branches beside a layer's input (LAuReL) or a shared block; 0: none
    residual_streams: int = 0  # streams that a token has side by side; 0: one
    residual_gate_rank: int = 0  # width of the low-rank gates by which branches read the streams, channel by channel; 0: none
    sinkhorn_iterations: int = 0  # streams are mixed by a matrix normalized this often by rows and columns; 0: they are not
    sinkhorn_eps: float = 0.0  # is added to the weights of streams, and to the sums of those normalizations
    unmixed_streams: bool = False  # branches read and write the streams with a token's own numbers, without mixing them
    loops: int = 1  # passes through the stored layers, each with a KV cache of its own; `num_hidden_layers` counts all of them

    # Embeddings and head
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False  # embeddings are normed, without a weight
    position_offset: int | None = None  # row of the learned positions' table for position 0; None: no such table
    extra_embeddings: int = 0  # rows of the embedding behind those of the vocabulary, for tokens that are never generated
    extra_embeddings_in_text: bool = False  # ... and that a prompt may hold as they are, where they do not stand for rows of images
    per_layer_input_dim: int = 0  # width of the per-layer inputs (Gemma 3n); 0: none
    per_layer_input_vocab: int = 0  # rows of their table; 0: no table
    per_layer_input_multiplier: float = 1.0
    ngrams: NgramConfig | None = None
    head_bias: bool = False
    head_transform_act: str | None = None  # before the head come a matrix, this activation and a norm
    head_transform_bias: bool = False  # ... and that matrix has a bias
    final_logit_softcapping: float | None = None
    logits_scaling: float = 1.0
    mtp_layers: int = 0  # multi-token prediction layers behind the last one; one of them can draft

    # Encoders, limits
    pooled_dim: int = 0  # width of the projection of pooled states; 0: none
    pooled_inner_dim: int = 0  # hidden width of that projection; 0: it is one matrix
    listwise_reranker: bool = False  # embeds a query and documents from one text, to compare them
    max_supported_tokens: int | None = None  # beyond this length the model would compute something that is not implemented
    warnings: tuple[str, ...] = ()

    @property
    def prompt_vocab_size(self) -> int:
        """A prompt may hold the token ids below this."""
        return self.vocab_size + (self.extra_embeddings if self.extra_embeddings_in_text else 0)

    @property
    def stored_layers(self) -> int:
        """How many layers have tensors of their own."""
        return self.num_hidden_layers // self.loops

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that have keys and values of their own."""
        return tuple(layer for layer in range(self.num_hidden_layers)
                     if self.has_attention(layer) and (not self.kv_sources or self.kv_sources[layer] == layer))

    @property
    def last_stateful_layer(self) -> int:
        """The last layer that keeps something of the text for itself; what those behind it do matters to the next token alone."""
        return max((*self.attention_layers, *self.recurrent_layers), default=self.num_hidden_layers)

    @property
    def sinkhorn(self) -> tuple[int, float]:
        """By how many rounds of dividing streams are mixed, and what is added to what is divided by."""
        return (self.sinkhorn_iterations,
                self.sinkhorn_eps) if self.compressed_attention is None else (self.compressed_attention.sinkhorn_iterations,
                                                                              self.compressed_attention.sinkhorn_eps)

    @property
    def has_hyper_connections(self) -> bool:
        """Whether a token says by numbers of its own how branches meet its streams, in a model without keys of several tokens."""
        return self.sinkhorn_iterations > 0 or self.unmixed_streams

    @property
    def interleaves_shared_kv(self) -> bool:
        """Whether a layer with keys and values of its own comes behind one that attends to others'."""
        return any(source != layer for layer, source in enumerate(self.kv_sources[: max(self.attention_layers, default=0)]))

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention to the text."""
        own = self.parallel_hybrid or layer not in self.recurrent_layers or layer in self.hybrid_layers
        return own and layer not in (*self.cross_attention_layers, *self.layers_without_attention)

    def kv_heads_of(self, layer: int) -> tuple[int, int]:
        """Key-value heads of a layer, and their size, which is that of its query heads."""
        return self.layer_kv_heads[layer] if self.layer_kv_heads else (self.num_key_value_heads, self.head_dim)

    def mla_of(self, layer: int) -> LatentShape | None:
        """The widths of a layer's latent attention."""
        return self.layer_mla[layer] if self.layer_mla else self.mla

    @property
    def widest_mla(self) -> LatentShape | None:
        """What has room for the latent attention of all layers."""
        return widest(self.layer_mla) if self.layer_mla else self.mla

    def query_heads_of(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.layer_query_heads[layer] if self.layer_query_heads else self.num_attention_heads

    def intermediate_size_of(self, layer: int) -> int:
        """The width inside a layer's MLP."""
        return self.layer_intermediate_sizes[layer] if self.layer_intermediate_sizes else self.intermediate_size

    def expert_act(self, layer: int, shared: bool = False) -> str:
        """The activation of a layer's experts, or of the one that every token visits."""
        bound = self.gate_limits[layer][shared] if self.gate_limits else None
        return self.hidden_act if bound is None else capped_silu(bound)

    def gate_cutoff_of(self, layer: int) -> float | None:
        """How many deviations beyond their mean a layer's gates have to be."""
        return self.gate_cutoffs[layer] if self.gate_cutoffs else None

    def multiplier(self, role: str) -> float:
        """What of a role is multiplied by."""
        return dict(self.multipliers).get(role, 1.0)

    @property
    def projected_head_dim(self) -> int:
        """How wide the head of a query or key is made."""
        return self.v_head_dim if self.alibi_slopes or self.differential_attention or self.dynamic_mask else self.head_dim

    @property
    def cache_kv_heads(self) -> tuple[tuple[int, int], ...]:
        """`kv_heads_of` the `attention_layers`."""
        return tuple(map(self.kv_heads_of, self.attention_layers))

    @property
    def is_generative(self) -> bool:
        """Whether the model goes on with a text."""
        return not (self.bidirectional or self.listwise_reranker)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary positions of the layers that see furthest."""
        return next((rope for rope, window in sorted(zip(self.ropes, self.windows), key=lambda each: each[1] is not None) if rope), None)

    @property
    def rotary_head_dim(self) -> int:
        """The width of what rotary positions turn all or a share of: a head, or the part of one that latent attention sets apart."""
        return self.projected_head_dim if self.mla is None else self.mla.rope

    @property
    def widest_intermediate(self) -> int:
        """The width inside the widest MLP, or between the last norm and the head."""
        own = self.moe
        return max(self.intermediate_size, self.hidden_size if self.head_transform_act else 0, own.widest_expert if own else 0,
                   own.shared_expert_dim or 0 if own else 0, self.per_layer_input_dim, self.router_mlp_dim, *self.layer_intermediate_sizes)

    @property
    def context_length(self) -> int:
        """Tokens the model is said to handle: yarn's extension counts where max_position_embeddings was left as it was. One that is more
        than the original length says it itself, though yarn may reach beyond. At most `most_tokens`."""
        found = self.max_position_embeddings
        if self.rope is not None and self.rope.kind == "yarn" and found <= self.rope.params["original_max_position_embeddings"]:
            extended = self.rope.params["original_max_position_embeddings"] * self.rope.params["factor"]
            found = max(found, int(min(extended, MAX_POSITIONS)))
        return found if self.max_supported_tokens is None else min(found, self.max_supported_tokens)
