"""Spilling the KV cache to disk: where, how much, and what that takes of memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import UsageError, typed
from ...kernels.layout import PageLayout
from ...offload.notes import Fallback
from ...offload.page_pool import DiskTier
from ...offload.page_slots import slot_nbytes
from ...offload.page_stream import RING_NBYTES, ring_nbytes
from ...offload.placement import Placement
from ...offload.plan_kv import Spill
from ...offload.size import parse_size
from ...quant.kv import PackedCodec, RawCodec, codec
from .cache_shape import CacheShape, cache_nbytes, page_sizes
from .states import states_nbytes

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..prepare import EngineOptions, Prepared

SPARSE = "sparse"
MIN_SELECTED, PAGES_PER_SELECTED = 4, 10  # at least this many pages, else 1 in PAGES_PER_SELECTED
SPARSE_RING = 8 << 20  # only prompts read through it; memory is better spent on pages


def spill_folder(options: EngineOptions) -> Path:
    """`--spill-dir`, or a folder beside the compiled kernels. Raises UsageError for a ~user or a folder above it that does not exist."""
    from ...kernels.compile import cache_root

    if not options.spill_dir:
        return cache_root() / "kv"
    try:
        folder = Path(options.spill_dir).expanduser()
    except RuntimeError as error:
        raise UsageError(f"--spill-dir {options.spill_dir}: there is no such user", "give the path without ~") from error
    if not folder.absolute().parent.is_dir():  # a disk that is not mounted, or a mistake
        raise UsageError(f"--spill-dir {options.spill_dir}: there is no folder {folder.parent}",
                         f"correct the path, or make it: mkdir -p {typed(folder.parent)}")
    return folder


def spill_request(options: EngineOptions, codecs: Sequence[RawCodec | PackedCodec], layouts: Sequence[PageLayout], shape: CacheShape,
                  workspace: int, states: int = 0) -> Spill:
    """The planner's input for a cache with spilled pages.

    workspace: additional workspace bytes
    states: bytes of recurrent states
    """
    sizes, besides_ring = page_sizes(codecs, layouts), _nbytes_besides_ring(options, codecs, layouts, shape)
    exact_nbytes, _ = cache_nbytes(codecs, layouts, shape)
    memory = besides_ring + ring_nbytes(sizes, shape.pages, _ring_nbytes(options, exact_nbytes + states + besides_ring))
    folder = spill_folder(options)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk, where = shutil.disk_usage(existing).free, f"{folder} has"
    max_disk = _max_disk_nbytes(options)
    is_limited = max_disk is not None and max_disk < disk
    if is_limited:
        disk, where = max_disk, "--disk allows"
    ram = parse_size(options.kv_ram) if options.kv_ram else None
    return Spill(memory, workspace, ram, disk, where, options.kv_read == SPARSE, is_limited)


def disk_tier(prepared: Prepared, cancelled: Callable[[], bool]) -> DiskTier | None:
    """The disk tier of a planned run; None if memory holds all pages."""
    placement, options, shape = prepared.placement, prepared.options, prepared.shape
    if placement.kv_pages is None:
        return None
    config, num_cpu_layers = prepared.config, placement.devices.count("cpu")
    codecs = prepared.codecs[: sum(layer < num_cpu_layers for layer in config.attention_layers)]
    layouts = [codec(options.kv).layout(*heads) for heads in config.cache_kv_heads[: len(codecs)]]
    fixed, page = cache_nbytes(codecs, layouts, shape)
    fixed += sum(states_nbytes(config)[:num_cpu_layers])
    # The ring was planned for the requested context, and so was what lies beside it: no more than the plan leaves.
    left = placement.host_kv_bytes - fixed - _nbytes_besides_ring(options, codecs, layouts, shape) - placement.kv_pages * page
    slots = max_selected_pages(shape.pages) if options.kv_read == SPARSE else 0
    return DiskTier(spill_folder(options), placement.kv_pages, max(0, min(_max_ring_nbytes(options), left)), cancelled, slots=slots,
                    max_nbytes=_max_disk_nbytes(options))


def _max_disk_nbytes(options: EngineOptions) -> int | None:
    """The limit of the file in bytes; None for the disk's free space."""
    return parse_size(options.disk) if options.disk else None


