"""Planning a run whose KV cache may be partly on disk: pure arithmetic, like `plan.py`, which it calls where memory holds the cache.

A page in memory and as many bytes of weights save a token the same reads, but weights are read from the first token on and a page only once
the context has grown to it. So weights come first: if they fit, all of them stay, and pages take what is left. If they do not, or the disk
cannot take the other pages, the context comes first as long as it fits beside streamed weights; only then are pages spilled, as many as the
disk takes.
"""

from dataclasses import dataclass, replace

from .. import DoesNotFit, MemoryTooSmall
from .demand import Demand, kv_pages, largest, page_nbytes, with_slack
from .notes import Fallback
from .placement import Budget, Placement, Residency, choose_pinned, min_streaming_nbytes
from .plan import is_resident, plan
from .size import SPARE, format_size, ram_argument

PAGE = 128  # tokens


@dataclass(frozen=True)
class Spill:
    """What spilling pages of the KV cache to a file takes, in bytes."""

    ring: int  # memory for reads and for a page being written
    workspace: int  # more workspace than without spilling
    ram: int | None  # limit of memory for the cache; None: what is left
    disk: int  # limit of the file
    limit_source: str  # for messages, what limits the file: a phrase such as "--disk allows"
    is_sparse: bool = False  # a token reads few of the pages
    is_requested: bool = False  # the limit of the file was requested


class _SpillDoesNotFit(DoesNotFit):
    """No plan with spilled pages fits. The hint is an alternative to a shorter context; `required_nbytes`: memory that
    the plan takes, None if the disk is too small."""

    def __init__(self, message: str, hint: str, required_nbytes: int | None = None) -> None:
        super().__init__(message, hint)
        self.required_nbytes = required_nbytes


def plan_tiers(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill | None) -> Placement:
    """`plan.plan` on the host, spilling pages to disk if the requested context does not fit in memory or in `spill.ram`.

    Raises DoesNotFit and UsageError as `plan` does, DoesNotFit also if the disk or `spill.ram` is too small, with the longest context that
    would fit."""
    try:
        return _plan(demand, budget, ctx_max, ctx_wanted, spill)
    except _SpillDoesNotFit as error:
        alternative = f", or {error.hint}" if error.hint.startswith("--") else ""
        longest = _longest_ctx(demand, budget, ctx_max, ctx_wanted or ctx_max, spill)
        hint = f"-c {longest} fits{alternative}" if longest else error.hint
        if error.required_nbytes is None:
            raise DoesNotFit(error.message, hint) from None
        raise MemoryTooSmall(error.message, hint, error.required_nbytes, longest) from None


def _longest_ctx(demand: Demand, budget: Budget, ctx_max: int, ctx: int, spill: Spill) -> int:
    """The longest context shorter than `ctx` that can be planned when requested, with SPARE; 0 for none."""
    reduced = replace(budget, ram=budget.ram - SPARE)

    def length(pages: int) -> int:
        return min(ctx_max, demand.kv_sinks + pages * PAGE)

    def is_planned(pages: int) -> bool:
        try:
            return bool(_plan(demand, reduced, ctx_max, length(pages), spill))
        except DoesNotFit:
            return False

    shorter = kv_pages(demand, ctx, PAGE) - 1
    pages = largest(is_planned, shorter, 1) if shorter else 0
    return length(pages) if pages else 0


def _plan(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill | None) -> Placement:
    ctx = ctx_wanted or (ctx_max if spill is not None and spill.ram is not None else 0)
    if spill is not None and not budget.vram and ctx and demand.kv_bytes_per_token:
        spilled = _spilled(demand, budget, ctx_max, ctx_wanted, ctx, spill)
        if spilled is not None:
            return spilled
    return plan(demand, budget, ctx_max, ctx_wanted, "cpu", None, PAGE)


def _unspilled(demand: Demand, budget: Budget, ctx_max: int, ctx: int | None) -> Placement | None:
    """The plan with the whole cache in memory; None if there is none."""
    try:
        return plan(demand, budget, ctx_max, ctx, "cpu", None, PAGE)
    except DoesNotFit:
        return None


