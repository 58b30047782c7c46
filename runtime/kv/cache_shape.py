"""The shape of a KV cache and its size in bytes: the same arithmetic for the planner and for the cache itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ...kernels.layout import F16, PAGE, PageLayout
from ...quant.kv import PackedCodec, PackedFormat, RawCodec
from ..compressed_config import keys_nbytes
from .states import shape_of

if TYPE_CHECKING:
    from ...kernels.compressed_shape import CompressedShape
    from ...kernels.indexer_shape import IndexShape
    from ...kernels.state_shape import StateShape
    from ..config import ModelConfig


@dataclass(frozen=True)
class AttnSpec:
    """Attention of one layer, bound when the cache is built."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query at position p sees keys after p - window; None: all
    softcap: float | None = None
    index: IndexShape | None = None  # the indexer of sparse attention
    is_sparse: bool = False  # by this layer's selection, or that of the last layer with an `index`
    latent: bool = False  # keys double as values
    compressed: CompressedShape | None = None  # compressed keys, seen in addition to those within the window


@dataclass(frozen=True)
class SharedPages:
    """A layer without keys and values of its own, which attends to those of an earlier `layer` with the same heads, scale and window. Other
    fields as in `AttnSpec`."""

    layer: int
    index: IndexShape | None = None
    is_sparse: bool = False
    latent: bool = False
    compressed: CompressedShape | None = None


@dataclass(frozen=True)
class AttentionAndState:
    """A layer with attention and a recurrent state side by side."""

    attention: AttnSpec
    state: StateShape


@dataclass(frozen=True)
class NoCache:
    """A layer that caches nothing of the text: cross-attention to images only (`cross_attention_cache.py`), or none."""


LayerSpec = "AttnSpec | SharedPages | StateShape | AttentionAndState | NoCache"  # what a layer caches


def attention_specs(config: ModelConfig) -> list[AttnSpec]:
    """The attention of each layer that has its own keys and values."""
    indexer = config.indexer
    return [AttnSpec(config.query_heads_of(layer), kv_heads, head_dim, head_dim**-0.5 if config.attn_scale is None else config.attn_scale,
                     config.windows[layer], config.attn_logit_softcapping, indexer.shape_of(layer) if indexer else None,
                     indexer is not None and indexer.source_layers[layer] is not None, config.mla is not None,
                     config.compressed_attention.shapes[layer] if config.compressed_attention else None)
            for layer, (kv_heads, head_dim) in zip(config.attention_layers, config.cache_kv_heads, strict=True)]


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """What each layer caches."""
    paged = dict(zip(config.attention_layers, attention_specs(config), strict=True))
    specs: list[LayerSpec] = []
    for layer in range(config.num_hidden_layers):
        if layer in config.cross_attention_layers or layer in config.layers_without_attention:
            specs.append(NoCache())
        elif layer not in config.recurrent_layers:
            specs.append(paged.get(layer) or _shared_spec(config, layer))
        else:
            state = shape_of(config, layer)
            specs.append(AttentionAndState(paged[layer], state) if config.has_attention(layer) else state)
    return specs


def _shared_spec(config: ModelConfig, layer: int) -> SharedPages:
    indexer = config.indexer
    return SharedPages(config.kv_sources[layer], indexer.shape_of(layer) if indexer else None,
                       indexer is not None and indexer.source_layers[layer] is not None, config.mla is not None)


@dataclass(frozen=True)
class CacheShape:
    """The capacity of the cache in tokens. Tokens are stored on a grid of pages, where page -1 is the sinks."""

    ctx: int
    sink: int = 64
    window: int = 128  # the newest tokens, which stay exact
    chunk: int = 512  # the longest chunk of a prompt
    written: int | None = None  # how many generated tokens are kept; None: all

    @property
    def sinks(self) -> int:
        """Sinks, rounded up to 16, at most a page."""
        return min(PAGE, -(-self.sink // 16) * 16)

    def first_reader(self, by_token: bool = False) -> int:
        """The first position that reads a packed page. A query sees as packed the pages sealed before its own page began; a window that
        ends within a page keeps all of that page exact."""
        return self.sinks + PAGE + (self.window if by_token else -(-self.window // PAGE) * PAGE)

    @property
    def slots(self) -> int:
        """Open pages held at once: those of the sinks, the window, the chunk and generated tokens, and one at either end."""
        return 1 + -(-self.window // PAGE) + -(-self.chunk // PAGE) + -(-(self.written or 0) // PAGE) + 2

    @property
    def pages(self) -> int:
        """Pages of a full context, without the sinks."""
        return max(1, -(-(self.ctx - self.sinks) // PAGE))

    def start(self, page: int) -> int:
        """The first position of a page."""
        return self.sinks + PAGE * page if page >= 0 else 0

    def page(self, position: int) -> int:
        """The page of a position."""
        return (position - self.sinks) // PAGE if position >= self.sinks else -1

    def tokens_in(self, page: int, end: int) -> int:
        """How many of the tokens before `end` lie in a page, which holds at least one of them."""
        return min(end - self.start(page), PAGE if page >= 0 else self.sinks)

    def sealed_at(self, n: int) -> int:
        """Sealed pages once `n` tokens are committed."""
        return max(0, (n - self.window - self.sinks) // PAGE)


def index_nbytes(config: ModelConfig, kv: RawCodec | PackedFormat) -> tuple[int, ...]:
    """Bytes of index keys and compressed keys per page of tokens, by layer; 0 for layers without."""
    stored, layers = index_type(kv), range(config.num_hidden_layers)
    shapes = config.compressed_attention.shapes if config.compressed_attention else (None,) * len(layers)
    return tuple(keys_nbytes(shapes[layer], config.indexer and config.indexer.shape_of(layer), stored, PAGE) for layer in layers)


def index_type(kv: RawCodec | PackedFormat) -> int:
    """The type of index keys, which is that of exact tokens."""
    return kv.stored if isinstance(kv, RawCodec) else F16


def exact_parts(layout: PageLayout, shape: CacheShape) -> int:
    """The most parts of a layer's exact slots; the last slot, the sinks', has only as many as they need."""
    return (shape.slots - 1) * layout.parts + layout.parts_of(shape.sinks)


def page_sizes(codecs: Sequence[RawCodec | PackedCodec], layouts: Sequence[PageLayout]) -> list[int]:
    """Bytes of a sealed page, by layer; `layouts`: of exact tokens."""
    return [codec.layout(layout.kv_heads, layout.head_dim).layer_page_nbytes for codec, layout in zip(codecs, layouts, strict=True)]


def cache_nbytes(codecs: Sequence[RawCodec | PackedCodec], layouts: Sequence[PageLayout], shape: CacheShape) -> tuple[int, int]:
    """(maximum bytes of exact slots, bytes per page of the grid) over all layers: the planner's figures."""
    sealed = sum(page_sizes(codecs, layouts))
    fixed = sum(exact_nbytes(layout, shape) for layout in layouts)
    if not codecs or codecs[0].better is None:
        return fixed, sealed
    # The upgraded share takes more, rounded up to whole pages.
    upgrade_nbytes = sum(page_sizes([codec.better for codec in codecs], layouts)) - sealed
    return fixed + upgrade_nbytes, sealed + ceil(codecs[0].share * upgrade_nbytes)


def exact_nbytes(layout: PageLayout, shape: CacheShape) -> int:
    """Maximum bytes of a layer's exact slots."""
    return exact_parts(layout, shape) * layout.part_nbytes
