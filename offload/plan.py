"""Placement planning from headers alone: pure arithmetic on byte counts, so `effllm plan` and a run cannot disagree.

Memory = (baseline + workspace + weights + KV cache) + 5%. The 5% cover allocator overhead and small objects. The caller measures the
baseline after its imports, so a RAM budget holds for the whole process. Embedding and head stay on the host. A GPU takes the last layers,
so that activations cross to it once and back once. Weights that do not fit are streamed, in blocks that the caller defines; the pinned
weights and the ring are then exact mappings, and the 5% apply to the rest. Layers with a sliding window are planned as if they kept the
whole context; the cache knows exact figures per layer and passes the sum.
"""

from dataclasses import dataclass, replace

from .. import DoesNotFit, MemoryTooSmall, UsageError
from .demand import AUTO_CTX, RESIDENT_CTX, Demand, describe_ctx, gpu_kv_nbytes, gpu_workspace, kv_nbytes, largest, with_slack
from .notes import Fallback
from .placement import Budget, GpuBytes, Placement
from .plan_experts import paged
from .plan_streamed import streamed
from .size import SPARE, format_size, ram_argument


@dataclass(frozen=True)
class Split:
    """Byte counts for one choice of (GPU layers, context); pairs are (host, GPU)."""

    gpu_layers: int
    ctx: int
    weights: tuple[int, int]
    kv: tuple[int, int]
    ram: int
    vram: int

    def gpu_bytes(self, demand: Demand) -> GpuBytes:
        return GpuBytes(self.weights[1], self.kv[1], gpu_workspace(demand)) if self.gpu_layers else GpuBytes()


def plan(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None = None, device: str = "auto",
         gpu_layers: int | None = None, quantum: int = 128) -> Placement:
    """Place every layer and choose the context: `ctx_wanted`, or else the largest that fits, up to `ctx_max`.

    Raises DoesNotFit with the figures and what would fit instead, UsageError for a contradictory request."""
    check_request(budget, ctx_wanted, device, gpu_layers)
    if (demand.blocks or demand.experts) and not budget.vram and not is_resident(demand, budget, ctx_max, ctx_wanted, quantum):
        if demand.experts:
            return paged(demand, budget, ctx_max, ctx_wanted, quantum)
        return streamed(demand, budget, ctx_max, ctx_wanted, quantum)
    smallest = ctx_wanted or min(quantum, ctx_max)
    count = _gpu_count(demand, budget, ctx_wanted or min(ctx_max, AUTO_CTX), device, gpu_layers, quantum)
    if not _fits(split_of(demand, count, smallest, quantum), budget):
        # Host memory is short as well: a shorter context lets more layers move off it.
        count = _gpu_count(demand, budget, smallest, device, gpu_layers, quantum)
    ctx = ctx_wanted or _largest_ctx(demand, budget, count, ctx_max, quantum)
    split = split_of(demand, count, ctx or smallest, quantum)
    if not _fits(split, budget):
        raise does_not_fit(demand, budget, split, ctx_max, quantum)
    host = demand.layers - count
    return Placement(
        devices=("cpu",) * host + ("cuda",) * count,
        ctx=split.ctx,
        weights_bytes=sum(split.weights),
        kv_bytes=sum(split.kv),
        workspace_bytes=demand.workspace,
        baseline_bytes=demand.baseline,
        total_bytes=split.ram,
        budget=budget,
        notes=tuple(_notes(demand, split, ctx_max, ctx_wanted)),
        vram_bytes=split.vram,
        kv_bytes_per_token=demand.kv_bytes_per_token,
        gpu=split.gpu_bytes(demand),
    )


