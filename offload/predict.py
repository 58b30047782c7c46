"""Performance model: tokens per second of a plan, from byte and operation counts and the measured rates of a machine. Pure arithmetic.

A pass streams while it computes, so T = max(disk bytes / disk rate, CPU seconds). CPU seconds are the sum of: bytes of each weight format
over the rate at which our kernels process it, attention products over theirs, and fixed costs per pass and per layer. Rates are measured as
a model will see them (from memory, not from a cache), so a format that is bound by arithmetic simply has a lower one. Attention has two: in
a short context the newest tokens, which are exact, dominate and caches hold the rest; beyond that it is all packed pages from memory. A
prompt is read in chunks, each one pass over the disk.

Every pass reads the same disk bytes in the same order. Caches on the way (the disk's own, a hypervisor's) may serve them faster the second
time, so for as many bytes as were probed twice the second rate applies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

# Relative errors of predictions, from a few machines (`docs/speed.md`); other known uncertainties are added. For models that fit in
# caches, fixed costs and chance are a large part.
ERROR, STREAMED_ERROR, MIXTURE_ERROR, UNKNOWN_ERROR, CACHED_ERROR = 0.15, 0.1, 0.15, 0.3, 0.3
# Prompts of at least this many tokens run at the rates of a full chunk. Shorter ones go through kernels for few columns, or fill 32-token
# tiles partly: in bf16 eight tokens cost twice, twelve three times what the rates say, and 48 as much as 64; at 4 bits up to 1.7 times
# (one thread of an EPYC with AVX-512, layers of 2048).
LEAST_PROMPT = 64
# Share of the memory's rate for a kind of weights that was not measured here.
USUAL_SHARE = 0.7
# Raw types are read alike: bytes decide. In a prompt they are multiplied as floats, three times as slow as low bits.
RAW_KIND = "bf16"
# Weights up to the first size stay in the CPU's caches from token to token, from the second on they do not: the sizes at which rates are
# measured. (64 MiB with a 32 MiB L3 still profited: 4 bits ran at 72 GB/s, against 62 for 256 MiB.)
CACHED_NBYTES, MEMORY_NBYTES = 8 << 20, 256 << 20
# Inputs plus outputs of a layer's matrices per product, for the wide and the narrow layers in which prompt rates are measured. Norms,
# activations and activation quantization scale with them, so a narrow layer has more of these per product.
WIDE_ENDS, NARROW_ENDS = 0.0009, 0.006
# Tokens of context that are attended to at the short-context rate.
NEAR = 1024
# Recurrent states: bytes moved per value and pass (read in one slot, written in another, which is fetched for it), and values per second
# for each token of a prompt, which stay in L1 from token to token (two cores of a Zen 5: 34 us for a layer of 32 heads of
# 128 x 128).
STATE_TRAFFIC, STATE_RATE = 12, 15e9
# A layer with paged experts returns to Python: 0.1 ms, where sampling a token takes 25 us (a Zen 5).
VISIT = 4


@dataclass(frozen=True)
class KindRate:
    """Rates of one weight format: bytes per second for one token, products per second for a prompt; `cached`: `decode` for a model of at
    most CACHED_NBYTES; `narrow`: `prefill` for layers of NARROW_ENDS (0: not measured). For attention all are products: `decode` over NEAR
    tokens, `deep` beyond (0: not measured, assumed equal)."""

    decode: float
    prefill: float
    cached: float = 0.0
    deep: float = 0.0
    narrow: float = 0.0

    def decode_at(self, nbytes: int) -> float:
        """Bytes per second for one token of a model of `nbytes`: log-interpolated between the cache's rate and memory's."""
        if not self.cached:
            return self.decode
        share = log2(min(max(nbytes, CACHED_NBYTES), MEMORY_NBYTES) / CACHED_NBYTES) / log2(MEMORY_NBYTES / CACHED_NBYTES)
        return 1 / (share / self.decode + (1 - share) / self.cached)

    def prompt_s(self, products: float, ends: float) -> float:
        """Seconds for `products` of a prompt, in matrices with `ends` inputs plus outputs: both products and ends cost, as fitted to wide
        and narrow layers. Wider layers count as wide."""
        if not self.narrow or not products:
            return products / self.prefill
        beyond = max(0.0, ends / products - WIDE_ENDS) / (NARROW_ENDS - WIDE_ENDS)
        return products * (1 / self.prefill + beyond * max(0.0, 1 / self.narrow - 1 / self.prefill))

    def attention_s(self, width: int, reaches: Sequence[int]) -> float:
        """Seconds for one token that attends to this many tokens in each layer, at `width` products per token."""
        near, every = sum(min(reach, NEAR) for reach in reaches), sum(reaches)
        return width * (near / self.decode + (every - near) / (self.deep or self.decode))


@dataclass(frozen=True)
class Rates:
    """A machine. `memory` and `disk` in bytes per second (`disk` None: not probed), `attention` by cache precision in products per second,
    overheads in seconds. `unrest`: how much slower the usual memory pass was than the best, a share."""

    memory: float
    token_s: float
    layer_s: float
    kinds: Mapping[str, KindRate] = field(default_factory=dict)
    attention: Mapping[str, KindRate] = field(default_factory=dict)
    disk: float | None = None
    unrest: float = 0.0
    small: Callable[[int], float] | None = None  # bytes per second of many concurrent reads of this size
    disk_alone: float | None = None  # at queue depth 1
    again: Callable[[int, bool], float] | None = None  # bytes per second when every pass re-reads this many in order, with checksums or not
    choice_s: float = 0.0  # seconds from a pass's logits to the next pass


@dataclass(frozen=True)
class WeightCost:
    """Weights of one format that a token goes through: bytes read and products. `last_only`: once per prompt (the head); `routed`: experts.
    `ends`: inputs plus outputs of the matrices. `spared`: the share of products computed only for a prompt's last tokens."""

    kind: str
    nbytes: int
    products: int
    last_only: bool = False
    routed: bool = False
    ends: int = 0
    spared: float = 0.0