def max_selected_pages(pages: int) -> int:
    """The most pages of a layer that a token reads, and that stay for the next one, when few are selected from a cache of `pages`."""
    return max(MIN_SELECTED, pages // PAGES_PER_SELECTED)


def resolve_kv_read(options: EngineOptions, placement: Placement, config: ModelConfig, pages: int,
                    notices: list[str]) -> EngineOptions:
    """The options for a plan of `pages` pages, with a notice about `--kv-read sparse`: if memory holds the whole cache, all of it is read.
    Raises UsageError for a model where it can have no effect, unless it is a setting for all models."""
    if options.kv_read != SPARSE:
        return options
    if refusal := _sparse_read_refusal(placement, config):
        if "kv_read" not in options.from_settings:
            raise UsageError(*refusal)
        notices.append(Fallback(f"{refusal[0]}: ignored, since it is a setting for all models"))
        return replace(options, kv_read="exact")
    if placement.kv_pages is None:
        notices.append(Fallback("--kv-read sparse: the whole cache fits in memory and is read exactly; --kv-ram SIZE moves a part of it "
                                "to disk"))
        return replace(options, kv_read="exact")
    notices.append(f"--kv-read sparse: answers are not exact; of a layer's {pages - placement.kv_pages} pages on the disk a token reads "
                   f"at most {max_selected_pages(pages)} and estimates the others "
                   "(effllm eval kld MODEL --kv-read sparse ... measures what that costs)")
    return options


def _sparse_read_refusal(placement: Placement, config: ModelConfig) -> tuple[str, str] | None:
    """Why no pages could ever be selected, and the remedy; None where they could."""
    if not config.attention_layers:
        return "--kv-read sparse: this model has no keys and values, so there are no pages to select", "no --kv-read"
    cpu_layers = [layer for layer in config.attention_layers if placement.devices[layer] == "cpu"]
    if "cpu" in placement.devices and all(config.windows[layer] is not None for layer in cpu_layers):
        return "--kv-read sparse: every layer of this model has a sliding window and reads all of it", "no --kv-read"
    if placement.kv_pages is None and "cpu" not in placement.devices:
        return "--kv-read sparse: all layers have their cache on the GPU", "--device cpu with --kv-ram SIZE"
    return None


def _nbytes_besides_ring(options: EngineOptions, codecs: Sequence[RawCodec | PackedCodec], layouts: Sequence[PageLayout],
                         shape: CacheShape) -> int:
    """Memory besides the ring for pages being written to disk and, for sparse reads, summaries of all pages."""
    sizes = page_sizes(codecs, layouts)
    if options.kv_read != SPARSE:
        return sum(sizes)
    from ...kernels.cpu.kv.selective import abstract_nbytes, basis_nbytes

    summaries = shape.pages * sum(abstract_nbytes(layout.kv_heads, layout.head_dim) for layout in layouts)
    bases = sum(map(basis_nbytes, {layout.head_dim for layout in layouts}))  # shared by layers of one head size
    return sum(sizes) + bases + summaries + sum(max_selected_pages(shape.pages) * slot_nbytes(size) for size in sizes)


def _ring_nbytes(options: EngineOptions, fixed: int) -> int:
    """Approximate ring size: at most a quarter of the cache's limit, and at most what is left of it beside the `fixed` bytes; so the
    minimum that a refusal names is enough."""
    if not options.kv_ram:
        return _max_ring_nbytes(options)
    ram = parse_size(options.kv_ram)
    return max(0, min(_max_ring_nbytes(options), ram // 4, ram - fixed))


def _max_ring_nbytes(options: EngineOptions) -> int:
    """The ring size when memory is plentiful."""
    return SPARSE_RING if options.kv_read == SPARSE else RING_NBYTES
