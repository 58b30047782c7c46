"""Building a KV cache: memory for pages and states on each layer's backend, with sealing and page selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.memory import anonymous
from ...offload.page_pool import DiskTier, PagePool
from ...quant.kv import PackedCodec, PackedFormat, RawCodec
from ..cache import KVCache
from ..policy import open_policy
from .attention_probes import AttentionProbes
from .cache_components import LayerPages, TokenSelection, layer_codecs, page_selector, sealers
from .cache_shape import AttentionAndState, AttnSpec, CacheShape, LayerSpec, NoCache, SharedPages, exact_nbytes, index_type, page_sizes
from .states import LayerStates, States, controls

if TYPE_CHECKING:
    from ...kernels.cpu.compressed import CompressedKeys
    from ...kernels.cpu.indexer import LayerIndex


def build_cache(backends: Sequence[object], specs: Sequence[LayerSpec], kv: RawCodec | PackedFormat, shape: CacheShape,
                codecs: Sequence[RawCodec | PackedCodec] | None = None, disk: DiskTier | None = None) -> KVCache:
    """An empty cache with its memory.

    backends, specs: one per layer
    codecs: of the pages of each layer that has some, None for those of `kv` without a profile
    disk: where to spill pages of layers on the CPU that do not fit in memory, None for nowhere
    """
    states, stateful = _open_states(backends, specs)
    stateful |= {index: spec for index, spec in enumerate(specs) if isinstance(spec, NoCache)}
    shared = {index: spec.layer for index, spec in enumerate(specs) if isinstance(spec, SharedPages)}
    with_state = frozenset(index for index, spec in enumerate(specs) if isinstance(spec, AttentionAndState))
    paged_layers = tuple(index for index in range(len(specs)) if index in with_state or (index not in stateful and index not in shared))
    if not paged_layers:
        return _without_pages(states, stateful, shape, kv)
    all_backends, all_specs = backends, specs
    # From here on, `backends` and `specs` are those of the layers with pages, and `i` counts these.
    backends = [backends[index] for index in paged_layers]
    specs = [getattr(specs[index], "attention", specs[index]) for index in paged_layers]
    heads = [(spec.kv_heads, spec.head_dim) for spec in specs]
    layouts, codecs = [kv.layout(kv_heads, head_dim) for kv_heads, head_dim in heads], codecs or layer_codecs(kv, heads)
    sizes = page_sizes(codecs, layouts)
    pooled = [i for i, ops in enumerate(backends) if ops.name == "cpu"] if disk is not None else range(len(specs))
    pool = PagePool(shape.pages, [sizes[i] for i in pooled], disk)
    extents = {i: pool.extent(place) for place, i in enumerate(pooled)}
    exact = [anonymous(exact_nbytes(layout, shape)) for layout in layouts]
    upgraded = [codec.better for codec in codecs if codec.better is not None]
    upgraded_pool = PagePool(shape.pages, page_sizes(upgraded, layouts[: len(upgraded)]))
    layers = [ops.kv_layer(layouts[i], exact[i], extents[i] if i in extents else anonymous(shape.pages * sizes[i]), spec.scale,
                           spec.window, spec.softcap, codecs[i], **({"better_pages": upgraded_pool.extent(i)} if upgraded else {}))
              for i, (ops, spec) in enumerate(zip(backends, specs, strict=True))]
    readers = {index: layers[paged_layers.index(layer)].reader() for index, layer in shared.items()}
    spilling: list[LayerPages] = []
    if pool.stream is not None:
        owners = [(layers[i], i) for i in pooled]
        # Additional readers come after all others in a pass: where pages are on disk, only the last layers share.
        sources = {index: paged_layers.index(layer) for index, layer in shared.items()}
        owners += [(readers[index], i) for index, i in sources.items() if i in pooled]
        for pages, i in owners:
            _connect_disk(pages, layers[i], pooled.index(i), codecs[i], pool, shape, disk)
            spilling.append(pages)
    upgraded_sealers = sealers(backends, [pages.second for pages in layers], upgraded, layouts) if upgraded else []
    all_sealers = [*sealers(backends, layers, codecs, layouts), *upgraded_sealers]
    policy = open_policy(kv.policy, codecs[0].share if upgraded else 0.0)
    probes = AttentionProbes(specs, shape, paged_layers) if policy.probes else None
    token_selections = _open_indexes(backends, dict(enumerate(specs)), kv, shape, disk)
    reader_specs = {index: spec for index, spec in enumerate(all_specs) if index in shared}
    reader_selections = _open_indexes(all_backends, reader_specs, kv, shape, disk)
    return KVCache(layers, codecs, policy, shape, layouts, exact, all_sealers, pool, probes, spilling, states, stateful, readers,
                   with_state, token_selections, reader_selections)


def _connect_disk(pages: LayerPages, writer: LayerPages, index: int, codec: RawCodec | PackedCodec, pool: PagePool, shape: CacheShape,
                  disk: DiskTier) -> None:
    """Let a layer read pages from disk.

    writer: the layer that writes the pages: `pages` itself, or an earlier layer
    index: of the writer in the pool
    """
    pages.spilled = pool.spilled(index, 1 if shape.sinks else 0, again=pages is not writer)
    if disk.slots:
        pages.selective = page_selector(pages, codec, pool) if pages is writer else writer.selective.reader(pages)


def _open_indexes(backends: Sequence[object], specs: Mapping[int, AttnSpec | SharedPages], kv: RawCodec | PackedFormat,
                  shape: CacheShape, disk: DiskTier | None) -> dict[int, TokenSelection]:
    """The indexers of layers with sparse attention, by layer. Raises UsageError for pages that they cannot read."""
    sparse = {layer: spec for layer, spec in specs.items() if spec.is_sparse or spec.compressed}
    is_on_gpu = any(backends[layer].name != "cpu" for layer, spec in sparse.items() if not spec.compressed)
    if sparse and (kv.is_packed or disk is not None or is_on_gpu):
        raise UsageError("a model with sparse attention keeps its cache unpacked, in memory and on the CPU",
                         "--kv 16bit --device cpu, without --kv-ram")
    stored = index_type(kv)

    def selection(layer: int, spec: AttnSpec | SharedPages) -> TokenSelection:
        index: LayerIndex | None = None
        keys: CompressedKeys | None = None
        if spec.index is not None:
            index = backends[layer].index_layer(spec.index, anonymous(spec.index.nbytes(shape.ctx, stored)), stored)
        if spec.compressed is not None:
            keys = backends[layer].compressed_keys(spec.compressed, anonymous(spec.compressed.keys_nbytes(shape.ctx, stored)), stored)
        return TokenSelection(index, spec.latent, keys)

    return {layer: selection(layer, spec) for layer, spec in sparse.items()}


def _open_states(backends: Sequence[object], specs: Sequence[LayerSpec]) -> tuple[States | None, dict[int, LayerStates]]:
    """Recurrent states: all of them, and by layer."""
    pass_slots = controls()
    shapes = {index: getattr(spec, "state", spec) for index, spec in enumerate(specs)
              if not isinstance(spec, AttnSpec | SharedPages | NoCache)}
    stateful = {index: backends[index].state_layer(spec, anonymous(spec.nbytes), pass_slots) for index, spec in shapes.items()}
    states = States([*stateful.values()], [*shapes.values()], pass_slots) if shapes else None
    return states, stateful


def _without_pages(states: States, stateful: Mapping[int, LayerStates], shape: CacheShape, kv: RawCodec | PackedFormat) -> KVCache:
    """A cache for a model of recurrent states only."""
    return KVCache([], [], open_policy("", 0.0), shape, [kv.layout(1, 64)], pool=PagePool(shape.pages, []), states=states,
                   stateful=stateful)
