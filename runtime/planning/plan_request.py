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
from ...offload.demand import Demand, largest
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
    """The cache, independent of the context length: `kv` as requested, a codec for each layer that has pages, exact tokens. `states`: bytes
    of each layer's state, 0 for none; `paged`: the layers that have pages; `index`: index bytes per page of tokens, by layer. `written`:
    see `CacheShape`."""

    kv: RawCodec | PackedCodec
    codecs: tuple[RawCodec | PackedCodec, ...]
    layouts: tuple[PageLayout, ...]
    sinks: int
    window: int
    states: tuple[int, ...]
    paged: tuple[int, ...]
    index: tuple[int, ...]
    written: int | None = None

    def by_layer(self, shape: CacheShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(fixed bytes, bytes per page of the grid) of every layer, without what a policy adds."""
        always, pages = list(self.states), [0] * len(self.states)
        for layer, layout, size in zip(self.paged, self.layouts, page_sizes(self.codecs, self.layouts), strict=True):
            always[layer] += exact_nbytes(layout, shape)  # in addition to a state, if a layer has both
            pages[layer] = size
        return tuple(map(add, always, self.index)), tuple(map(add, pages, self.index))  # the sinks count as one more page

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
               say: Callable[[str], None]) -> tuple[EngineOptions, CacheLayout]:
    """The options with `--kv auto` resolved, and the cache of that precision. Raises UsageError for one that breaks the model."""
    if (options.kv_sink or 0) > PAGE:
        say(Fallback(f"--kv-sink {options.kv_sink}: at most {PAGE} sinks, using {PAGE}"))
    if options.kv != AUTO and (policy := codec(options.kv).policy) and options.kv_ram:
        raise UsageError(f"--kv {options.kv}: pages of two kinds stay in memory in this version", f"no --kv-ram, or no +{policy}")
    profile = profile_for(options.kv, folder, config, store, say)
    options = replace(options, kv=resolve_auto(options.kv, profile, say))
    kv = codec(options.kv)
    if profile is not None and kv.is_packed and not options.force:
        refuse_broken(options.kv, profile)
    if kv.is_packed and (config.slopes or config.keys_marked):
        why = "scores of this model grow with a key's position" if config.slopes else "every key of this model has a score bias"
        raise UsageError(f"--kv {options.kv}: {why}, which packed caches do not support", "--kv 16bit")
    if not kv.is_packed:
        for name in ("kv_sink", "kv_window"):
            if name not in options.preset and getattr(options, name) is not None:
                say(Fallback(f"--{name.replace('_', '-')} has no effect: at --kv {options.kv} every token is exact"))
        options = replace(options, kv_sink=None, kv_window=None)  # page positions are unaffected too, by which a saved session is found
    sinks, window = exact_ends(options, profile if kv.is_packed else None, say)
    codecs, layouts = layer_codecs(kv, config.cache_heads, profile), tuple(kv.layout(*heads) for heads in config.cache_heads)
    return options, CacheLayout(kv, tuple(codecs), layouts, CacheShape(1, sinks).sinks, window, states_nbytes(config),
                              config.attention_layers, index_nbytes(config, kv), config.written_window)


def exact_ends(options: EngineOptions, profile: Profile | None = None, say: Callable[[str], None] = str) -> tuple[int, int]:
    """Sink and window tokens that stay exact; a packed cache's profile decides if neither was specified."""
    if options.kv_sink is None and options.kv_window is None and profile is not None and profile.ends != SINK_SPLITS[0]:
        say("--kv-sink {} --kv-window {} by this model's profile".format(*profile.ends))
        return profile.ends
    return tuple(usual if asked is None else asked for asked, usual in zip((options.kv_sink, options.kv_window), SINK_SPLITS[0],
                                                                           strict=True))


@dataclass(frozen=True)
class OffloadLayouts:
    """How weights can be read from disk: experts one by one, or parts of matrices through a ring, with the neurons of `places` on demand.
    All empty if the weights must fit."""

    experts: ExpertLayout | None = None
    parts: StreamLayout | None = None
    places: tuple[BundlePlace, ...] = ()
    units: tuple[Units, ...] = ()

    @property
    def always_nbytes(self) -> int:
        """Bytes that stay in memory in any case."""
        kept = self.experts or self.parts
        return 0 if kept is None else kept.always_nbytes

    def streams(self, placement: Placement, tensors: Tensors, store: TensorStore) -> StreamingPlan | PagedExperts | None:
        """What a run reads from disk under this plan; None if everything fits."""
        if placement.expert_slots is not None:
            return plan_paging(self.experts, placement.expert_slots, tensors, store)
        if placement.residency is None:
            return None
        windows = NeuronWindows(self.places, placement.slots) if placement.slots else None
        return StreamingPlan(self.parts, placement.residency, windows=windows)

    def disk_layers(self, placement: Placement, tensors: Tensors) -> tuple[int, ...]:
        """Layers of which a token reads from disk under this plan."""
        found = {layer for layer, (own, units) in enumerate(zip(placement.slots, self.units)) if own < units.count}
        if placement.residency is not None and placement.residency.streamed:
            away = set(placement.residency.streamed)
            found |= {key for key, roles in tensors.items() if key != "outer"
                      for tensor in roles.values() for own in self.parts.slices.get(tensor.used_as, ()) if own.part in away}
        if placement.expert_slots is not None and placement.expert_slots < len(self.experts.parts):
            found |= set(self.experts.layers)
        return tuple(sorted(found))


def offload_layouts(tensors: Tensors, config: ModelConfig, store: TensorStore, folder: Path | None) -> OffloadLayouts:
    """The ways in which a model's weights can be read piecemeal."""
    own = config.mixture
    experts = expert_layout(tensors, own.experts, own.per_token, store) if own else None
    if experts is not None:
        return OffloadLayouts(experts)
    parts, neurons = plan_layout(tensors, store), bundle_places(tensors, store) if len(tensors) > 1 else ()
    known = load_sparsity(folder, config.num_hidden_layers) if neurons else None
    units = tuple(Units(place.units, place.unit, () if known is None else known.curve(layer)) for layer, place in enumerate(neurons))
    return OffloadLayouts(None, parts, neurons, units)


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on but the chunk length. `gpu`: the GPU that may be used; `baseline`: bytes of the process without
    the model; `lora`: the largest adapter rank; `reads`: what a draft model reads of passes."""

    config: ModelConfig
    options: EngineOptions
    tensors: Tensors
    cache: CacheLayout
    store: TensorStore
    folder: Path | None
    gpu: Device | None
    bundled: bool
    workers: int
    baseline: int
    budget: Budget
    lora: int = 0
    reads: DraftInputs = DraftInputs()
    _cuts: dict[int, OffloadLayouts] = field(default_factory=dict)

    def beneath(self, gpu_layers: int) -> Tensors:
        """The model without its last `gpu_layers` layers."""
        return {key: roles for key, roles in self.tensors.items() if key == "outer" or key < self.config.num_hidden_layers - gpu_layers}

    def cuts(self, gpu_layers: int = 0) -> OffloadLayouts:
        """The offload layouts of the layers beneath the last `gpu_layers`."""
        if self.options.load != "ram":
            return OffloadLayouts()
        if gpu_layers not in self._cuts:
            self._cuts[gpu_layers] = offload_layouts(self.beneath(gpu_layers), self.config, self.store, self.folder)
        return self._cuts[gpu_layers]

    def plan(self, tokens: int) -> Placement:
        """The plan with workspace for passes of `tokens` tokens. Raises DoesNotFit."""
        config, options, cache = self.config, self.options, self.cache
        shape = cache.shape(options.ctx or config.context_length, tokens)
        fixed, per_page = cache_nbytes(cache.codecs, cache.layouts, shape)
        chosen_by = sum(cache.index)
        fixed, per_page = options.parallel * (fixed + chosen_by + sum(cache.states)), options.parallel * (per_page + chosen_by)
        workspace, spilled = self._workspace(shape, bool(cache.kv.policy)), self._workspace(shape, True)
        always, pages = (tuple(options.parallel * nbytes for nbytes in each) for each in cache.by_layer(shape))
        by_layer = tuple(-(-nbytes // PAGE) for nbytes in pages)
        widths = self._dims(shape, False)
        weights, gpu_workspace = devices.blocks(self.tensors, widths, cache.kv.is_packed), devices.workspace(self.tensors, widths)

        def host(above: int) -> Demand:
            """The host's demand with `above` layers on the GPU."""
            layers, cuts = config.num_hidden_layers - above, self.cuts(above)
            left = tuple(own for own in weights if own.layer is None or own.layer < layers)
            return Demand(
                baseline=self.baseline, workspace=workspace, weights=left,
                kv_bytes_per_token=sum(by_layer[:layers]) if above else -(-per_page // PAGE),
                kv_fixed=sum(always[:layers]) if above else fixed, kv_fixed_layers=always[:layers], layers=layers,
                blocks=() if cuts.parts is None else cuts.parts.sizes, same=() if cuts.parts is None else cuts.parts.same,
                always=cuts.always_nbytes, units=cuts.units,
                experts=cuts.experts and cuts.experts.demand, gpu_workspace=gpu_workspace,
                kv_layers=() if cache.kv.policy else by_layer[:layers], kv_sinks=cache.sinks,
                kv_page=sum(pages[:layers]) if above else per_page, texts=options.parallel)

        def copied() -> CopiedLayers | None:
            if options.load != "ram" or self.bundled or config.state is not None or self.link is None:
                return None  # states stay with their layers
            return devices.copied(self.tensors, widths, config.mixture, options.exact, self.workers, self.link)

        spill = None
        alone = options.parallel == 1 and config.indexed is None and not config.shares_by_turns and not self.reads.cache
        if cache.codecs and not cache.kv.policy and alone:
            spill = kv_spill.spill_request(options, cache.codecs, cache.layouts, shape, spilled - workspace, sum(cache.states))
        device, layers, beside = ("cpu", None, 0) if self.gpu is None else (options.device, options.gpu_layers, self.gpu.host_nbytes)
        placed = plan_split(host, self.budget, max(config.context_length, options.ctx or 0), options.ctx, device, layers, spill, copied,
                            beside)
        return with_head(placed, gpu_head.head_bytes(self.tensors["outer"], config.hidden_size))

    def with_shorter(self, error: DoesNotFit, tokens: int) -> DoesNotFit:
        """If host memory is too small for passes of `tokens` tokens, the error with the longest context that would fit; its chunks and
        exact tokens may take less memory than those of the requested one."""
        if self.gpu is not None or not isinstance(error, MemoryTooSmall):
            return error

        def fits(ctx: int) -> bool:
            try:
                return bool(replace(self, options=replace(self.options, ctx=ctx), budget=spare).plan(tokens))
            except DoesNotFit:
                return False

        asked, spare = self.options.ctx, replace(self.budget, ram=self.budget.ram - SPARE)
        shorter, ram = largest(fits, asked or self.config.context_length, PAGE), f"--ram {ram_argument(error.least)}"
        if shorter <= error.shorter:
            return error
        hint = f"-c {shorter} fits; {f'{asked} tokens take' if asked else 'without -c it takes'} {ram}"
        return MemoryTooSmall(error.message, hint, error.least, shorter)

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
                    self.lora, len(self.reads.between))

    def _workspace(self, shape: CacheShape, on_disk: bool) -> int:
        """Bytes of workspace; `on_disk`: with cache pages on disk, or of two kinds, where attention alternates."""
        from ...kernels.cpu.ops import plan_workspace

        return 4 * sum(plan_workspace(self._dims(shape, on_disk), self.workers).values())
