"""What a model demands of a machine, in bytes, and arithmetic shared by all planners: cache size by context, slack, the longest context."""

from collections.abc import Callable
from dataclasses import dataclass

from .placement import Units

# With the device left open, layers move back to the host only for a context up to this; a longer one takes what memory is left.
AUTO_CTX = 4096
# A context that was not requested is shortened down to this so that all weights fit; below that, weights are streamed instead.
RESIDENT_CTX = 512


@dataclass(frozen=True)
class BlockBytes:
    """Weights that are placed as a unit: a layer (named by its number), or what surrounds the layers (embedding, norm, head)."""

    name: str
    nbytes: int
    gpu_nbytes: int | None = None  # bytes on a GPU, if different

    @property
    def nbytes_on_gpu(self) -> int:
        return self.nbytes if self.gpu_nbytes is None else self.gpu_nbytes

    @property
    def layer(self) -> int | None:
        return int(self.name) if self.name.isdecimal() else None


@dataclass(frozen=True)
class Experts:
    """Experts that share one pool of slots: `count` in all, in `layers` layers; a token visits `per_token` of them per layer."""

    layers: int
    count: int
    per_token: int
    slot_nbytes: int

    @property
    def least(self) -> int:
        """The fewest useful slots, those of two tokens; below that no policy helps."""
        return min(self.count, 2 * self.per_token * self.layers)


@dataclass(frozen=True)
class Demand:
    """What a model asks for, in bytes; the KV figures are sums over all layers.

    `blocks`: weights that can be streamed, in order of use; empty if none can. `same`: which blocks are identical, as in `choose_pinned`.
    `always`: what stays in memory when they stream. `experts`: a mixture's experts, where they can be read individually; `always` is then
    everything else. `units`: per layer, neurons read on demand; they are in neither. `gpu_workspace`: workspace on a GPU (None: as on the
    host). `kv_layers`: cache bytes per token of each layer, rounded up, where layers differ; `kv_fixed_layers`: `kv_fixed` by layer,
    likewise. `kv_sinks`: tokens before the first page; `kv_page`: bytes of a page, 0 for the sum of its tokens; `texts`: how many sequences
    share all of it."""

    baseline: int
    workspace: int
    weights: tuple[BlockBytes, ...]
    kv_bytes_per_token: int
    kv_fixed: int
    layers: int
    blocks: tuple[int, ...] = ()
    same: tuple[int, ...] = ()
    always: int = 0
    experts: Experts | None = None
    units: tuple[Units, ...] = ()
    gpu_workspace: int | None = None
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


def kv_nbytes(demand: Demand, ctx: int, quantum: int) -> int:
    """Bytes of the cache, which grows in whole pages."""
    return demand.kv_fixed + kv_pages(demand, ctx, quantum) * page_nbytes(demand, quantum)


def kv_pages(demand: Demand, ctx: int, quantum: int) -> int:
    """Pages of the cache for a context; the page grid begins after the sinks."""
    return max(1, -(-(ctx - demand.kv_sinks) // quantum))


def page_nbytes(demand: Demand, quantum: int) -> int:
    """Bytes of one page of the cache, summed over layers."""
    return demand.kv_page or demand.kv_bytes_per_token * quantum


def gpu_kv_nbytes(demand: Demand, count: int, ctx: int, quantum: int) -> int:
    """Cache bytes of the last `count` layers."""
    if not count or not demand.kv_layers:
        return -(-kv_nbytes(demand, ctx, quantum) * count // demand.layers) if count else 0
    fixed = sum(demand.kv_fixed_layers[-count:]) or -(-demand.kv_fixed * count // demand.layers)
    return fixed + sum(demand.kv_layers[-count:]) * kv_pages(demand, ctx, quantum) * quantum


def gpu_workspace(demand: Demand) -> int:
    """Workspace bytes on a GPU that runs some of the layers."""
    return demand.workspace if demand.gpu_workspace is None else demand.gpu_workspace


def with_slack(nbytes: int) -> int:
    """`nbytes` plus 5% for allocator overhead and small objects (see `plan.py`)."""
    return -(-nbytes * 105 // 100)


def largest(is_good: Callable[[int], bool], most: int, quantum: int) -> int:
    """`most`, or the largest multiple of `quantum` below it for which `is_good` holds, or 0."""
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


def describe_ctx(demand: Demand, ctx: int) -> str:
    """A context length for messages: its tokens, and how many sequences share them."""
    return f"{ctx} tokens" if demand.texts == 1 else f"{demand.texts} times {ctx} tokens"
