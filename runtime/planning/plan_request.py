"""The planner's inputs, gathered from headers: the cache's layout, how weights can be offloaded if they do not fit, and the bytes of both
by context and chunk length. Pure arithmetic on what `prepare.py` has opened and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

from ... import DoesNotFit, MemoryTooSmall, UsageError
from ...kernels.layout import PAGE, PageLayout
from ...kernels.workspace import Dims
from ...offload.checkpoint import TensorStore
from ...offload.demand import AUTO_CTX, Demand, largest
from ...offload.neuron_pager import BundlePlace
from ...offload.notes import Fallback
from ...offload.placement import Budget, Placement, Units
from ...offload.plan_gpu import CopiedLayers, plan_split, with_head
from ...offload.size import SPARE, ram_argument
from ...quant.kv import PackedCodec, RawCodec, codec
from ...quant.kv_sink_split import SINK_SPLITS
from ..cache import CacheShape
from ..config import ModelConfig
from ..kv import kv_spill
from ..kv.cache_components import layer_codecs
from ..kv.cache_shape import cache_nbytes, exact_nbytes, index_nbytes, page_sizes
from ..kv.kv_setting import AUTO, profile_for, refuse_broken, resolve_auto
from ..kv.states import states_nbytes
from ..sparse.neuron_bundles import NeuronWindows, bundle_places
from ..sparse.sparsity_file import load as load_sparsity
from ..speculation.mtp_tensors import MTP
from ..speculation.trained_draft import DraftInputs
from ..tensors import ModelTensor
from ..weights import gpu_head
from ..weights.paged_experts import ExpertLayout, PagedExperts, expert_layout, plan_paging
from ..weights.stream_layout import StreamLayout, plan_layout
from ..weights.streamed_weights import StreamingPlan
from ..workspace_dims import dims
from . import devices

if TYPE_CHECKING:
    from ...kernels.cuda.device import Device
    from ..kv.kv_profile import Profile
    from ..prepare import EngineOptions

LOGIT_ROWS = 32  # rows of logits computed at once when scoring text
Tensors = Mapping[int | str, Mapping[str, ModelTensor]]


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of a run, independent of the context length."""

    kv: RawCodec | PackedCodec  # as requested
    codecs: tuple[RawCodec | PackedCodec, ...]  # by layer in `paged`
    layouts: tuple[PageLayout, ...]  # by layer in `paged`
    sinks: int  # first tokens that stay exact
    window: int  # newest tokens that stay exact
    states: tuple[int, ...]  # bytes of each layer's recurrent state, 0 for none
    paged: tuple[int, ...]  # the layers that have pages
    index: tuple[int, ...]  # bytes of a sparse-attention index per page, by layer
    written: int | None = None  # see `CacheShape`

    def by_layer(self, shape: CacheShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(fixed bytes, bytes per page of the grid) of every layer, without what a policy adds."""
        fixed, pages = list(self.states), [0] * len(self.states)
        for layer, layout, size in zip(self.paged, self.layouts, page_sizes(self.codecs, self.layouts), strict=True):
            fixed[layer] += exact_nbytes(layout, shape)  # in addition to a state, if a layer has both
            pages[layer] = size
        return tuple(map(add, fixed, self.index)), tuple(map(add, pages, self.index))  # the sinks count as one more page

    def shape(self, ctx: int, tokens: int) -> CacheShape:
        """The cache for a context, with passes of `tokens` tokens."""
        return CacheShape(ctx, self.sinks, min(self.window, ctx), min(tokens, -(-ctx // PAGE) * PAGE),
                          None if self.written is None else min(self.written, ctx))

    def unpacked(self, shape: CacheShape, ctx: int) -> str:
        """The notice for a packed cache that is too short to pack any page; "" for others."""
        # The first token after these reads a packed page.
        if not self.kv.is_packed or ctx > shape.sinks + shape.window + PAGE:
            return ""
        return (f"nothing will be packed in a context of {ctx} token{'' if ctx == 1 else 's'}: it is no longer than the sinks and the "
                f"window, which stay exact, and a page ({shape.sinks} + {self.window} + {PAGE})")


def cache_layout(options: EngineOptions, folder: Path | None, config: ModelConfig, store: TensorStore,
               notify: Callable[[str], None]) -> tuple[EngineOptions, CacheLayout]:
    """The options with `--kv auto` resolved, and the cache of that precision. Raises UsageError for one that breaks the model."""
    if (options.kv_sink or 0) > PAGE:
        notify(Fallback(f"--kv-sink {options.kv_sink}: at most {PAGE} sinks, using {PAGE}"))
    if options.kv != AUTO and (policy := codec(options.kv).policy) and options.kv_ram:
        raise UsageError(f"--kv {options.kv}: pages of two kinds stay in memory in this version", f"no --kv-ram, or no +{policy}")
    profile = profile_for(options.kv, folder, config, store, notify)
    options = replace(options, kv=resolve_auto(options.kv, profile, notify))
    kv = codec(options.kv)
    if profile is not None and kv.is_packed and not options.force:
        refuse_broken(options.kv, profile)
    if kv.is_packed and (config.alibi_slopes or config.dynamic_mask):
        why = "scores of this model grow with a key's position" if config.alibi_slopes else "every key of this model has a score bias"
        raise UsageError(f"--kv {options.kv}: {why}, which packed caches do not support", "--kv 16bit")
    if not kv.is_packed:
        for name in ("kv_sink", "kv_window"):
            if name not in options.from_settings and getattr(options, name) is not None:
                notify(Fallback(f"--{name.replace('_', '-')} has no effect: at --kv {options.kv} every token is exact"))
        options = replace(options, kv_sink=None, kv_window=None)  # page positions are unaffected too, by which a saved session is found
    sinks, window = exact_ends(options, profile if kv.is_packed else None, notify)
    codecs, layouts = layer_codecs(kv, config.cache_kv_heads, profile), tuple(kv.layout(*heads) for heads in config.cache_kv_heads)
    return options, CacheLayout(kv, tuple(codecs), layouts, CacheShape(1, sinks).sinks, window, states_nbytes(config),
                              config.attention_layers, index_nbytes(config, kv), config.answer_window)


def exact_ends(options: EngineOptions, profile: Profile | None = None, notify: Callable[[str], None] = str) -> tuple[int, int]:
    """Sink and window tokens that stay exact; a packed cache's profile decides if neither was specified."""
    if options.kv_sink is None and options.kv_window is None and profile is not None and profile.ends != SINK_SPLITS[0]:
        notify("--kv-sink {} --kv-window {} by this model's profile".format(*profile.ends))
        return profile.ends
    sinks, window = SINK_SPLITS[0]
    return (sinks if options.kv_sink is None else options.kv_sink, window if options.kv_window is None else options.kv_window)


@dataclass(frozen=True)
class OffloadLayouts:
    """How weights can be read from disk during a run. All empty if the weights must fit in memory."""

    experts: ExpertLayout | None = None  # read individually
    parts: StreamLayout | None = None  # parts of matrices, streamed through a ring on every pass
    places: tuple[BundlePlace, ...] = ()  # neurons read on demand, by layer
    units: tuple[Units, ...] = ()  # their number and bytes, for the planner

    @property
    def always_nbytes(self) -> int:
        """Bytes that stay in memory in any case."""
        layout = self.experts or self.parts
        return 0 if layout is None else layout.always_nbytes

    def streaming(self, placement: Placement, tensors: Tensors, store: TensorStore) -> StreamingPlan | PagedExperts | None:
        """What a run reads from disk under this plan; None if everything fits."""
        if placement.expert_slots is not None:
            return plan_paging(self.experts, placement.expert_slots, tensors, store)
        if placement.residency is None:
            return None
        windows = NeuronWindows(self.places, placement.slots) if placement.slots else None
        return StreamingPlan(self.parts, placement.residency, windows=windows)

    def disk_layers(self, placement: Placement, tensors: Tensors) -> tuple[int, ...]:
        """Layers of which a token reads from disk under this plan."""
        found = {layer for layer, (slots, units) in enumerate(zip(placement.slots, self.units)) if slots < units.count}
        if placement.residency is not None and placement.residency.streamed:
            streamed = set(placement.residency.streamed)
            found |= {key for key, roles in tensors.items() if key != "outer"
                      for tensor in roles.values() for piece in self.parts.slices.get(tensor.used_as, ()) if piece.part in streamed}
        if placement.expert_slots is not None and placement.expert_slots < len(self.experts.parts):
            found |= set(self.experts.layers)
        return tuple(sorted(found))


def offload_layouts(tensors: Tensors, config: ModelConfig, store: TensorStore, folder: Path | None) -> OffloadLayouts:
    """The ways in which a model's weights can be read piecemeal."""
    mixture = config.moe
    experts = expert_layout(tensors, mixture.num_experts, mixture.experts_per_token, store) if mixture else None
    if experts is not None:
        return OffloadLayouts(experts)
    parts, neurons = plan_layout(tensors, store), bundle_places(tensors, store) if len(tensors) > 1 else ()
    sparsity = load_sparsity(folder, config.num_hidden_layers) if neurons else None
    units = tuple(Units(place.units, place.unit, () if sparsity is None else sparsity.curve(layer)) for layer, place in enumerate(neurons))
    return OffloadLayouts(None, parts, neurons, units)


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on but the chunk length."""

    config: ModelConfig
    options: EngineOptions
    tensors: Tensors
    cache: CacheLayout
    store: TensorStore
    folder: Path | None
    gpu: Device | None  # the GPU that may be used
    bundled: bool  # is the checkpoint stored as neuron bundles?
    workers: int  # threads
    baseline: int  # bytes of the process without the model
    budget: Budget
    lora: int = 0  # the largest adapter rank
    draft_inputs: DraftInputs = DraftInputs()  # what a draft model reads of passes
    _layouts: dict[int, OffloadLayouts] = field(default_factory=dict)  # by GPU layers

    def host_tensors(self, gpu_layers: int) -> Tensors:
        """The model without its last `gpu_layers` layers."""
        return {key: roles for key, roles in self.tensors.items() if key == "outer" or key < self.config.num_hidden_layers - gpu_layers}

    def layouts(self, gpu_layers: int = 0) -> OffloadLayouts:
        """How the weights of all but the last `gpu_layers` layers can be read from disk."""
        if self.options.load != "ram":
            return OffloadLayouts()
        if gpu_layers not in self._layouts:
            self._layouts[gpu_layers] = offload_layouts(self.host_tensors(gpu_layers), self.config, self.store, self.folder)
        return self._layouts[gpu_layers]

    def plan(self, tokens: int) -> Placement:
        """The plan with workspace for passes of `tokens` tokens. Raises DoesNotFit.

        Exact tokens, chunks and workspace are sized for the model's context. If no context was requested and that leaves room for none, or
        for less than a pass, they are sized for the longest context that then fits."""
        ctx_max, refused, placed = self.config.context_length, None, None
        try:
            placed = self._plan(tokens, self.options.ctx)
        except MemoryTooSmall as error:
            refused = error
        if self.options.ctx is not None or (placed and (self.gpu is not None or placed.ctx >= min(ctx_max, tokens))):
            if refused is not None:
                raise refused
            return placed
        ctx = largest(lambda ctx: self._fits(tokens, ctx), min(ctx_max, AUTO_CTX), PAGE)
        if placed is not None and ctx <= placed.ctx:
            return placed
        placed = self._plan(tokens, ctx or min(ctx_max, PAGE))
        note = Fallback(f"context {placed.ctx} of the model's {ctx_max}: the most that fits in the memory budget")
        return placed if placed.ctx == ctx_max else replace(placed, notes=(*placed.notes, note))

    def _fits(self, tokens: int, ctx: int) -> bool:
        try:
            return bool(self._plan(tokens, ctx))
        except DoesNotFit:
            return False

    def _plan(self, tokens: int, ctx: int | None) -> Placement:
        """The plan for a context of `ctx` tokens; None: the model's, or what fits of it."""
        config, options, cache = self.config, self.options, self.cache
        shape = cache.shape(ctx or config.context_length, tokens)
        dims = self._dims(shape, False)
        workspace, spill_workspace = self._workspace(shape, bool(cache.kv.policy)), self._workspace(shape, True)

        def copied() -> CopiedLayers | None:
            if options.load != "ram" or self.bundled or config.recurrent is not None or self.link is None:
                return None  # states stay with their layers
            return devices.copied(self.tensors, dims, config.moe, options.exact, self.workers, self.link)

        spill = None
        # A context that was not requested is shortened rather than put on the disk, unless memory for the cache was set.
        may_spill = ctx == options.ctx or options.kv_ram is not None
        can_spill = options.parallel == 1 and config.indexer is None and not config.interleaves_shared_kv and not self.draft_inputs.kv_cache
        if cache.codecs and not cache.kv.policy and may_spill and can_spill:
            spill = kv_spill.spill_request(options, cache.codecs, cache.layouts, shape, spill_workspace - workspace, sum(cache.states))
        device, gpu_layers, gpu_host_nbytes = "cpu", None, 0
        if self.gpu is not None:
            device, gpu_layers, gpu_host_nbytes = options.device, options.gpu_layers, self.gpu.host_nbytes
        placed = plan_split(self._host_demand(shape, dims, workspace), self.budget, max(config.context_length, ctx or 0),
                            ctx, device, gpu_layers, spill, copied, gpu_host_nbytes)
        return with_head(placed, gpu_head.head_bytes(self.tensors["outer"], config.hidden_size))

    def _host_demand(self, shape: CacheShape, dims: Dims, workspace: int) -> Callable[[int], Demand]:
        """A function from a number of GPU layers to what the rest of the model demands of the host."""
        config, cache, sequences = self.config, self.cache, self.options.parallel
        index_nbytes = sum(cache.index)
        fixed, per_page = cache_nbytes(cache.codecs, cache.layouts, shape)
        fixed, per_page = sequences * (fixed + index_nbytes + sum(cache.states)), sequences * (per_page + index_nbytes)
        layer_fixed, layer_page = (tuple(sequences * nbytes for nbytes in each) for each in cache.by_layer(shape))
        layer_token = tuple(-(-nbytes // PAGE) for nbytes in layer_page)
        weights, gpu_workspace = devices.blocks(self.tensors, dims, cache.kv.is_packed), devices.workspace(self.tensors, dims)

        def demand(gpu_layers: int) -> Demand:
            layers, layouts = config.num_hidden_layers - gpu_layers, self.layouts(gpu_layers)
            parts = layouts.parts
            return Demand(
                baseline=self.baseline, workspace=workspace,
                weights=tuple(block for block in weights if block.layer is None or block.layer < layers),
                kv_bytes_per_token=sum(layer_token[:layers]) if gpu_layers else -(-per_page // PAGE),
                kv_fixed=sum(layer_fixed[:layers]) if gpu_layers else fixed, kv_fixed_layers=layer_fixed[:layers], layers=layers,
                blocks=() if parts is None else parts.sizes, copy_of=() if parts is None else parts.same,
                always_nbytes=layouts.always_nbytes, units=layouts.units,
                experts=layouts.experts and layouts.experts.demand, gpu_workspace=gpu_workspace,
                kv_layers=() if cache.kv.policy else layer_token[:layers], kv_sinks=cache.sinks,
                kv_page=sum(layer_page[:layers]) if gpu_layers else per_page, sequences=sequences)

        return demand

    def with_shorter(self, error: DoesNotFit, tokens: int) -> DoesNotFit:
        """If host memory is too small for passes of `tokens` tokens, the error with the longest context that would fit; its chunks and
        exact tokens may take less memory than those of the requested one."""
        requested = self.options.ctx
        if requested is None or self.gpu is not None or not isinstance(error, MemoryTooSmall):
            return error  # without a request, the shortest context is what does not fit
        budget = replace(self.budget, ram=self.budget.ram - SPARE)

        def fits(ctx: int) -> bool:
            return replace(self, options=replace(self.options, ctx=ctx), budget=budget)._fits(tokens, ctx)

        shorter = largest(fits, requested, PAGE)
        if shorter <= error.fitting_ctx:
            return error
        hint = f"-c {shorter} fits; {requested} tokens take --ram {ram_argument(error.required_nbytes)}"
        return MemoryTooSmall(error.message, hint, error.required_nbytes, shorter)

    @cached_property
    def link(self) -> float | None:
        """Bytes per second to the GPU, measured once; None if it has no room to measure, nor for copies then."""
        try:
            return self.gpu.link_rate()
        except DoesNotFit:
            return None

    def _dims(self, shape: CacheShape, on_disk: bool) -> Dims:
        mtp = any(role.startswith(MTP) for role in self.tensors["outer"])
        return dims(self.config, shape.ctx, shape.chunk, LOGIT_ROWS, self.cache.kv.is_packed, self.bundled, on_disk, mtp,
                    self.lora, len(self.draft_inputs.aux_layers))

    def _workspace(self, shape: CacheShape, on_disk: bool) -> int:
        """Bytes of workspace; `on_disk`: with cache pages on disk, or of two kinds, where attention alternates."""
        from ...kernels.cpu.ops import plan_workspace

        return 4 * sum(plan_workspace(self._dims(shape, on_disk), self.workers).values())