@dataclass(frozen=True)
class PagedExpertCost:
    """Experts of which a share `kept` is in memory; a token hits a share `hit_rate` of those it visits. Which ones a layer needs is known
    only after its router, and what prefetching then hides of the disk's time is about what issuing reads and writing memory add to the
    CPU's: so one token pays for both in sequence. A prompt's pass, which visits most experts, overlaps reads with expert products.
    `expert_s`: CPU seconds to repack one expert, each time it is read."""

    layers: int
    experts: int
    per_token: int
    expert_nbytes: int
    kept: float
    hit_rate: float
    expert_s: float = 0.0

    @property
    def missed(self) -> float:
        """Experts per layer that a token reads from disk."""
        return self.per_token * (1 - self.hit_rate)

    def reads(self, tokens: int) -> float:
        """Experts read from disk for a chunk of `tokens`, assuming uniform routing for more than one."""
        if tokens == 1:
            return self.layers * self.missed
        visited = self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)
        return self.layers * visited * (1 - self.kept)

    def nbytes(self, tokens: int) -> float:
        """Bytes of those reads."""
        return self.reads(tokens) * self.expert_nbytes

    def made_s(self, tokens: int) -> float:
        """CPU seconds to repack them before they can be multiplied."""
        return self.reads(tokens) * self.expert_s


@dataclass(frozen=True)
class Work:
    """What one token asks of a machine.

    `attention_width`: products per layer and token attended to; `windows`: the most tokens that each attention layer attends to, None for
    all; `stateful`: how many layers have no attention, with `state_bytes` of state traffic per pass; `kv_bytes`: read per token of depth,
    all layers; `kv_layers` and `widths`: that, and products, per attention layer where layers differ; `streamed`: bytes from disk per pass;
    `load`: bytes read once. For neurons read on demand: `missed` bytes per token in reads of `read_bytes` (`assumed`: not measured),
    `neurons` bytes by every prompt pass, `window` bytes of them in memory. `paged`: what streams are experts. `kv_held`: tokens whose keys
    and values are in memory, None for all; later ones come from disk. `alone`: how many of the last attention layers compute only the last
    `kept` tokens of a prompt's pass."""

    parts: tuple[WeightCost, ...]
    attention_width: int
    windows: tuple[int | None, ...]
    kv: str
    kv_bytes: int
    streamed: int = 0
    load: int = 0
    chunk: int = 512
    mixture: bool = False
    paged: PagedExpertCost | None = None
    missed: float = 0.0
    read_bytes: int = 0
    neurons: int = 0
    window: int = 0
    assumed: bool = False
    kv_held: int | None = None
    stateful: int = 0
    state_bytes: int = 0
    kv_layers: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    alone: int = 0
    kept: int = 0

    @property
    def layers(self) -> int:
        return len(self.windows) + self.stateful

    def kv_disk_bytes(self, depth: int) -> int:
        """Bytes of keys and values read from disk by a pass after `depth` tokens."""
        if self.kv_held is None:
            return 0
        spilled = [max(0, min(depth - self.kv_held, depth if window is None else window)) for window in self.windows]
        if self.kv_layers:
            return sum(own * count for own, count in zip(self.kv_layers, spilled, strict=True))
        return self.kv_bytes * sum(spilled) // max(1, len(self.windows))

    def kv_read(self, reaches: Sequence[int]) -> float:
        """Bytes of keys and values for one token that attends to this many tokens in each layer, on any tier."""
        if self.kv_layers:
            return sum(own * reach for own, reach in zip(self.kv_layers, reaches, strict=True))
        return self.kv_bytes * sum(reaches) / max(1, len(reaches))

    def kv_at(self, depth: int) -> int:
        """Bytes of keys and values for one token after `depth` tokens."""
        return round(self.kv_read([depth if window is None else min(window, depth) for window in self.windows]))

    def by_width(self, of_layers: Sequence[int]) -> list[tuple[int, list[int]]]:
        """(products per token attended to, the values of the layers of that width)."""
        if not self.widths:
            return [(self.attention_width, list(of_layers))]
        each = list(zip(self.widths, of_layers, strict=True))
        return [(width, [own for other, own in each if other == width]) for width in sorted(set(self.widths))]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one token reads, on any tier."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Prediction:
    """Seconds by tier, and the bottleneck: disk, memory or processor. `error` is relative: between seconds / (1 + error) and * (1 +
    error)."""

    seconds: float
    disk_s: float
    memory_s: float
    processor_s: float
    limit: str
    error: float

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.seconds

    @property
    def range(self) -> tuple[float, float]:
        """The plausible range of tokens per second."""
        return self.tokens_per_s / (1 + self.error), self.tokens_per_s * (1 + self.error)


