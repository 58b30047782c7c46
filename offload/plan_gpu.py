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
    """Host layers that passes of `tokens` or more copy to the GPU; `nbytes`: the largest, as copied; `vectors`: what of all of them stays
    there."""

    nbytes: int
    tokens: int
    vectors: int = 0

    @property
    def buffers(self) -> int:
        """Bytes of buffers on either side, at most."""
        return BUFFERS * self.nbytes + self.vectors


@dataclass(frozen=True)
class HeadBytes:
    """What the head takes on a GPU that has all layers: its weights, and workspace for some tokens' logits."""

    weights: int
    workspace: int


@dataclass(frozen=True)
class LinkRates:
    """What decides between computing a layer on the host and copying it: CPU products and bytes per second, and link bytes per second."""

    products: float
    memory: float
    link: float


def copied_from(nbytes: int, products: int, border: int, rates: LinkRates) -> int | None:
    """The fewest tokens for which copying a layer is cheaper than computing it on the host; None if it never is.

    n tokens take max(nbytes / memory, n * products / rate) on the CPU. The copy takes nbytes / link, plus `border` bytes per token; the
    GPU's products are not counted, since they finish while the next layer crosses."""
    copy = nbytes / rates.link
    if copy + border / rates.link < max(nbytes / rates.memory, products / rates.products):
        return 1
    saved = products / rates.products - border / rates.link
    return max(1, int(copy / saved) + 1) if saved > 0 else None


def plan_split(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str, gpu_layers: int | None,
               spill: Spill | None, copied: Callable[[], CopiedLayers | None] | None = None, beside: int = 0) -> Placement:
    """The plan for a model of which `host(n)` is what remains beneath a GPU with its last n layers; `host(0)` is all of it. `copied` is
    called only where layers lie on both sides and in memory. `beside`: host memory that a GPU takes once it has layers; if no GPU layers
    were requested and memory does not hold that too, the CPU runs alone.

    Raises DoesNotFit and UsageError as `plan` and `plan_tiers` do."""
    check_request(budget, ctx_wanted, device, gpu_layers)
    whole = host(0)

    def alone(more: int = 0) -> Placement:
        return plan_tiers(whole, Budget(budget.ram + more), ctx_max, ctx_wanted, spill)

    if not budget.vram or device == "cpu" or gpu_layers == 0:
        return alone()

    def paid(above: int) -> Demand:
        own = host(above)
        return replace(own, baseline=own.baseline + beside) if above else own

    is_open = device == "auto" and gpu_layers is None
    one = split_of(whole, 1, ctx_wanted or min(ctx_max, AUTO_CTX), PAGE).vram
    try:
        placed = _with_gpu(paid, budget, ctx_max, ctx_wanted, device, gpu_layers, spill, copied, beside)
    except DoesNotFit as refused:
        if not is_open:
            raise _or_cpu(refused, alone) from None
        placed = _unless(refused, alone, beside, one <= budget.vram)
    if "cuda" in placed.devices and not (is_open and beside and _reads_disk(placed)):
        return placed
    try:
        cpu = alone()
    except DoesNotFit:
        return placed
    if "cuda" in placed.devices and (_reads_disk(cpu) or cpu.ctx < placed.ctx):
        return placed
    why = (f"no layer fits on the GPU: one takes {format_size(one)}, cache and workspace included, and "
           f"{format_size(budget.vram)} may be used" if one > budget.vram else
           f"the GPU's libraries take {format_size(beside)} of memory, beside which {format_size(budget.ram)} hold too little of the model")
    return replace(cpu, budget=budget, notes=(*cpu.notes, Fallback(f"{why}: running on the CPU")))


def _or_cpu(refused: DoesNotFit, alone: Callable[[], Placement]) -> DoesNotFit:
    """The error for requested GPU layers, suggesting the CPU where that works and memory is what is short."""
    if "of GPU memory" in refused.message and "it takes" not in refused.hint:
        return refused
    try:
        alone()
    except DoesNotFit:
        return refused
    return DoesNotFit(refused.message, f"{refused.hint}, or --device cpu")