def _spilled(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, spill: Spill) -> Placement | None:
    """The plan with pages on disk; None if there is a better one without, or none at all."""
    page, total = page_nbytes(demand, PAGE), kv_pages(demand, ctx, PAGE)
    max_pages = total
    if spill.ram is None:
        if spill.ring + spill.workspace >= total * page or is_resident(demand, budget, ctx_max, ctx, PAGE):
            return None
    else:
        is_whole = spill.ram >= demand.kv_fixed + total * page
        if is_whole and (unspilled := _unspilled(demand, budget, ctx_max, ctx_wanted)) is not None:  # if memory holds that much too
            return unspilled
        max_pages = (spill.ram - demand.kv_fixed - spill.ring) // page
        if max_pages < 0 and is_whole:
            return None  # reading from disk would take more memory than that
        if max_pages < 0:
            needed = demand.kv_fixed + spill.ring
            raise DoesNotFit(f"--kv-ram {format_size(spill.ram)} is too small: {format_size(needed)} of the cache must be in memory in "
                             f"any case ({format_size(demand.kv_fixed)} for sink and window tokens, {format_size(spill.ring)} for read "
                             "buffers)", f"--kv-ram {-(-needed // 2**20)}Mi")
    min_pages = 0 if ctx_wanted is None else min(max_pages, max(0, total - spill.disk // page))  # pages that the disk cannot take
    streamed_parts: tuple[str, ...] = ()  # for the message
    if min_pages < total:
        streamed_parts = (f"{format_size((total - min_pages) * page)} of the KV cache" if min_pages else "the KV cache",)
    fixed_nbytes = demand.baseline + demand.workspace + spill.workspace + demand.kv_fixed + spill.ring
    weights = sum(block.nbytes for block in demand.weights)
    if with_slack(fixed_nbytes + weights) <= budget.ram:
        pages = min(max_pages, total, (budget.ram * 100 // 105 - fixed_nbytes - weights) // page)
        if pages >= min_pages or not (demand.blocks or demand.experts):
            return _placement(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, None,
                              with_slack(fixed_nbytes + weights + pages * page))
    if demand.experts or demand.units:
        return _with_slots(demand, budget, ctx_max, ctx_wanted, ctx, max_pages, min_pages, spill)
    if not demand.blocks:
        needed = with_slack(fixed_nbytes + weights + min_pages * page)
        return _refuse_or_unspilled(demand, budget, ctx_max, ctx_wanted, needed, streamed_parts, spill)
    if spill.ram is None:
        if (unspilled := _unspilled(demand, budget, ctx_max, ctx_wanted)) is not None:
            return unspilled
        max_pages = min_pages
    ring = demand.always_nbytes + min_streaming_nbytes(demand.blocks, demand.copy_of)
    pages = min(max_pages, ((budget.ram - ring) * 100 // 105 - fixed_nbytes) // page)
    if with_slack(fixed_nbytes) + ring > budget.ram:
        needed = with_slack(fixed_nbytes + min_pages * page) + ring
        return _refuse_or_unspilled(demand, budget, ctx_max, ctx_wanted, needed, ("weights", *streamed_parts), spill)
    fixed = with_slack(fixed_nbytes + pages * page)
    residency = choose_pinned(demand.blocks, budget.ram - fixed - demand.always_nbytes, copy_of=demand.copy_of)
    return _placement(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, residency, fixed + demand.always_nbytes + residency.nbytes)


def _with_slots(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, max_pages: int, min_pages: int,
            spill: Spill) -> Placement:
    """The plan for experts or neurons read on demand: as many of `max_pages` pages as fit beside the minimum of slots, and slots in what
    memory is left. If the cache has no explicit limit, it is spilled only if it does not fit otherwise, except the `min_pages` pages that
    the disk cannot take."""
    page = page_nbytes(demand, PAGE)

    def planned(pages: int) -> Placement:
        base = replace(demand, workspace=demand.workspace + spill.workspace, kv_bytes_per_token=0, kv_page=0, kv_layers=(),
                      kv_fixed=demand.kv_fixed + spill.ring + pages * page)  # constant in the context length, for every layer
        return plan(base, budget, max(ctx_max, ctx), ctx, "cpu", None, PAGE)

    def fits(pages: int) -> bool:
        try:
            return bool(planned(pages))
        except DoesNotFit:
            return False

    if spill.ram is None:
        if (unspilled := _unspilled(demand, budget, ctx_max, ctx_wanted)) is not None:
            return unspilled
        max_pages = min_pages
    pages = largest(fits, max_pages, 1)
    try:
        base = planned(pages if pages or fits(0) else min_pages)
    except DoesNotFit as error:
        raise _SpillDoesNotFit(error.message, error.hint, error.required_nbytes if isinstance(error, MemoryTooSmall) else None) from None
    placed = _placement(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, base.residency, base.total_bytes)
    if placed.kv_pages is None:
        return placed  # another plan, with slots for its own cache
    return replace(placed, slots=base.slots, window_bytes=base.window_bytes, expert_slots=base.expert_slots, always_bytes=base.always_bytes,
                   notes=base.notes + placed.notes)


def _refuse_or_unspilled(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, needed: int,
             streamed_parts: tuple[str, ...], spill: Spill) -> Placement:
    """The plan without spilled pages, for when spilling takes too much memory too. Raises DoesNotFit if there is none."""
    if (unspilled := _unspilled_within_limit(demand, budget, ctx_max, ctx_wanted, spill)) is not None:
        return unspilled
    with_disk = f" even with {' and '.join(streamed_parts)} read from the disk for every token" if streamed_parts else ""
    raise _SpillDoesNotFit(f"needs {format_size(needed)} of memory{with_disk}, the budget is {format_size(budget.ram)}",
                 f"it takes --ram {ram_argument(needed)}, or a smaller model", needed)


def _unspilled_within_limit(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill) -> Placement | None:
    """The plan with no page on disk and at most `spill.ram` of cache, for `ctx_wanted` or else the longest context; None if there is
    none."""
    pages = None if spill.ram is None else (spill.ram - demand.kv_fixed) // page_nbytes(demand, PAGE)
    if pages is not None and pages < 1:
        return None
    placed = _unspilled(demand, budget, ctx_max, ctx_wanted)
    if placed is None or pages is None or kv_pages(demand, placed.ctx, PAGE) <= pages:
        return placed
    max_ctx = demand.kv_sinks + pages * PAGE
    if ctx_wanted is not None or (placed := _unspilled(demand, budget, ctx_max, max_ctx)) is None:
        return None
    return replace(placed, notes=(*placed.notes, Fallback(f"context {max_ctx} of the model's {ctx_max}: the most that --kv-ram holds; with "
                                                          "pages on the disk it is no longer, "
                                                          f"{spill.limit_source} {format_size(spill.disk)}")))


def _placement(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, pages: int, spill: Spill,
            residency: Residency | None, total_bytes: int) -> Placement:
    """The placement with `pages` pages in memory. If no context was requested and the disk is so small that memory alone holds a longer
    one, that one. Raises DoesNotFit if the disk is too small for a requested context."""
    page = page_nbytes(demand, PAGE)
    on_disk = kv_pages(demand, ctx, PAGE) - pages
    if on_disk * page > spill.disk:
        max_ctx = min(ctx_max, demand.kv_sinks + (pages + spill.disk // page) * PAGE)
        unspilled = _unspilled_within_limit(demand, budget, ctx_max, None, spill) if ctx_wanted is None else None
        if unspilled is not None and (unspilled.ctx >= max_ctx or spill.disk < page):
            return unspilled
        if ctx_wanted is not None or spill.disk < page:
            # One page more: the process's own memory differs between runs.
            remedy = f"--disk {ram_argument((on_disk + 1) * page)}" if spill.is_requested else "--spill-dir DIR for another disk"
            raise _SpillDoesNotFit(f"{format_size(on_disk * page)} of the KV cache for {ctx} tokens would be on disk, {spill.limit_source} "
                         f"{format_size(spill.disk)}", remedy)
        ctx, on_disk = max_ctx, kv_pages(demand, max_ctx, PAGE) - pages
    memory_nbytes = demand.kv_fixed + spill.ring + pages * page
    how_read = "of which a token reads few pages" if spill.is_sparse else "read for every token"
    notes = [Fallback(f"with a full context {format_size(on_disk * page)} of the KV cache are on disk, {how_read}; "
                      f"{format_size(memory_nbytes - spill.ring)} of it stay in memory")]
    if residency is not None and residency.streamed and not demand.units:
        notes.append(Fallback(f"{format_size(residency.streamed_nbytes)} of weights do not fit in memory either and are read for every "
                              "token too"))
    if ctx > ctx_max:
        notes.append(f"a context of {ctx} is beyond the {ctx_max} tokens that the model was trained for")
    elif ctx_wanted is None and ctx < ctx_max:
        notes.append(Fallback(f"context {ctx} of the model's {ctx_max}: the most that the disk holds"))
    return Placement(("cpu",) * demand.layers, ctx, sum(block.nbytes for block in demand.weights), memory_nbytes,
                     demand.workspace + spill.workspace, demand.baseline, total_bytes, budget, tuple(notes), 0, residency,
                     demand.kv_bytes_per_token, kv_pages=pages, kv_disk_bytes=on_disk * page,
                     always_bytes=0 if residency is None else demand.always_nbytes, kv_ring_bytes=spill.ring)