def decode(work: Work, rates: Rates, depth: int = 0) -> Prediction | None:
    """One token after `depth` others. None if weights stream and the disk is unknown."""
    if (work.streamed or work.missed or work.kv_disk_bytes(depth)) and not rates.disk:
        return None
    weights = sum(part.nbytes / _kind(rates, part.kind).decode_at(work.bytes_per_token) for part in work.parts)
    reaches = [min(depth, depth if window is None else window) for window in work.windows]
    kept, states = work.kv_read(reaches) / rates.memory, work.state_bytes / rates.memory
    attends = _attention(rates, work.kv)
    attention = max(sum(attends.attention_s(width, own) for width, own in work.by_width(reaches)), kept) + states
    fixed = rates.token_s + rates.choice_s + work.layers * rates.layer_s
    memory = work.bytes_per_token / rates.memory + kept + states
    # Missing neurons are known, and read, only after a layer's gates: the CPU waits for them.
    waits = work.missed / (rates.small(work.read_bytes) if rates.small else rates.disk) if work.missed else 0.0
    pages, ordered = work.kv_disk_bytes(depth), work.kv_disk_bytes(depth) + (work.streamed if work.paged is None else 0)
    weights_s = work.streamed / _disk(work, rates, 1, ordered) if work.streamed else 0.0
    pages_s = pages / _again(rates, ordered, checked=True) if pages else 0.0
    if work.paged is not None:
        fixed += work.paged.made_s(1) + work.paged.layers * VISIT * rates.choice_s
        waits, weights_s = waits + weights_s, 0.0
    return _made(work, rates, weights + attention + fixed, memory, weights_s, pages_s, waits)


def window_gain(work: Work, rates: Rates) -> float | None:
    """Disk seconds of streaming the same matrices with equal memory, over those of a neuron window: above 1 the window pays. None without a
    window or a known disk."""
    if not work.neurons or not work.missed or not rates.disk:
        return None
    small = rates.small(work.read_bytes) if rates.small else rates.disk
    return ((work.neurons - work.window) / rates.disk) / (work.missed / small)


def is_predictable(tokens: int) -> bool:
    """Whether to report a prediction for a prompt of this many tokens: it is too optimistic for a few, but not for one."""
    return tokens == 1 or tokens >= LEAST_PROMPT


