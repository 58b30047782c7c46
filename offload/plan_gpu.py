"""Planning a run with a GPU above memory and disk: pure arithmetic, like `plan.py`.

The GPU takes the last layers, weights and caches, as many as it holds; the rest is planned as a smaller model, so that everything else a
plan can do (stream weights, page experts and neurons, spill the cache) still works beneath it. A layer on the host is computed there, since
one token reads its bytes from memory faster than they cross the link; a pass of many tokens reads them once and multiplies them often, and
from some number of tokens on, copying is cheaper. Two buffers on the GPU and two pinned on the host let one layer cross while the other is
used.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import DoesNotFit, EffllmError, MemoryTooSmall
from .demand import AUTO_CTX, RESIDENT_CTX, Demand, gpu_kv_nbytes, gpu_workspace, largest, with_slack
from .notes import Fallback
from .placement import Budget, GpuBytes, Placement
from .plan import Split, check_request, does_not_fit, plan, split_of
from .plan_kv import PAGE, Spill, plan_tiers
from .size import SPARE, format_size, ram_argument

BUFFERS = 2  # on each side: one layer crosses while the other is used


@dataclass(frozen=True)
class CopiedLayers:
    """Host layers that long passes copy to the GPU."""

    nbytes: int  # of the largest, as copied
    tokens: int  # the shortest pass that copies
    vectors: int = 0  # bytes of norms and biases of all these layers, which stay on the GPU

    @property
    def buffers(self) -> int:
        """Bytes of buffers on either side, at most."""
        return BUFFERS * self.nbytes + self.vectors


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the head on a GPU that has all layers: its weights, and workspace for the logits of some tokens."""

    weights: int
    workspace: int


@dataclass(frozen=True)
class LinkRates:
    """What decides between computing a layer on the host and copying it: CPU products and bytes per second, and link bytes per second."""

    products: float
    memory: float
    link: float


def copied_from(nbytes: int, products: int, token_nbytes: int, rates: LinkRates) -> int | None:
    """The fewest tokens for which copying a layer is cheaper than computing it on the host; None if it never is.

    `products` and `token_nbytes`: of one token; the latter cross the link for attention. n tokens take max(nbytes / memory, n * products /
    rate) on the CPU. The copy takes nbytes / link, plus the bytes of the tokens; the GPU's products are not counted, since they finish
    while the next layer crosses."""
    copy_s = nbytes / rates.link
    if copy_s + token_nbytes / rates.link < max(nbytes / rates.memory, products / rates.products):
        return 1
    saved_s = products / rates.products - token_nbytes / rates.link
    return max(1, int(copy_s / saved_s) + 1) if saved_s > 0 else None


def plan_split(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str, gpu_layers: int | None,
               spill: Spill | None, copied: Callable[[], CopiedLayers | None] | None = None, gpu_host_nbytes: int = 0) -> Placement:
    """The plan for a run that may use a GPU.

    `host(n)`: what the host needs if the last n layers are on the GPU; `host(0)` is the whole model. `copied` is called only if layers are
    on both sides, and in memory. `gpu_host_nbytes`: host memory that the GPU's libraries take once it has layers; unless GPU layers were
    requested, the CPU runs alone if memory does not hold that too. Raises DoesNotFit and UsageError as `plan` and `plan_tiers` do."""
    check_request(budget, ctx_wanted, device, gpu_layers)
    whole = host(0)

    def cpu_only(extra: int = 0) -> Placement:
        return plan_tiers(whole, Budget(budget.ram + extra), ctx_max, ctx_wanted, spill)

    if not budget.vram or device == "cpu" or gpu_layers == 0:
        return cpu_only()

    def demand_with_gpu(count: int) -> Demand:
        demand = host(count)
        return replace(demand, baseline=demand.baseline + gpu_host_nbytes) if count else demand

    is_auto = device == "auto" and gpu_layers is None
    one_layer_nbytes = split_of(whole, 1, ctx_wanted or min(ctx_max, AUTO_CTX), PAGE).vram
    try:
        placed = _with_gpu(demand_with_gpu, budget, ctx_max, ctx_wanted, device, gpu_layers, spill, copied, gpu_host_nbytes)
    except DoesNotFit as refused:
        if not is_auto:
            raise _suggest_cpu(refused, cpu_only) from None
        placed = _cpu_plan(refused, cpu_only, gpu_host_nbytes, one_layer_nbytes <= budget.vram)
    if "cuda" in placed.devices and not (is_auto and gpu_host_nbytes and _reads_disk(placed)):
        return placed
    try:
        cpu = cpu_only()
    except DoesNotFit:
        return placed
    if "cuda" in placed.devices and (_reads_disk(cpu) or cpu.ctx < placed.ctx):
        return placed
    if one_layer_nbytes > budget.vram:
        reason = (f"no layer fits on the GPU: one takes {format_size(one_layer_nbytes)}, cache and workspace included, and "
                  f"{format_size(budget.vram)} may be used")
    else:
        reason = (f"the GPU's libraries take {format_size(gpu_host_nbytes)} of memory, beside which {format_size(budget.ram)} hold too "
                  "little of the model")
    return replace(cpu, budget=budget, notes=(*cpu.notes, Fallback(f"{reason}: running on the CPU")))


