"""What goes where, decided from headers alone: pure arithmetic over byte counts, so `effllm plan` and a run cannot disagree.

Memory = (baseline + workspace + weights + KV cache) + 5%, where the 5% pays for allocator slack and small objects. The baseline is
measured by the caller after its imports, so a RAM budget is a figure for the whole process. Embedding and head stay on the host; the
card takes the last layers of the model, so that activations cross to it once and come back once. Weights that do not fit are streamed
where the caller says in which blocks: then pinned weights and the ring are exact mappings, and the 5% are of the rest.
Sliding-window layers are planned as if they kept the whole context; exact per-layer figures belong to the cache, which passes its sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import DoesNotFit, MemoryTooSmall, UsageError
from .notes import Fallback
from .placement import Residency, Units, reside, slots_for
from .size import SPARE, asked_mib, format_size, memory_too_small

# With the device left open, layers move back to the host only for a context up to this; longer ones fill what memory is left.
AUTO_CTX = 4096
# A context that was not asked for is shortened to here so that all weights fit; shorter than that, weights are streamed instead.
RESIDENT_CTX = 512


@dataclass(frozen=True)
class BlockBytes:
    """Weights that are placed together: a layer, named by its number, or what surrounds the layers (embedding, norm, head)."""

    name: str
    nbytes: int
    on_card: int | None = None  # bytes that it takes on a GPU, where those are others

    @property
    def card_nbytes(self) -> int:
        return self.nbytes if self.on_card is None else self.on_card

    @property
    def layer(self) -> int | None:
        return int(self.name) if self.name.isdecimal() else None


@dataclass(frozen=True)
class Experts:
    """Experts that share slots: so many in all, in `layers` layers, of which a token visits `per_token` a layer."""

    layers: int
    count: int
    per_token: int
    slot_nbytes: int

    @property
    def least(self) -> int:
        """Slots below which no policy helps: those of two tokens."""
        return min(self.count, 2 * self.per_token * self.layers)


@dataclass(frozen=True)
class Demand:
    """What a model asks for, in bytes; the KV figures are sums over all layers.

    `blocks`: weights that can be streamed, in order of use; empty where none can. `always`: what stays in memory when they are. `experts`:
    those of a mixture, where they can be read one by one; `always` is then all the rest. `units`: of each layer, neurons that are read
    when they are active; they are in neither. `card_workspace`: working memory on a GPU (None: as much as on the host). `kv_layers`: the
    cache's bytes per token of each layer, rounded up, where they differ; `kv_fixed_layers`: `kv_fixed` by layer, likewise. `kv_sinks`:
    tokens before its first page; `kv_page`: bytes of a page, 0 for those of its tokens; `texts`: how many share all of it."""

    baseline: int
    workspace: int
    weights: tuple[BlockBytes, ...]
    kv_bytes_per_token: int
    kv_fixed: int
    layers: int
    blocks: tuple[int, ...] = ()
    always: int = 0
    experts: Experts | None = None
    units: tuple[Units, ...] = ()
    card_workspace: int | None = None
    kv_layers: tuple[int, ...] = ()
    kv_fixed_layers: tuple[int, ...] = ()
    kv_sinks: int = 0
    kv_page: int = 0
    texts: int = 1

    def __post_init__(self) -> None:
        above = sum(self.kv_layers) - self.kv_bytes_per_token
        if self.kv_layers and (len(self.kv_layers) != self.layers or not 0 <= above <= self.layers):
            raise ValueError(f"{len(self.kv_layers)} layers' caches of {sum(self.kv_layers)} bytes a token in all")
        placed = sorted(block.layer for block in self.weights if block.layer is not None)
        if placed != list(range(self.layers)):
            raise ValueError(f"{self.layers} layers need one block of weights each, got blocks for {placed}")


@dataclass(frozen=True)
class Budget:
    """Bytes that may be used: `ram` by the whole process, `vram` on the card."""

    ram: int
    vram: int = 0


@dataclass(frozen=True)
class OnCard:
    """Bytes on a GPU: weights, with a `head` that the host has too, cache, working memory with `buffers` for copied layers."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    buffers_bytes: int = 0
    head_bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """A plan that fits. `devices` has one entry per layer; `total_bytes` is host memory and `vram_bytes` the card's, slack included;
    the weights and KV figures are sums over both. `residency` says which of the demand's blocks stream; None where none does.
    `always_bytes`: memory for what stays when others stream (`Demand.always`), 0 where everything fits.
    `slots`: of each layer's units, how many stay at a time; empty where all do, or there are none. `expert_slots`: how many experts stay,
    where not all do. `kv_pages`: pages of the cache that stay in memory, None for all; `kv_bytes` are those in memory, `kv_disk_bytes`
    with a full context on the disk. `card` says what of the sums lies on the GPU. `disk_layers`: layers of which a token reads from the
    disk. `copied_from`: passes of so many tokens copy the host's layers to the GPU (None: none do)."""

    devices: tuple[str, ...]
    ctx: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    baseline_bytes: int
    total_bytes: int
    budget: Budget
    notes: tuple[str, ...] = ()
    vram_bytes: int = 0
    residency: Residency | None = None
    kv_bytes_per_token: int = 0
    slots: tuple[int, ...] = ()
    window_bytes: int = 0
    expert_slots: int | None = None
    kv_pages: int | None = None
    kv_disk_bytes: int = 0
    card: OnCard = OnCard()
    disk_layers: tuple[int, ...] = ()
    copied_from: int | None = None
    always_bytes: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """Of each layer: gpu, memory, or disk where a token reads some of it from there."""
        return tuple("gpu" if device == "cuda" else "disk" if layer in self.disk_layers else "memory"
                     for layer, device in enumerate(self.devices))

    @property
    def host_weights_bytes(self) -> int:
        """Bytes of weights that are not on the GPU."""
        return self.weights_bytes - self.card.weights_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of memory of the host in which weights lie from pass to pass: all that are not on the GPU where nothing streams, else what
        always stays, the pinned blocks and the window of neurons, without the ring. Experts are counted by their pager."""
        kept = self.always_bytes + self.window_bytes
        return self.host_weights_bytes if self.residency is None else self.residency.pinned_nbytes + kept

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of the cache in the host's memory."""
        return self.kv_bytes - self.card.kv_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that every pass reads from the disk."""
        return self.residency.streamed_nbytes if self.residency else 0


@dataclass(frozen=True)
class _Split:
    """Byte counts of one choice of (layers on the card, context); pairs are (host, card)."""

    gpu_layers: int
    ctx: int
    weights: tuple[int, int]
    kv: tuple[int, int]
    ram: int
    vram: int

    def on_card(self, demand: Demand) -> OnCard:
        return OnCard(self.weights[1], self.kv[1], _card_workspace(demand)) if self.gpu_layers else OnCard()


def plan(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None = None, device: str = "auto",
         gpu_layers: int | None = None, quantum: int = 128) -> Placement:
    """Place every layer and choose the context: `ctx_wanted`, or else the largest up to `ctx_max` that fits.

    Raises DoesNotFit with the figures and what would fit instead, UsageError where the request contradicts itself.
    """
    _check(budget, ctx_wanted, device, gpu_layers)
    if (demand.blocks or demand.experts) and not budget.vram and not _is_resident(demand, budget, ctx_max, ctx_wanted, quantum):
        if demand.experts:
            from .expert_plan import paged

            return paged(demand, budget, ctx_max, ctx_wanted, quantum)
        return _streamed(demand, budget, ctx_max, ctx_wanted, quantum)
    smallest = ctx_wanted or min(quantum, ctx_max)
    count = _gpu_count(demand, budget, ctx_wanted or min(ctx_max, AUTO_CTX), device, gpu_layers, quantum)
    if not _fits(_split(demand, count, smallest, quantum), budget):
        # Host memory is short as well: a shorter context lets more layers leave it.
        count = _gpu_count(demand, budget, smallest, device, gpu_layers, quantum)
    ctx = ctx_wanted or _largest_ctx(demand, budget, count, ctx_max, quantum)
    split = _split(demand, count, ctx or smallest, quantum)
    if not _fits(split, budget):
        raise _does_not_fit(demand, budget, split, ctx_max, quantum)
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
        card=split.on_card(demand),
    )


def _is_resident(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> bool:
    """Whether all weights fit beside a context that is worth having."""
    return _fits(_split(demand, 0, ctx_wanted or min(ctx_max, RESIDENT_CTX), quantum), budget)


def _streamed(demand: Demand, budget: Budget, ctx_max: int, ctx_wanted: int | None, quantum: int) -> Placement:
    """All on the host, weights pinned as far as memory goes: the context comes first, since every pass reads it too."""
    window = sum(own * layer.nbytes for own, layer in zip(slots_for(demand.units, 0), demand.units, strict=True))
    least = reside(demand.blocks, _least(demand.blocks)).nbytes + demand.always + window

    def fits(ctx: int, spare: int = 0) -> bool:
        return with_slack(demand.baseline + demand.workspace + kv_nbytes(demand, ctx, quantum)) + least + spare <= budget.ram

    ctx = ctx_wanted or largest(fits, min(ctx_max, AUTO_CTX), quantum)
    cache = kv_nbytes(demand, ctx or quantum, quantum)
    fixed = with_slack(demand.baseline + demand.workspace + cache)
    if not ctx or not fits(ctx):
        shorter, needs = largest(lambda ctx: fits(ctx, SPARE), min(ctx_max, ctx), quantum), fixed + least
        said = (f"needs {format_size(needs)} of memory even with weights read from the disk for every token (KV cache {format_size(cache)} "
                f"for {_texts(demand, ctx or quantum)} + program and buffers {format_size(needs - cache)}), "
                f"the budget is {format_size(budget.ram)}")
        raise memory_too_small(said, needs, ctx, shorter, "or a smaller model")
    # Whatever is used by every token goes first: a neuron is used by few.
    slots = slots_for(demand.units, budget.ram - fixed - demand.always - sum(demand.blocks))
    window = sum(own * layer.nbytes for own, layer in zip(slots, demand.units, strict=True))
    residency = reside(demand.blocks, budget.ram - fixed - demand.always - window)
    notes = [Fallback(f"{format_size(residency.streamed_nbytes)} of weights do not fit in memory: every token reads them from the disk"
                      f"{f', {format_size(stays)} stay in memory' if (stays := residency.pinned_nbytes + window) else ''}")
             if residency.streamed else "the embedding stays on the disk: a token reads its row"]
    if slots:
        neurons = sum(layer.count * layer.nbytes for layer in demand.units)
        notes.append(Fallback(f"{format_size(neurons)} of neurons are on the disk: those that a token activates are read unless they are "
                              f"among the {format_size(window)} that lately were active"))
    if ctx > ctx_max:
        notes.append(f"a context of {ctx} is beyond the {ctx_max} tokens that the model was made for")
    elif ctx_wanted is None and ctx < ctx_max:
        notes.append(Fallback(f"context {ctx} of the model's {ctx_max}: more of it would leave less memory for weights (-c for another)"))
    return Placement(("cpu",) * demand.layers, ctx, sum(block.nbytes for block in demand.weights), cache, demand.workspace,
                     demand.baseline, fixed + demand.always + window + residency.nbytes, budget, tuple(notes), 0, residency,
                     demand.kv_bytes_per_token, slots, window, always_bytes=demand.always)


def _least(blocks: tuple[int, ...]) -> int:
    """The smallest budget that `reside` takes: the ring alone, or everything where that is less."""
    return min(sum(blocks), 2 * max(blocks))


def _check(budget: Budget, ctx_wanted: int | None, device: str, gpu_layers: int | None) -> None:
    if device not in ("cpu", "cuda", "auto"):
        raise UsageError(f"{device!r} is not a device", "use --device cpu, cuda or auto")
    if ctx_wanted is not None and ctx_wanted < 1:
        raise UsageError(f"a context of {ctx_wanted} tokens holds nothing", "give -c a positive number")
    if gpu_layers is not None and gpu_layers < 0:
        raise UsageError(f"-ngl {gpu_layers} is not a number of layers", "give -ngl 0 or more")
    if device == "cpu" and gpu_layers:
        raise UsageError(f"-ngl {gpu_layers} asks for a GPU, --device cpu rules it out", "drop one of the two")
    if not budget.vram and (device == "cuda" or gpu_layers):
        raise UsageError("no GPU memory is available to this process", "use --device cpu, or see effllm doctor")


def _gpu_count(demand: Demand, budget: Budget, ctx: int, device: str, gpu_layers: int | None, quantum: int) -> int:
    """Layers for the card: as asked, or as many as fit beside their share of a context of `ctx`."""
    if device == "cpu" or not budget.vram:
        return 0
    if gpu_layers is not None:
        return min(gpu_layers, demand.layers)
    if device == "cuda":
        return demand.layers
    counts = range(demand.layers, 0, -1)
    return next((count for count in counts if _split(demand, count, ctx, quantum).vram <= budget.vram), 0)


def _largest_ctx(demand: Demand, budget: Budget, count: int, ctx_max: int, quantum: int) -> int:
    """The largest context that fits: `ctx_max`, or whole quanta of it; 0 when not even one quantum does."""
    return largest(lambda ctx: _fits(_split(demand, count, ctx, quantum), budget), ctx_max, quantum)


def largest(is_good: Callable[[int], bool], most: int, quantum: int) -> int:
    """`most`, or the largest whole number of quanta below it that is good, or 0."""
    if is_good(most):
        return most
    fits, fails = 0, -(-most // quantum)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if is_good(middle * quantum):
            fits = middle
        else:
            fails = middle
    return fits * quantum


def kv_nbytes(demand: Demand, ctx: int, quantum: int) -> int:
    """Bytes of the cache, which grows by whole pages."""
    return demand.kv_fixed + kv_pages(demand, ctx, quantum) * page_nbytes(demand, quantum)


def kv_pages(demand: Demand, ctx: int, quantum: int) -> int:
    """Pages of the cache for a context: their grid begins behind the sinks."""
    return max(1, -(-(ctx - demand.kv_sinks) // quantum))


def page_nbytes(demand: Demand, quantum: int) -> int:
    """Bytes of a page of the cache, all layers."""
    return demand.kv_page or demand.kv_bytes_per_token * quantum


def _split(demand: Demand, count: int, ctx: int, quantum: int) -> _Split:
    first = demand.layers - count
    everything = sum(block.nbytes for block in demand.weights)
    moved = [block for block in demand.weights if block.layer is not None and block.layer >= first]
    weights = everything - sum(block.nbytes for block in moved), sum(block.card_nbytes for block in moved)
    kv, kv_card = kv_nbytes(demand, ctx, quantum), card_kv_nbytes(demand, count, ctx, quantum)
    ram = with_slack(demand.baseline + demand.workspace + weights[0] + kv - kv_card)
    vram = with_slack(_card_workspace(demand) + weights[1] + kv_card) if count else 0
    return _Split(count, ctx, weights, (kv - kv_card, kv_card), ram, vram)


def card_kv_nbytes(demand: Demand, count: int, ctx: int, quantum: int) -> int:
    """Bytes of the cache of the last `count` layers."""
    if not count or not demand.kv_layers:
        return -(-kv_nbytes(demand, ctx, quantum) * count // demand.layers) if count else 0
    fixed = sum(demand.kv_fixed_layers[-count:]) or -(-demand.kv_fixed * count // demand.layers)
    return fixed + sum(demand.kv_layers[-count:]) * kv_pages(demand, ctx, quantum) * quantum


def _card_workspace(demand: Demand) -> int:
    return demand.workspace if demand.card_workspace is None else demand.card_workspace


def with_slack(nbytes: int) -> int:
    return -(-nbytes * 105 // 100)


def _fits(split: _Split, budget: Budget) -> bool:
    return split.ram <= budget.ram and split.vram <= budget.vram


def _notes(demand: Demand, split: _Split, ctx_max: int, ctx_wanted: int | None) -> list[str]:
    notes = []
    if split.ctx > ctx_max:
        notes.append(f"a context of {split.ctx} is beyond the {ctx_max} tokens that the model was made for")
    elif ctx_wanted is None and split.ctx < ctx_max:
        notes.append(Fallback(f"context {split.ctx} of the model's {ctx_max}: the most that the memory budget holds"))
    if 0 < split.gpu_layers < demand.layers:
        notes.append(f"{split.gpu_layers} of {demand.layers} layers on the GPU, the rest on the CPU")
    return notes


def _texts(demand: Demand, ctx: int) -> str:
    return f"{ctx} tokens" if demand.texts == 1 else f"{demand.texts} times {ctx} tokens"


def _does_not_fit(demand: Demand, budget: Budget, split: _Split, ctx_max: int, quantum: int) -> DoesNotFit:
    """The error for the memory that runs out first, with the nearest request that fits."""
    side, where = (0, "memory") if split.ram > budget.ram else (1, "GPU memory")
    needs, limit = ((split.ram, budget.ram), (split.vram, budget.vram))[side]
    weights, kv = split.weights[side], split.kv[side]
    message = (f"needs {format_size(needs)} of {where} (weights {format_size(weights)} + KV cache {format_size(kv)} for "
               f"{_texts(demand, split.ctx)} + overhead {format_size(needs - weights - kv)}), the budget is {format_size(limit)}")
    hint, shorter = _nearest(demand, budget, split, ctx_max, quantum)
    return DoesNotFit(message, hint) if side else MemoryTooSmall(message, hint, split.ram, shorter)


def _nearest(demand: Demand, budget: Budget, split: _Split, ctx_max: int, quantum: int) -> tuple[str, int]:
    """What to ask for instead: less context (and how much, else 0), else other layers on the card, else the memory it takes."""
    smaller = _largest_ctx(demand, replace(budget, ram=budget.ram - SPARE), split.gpu_layers, min(ctx_max, split.ctx), quantum)
    ram, vram = f"--ram {asked_mib(split.ram)}", f"--vram {-(-split.vram // 2**20)}Mi"
    short = " and ".join([ram] * (split.ram > budget.ram) + [vram] * (split.vram > budget.vram))
    if smaller:
        return f"-c {smaller} fits; {split.ctx} tokens take {short}", smaller
    counts = range(demand.layers, -1, -1) if budget.vram else range(0)
    count = next((n for n in counts if _fits(_split(demand, n, split.ctx, quantum), budget)), None)
    if count is not None:
        return f"-ngl {count} fits" if count else "--device cpu fits", 0
    return f"no context is short enough: it takes {short}, or a smaller model", 0
