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
    def min_slots(self) -> int:
        """The fewest useful slots, those of two tokens; below that no policy helps."""
        return min(self.count, 2 * self.per_token * self.layers)


@dataclass(frozen=True)
class Demand:
    """What a model needs, in bytes. KV figures without "layers" in their name are sums over all layers."""

    baseline: int  # the process without the model
    workspace: int
    weights: tuple[BlockBytes, ...]
    kv_bytes_per_token: int
    kv_fixed: int  # cache bytes whatever the context length
    layers: int
    blocks: tuple[int, ...] = ()  # weights that can be streamed, in order of use; empty if none can
    copy_of: tuple[int, ...] = ()  # which blocks are identical, as in `choose_pinned`
    always_nbytes: int = 0  # weights that stay in memory when blocks, experts or neurons are read from disk
    experts: Experts | None = None  # a mixture's experts, if they can be read individually
    units: tuple[Units, ...] = ()  # per layer, neurons read on demand; in neither `blocks` nor `always_nbytes`
    gpu_workspace: int | None = None  # None: as on the host
    kv_layers: tuple[int, ...] = ()  # cache bytes per token of each layer, rounded up; empty if layers do not differ
    kv_fixed_layers: tuple[int, ...] = ()  # `kv_fixed` of each layer
    kv_sinks: int = 0  # tokens before the first page
    kv_page: int = 0  # bytes of a page; 0: the sum of its tokens
    sequences: int = 1  # how many share the plan, each with its own cache

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


def largest(fits: Callable[[int], bool], limit: int, quantum: int) -> int:
    """`limit` if it fits, else the largest multiple of `quantum` below it that does, or 0."""
    if fits(limit):
        return limit
    low, high = 0, -(-limit // quantum)  # in quanta: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * quantum):
            low = middle
        else:
            high = middle
    return low * quantum


def describe_ctx(demand: Demand, ctx: int) -> str:
    """A context length for messages: its tokens, and how many sequences share them."""
    return f"{ctx} tokens" if demand.sequences == 1 else f"{demand.sequences} times {ctx} tokens"