def _suggest_cpu(refused: DoesNotFit, cpu_only: Callable[[], Placement]) -> DoesNotFit:
    """The error for requested GPU layers, suggesting the CPU where that works and memory is what is short."""
    if "of GPU memory" in refused.message and "it takes" not in refused.hint:
        return refused
    try:
        cpu_only()
    except DoesNotFit:
        return refused
    return DoesNotFit(refused.message, f"{refused.hint}, or --device cpu")


def _cpu_plan(refused: DoesNotFit, cpu_only: Callable[[int], Placement], gpu_host_nbytes: int, fits_gpu: bool) -> Placement:
    """The plan without the GPU if there is one; else raises the error of whichever is nearer to fitting."""
    try:
        return cpu_only(0)
    except DoesNotFit as error:
        if fits_gpu:
            try:
                cpu_only(gpu_host_nbytes)
            except DoesNotFit:
                raise refused from None
        raise error from None


def _reads_disk(placed: Placement) -> bool:
    """Whether tokens read weights or pages from disk under this plan."""
    return bool(placed.streamed_bytes or placed.slots or placed.kv_disk_bytes or placed.expert_slots is not None)


def _with_gpu(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str, gpu_layers: int | None,
               spill: Spill | None, copied: Callable[[], CopiedLayers | None] | None, gpu_host_nbytes: int) -> Placement:
    """The plan with what fits on the GPU."""
    whole = host(0)
    can_offload = bool(whole.blocks or whole.experts or spill is not None)
    placed = refusal = None
    if spill is None or spill.ram is None:
        resident = replace(whole, baseline=whole.baseline + gpu_host_nbytes, blocks=(), copy_of=(), always_nbytes=0, experts=None, units=())
        try:
            placed = plan(resident, budget, ctx_max, ctx_wanted, device, gpu_layers, PAGE)
        except DoesNotFit as error:
            refusal = error
    if placed is not None and (ctx_wanted or placed.ctx >= min(ctx_max, RESIDENT_CTX) or not can_offload):
        return _with_copies(placed, resident, budget, ctx_max, gpu_layers, copied)
    if not can_offload:
        raise refusal
    return _with_offloading(host, budget, ctx_max, ctx_wanted, device, gpu_layers, spill)


def _with_offloading(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str,
                     gpu_layers: int | None, spill: Spill | None) -> Placement:
    """As many layers on the GPU as fit, and a plan for the rest that may stream weights and spill the cache."""
    whole = host(0)
    ctx = ctx_wanted or min(ctx_max, AUTO_CTX)
    count = whole.layers if gpu_layers is None else min(gpu_layers, whole.layers)
    min_ctx = min(ctx, PAGE)
    if gpu_layers is not None or device == "cuda":
        split = split_of(whole, count, ctx_wanted or min_ctx, PAGE)
        if split.vram > budget.vram:
            raise _gpu_too_small(host, budget, ctx_max, split, spill)
    else:
        count = _max_gpu_layers(whole, budget, ctx)
    while True:
        gpu_ctx, host_demand = _max_gpu_ctx(whole, budget, count, ctx_max), host(count)
        host_plan = plan_tiers(host_demand, Budget(budget.ram), gpu_ctx, ctx_wanted, spill)
        max_layers = count if gpu_layers is not None else _max_gpu_layers(whole, budget, host_plan.ctx)
        if max_layers <= count:
            break
        count = max_layers  # the host's memory limits the context, so the GPU has room for another layer
    if not count:
        return replace(host_plan, budget=budget)
    return _combined(host_plan, whole, host_demand, count, budget, ctx_max, ctx_wanted, gpu_ctx)


def _gpu_too_small(host: Callable[[int], Demand], budget: Budget, ctx_max: int, split: Split, spill: Spill | None) -> DoesNotFit:
    """The error for a GPU that does not hold the layers requested, with the nearest request that fits: a shorter context, fewer layers, or
    the memory that it takes on both sides."""
    whole = host(0)

    def placed(ctx: int, count: int, limits: Budget) -> Placement:
        return _with_offloading(host, limits, ctx_max, ctx, "auto", count, spill)

    def fits(ctx: int, count: int, limits: Budget) -> bool:
        try:
            return split_of(whole, count, ctx, PAGE).vram <= limits.vram and bool(placed(ctx, count, limits))
        except DoesNotFit:
            return False

    message = does_not_fit(whole, replace(budget, ram=max(budget.ram, split.ram)), split, ctx_max, PAGE).message
    reduced = replace(budget, ram=budget.ram - SPARE)
    if shorter := largest(lambda ctx: fits(ctx, split.gpu_layers, reduced), min(ctx_max, split.ctx), PAGE):
        return DoesNotFit(message, f"-c {shorter} fits")
    count = next((count for count in range(split.gpu_layers - 1, -1, -1) if fits(split.ctx, count, budget)), None)
    if count is not None:
        return DoesNotFit(message, f"-ngl {count} fits" if count else "--device cpu fits")
    remedy = f"no context fits: it takes --vram {-(-split.vram // 2**20)}Mi"
    try:
        placed(split.ctx, split.gpu_layers, replace(budget, vram=split.vram))
    except MemoryTooSmall as error:
        return DoesNotFit(message, f"{remedy} and --ram {ram_argument(error.required_nbytes)}")
    except DoesNotFit as error:
        return DoesNotFit(message, f"{remedy}, and then {error.hint}")
    return DoesNotFit(message, f"{remedy}, or a smaller model")