def prompt(work: Work, rates: Rates, tokens: int) -> Prediction | None:
    """From the start of a prompt to its first answer token. None as for `decode`, and if the format of most products was not measured, nor
    another with the same kernels."""
    passes = -(-tokens // work.chunk)
    spilled = sum(work.kv_disk_bytes(number * work.chunk) for number in range(passes))
    if (work.streamed or work.neurons or spilled) and not rates.disk:
        return None
    most = max(work.parts, key=lambda part: 0 if part.last_only else part.products).kind
    alike = [rate.prefill for kind, rate in rates.kinds.items() if (kind == RAW_KIND) == (most == RAW_KIND)]
    if not alike:
        return None
    seconds = routed = 0.0
    for part in work.parts:
        rate = rates.kinds.get(part.kind)
        if part.last_only or tokens == 1:
            own = part.nbytes / _kind(rates, part.kind).decode
        else:
            # A few tokens use the decode kernels: a pass then costs at least one read of the weights.
            rate = rate or KindRate(USUAL_SHARE * rates.memory, min(alike))
            share = 1 - part.spared * (1 - min(1.0, passes * work.kept / max(1, tokens)))
            own = max(share * tokens * rate.prompt_s(part.products, part.ends), part.nbytes / rate.decode)
        seconds += own
        routed += own * part.routed
    pairs_of = [_pairs(tokens, window) for window in work.windows]
    for layer in range(len(pairs_of) - work.alone, len(pairs_of)):
        pairs_of[layer] = min(pairs_of[layer], passes * work.kept * tokens)
    for width, pairs in work.by_width(pairs_of):
        seconds += sum(pairs) * width / _attention(rates, work.kv).prefill
    seconds += passes * work.state_bytes / rates.memory + tokens * work.state_bytes / (STATE_TRAFFIC * STATE_RATE)
    seconds += passes * (rates.token_s + work.layers * rates.layer_s)
    # The last pass of a prompt reads the most of the cache.
    pages_s = spilled / _again(rates, work.kv_disk_bytes((passes - 1) * work.chunk), checked=True) if spilled else 0.0
    weights_s = 0.0
    if work.streamed or work.neurons:
        streamed = work.streamed + work.neurons if work.paged is None else work.paged.nbytes(-(-tokens // passes))
        seconds += 0.0 if work.paged is None else passes * work.paged.made_s(-(-tokens // passes))
        weights_s = passes * streamed / _disk(work, rates, tokens)
    return _made(work, rates, seconds, passes * work.bytes_per_token / rates.memory, weights_s, pages_s, routed=routed)


def load_seconds(work: Work, rates: Rates) -> float | None:
    """Seconds to read the weights from disk once; None if unknown. A recently read file comes from the page cache, faster."""
    return work.load / rates.disk if rates.disk else None


def _disk(work: Work, rates: Rates, tokens: int, ordered: int = 0) -> float:
    """The disk rate for streamed weights: a single token's experts come one at a time if few are missing; others are among `ordered` bytes
    that every pass reads (0: never read before)."""
    if work.paged is None:
        return _again(rates, ordered) if ordered else rates.disk
    return rates.disk_alone if tokens == 1 and work.paged.missed < 1.5 and rates.disk_alone else rates.disk


def _again(rates: Rates, nbytes: int, checked: bool = False) -> float:
    """The disk rate for bytes that every pass re-reads, with checksums for pages."""
    return rates.again(nbytes, checked) if rates.again else rates.disk


def _made(work: Work, rates: Rates, processor: float, memory: float, weights: float, pages: float, waits: float = 0.0,
          routed: float = 0.0) -> Prediction:
    """Combine the times: for `weights` seconds the disk reads weights while the CPU works, overlapping only with the `routed` seconds if
    they are experts; for `pages` seconds it reads the cache, overlapping with everything; for `waits` seconds the CPU is idle."""
    beside, disk = processor if work.paged is None else routed, weights + pages
    error = (ERROR + rates.unrest + (STREAMED_ERROR if disk or waits else 0) + (MIXTURE_ERROR if work.mixture else 0)
             + (UNKNOWN_ERROR if work.assumed else 0) + (CACHED_ERROR if work.bytes_per_token < MEMORY_NBYTES else 0))
    known = all(part.kind in rates.kinds for part in work.parts) and work.kv in rates.attention
    limit = "disk" if disk + waits > processor else "memory" if memory > 0.5 * processor else "processor"
    seconds = max(processor - beside + max(weights, beside), disk) + waits
    return Prediction(seconds, disk + waits, memory, processor, limit, round(error + (0 if known else UNKNOWN_ERROR), 2))


def _kind(rates: Rates, kind: str) -> KindRate:
    usual = USUAL_SHARE * rates.memory
    return rates.kinds.get(kind) or KindRate(usual, usual)


def _attention(rates: Rates, kv: str) -> KindRate:
    """The measured rate, else the slowest other, else one product per byte of memory."""
    others = rates.attention.values()
    slowest = {side: min((getattr(rate, side) for rate in others), default=rates.memory) for side in ("decode", "prefill", "deep")}
    return rates.attention.get(kv) or KindRate(**slowest)


def _pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs of one layer for a prompt."""
    reach = min(tokens, tokens if window is None else window)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach
