"""Planning a mixture of experts that does not fit: everything else stays in memory, and the remainder becomes expert slots."""

from .demand import AUTO_CTX, Demand, kv_nbytes, largest, with_slack
from .placement import Budget, Placement
from .size import SPARE, format_size, memory_too_small


def paged(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> Placement:
    """All on the host; the context takes precedence over slots.

    Raises MemoryTooSmall with the number of slots that the budget holds and the useful minimum: with fewer than the experts of two tokens,
    every token evicts what the next one needs, whatever the policy."""
    experts = demand.experts
    min_slots_nbytes = experts.min_slots * experts.slot_nbytes

    def fixed(ctx: int) -> int:
        return with_slack(demand.baseline + demand.workspace + kv_nbytes(demand, ctx, quantum)) + demand.always_nbytes

    ctx = ctx_wanted or largest(lambda ctx: fixed(ctx) + min_slots_nbytes <= budget.ram, min(ctx_max, AUTO_CTX), quantum)
    needed = fixed(ctx or min(quantum, ctx_max))
    if not ctx or needed + min_slots_nbytes > budget.ram:
        affordable = max(0, budget.ram - needed) // experts.slot_nbytes
        shorter = largest(lambda ctx: fixed(ctx) + min_slots_nbytes + SPARE <= budget.ram, min(ctx_max, ctx), quantum)
        raise memory_too_small(
            f"{format_size(budget.ram)} of memory hold {affordable} of {experts.count} experts beside {format_size(needed)} for everything "
            f"else; it takes {experts.min_slots}, {-(-experts.min_slots // experts.layers)} a layer, and "
            f"{format_size(needed + min_slots_nbytes)}",
            needed + min_slots_nbytes, ctx, shorter, "fewer bits, or a smaller model")
    slots = min(experts.count, (budget.ram - needed) // experts.slot_nbytes)
    notes = [f"{slots} of {experts.count} experts stay in memory, the others are read from disk on demand"
             if slots < experts.count else "the embedding stays on disk: one row is read per token"]
    if ctx > ctx_max:
        notes.append(f"a context of {ctx} is beyond the {ctx_max} tokens that the model was trained for")
    elif ctx_wanted is None and ctx < ctx_max:
        notes.append(f"context {ctx} of the model's {ctx_max}: a longer one would leave less memory for experts (set it with -c)")
    return Placement(("cpu",) * demand.layers, ctx, sum(block.nbytes for block in demand.weights), kv_nbytes(demand, ctx, quantum),
                     demand.workspace, demand.baseline, needed + slots * experts.slot_nbytes, budget, tuple(notes),
                     kv_bytes_per_token=demand.kv_bytes_per_token, expert_slots=slots, always_bytes=demand.always_nbytes)