def _unless(refused: DoesNotFit, alone: Callable[[int], Placement], beside: int, fits_gpu: bool) -> Placement:
    """The plan without the GPU if there is one; else raises the error of whichever is nearer to fitting."""
    try:
        return alone(0)
    except DoesNotFit as error:
        if fits_gpu:
            try:
                alone(beside)
            except DoesNotFit:
                raise refused from None
        raise error from None


def _reads_disk(placed: Placement) -> bool:
    """Whether tokens read weights or pages from disk under this plan."""
    return bool(placed.streamed_bytes or placed.slots or placed.kv_disk_bytes or placed.expert_slots is not None)


def _with_gpu(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str, gpu_layers: int | None,
               spill: Spill | None, copied: Callable[[], CopiedLayers | None] | None, beside: int) -> Placement:
    """The plan with what fits on the GPU."""
    whole = host(0)
    may_leave = bool(whole.blocks or whole.experts or spill is not None)
    placed = refusal = None
    if spill is None or spill.ram is None:
        plain = replace(whole, baseline=whole.baseline + beside, blocks=(), same=(), always=0, experts=None, units=())
        try:
            placed = plan(plain, budget, ctx_max, ctx_wanted, device, gpu_layers, PAGE)
        except DoesNotFit as error:
            refusal = error
    if placed is not None and (ctx_wanted or placed.ctx >= min(ctx_max, RESIDENT_CTX) or not may_leave):
        return _with_copies(placed, plain, budget, ctx_max, gpu_layers, copied)
    if not may_leave:
        raise refusal
    return _beneath(host, budget, ctx_max, ctx_wanted, device, gpu_layers, spill)


def _beneath(host: Callable[[int], Demand], budget: Budget, ctx_max: int, ctx_wanted: int | None, device: str, gpu_layers: int | None,
             spill: Spill | None) -> Placement:
    """The GPU filled, and the rest planned beneath it."""
    whole = host(0)
    ctx = ctx_wanted or min(ctx_max, AUTO_CTX)
    count = whole.layers if gpu_layers is None else min(gpu_layers, whole.layers)
    least = min(ctx, PAGE)
    if gpu_layers is not None or device == "cuda":
        split = split_of(whole, count, ctx_wanted or least, PAGE)
        if split.vram > budget.vram:
            raise _refused(host, budget, ctx_max, split, spill)
    else:
        count = _most(whole, budget, ctx)
    while True:
        room, left = _room(whole, budget, count, ctx_max), host(count)
        made = plan_tiers(left, Budget(budget.ram), room, ctx_wanted, spill)
        more = count if gpu_layers is not None else _most(whole, budget, made.ctx)
        if more <= count:
            break
        count = more  # the host holds fewer tokens than hoped for, so the GPU has room for another layer
    if not count:
        return replace(made, budget=budget)
    return _joined(made, whole, left, count, budget, ctx_max, ctx_wanted, room)


def _refused(host: Callable[[int], Demand], budget: Budget, ctx_max: int, split: Split, spill: Spill | None) -> DoesNotFit:
    """The error for a GPU that does not hold the layers requested, with the nearest request that fits: a shorter context, fewer layers, or
    the memory that it takes on both sides."""
    whole = host(0)

    def placed(ctx: int, count: int, within: Budget) -> Placement:
        return _beneath(host, within, ctx_max, ctx, "auto", count, spill)

    def fits(ctx: int, count: int, within: Budget) -> bool:
        try:
            return split_of(whole, count, ctx, PAGE).vram <= within.vram and bool(placed(ctx, count, within))
        except DoesNotFit:
            return False

    message = does_not_fit(whole, replace(budget, ram=max(budget.ram, split.ram)), split, ctx_max, PAGE).message
    spare = replace(budget, ram=budget.ram - SPARE)
    if shorter := largest(lambda ctx: fits(ctx, split.gpu_layers, spare), min(ctx_max, split.ctx), PAGE):
        return DoesNotFit(message, f"-c {shorter} fits")
    count = next((count for count in range(split.gpu_layers - 1, -1, -1) if fits(split.ctx, count, budget)), None)
    if count is not None:
        return DoesNotFit(message, f"-ngl {count} fits" if count else "--device cpu fits")
    wanted = f"no context fits: it takes --vram {-(-split.vram // 2**20)}Mi"
    try:
        placed(split.ctx, split.gpu_layers, replace(budget, vram=split.vram))
    except MemoryTooSmall as error:
        return DoesNotFit(message, f"{wanted} and --ram {ram_argument(error.least)}")
    except DoesNotFit as error:
        return DoesNotFit(message, f"{wanted}, and then {error.hint}")
    return DoesNotFit(message, f"{wanted}, or a smaller model")