def is_resident(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> bool:
    """Whether all weights fit in memory with a useful context."""
    return _fits(split_of(demand, 0, ctx_wanted or min(ctx_max, RESIDENT_CTX), quantum), budget)


def check_request(budget: Budget, ctx_wanted: int | None, device: str, gpu_layers: int | None) -> None:
    """Raises UsageError for a contradictory request, or one for a GPU that does not exist."""
    if device not in ("cpu", "cuda", "auto"):
        raise UsageError(f"{device!r} is not a device", "use --device cpu, cuda or auto")
    if ctx_wanted is not None and ctx_wanted < 1:
        raise UsageError(f"a context of {ctx_wanted} tokens is too small", "give -c a positive number")
    if gpu_layers is not None and gpu_layers < 0:
        raise UsageError(f"-ngl {gpu_layers} is not a valid number of layers", "give -ngl 0 or more")
    if device == "cpu" and gpu_layers:
        raise UsageError(f"-ngl {gpu_layers} requires a GPU, which --device cpu rules out", "drop one of the two")
    if not budget.vram and (device == "cuda" or gpu_layers):
        raise UsageError("no GPU memory is available to this process", "use --device cpu, or see effllm doctor")


def _gpu_count(demand: Demand, budget: Budget, ctx: int, device: str, gpu_layers: int | None, quantum: int) -> int:
    """Layers for the GPU: as requested, or as many as fit with their share of a context of `ctx`."""
    if device == "cpu" or not budget.vram:
        return 0
    if gpu_layers is not None:
        return min(gpu_layers, demand.layers)
    if device == "cuda":
        return demand.layers
    counts = range(demand.layers, 0, -1)
    return next((count for count in counts if split_of(demand, count, ctx, quantum).vram <= budget.vram), 0)


def _largest_ctx(demand: Demand, budget: Budget, count: int, ctx_max: int, quantum: int) -> int:
    """The largest context that fits: `ctx_max`, or a multiple of `quantum`; 0 if not even one quantum does."""
    return largest(lambda ctx: _fits(split_of(demand, count, ctx, quantum), budget), ctx_max, quantum)


def split_of(demand: Demand, count: int, ctx: int, quantum: int) -> Split:
    """The byte counts with the last `count` layers on the GPU and a context of `ctx` tokens."""
    first = demand.layers - count
    total_nbytes = sum(block.nbytes for block in demand.weights)
    moved = [block for block in demand.weights if block.layer is not None and block.layer >= first]
    weights = total_nbytes - sum(block.nbytes for block in moved), sum(block.nbytes_on_gpu for block in moved)
    kv, kv_gpu = kv_nbytes(demand, ctx, quantum), gpu_kv_nbytes(demand, count, ctx, quantum)
    ram = with_slack(demand.baseline + demand.workspace + weights[0] + kv - kv_gpu)
    vram = with_slack(gpu_workspace(demand) + weights[1] + kv_gpu) if count else 0
    return Split(count, ctx, weights, (kv - kv_gpu, kv_gpu), ram, vram)


def _fits(split: Split, budget: Budget) -> bool:
    return split.ram <= budget.ram and split.vram <= budget.vram


def _notes(demand: Demand, split: Split, ctx_max: int, ctx_wanted: int | None) -> list[str]:
    notes = []
    if split.ctx > ctx_max:
        notes.append(f"a context of {split.ctx} is beyond the {ctx_max} tokens that the model was trained for")
    elif ctx_wanted is None and split.ctx < ctx_max:
        notes.append(Fallback(f"context {split.ctx} of the model's {ctx_max}: the most that fits in the memory budget"))
    if 0 < split.gpu_layers < demand.layers:
        notes.append(f"{split.gpu_layers} of {demand.layers} layers on the GPU, the rest on the CPU")
    return notes


def does_not_fit(demand: Demand, budget: Budget, split: Split, ctx_max: int, quantum: int) -> DoesNotFit:
    """The error for the memory that runs out first, with the nearest request that fits."""
    tier, where = (0, "memory") if split.ram > budget.ram else (1, "GPU memory")
    needs, limit = ((split.ram, budget.ram), (split.vram, budget.vram))[tier]
    weights, kv = split.weights[tier], split.kv[tier]
    message = (f"needs {format_size(needs)} of {where} (weights {format_size(weights)} + KV cache {format_size(kv)} for "
               f"{describe_ctx(demand, split.ctx)} + overhead {format_size(needs - weights - kv)}), the budget is {format_size(limit)}")
    hint, fitting_ctx = _nearest(demand, budget, split, ctx_max, quantum)
    return DoesNotFit(message, hint) if tier else MemoryTooSmall(message, hint, split.ram, fitting_ctx)


def _nearest(demand: Demand, budget: Budget, split: Split, ctx_max: int, quantum: int) -> tuple[str, int]:
    """The nearest request that fits: a shorter context (and how long, else 0), else another number of GPU layers, else the memory it
    takes."""
    shorter_ctx = _largest_ctx(demand, replace(budget, ram=budget.ram - SPARE), split.gpu_layers, min(ctx_max, split.ctx), quantum)
    ram, vram = f"--ram {ram_argument(split.ram)}", f"--vram {-(-split.vram // 2**20)}Mi"
    flags = " and ".join([ram] * (split.ram > budget.ram) + [vram] * (split.vram > budget.vram))
    if shorter_ctx:
        return f"-c {shorter_ctx} fits; {split.ctx} tokens take {flags}", shorter_ctx
    counts = range(demand.layers, -1, -1) if budget.vram else range(0)
    count = next((n for n in counts if _fits(split_of(demand, n, split.ctx, quantum), budget)), None)
    if count is not None:
        return f"-ngl {count} fits" if count else "--device cpu fits", 0
    return f"no context fits: it takes {flags}, or a smaller model", 0
