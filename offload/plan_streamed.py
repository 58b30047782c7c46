"""Planning weights that do not fit, all on the host: pinned as far as memory goes, the rest streamed from disk on every pass."""

from .demand import AUTO_CTX, Demand, describe_ctx, kv_nbytes, largest, with_slack
from .notes import Fallback
from .placement import Budget, Placement, choose_pinned, least_budget, slots_for
from .size import SPARE, format_size, memory_too_small


def streamed(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> Placement:
    """All on the host, weights pinned as far as memory goes; the context takes precedence, since every pass reads it too."""
    window = sum(own * layer.nbytes for own, layer in zip(slots_for(demand.units, 0), demand.units, strict=True))
    least = choose_pinned(demand.blocks, least_budget(demand.blocks, demand.same), same=demand.same).nbytes + demand.always + window

    def fits(ctx: int, spare: int = 0) -> bool:
        return with_slack(demand.baseline + demand.workspace + kv_nbytes(demand, ctx, quantum)) + least + spare <= budget.ram

    ctx = ctx_wanted or largest(fits, min(ctx_max, AUTO_CTX), quantum)
    cache = kv_nbytes(demand, ctx or quantum, quantum)
    fixed = with_slack(demand.baseline + demand.workspace + cache)
    if not ctx or not fits(ctx):
        shorter, needs = largest(lambda ctx: fits(ctx, SPARE), min(ctx_max, ctx), quantum), fixed + least
        said = (f"needs {format_size(needs)} of memory even with weights read from the disk for every token (KV cache {format_size(cache)} "
                f"for {describe_ctx(demand, ctx or quantum)} + program and buffers {format_size(needs - cache)}), "
                f"the budget is {format_size(budget.ram)}")
        raise memory_too_small(said, needs, ctx, shorter, "or a smaller model")
    # What every token uses goes first; a neuron is used by few.
    slots = slots_for(demand.units, budget.ram - fixed - demand.always - sum(demand.blocks))
    window = sum(own * layer.nbytes for own, layer in zip(slots, demand.units, strict=True))
    residency = choose_pinned(demand.blocks, budget.ram - fixed - demand.always - window, same=demand.same)
    away = sum(demand.blocks[index] for index in residency.streamed if not demand.same or demand.same[index] == index)
    often = f" {round(residency.streamed_nbytes / away)} times" if away < residency.streamed_nbytes else ""
    notes = [Fallback(f"{format_size(away)} of weights do not fit in memory and are read from the disk for every token{often}"
                      f"{f', {format_size(stays)} stay in memory' if (stays := residency.pinned_nbytes + window) else ''}")
             if residency.streamed else "the embedding stays on disk: one row is read per token"]
    if slots:
        neurons = sum(layer.count * layer.nbytes for layer in demand.units)
        notes.append(Fallback(f"{format_size(neurons)} of neurons are on the disk: those that a token activates are read unless they are "
                              f"among the {format_size(window)} that were active recently"))
    if ctx > ctx_max:
        notes.append(f"a context of {ctx} is beyond the {ctx_max} tokens that the model was trained for")
    elif ctx_wanted is None and ctx < ctx_max:
        notes.append(Fallback(f"context {ctx} of the model's {ctx_max}: a longer one would leave less memory for weights (set it with -c)"))
    return Placement(("cpu",) * demand.layers, ctx, sum(block.nbytes for block in demand.weights), cache, demand.workspace,
                     demand.baseline, fixed + demand.always + window + residency.nbytes, budget, tuple(notes), 0, residency,
                     demand.kv_bytes_per_token, slots, window, always_bytes=demand.always)
