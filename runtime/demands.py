"""What a run asks of the planner, gathered from headers: how its cache is made, how its weights can be cut where they do not fit, and
the bytes of both for a context and passes of a length. Everything here is arithmetic on what `prepare.py` has opened and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError
from ..kernels.layout import PAGE, PageLayout
from ..offload.checkpoint import TensorStore
from ..offload.neurons import BundlePlace
from ..offload.placement import Units
from ..offload.plan import BlockBytes, Budget, Demand, Placement
from ..offload.plan_kv import plan_tiers
from ..quant.kv import PackedCodec, RawCodec, codec
from . import kv_disk
from .bundles import Windows, places
from .cache import CacheShape, layer_codecs
from .cache_shape import cache_nbytes
from .config import ModelConfig
from .kv_setting import AUTO, chosen, profile_for, refuse_broken
from .model import ModelTensor, dims
from .paged_experts import ExpertParts, PagedExperts, cut_experts, paged
from .parts import Parts, cut
from .policy import open_policy
from .sparsity_file import load as load_sparsity
from .streamed import Streams

if TYPE_CHECKING:
    from .prepare import EngineOptions

LOGIT_ROWS = 32  # rows of logits made at once when a text is scored
Tensors = Mapping[int | str, Mapping[str, ModelTensor]]


@dataclass(frozen=True)
class CacheForm:
    """How the cache is made, whatever the context will be: `kv` as it was asked for, a codec a layer, tokens that stay exact."""

    kv: RawCodec | PackedCodec
    codecs: tuple[RawCodec | PackedCodec, ...]
    layout: PageLayout
    sinks: int
    window: int

    def shape(self, ctx: int, tokens: int) -> CacheShape:
        """The cache of a context, for passes of so many tokens."""
        return CacheShape(ctx, self.sinks, min(self.window, ctx), min(tokens, -(-ctx // PAGE) * PAGE))

    def unpacked(self, shape: CacheShape, ctx: int) -> str:
        """What to say of a packed cache that will hold no packed page; empty for others."""
        exact = shape.sinks + shape.window
        if not self.kv.is_packed or ctx >= exact + PAGE:
            return ""
        return (f"nothing will be packed in a context of {ctx} tokens, less than the first and newest tokens, which stay exact, and a page "
                f"({shape.sinks} + {shape.window} + {PAGE})")


def cache_form(options: EngineOptions, folder: Path | None, config: ModelConfig, store: TensorStore,
               say: Callable[[str], None]) -> tuple[EngineOptions, CacheForm]:
    """The options with the precision that `auto` comes to, and the cache of that precision. Raises UsageError for one that breaks the
    model."""
    sinks = CacheShape(1, options.kv_sink).sinks
    if options.kv_sink > PAGE:
        say(f"--kv-sink {options.kv_sink}: at most {PAGE} sinks, using {PAGE}")
    if options.kv != AUTO and (policy := codec(options.kv).policy):
        open_policy(policy, 0.0)
        if options.kv_ram:
            raise UsageError(f"--kv {options.kv}: pages of two kinds stay in memory in this version", f"no --kv-ram, or no +{policy}")
    profile = profile_for(options.kv, folder, config, store, say)
    options = replace(options, kv=chosen(options.kv, profile, say))
    kv = codec(options.kv)
    if profile is not None and kv.is_packed and not options.force:
        refuse_broken(options.kv, profile)
    codecs = layer_codecs(kv, config.num_hidden_layers, config.num_key_value_heads, config.head_dim, profile)
    return options, CacheForm(kv, tuple(codecs), kv.layout(config.num_key_value_heads, config.head_dim), sinks, options.kv_window)


@dataclass(frozen=True)
class Cuts:
    """How weights can be read from the disk: experts one by one, or parts of matrices in a ring, with neurons of `places` on their own.
    All empty where they have to fit."""

    experts: ExpertParts | None = None
    parts: Parts | None = None
    places: tuple[BundlePlace, ...] = ()
    units: tuple[Units, ...] = ()

    @property
    def always_nbytes(self) -> int:
        """Bytes that stay in memory whatever is read."""
        kept = self.experts or self.parts
        return 0 if kept is None else kept.always_nbytes

    def streams(self, placement: Placement, tensors: Tensors, store: TensorStore) -> Streams | PagedExperts | None:
        """What a run reads from the disk by this plan; None where everything fits."""
        if placement.expert_slots is not None:
            return paged(self.experts, placement.expert_slots, tensors, store)
        if placement.residency is None:
            return None
        return Streams(self.parts, placement.residency, windows=Windows(self.places, placement.slots) if placement.slots else None)


def cut_weights(tensors: Tensors, config: ModelConfig, store: TensorStore, folder: Path | None) -> Cuts:
    """The ways in which a model's weights lie ready to be read piece by piece."""
    own = config.mixture
    experts = cut_experts(tensors, own.experts, own.per_token, store) if own else None
    if experts is not None:
        return Cuts(experts)
    parts, neurons = cut(tensors, store), places(tensors, store)
    known = load_sparsity(folder, config.num_hidden_layers) if neurons else None
    units = tuple(Units(place.units, place.unit, () if known is None else known.curve(layer)) for layer, place in enumerate(neurons))
    return Cuts(None, parts, neurons, units)


@dataclass(frozen=True)
class Asked:
    """Everything that a plan depends on but the length of a pass. `device` is the one that runs, `held_to` what the planner may choose from
    (auto: layer by layer); `baseline`: bytes of the process without the model."""

    config: ModelConfig
    options: EngineOptions
    tensors: Tensors
    cache: CacheForm
    cuts: Cuts
    device: str
    held_to: str
    bundled: bool
    workers: int
    baseline: int
    budget: Budget

    def plan(self, tokens: int) -> Placement:
        """The plan with working memory for passes of so many tokens. Raises DoesNotFit where there is none."""
        config, options, cache, cuts = self.config, self.options, self.cache, self.cuts
        shape = cache.shape(options.ctx or config.context_length, tokens)
        fixed, per_page = cache_nbytes(cache.codecs, cache.layout, shape)
        workspace, spilled = self._workspace(shape, bool(cache.kv.policy)), self._workspace(shape, True)
        demand = Demand(
            baseline=self.baseline, workspace=workspace,
            weights=tuple(BlockBytes(str(key), sum(info.nbytes for info in roles.values())) for key, roles in self.tensors.items()),
            kv_bytes_per_token=per_page // PAGE, kv_fixed=fixed, layers=config.num_hidden_layers,
            blocks=() if cuts.parts is None else cuts.parts.sizes, always=cuts.always_nbytes,
            units=cuts.units, experts=cuts.experts and cuts.experts.demand)
        return plan_tiers(demand, self.budget, max(config.context_length, options.ctx or 0), options.ctx,
                          self.held_to, options.gpu_layers,
                          None if cache.kv.policy else
                          kv_disk.spill(options, self.device, cache.codecs, cache.layout, shape.pages, spilled - workspace))

    def _workspace(self, shape: CacheShape, on_disk: bool) -> int:
        """Bytes of working memory; `on_disk`: with pages of the cache read from there, or of two kinds: attention takes turns."""
        from ..kernels.cpu.ops import plan_workspace

        widths = dims(self.config, shape.ctx, shape.chunk, LOGIT_ROWS, self.cache.kv.is_packed, self.bundled, on_disk)
        return 4 * sum(plan_workspace(widths, self.workers).values())
