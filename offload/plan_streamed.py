"""Planning weights that do not fit, all on the host: pinned as far as memory goes, the rest streamed from disk on every pass."""

from .demand import AUTO_CTX, Demand, describe_ctx, kv_nbytes, largest, with_slack
from .notes import Fallback
from .placement import Budget, Placement, choose_pinned, min_streaming_nbytes, slots_for
from .size import SPARE, format_size, memory_too_small


def streamed(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> Placement:
    """All on the host, weights pinned as far as memory goes; the context takes precedence, since every pass reads it too."""
    window = sum(count * layer.nbytes for count, layer in zip(slots_for(demand.units, 0), demand.units, strict=True))
    min_weights_nbytes = min_streaming_nbytes(demand.blocks, demand.copy_of) + demand.always_nbytes + window

    def fits(ctx: int, spare: int = 0) -> bool:
        return with_slack(demand.baseline + demand.workspace + kv_nbytes(demand, ctx, quantum)) + min_weights_nbytes + spare <= budget.ram

    ctx = ctx_wanted or largest(fits, min(ctx_max, AUTO_CTX), quantum)
    cache = kv_nbytes(demand, ctx or quantum, quantum)
    fixed = with_slack(demand.baseline + demand.workspace + cache)
    if not ctx or not fits(ctx):
        shorter, needed = largest(lambda ctx: fits(ctx, SPARE), min(ctx_max, ctx), quantum), fixed + min_weights_nbytes
        message = (f"needs {format_size(needed)} of memory even with weights read from the disk for every token (KV cache "
                   f"{format_size(cache)} "
                f"for {describe_ctx(demand, ctx or quantum)} + program and buffers {format_size(needed - cache)}), "
                f"the budget is {format_size(budget.ram)}")
        raise memory_too_small(message, needed, ctx, shorter, "or a smaller model")
    # What every token uses goes first; a neuron is used by few.
    slots = slots_for(demand.units, budget.ram - fixed - demand.always_nbytes - sum(demand.blocks))
    window = sum(count * layer.nbytes for count, layer in zip(slots, demand.units, strict=True))
    residency = choose_pinned(demand.blocks, budget.ram - fixed - demand.always_nbytes - window, copy_of=demand.copy_of)
    streamed_nbytes = sum(demand.blocks[index] for index in residency.streamed if not demand.copy_of or demand.copy_of[index] == index)
    repeats = f" {round(residency.streamed_nbytes / streamed_nbytes)} times" if streamed_nbytes < residency.streamed_nbytes else ""
    notes = [Fallback(f"{format_size(streamed_nbytes)} of weights do not fit in memory and are read from the disk for every token{repeats}"
                      f"{f', {format_size(kept_nbytes)} stay in memory' if (kept_nbytes := residency.pinned_nbytes + window) else ''}")
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
                     demand.baseline, fixed + demand.always_nbytes + window + residency.nbytes, budget, tuple(notes), 0, residency,
                     demand.kv_bytes_per_token, slots, window, always_bytes=demand.always_nbytes)