def _max_gpu_ctx(whole: Demand, budget: Budget, count: int, ctx_max: int) -> int:
    """Tokens that the GPU holds with `count` layers, up to `ctx_max`."""
    return largest(lambda ctx: split_of(whole, count, ctx, PAGE).vram <= budget.vram, ctx_max, PAGE) if count else ctx_max


def _max_gpu_layers(whole: Demand, budget: Budget, ctx: int) -> int:
    """The most layers that the GPU holds with a context of `ctx`."""
    return next((count for count in range(whole.layers, 0, -1) if split_of(whole, count, ctx, PAGE).vram <= budget.vram), 0)


def _combined(host_plan: Placement, whole: Demand, host_demand: Demand, count: int, budget: Budget, ctx_max: int, ctx_wanted: int | None,
              gpu_ctx: int) -> Placement:
    """The host's plan combined with the last `count` layers on the GPU."""
    split = split_of(whole, count, host_plan.ctx, PAGE)
    gpu = GpuBytes(split.weights[1], gpu_kv_nbytes(whole, count, host_plan.ctx, PAGE), gpu_workspace(whole))
    notes = [f"{count} of {whole.layers} layers on the GPU, the rest on the CPU" if host_demand.layers else "all layers on the GPU",
             *host_plan.notes]
    if ctx_wanted is None and host_plan.ctx == gpu_ctx < ctx_max:
        notes.append(Fallback(f"context {host_plan.ctx} of the model's {ctx_max}: the most that fits in GPU memory"))
    return replace(host_plan, devices=host_plan.devices + ("cuda",) * count, weights_bytes=host_plan.weights_bytes + gpu.weights_bytes,
                   kv_bytes=host_plan.kv_bytes + gpu.kv_bytes, vram_bytes=split.vram, budget=budget, gpu=gpu, notes=tuple(notes),
                   kv_bytes_per_token=whole.kv_bytes_per_token)


def with_head(placed: Placement, head: HeadBytes) -> Placement:
    """The plan with the head on the GPU too, if all layers are there and it fits."""
    if "cpu" in placed.devices:
        return placed
    vram = placed.vram_bytes + with_slack(head.weights + head.workspace)
    if vram > placed.budget.vram:
        return placed
    gpu = replace(placed.gpu, weights_bytes=placed.gpu.weights_bytes + head.weights, head_bytes=head.weights,
                   workspace_bytes=placed.gpu.workspace_bytes + head.workspace)
    return replace(placed, weights_bytes=placed.weights_bytes + head.weights, vram_bytes=vram, gpu=gpu)


def _with_copies(placed: Placement, demand: Demand, budget: Budget, ctx_max: int, gpu_layers: int | None,
                 copied_layers: Callable[[], CopiedLayers | None] | None) -> Placement:
    """The plan with buffers for copied layers, if both sides have room for them; GPU layers that were not requested by number make room."""
    if copied_layers is None or not 0 < placed.devices.count("cuda") < demand.layers or (copied := copied_layers()) is None:
        return placed
    extra = with_slack(copied.buffers)
    count = None if gpu_layers is None else placed.devices.count("cuda")
    try:
        smaller = plan(demand, Budget(budget.ram - extra, budget.vram - extra), ctx_max, placed.ctx, "auto", count, PAGE)
    except EffllmError:
        return placed
    if not 0 < smaller.devices.count("cuda") < demand.layers:
        return placed
    passes = "all passes" if copied.tokens == 1 else f"passes of {copied.tokens} tokens or more"
    note = f"{passes} copy the CPU's layers to the GPU"
    return replace(smaller, total_bytes=smaller.total_bytes + extra, vram_bytes=smaller.vram_bytes + extra, copied_from=copied.tokens,
                   notes=(*dict.fromkeys((*smaller.notes, *placed.notes[:-1])), note), budget=budget,
                   workspace_bytes=smaller.workspace_bytes + copied.buffers,
                   gpu=replace(smaller.gpu, workspace_bytes=smaller.gpu.workspace_bytes + copied.buffers, buffers_bytes=copied.buffers))
