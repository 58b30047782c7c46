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
from .cache_components import TokenSelection, layer_codecs, page_selector, sealers
from .cache_shape import AttentionAndState, AttnSpec, CacheShape, LayerSpec, NoCache, SharedPages, exact_nbytes, index_type, page_sizes
from .states import LayerStates, States, controls

if TYPE_CHECKING:
    from ...kernels.cpu.compressed import CompressedKeys


def build_cache(backends: Sequence[object], specs: Sequence[LayerSpec], kv: RawCodec | PackedFormat, shape: CacheShape,
               codecs: Sequence[RawCodec | PackedCodec] | None = None, disk: DiskTier | None = None) -> KVCache:
    """An empty cache with its memory; one backend and one spec per layer. `codecs`: how to seal the pages of each layer that has some,
    where a profile says so. `disk`: where to spill pages that do not fit in memory, of layers on the CPU."""
    states, stateful = _open_states(backends, specs)
    stateful |= {index: spec for index, spec in enumerate(specs) if isinstance(spec, NoCache)}
    shared = {index: spec.layer for index, spec in enumerate(specs) if isinstance(spec, SharedPages)}
    both = frozenset(index for index, spec in enumerate(specs) if isinstance(spec, AttentionAndState))
    every = tuple(index for index in range(len(specs)) if index in both or (index not in stateful and index not in shared))
    if not every:
        return _without_pages(states, stateful, shape, kv)
    of_all, every_spec = backends, specs
    backends, specs = [backends[index] for index in every], [getattr(specs[index], "attention", specs[index]) for index in every]
    heads = [(spec.kv_heads, spec.head_dim) for spec in specs]
    layouts, codecs = [kv.layout(*each) for each in heads], codecs or layer_codecs(kv, heads)
    sizes = page_sizes(codecs, layouts)
    pooled = [i for i, ops in enumerate(backends) if ops.name == "cpu"] if disk is not None else range(len(specs))
    pool = PagePool(shape.pages, [sizes[i] for i in pooled], disk)
    extents = {layer: pool.extent(place) for place, layer in enumerate(pooled)}
    exact = [anonymous(exact_nbytes(layout, shape)) for layout in layouts]
    better = [codec.better for codec in codecs if codec.better is not None]
    beside = PagePool(shape.pages, page_sizes(better, layouts[: len(better)]))
    layers = [ops.kv_layer(layouts[i], exact[i], extents[i] if i in extents else anonymous(shape.pages * sizes[i]), spec.scale, spec.window,
                           spec.softcap, codecs[i], **({"beside": beside.extent(i)} if better else {}))
              for i, (ops, spec) in enumerate(zip(backends, specs, strict=True))]
    readers = {index: layers[every.index(layer)].reader() for index, layer in shared.items()}
    spilling = [(pages, pooled.index(i)) for i, pages in enumerate(layers) if i in pooled]
    # Additional readers come after all others in a pass: where pages are on disk, only the last layers share.
    spilling += [(readers[index], pooled.index(every.index(layer))) for index, layer in shared.items() if every.index(layer) in pooled]
    if pool.stream is None:
        spilling = []
    for pages, place in spilling:
        owner = layers[pooled[place]]
        pages.spilled = pool.spilled(place, 1 if shape.sinks else 0, again=pages is not owner)
        if disk.slots:
            pages.selective = page_selector(pages, codecs[pooled[place]], pool) if pages is owner else owner.selective.reader(pages)
    second = sealers(backends, [pages.second for pages in layers], better, layouts) if better else []
    sealing = [*sealers(backends, layers, codecs, layouts), *second]
    policy = open_policy(kv.policy, codecs[0].share if better else 0.0)
    probes = AttentionProbes(specs, shape, every) if policy.probes else None
    token_selections = _open_indexes(backends, dict(enumerate(specs)), kv, shape, disk)
    reader_selections = _open_indexes(of_all, {index: spec for index, spec in enumerate(every_spec) if index in shared}, kv, shape, disk)
    return KVCache(layers, codecs, policy, shape, layouts, exact, sealing, pool, probes, [pages for pages, _ in spilling], states, stateful,
                   readers, both, token_selections, reader_selections)


def _open_indexes(backends: Sequence[object], specs: Mapping[int, AttnSpec | SharedPages], kv: RawCodec | PackedFormat,
                  shape: CacheShape, disk: DiskTier | None) -> dict[int, TokenSelection]:
    """The indexers of layers with sparse attention, by layer. Raises UsageError for pages that they cannot read."""
    found = {place: spec for place, spec in specs.items() if spec.by_choice or spec.compressed}
    if found and (kv.is_packed or disk is not None or any(
            backends[place].name != "cpu" for place, spec in found.items() if not spec.compressed)):
        raise UsageError("a model with sparse attention keeps its cache unpacked, in memory and on the CPU",
                         "--kv 16bit --device cpu, without --kv-ram")
    stored = index_type(kv)

    def keys_of(place: int, spec: AttnSpec | SharedPages) -> CompressedKeys | None:
        own = spec.compressed
        return None if own is None else backends[place].compressed_keys(own, anonymous(own.keys_nbytes(shape.ctx, stored)), stored)

    return {place: TokenSelection(None if spec.index is None else backends[place].index_layer(
        spec.index, anonymous(spec.index.nbytes(shape.ctx, stored)), stored), spec.latent, keys_of(place, spec))
            for place, spec in found.items()}


def _open_states(backends: Sequence[object], specs: Sequence[LayerSpec]) -> tuple[States | None, dict[int, LayerStates]]:
    """Recurrent states: all of them, and by layer."""
    told = controls()
    shapes = {index: getattr(spec, "state", spec) for index, spec in enumerate(specs)
              if not isinstance(spec, AttnSpec | SharedPages | NoCache)}
    stateful = {index: backends[index].state_layer(spec, anonymous(spec.nbytes), told) for index, spec in shapes.items()}
    return (States([*stateful.values()], [*shapes.values()], told) if shapes else None), stateful


def _without_pages(states: States, stateful: Mapping[int, LayerStates], shape: CacheShape, kv: RawCodec | PackedFormat) -> KVCache:
    """A cache for a model of recurrent states only."""
    return KVCache([], [], open_policy("", 0.0), shape, [kv.layout(1, 64)], pool=PagePool(shape.pages, []), states=states,
                   stateful=stateful)
