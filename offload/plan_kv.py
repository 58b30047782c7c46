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
from .placement import Budget, Placement, Residency, choose_pinned, least_budget
from .plan import is_resident, plan
from .size import SPARE, format_size, ram_argument

PAGE = 128  # tokens


@dataclass(frozen=True)
class Spill:
    """What spilled pages need, in bytes: `ring` (memory for reads and for a page being written) and more workspace. `ram`: limit of cache
    memory, None for what is left; `disk`: limit of the file; `where`: what set that limit; `capped`: it was requested. `picks`: a token
    reads few of the pages."""

    ring: int
    workspace: int
    ram: int | None
    disk: int
    where: str
    picks: bool = False
    capped: bool = False


class _Short(DoesNotFit):
    """Refused; the hint is an alternative to a shorter context. `least`: the memory that it takes; None if the disk is too small."""

    def __init__(self, message: str, hint: str, least: int | None = None) -> None:
        super().__init__(message, hint)
        self.least = least


def plan_tiers(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill | None) -> Placement:
    """`plan.plan` on the host, spilling pages to disk if the requested context does not fit in memory or in `spill.ram`.

    Raises DoesNotFit and UsageError as `plan` does, DoesNotFit also if the disk or `spill.ram` is too small, with the longest context that
    would fit."""
    try:
        return _tiers(demand, budget, ctx_max, ctx_wanted, spill)
    except _Short as short:
        more = f", or {short.hint}" if short.hint.startswith("--") else ""
        longest = _longest(demand, budget, ctx_max, ctx_wanted or ctx_max, spill)
        hint = f"-c {longest} fits{more}" if longest else short.hint
        if short.least is None:
            raise DoesNotFit(short.message, hint) from None
        raise MemoryTooSmall(short.message, hint, short.least, longest) from None


def _longest(demand: Demand, budget: Budget, ctx_max: int, ctx: int, spill: Spill) -> int:
    """The longest context shorter than `ctx` that can be planned when requested, with SPARE; 0 for none."""
    within = replace(budget, ram=budget.ram - SPARE)

    def length(pages: int) -> int:
        return min(ctx_max, demand.kv_sinks + pages * PAGE)

    def is_planned(pages: int) -> bool:
        try:
            return bool(_tiers(demand, within, ctx_max, length(pages), spill))
        except DoesNotFit:
            return False

    shorter = kv_pages(demand, ctx, PAGE) - 1
    pages = largest(is_planned, shorter, 1) if shorter else 0
    return length(pages) if pages else 0


def _tiers(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill | None) -> Placement:
    ctx = ctx_wanted or (ctx_max if spill is not None and spill.ram is not None else 0)
    if spill is not None and not budget.vram and ctx and demand.kv_bytes_per_token:
        placed = _spilled(demand, budget, ctx_max, ctx_wanted, ctx, spill)
        if placed is not None:
            return placed
    return plan(demand, budget, ctx_max, ctx_wanted, "cpu", None, PAGE)


def _whole(demand: Demand, budget: Budget, ctx_max: int, ctx: int | None) -> Placement | None:
    """The plan with the whole cache in memory; None if there is none."""
    try:
        return plan(demand, budget, ctx_max, ctx, "cpu", None, PAGE)
    except DoesNotFit:
        return None


def _spilled(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, spill: Spill) -> Placement | None:
    """The plan with pages on disk; None if there is a better one without, or none at all."""
    page, total = page_nbytes(demand, PAGE), kv_pages(demand, ctx, PAGE)
    most = total
    if spill.ram is None:
        if spill.ring + spill.workspace >= total * page or is_resident(demand, budget, ctx_max, ctx, PAGE):
            return None
    else:
        is_whole = spill.ram >= demand.kv_fixed + total * page
        if is_whole and (whole := _whole(demand, budget, ctx_max, ctx_wanted)) is not None:  # if memory holds that much too
            return whole
        most = (spill.ram - demand.kv_fixed - spill.ring) // page
        if most < 0 and is_whole:
            return None  # reading from disk would take more memory than that
        if most < 0:
            needed = demand.kv_fixed + spill.ring
            raise DoesNotFit(f"--kv-ram {format_size(spill.ram)} is too small: {format_size(needed)} of the cache must be in memory in "
                             f"any case ({format_size(demand.kv_fixed)} for sink and window tokens, {format_size(spill.ring)} for read "
                             "buffers)", f"--kv-ram {-(-needed // 2**20)}Mi")
    kept = 0 if ctx_wanted is None else min(most, max(0, total - spill.disk // page))  # pages that the disk cannot take
    read = () if kept == total else (f"{format_size((total - kept) * page)} of the KV cache" if kept else "the KV cache",)
    least = demand.baseline + demand.workspace + spill.workspace + demand.kv_fixed + spill.ring
    weights = sum(block.nbytes for block in demand.weights)
    if with_slack(least + weights) <= budget.ram:
        pages = min(most, total, (budget.ram * 100 // 105 - least - weights) // page)
        if pages >= kept or not (demand.blocks or demand.experts):
            return _placed(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, None, with_slack(least + weights + pages * page))
    if demand.experts or demand.units:
        return _beside(demand, budget, ctx_max, ctx_wanted, ctx, most, kept, spill)
    if not demand.blocks:
        return _without(demand, budget, ctx_max, ctx_wanted, with_slack(least + weights + kept * page), read, spill)
    if spill.ram is None:
        if (whole := _whole(demand, budget, ctx_max, ctx_wanted)) is not None:
            return whole
        most = kept
    ring = demand.always + choose_pinned(demand.blocks, least_budget(demand.blocks, demand.same), same=demand.same).nbytes
    pages = min(most, ((budget.ram - ring) * 100 // 105 - least) // page)
    if with_slack(least) + ring > budget.ram:
        return _without(demand, budget, ctx_max, ctx_wanted, with_slack(least + kept * page) + ring, ("weights", *read), spill)
    fixed = with_slack(least + pages * page)
    residency = choose_pinned(demand.blocks, budget.ram - fixed - demand.always, same=demand.same)
    return _placed(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, residency, fixed + demand.always + residency.nbytes)


def _beside(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, most: int, kept: int,
            spill: Spill) -> Placement:
    """The plan where experts or neurons take what memory the cache leaves, which has as many of `most` pages as fit beside the minimum of
    them. If the cache has no explicit limit, it is spilled only if it does not fit otherwise, except the `kept` pages that the disk cannot
    take."""
    page = page_nbytes(demand, PAGE)

    def held(pages: int) -> Placement:
        own = replace(demand, workspace=demand.workspace + spill.workspace, kv_bytes_per_token=0, kv_page=0, kv_layers=(),
                      kv_fixed=demand.kv_fixed + spill.ring + pages * page)  # constant in the context length, for every layer
        return plan(own, budget, max(ctx_max, ctx), ctx, "cpu", None, PAGE)

    def fits(pages: int) -> bool:
        try:
            return bool(held(pages))
        except DoesNotFit:
            return False

    if spill.ram is None:
        if (whole := _whole(demand, budget, ctx_max, ctx_wanted)) is not None:
            return whole
        most = kept
    pages = largest(fits, most, 1)
    try:
        own = held(pages if pages or fits(0) else kept)
    except DoesNotFit as error:
        raise _Short(error.message, error.hint, error.least if isinstance(error, MemoryTooSmall) else None) from None
    placed = _placed(demand, budget, ctx_max, ctx_wanted, ctx, pages, spill, own.residency, own.total_bytes)
    if placed.kv_pages is None:
        return placed  # another plan, with slots for its own cache
    return replace(placed, slots=own.slots, window_bytes=own.window_bytes, expert_slots=own.expert_slots, always_bytes=own.always_bytes,
                   notes=own.notes + placed.notes)


def _without(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, needed: int,
             read: tuple[str, ...], spill: Spill) -> Placement:
    """The plan without spilled pages, when they take too much as well. Raises DoesNotFit."""
    if (alone := _in_memory(demand, budget, ctx_max, ctx_wanted, spill)) is not None:
        return alone
    even = f" even with {' and '.join(read)} read from the disk for every token" if read else ""
    raise _Short(f"needs {format_size(needed)} of memory{even}, the budget is {format_size(budget.ram)}",
                 f"it takes --ram {ram_argument(needed)}, or a smaller model", needed)


def _in_memory(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, spill: Spill) -> Placement | None:
    """The plan with no page on disk and at most `spill.ram` of cache, for `ctx_wanted` or else the longest context; None if there is
    none."""
    pages = None if spill.ram is None else (spill.ram - demand.kv_fixed) // page_nbytes(demand, PAGE)
    if pages is not None and pages < 1:
        return None
    placed = _whole(demand, budget, ctx_max, ctx_wanted)
    if placed is None or pages is None or kv_pages(demand, placed.ctx, PAGE) <= pages:
        return placed
    most = demand.kv_sinks + pages * PAGE
    if ctx_wanted is not None or (placed := _whole(demand, budget, ctx_max, most)) is None:
        return None
    return replace(placed, notes=(*placed.notes, Fallback(f"context {most} of the model's {ctx_max}: the most that --kv-ram holds; with "
                                                          f"pages on the disk it is no longer, {spill.where} {format_size(spill.disk)}")))


def _placed(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, ctx: int, pages: int, spill: Spill,
            residency: Residency | None, total_bytes: int) -> Placement:
    """The placement with `pages` pages in memory. If no context was requested and the disk is so small that memory alone holds a longer
    one, that one. Raises DoesNotFit if the disk is too small for a requested context."""
    page = page_nbytes(demand, PAGE)
    on_disk = kv_pages(demand, ctx, PAGE) - pages
    if on_disk * page > spill.disk:
        fitting = min(ctx_max, demand.kv_sinks + (pages + spill.disk // page) * PAGE)
        alone = _in_memory(demand, budget, ctx_max, None, spill) if ctx_wanted is None else None
        if alone is not None and (alone.ctx >= fitting or spill.disk < page):
            return alone
        if ctx_wanted is not None or spill.disk < page:
            # One page more: the process's own memory differs between runs.
            more = f"--disk {ram_argument((on_disk + 1) * page)}" if spill.capped else "--spill-dir DIR for another disk"
            raise _Short(f"{format_size(on_disk * page)} of the KV cache for {ctx} tokens would be on disk, {spill.where} "
                         f"{format_size(spill.disk)}", more)
        ctx, on_disk = fitting, kv_pages(demand, fitting, PAGE) - pages
    held = demand.kv_fixed + spill.ring + pages * page
    read = "of which a token reads few pages" if spill.picks else "read for every token"
    notes = [Fallback(f"with a full context {format_size(on_disk * page)} of the KV cache are on disk, {read}; {format_size(held)} of "
                      "it stay in memory")]
    if residency is not None and residency.streamed and not demand.units:
        notes.append(Fallback(f"{format_size(residency.streamed_nbytes)} of weights do not fit in memory either and are read for every "
                              "token too"))
    if ctx > ctx_max:
        notes.append(f"a context of {ctx} is beyond the {ctx_max} tokens that the model was trained for")
    elif ctx_wanted is None and ctx < ctx_max:
        notes.append(Fallback(f"context {ctx} of the model's {ctx_max}: the most that the disk holds"))
    return Placement(("cpu",) * demand.layers, ctx, sum(block.nbytes for block in demand.weights), held, demand.workspace + spill.workspace,
                     demand.baseline, total_bytes, budget, tuple(notes), 0, residency, demand.kv_bytes_per_token, kv_pages=pages,
                     kv_disk_bytes=on_disk * page, always_bytes=0 if residency is None else demand.always)