def _room(whole: Demand, budget: Budget, count: int, ctx_max: int) -> int:
    """Tokens that the GPU holds with `count` layers, up to `ctx_max`."""
    return largest(lambda ctx: split_of(whole, count, ctx, PAGE).vram <= budget.vram, ctx_max, PAGE) if count else ctx_max


def _most(whole: Demand, budget: Budget, ctx: int) -> int:
    """The most layers that the GPU holds with a context of `ctx`."""
    return next((count for count in range(whole.layers, 0, -1) if split_of(whole, count, ctx, PAGE).vram <= budget.vram), 0)


def _joined(made: Placement, whole: Demand, left: Demand, count: int, budget: Budget, ctx_max: int, ctx_wanted: int | None,
            room: int) -> Placement:
    """The host's plan combined with `count` layers above it."""
    split = split_of(whole, count, made.ctx, PAGE)
    gpu = GpuBytes(split.weights[1], gpu_kv_nbytes(whole, count, made.ctx, PAGE), gpu_workspace(whole))
    notes = [f"{count} of {whole.layers} layers on the GPU, the rest on the CPU" if left.layers else "all layers on the GPU", *made.notes]
    if ctx_wanted is None and made.ctx == room < ctx_max:
        notes.append(Fallback(f"context {made.ctx} of the model's {ctx_max}: the most that fits in GPU memory"))
    return replace(made, devices=made.devices + ("cuda",) * count, weights_bytes=made.weights_bytes + gpu.weights_bytes,
                   kv_bytes=made.kv_bytes + gpu.kv_bytes, vram_bytes=split.vram, budget=budget, gpu=gpu, notes=tuple(notes),
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


def _with_copies(placed: Placement, plain: Demand, budget: Budget, ctx_max: int, gpu_layers: int | None,
                 ask: Callable[[], CopiedLayers | None] | None) -> Placement:
    """The plan with buffers for copied layers, if both sides have room for them; GPU layers that were not requested by number make room."""
    if ask is None or not 0 < placed.devices.count("cuda") < plain.layers or (copied := ask()) is None:
        return placed
    extra = with_slack(copied.buffers)
    count = None if gpu_layers is None else placed.devices.count("cuda")
    try:
        fewer = plan(plain, Budget(budget.ram - extra, budget.vram - extra), ctx_max, placed.ctx, "auto", count, PAGE)
    except EffllmError:
        return placed
    if not 0 < fewer.devices.count("cuda") < plain.layers:
        return placed
    passes = "all passes" if copied.tokens == 1 else f"passes of {copied.tokens} tokens or more"
    note = f"{passes} copy the CPU's layers to the GPU"
    return replace(fewer, total_bytes=fewer.total_bytes + extra, vram_bytes=fewer.vram_bytes + extra, copied_from=copied.tokens,
                   notes=(*dict.fromkeys((*fewer.notes, *placed.notes[:-1])), note), budget=budget,
                   workspace_bytes=fewer.workspace_bytes + copied.buffers,
                   gpu=replace(fewer.gpu, workspace_bytes=fewer.gpu.workspace_bytes + copied.buffers, buffers_bytes=copied.buffers))
