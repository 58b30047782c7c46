"""Performance model: tokens per second of a plan, from byte and operation counts and the measured rates of a machine. Pure arithmetic.

A pass streams while it computes, so T = max(disk bytes / disk rate, CPU seconds). CPU seconds are the sum of: bytes of each weight format
over the rate at which our kernels process it, attention products over theirs, and fixed costs per pass and per layer. Rates are measured as
a model will see them (from memory, not from a CPU cache), so a format that is bound by arithmetic simply has a lower one. Attention has two
rates: in a short context most time goes to the newest tokens, which are exact, and CPU caches hold the rest; beyond it all pages are packed
and come from memory. A prompt is processed in chunks, each one pass over the disk.

Every pass reads the same disk bytes in the same order. Caches on the way (the disk's own, a hypervisor's) may serve them faster the second
time, so for as many bytes as were probed twice the second rate applies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

# Relative errors of predictions, from a few machines (`docs/speed.md`); other known uncertainties are added. For models that fit in
# caches, fixed costs and chance are a large part.
ERROR, STREAMED_ERROR, MIXTURE_ERROR, UNKNOWN_ERROR, CACHED_ERROR = 0.15, 0.1, 0.15, 0.3, 0.3
# Prompts of at least this many tokens run at the rates of a full chunk. Shorter ones use kernels for few columns, or fill 32-token tiles
# partly: in bf16 eight tokens cost twice, twelve three times what the rates say, and 48 as much as 64; at 4 bits up to 1.7 times
# (one thread of an EPYC with AVX-512, layers of 2048).
MIN_PROMPT = 64
# Assumed rate of an unmeasured weight format, as a share of memory bandwidth.
DEFAULT_MEMORY_SHARE = 0.7
# All unquantized types count as the first kind: for a token only their bytes matter, and in a prompt they are multiplied as floats, a third
# as fast as low bits. Where processors multiply pairs of bf16, twice as fast, what is still multiplied in float32 is of the second.
RAW_KIND, RAW_FLOAT32_KIND = "bf16", "bf16 exact"
# Weights up to the first size stay in the CPU's caches from token to token, of the second size or more they do not. Rates are measured at
# both. (64 MiB with a 32 MiB L3 still profited: 4 bits ran at 72 GB/s, against 62 for 256 MiB.)
CACHED_NBYTES, MEMORY_NBYTES = 8 << 20, 256 << 20
# Input plus output features of a layer's matrices per product, in the wide and the narrow layers on which prompt rates are measured. The
# cost of norms, activations and activation quantization scales with features, so a narrow layer has more of it per product.
WIDE_FEATURES_PER_PRODUCT, NARROW_FEATURES_PER_PRODUCT = 0.0009, 0.006
# Tokens of context that attention reads at its short-context rate.
SHORT_CONTEXT = 1024
# Recurrent states: bytes moved per value and pass (4 read from one slot, 4 fetched and 4 written in another), and values per second for
# each token of a prompt, which stay in L1 from token to token (two cores of a Zen 5: 34 us for a layer of 32 heads of 128 x 128).
STATE_TRAFFIC, STATE_RATE = 12, 15e9
# Overhead of a layer with paged experts, in sampling times: it returns to Python, 0.1 ms where sampling a token takes 25 us (a Zen 5).
EXPERT_LAYER_COST = 4


@dataclass(frozen=True)
class KindRate:
    """Rates of one weight format, or of attention over one cache precision (then all are products per second)."""

    decode: float  # one token: bytes per second from memory; attention: over the first SHORT_CONTEXT tokens
    prefill: float  # a prompt: products per second
    cached: float = 0.0  # `decode` for a model of at most CACHED_NBYTES, 0 if not measured
    deep: float = 0.0  # attention to tokens beyond SHORT_CONTEXT, 0 if not measured: assumed equal to `decode`
    narrow: float = 0.0  # `prefill` in layers with NARROW_FEATURES_PER_PRODUCT, 0 if not measured

    def decode_at(self, nbytes: int) -> float:
        """Bytes per second for one token of a model of `nbytes`: log-interpolated between the CPU cache's rate and memory's."""
        if not self.cached:
            return self.decode
        share = log2(min(max(nbytes, CACHED_NBYTES), MEMORY_NBYTES) / CACHED_NBYTES) / log2(MEMORY_NBYTES / CACHED_NBYTES)
        return 1 / (share / self.decode + (1 - share) / self.cached)

    def prompt_s(self, products: float, features: float) -> float:
        """Seconds for `products` of a prompt in matrices with `features` input plus output features.

        Products and features both cost time, as fitted to wide and narrow layers. Wider layers count as wide."""
        if not self.narrow or not products:
            return products / self.prefill
        beyond = max(0.0, features / products - WIDE_FEATURES_PER_PRODUCT) / (NARROW_FEATURES_PER_PRODUCT - WIDE_FEATURES_PER_PRODUCT)
        return products * (1 / self.prefill + beyond * max(0.0, 1 / self.narrow - 1 / self.prefill))

    def attention_s(self, width: int, attended: Sequence[int]) -> float:
        """Seconds for one token at `width` products per attended token. `attended`: number of tokens attended to, by layer."""
        near, total = sum(min(tokens, SHORT_CONTEXT) for tokens in attended), sum(attended)
        return width * (near / self.decode + (total - near) / (self.deep or self.decode))


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine, in bytes per second unless noted."""

    memory: float
    token_s: float  # seconds of a one-token pass that no weight explains,
    layer_s: float  # and of each of its layers
    kinds: Mapping[str, KindRate] = field(default_factory=dict)  # by weight format
    attention: Mapping[str, KindRate] = field(default_factory=dict)  # by cache precision
    disk: float | None = None  # sequential reads, None if not probed
    memory_variation: float = 0.0  # how much slower the median memory pass was than the best, a share
    small_read_rate: Callable[[int], float] | None = None  # by read size, for many concurrent reads
    disk_depth1: float | None = None  # at queue depth 1
    reread_rate: Callable[[int, bool], float] | None = None  # when every pass re-reads this many bytes in order; with checksums or not
    choice_s: float = 0.0  # seconds from a pass's logits to the next pass


@dataclass(frozen=True)
class WeightCost:
    """What the weights of one format cost a token."""

    kind: str  # name of the format in `Rates.kinds`
    nbytes: int  # bytes that a token reads
    products: int
    last_only: bool = False  # computed once per prompt, not for every token: the LM head
    routed: bool = False  # weights of experts
    features: int = 0  # input plus output features of the matrices
    last_tokens_share: float = 0.0  # share of the products computed only for a prompt's last tokens


@dataclass(frozen=True)
class PagedExpertCost:
    """Experts of which only some are in memory.

    Which experts a layer needs is known only after its router, and what prefetching then hides of the disk's time is about what issuing
    reads and writing memory add to the CPU's: so one token pays for both in sequence. A prompt's pass, which visits most experts, overlaps
    reads with expert products."""

    layers: int
    experts: int  # per layer
    per_token: int  # experts that a token visits, per layer
    expert_nbytes: int
    resident_share: float  # share of the experts that is in memory
    hit_rate: float  # share of a token's visits that find their expert in memory
    repack_s_per_expert: float = 0.0  # CPU seconds to repack one expert on each read

    @property
    def missed_per_layer(self) -> float:
        """Experts per layer that a token reads from disk."""
        return self.per_token * (1 - self.hit_rate)

    def reads(self, tokens: int) -> float:
        """Experts read from disk for a chunk of `tokens`, assuming uniform routing for more than one."""
        if tokens == 1:
            return self.layers * self.missed_per_layer
        visited = self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)
        return self.layers * visited * (1 - self.resident_share)

    def nbytes(self, tokens: int) -> float:
        """Bytes of those reads."""
        return self.reads(tokens) * self.expert_nbytes

    def repack_s(self, tokens: int) -> float:
        """CPU seconds to repack them before they can be multiplied."""
        return self.reads(tokens) * self.repack_s_per_expert


@dataclass(frozen=True)
class Work:
    """What one token costs, as counts that do not depend on the machine."""

    parts: tuple[WeightCost, ...]
    attention_width: int  # products per attention layer and attended token
    windows: tuple[int | None, ...]  # the most tokens each attention layer attends to, None for all
    kv: str  # cache precision
    kv_bytes: int  # bytes of keys and values read per token of depth, all layers
    streamed: int = 0  # bytes of weights read from disk on every pass
    load: int = 0  # bytes of weights read from disk once
    chunk: int = 512  # tokens of a prompt's pass
    is_moe: bool = False
    paged: PagedExpertCost | None = None  # set if what is streamed are experts
    missed_bytes: float = 0.0  # neurons on demand: bytes that a token reads from disk,
    neuron_read_bytes: int = 0  # the size of one such read,
    neuron_bytes: int = 0  # all neurons, which every pass of a prompt reads,
    resident_neuron_bytes: int = 0  # and those that are in memory
    is_sparsity_assumed: bool = False  # the share of active neurons was not measured
    resident_kv_tokens: int | None = None  # tokens whose keys and values are in memory; later ones come from disk. None: all
    num_recurrent_layers: int = 0  # layers without attention
    state_bytes: int = 0  # traffic of recurrent states per pass
    kv_bytes_by_layer: tuple[int, ...] = ()  # `kv_bytes` by attention layer, where layers differ
    attention_widths: tuple[int, ...] = ()  # `attention_width` by attention layer, where layers differ
    num_last_token_layers: int = 0  # how many of the last attention layers compute only
    num_last_tokens: int = 0  # this many tokens of a prompt's pass

    @property
    def layers(self) -> int:
        return len(self.windows) + self.num_recurrent_layers

    def kv_disk_bytes(self, depth: int) -> int:
        """Bytes of keys and values read from disk by a pass after `depth` tokens."""
        if self.resident_kv_tokens is None:
            return 0
        spilled = [max(0, min(depth - self.resident_kv_tokens, depth if window is None else window)) for window in self.windows]
        if self.kv_bytes_by_layer:
            return sum(nbytes * tokens for nbytes, tokens in zip(self.kv_bytes_by_layer, spilled, strict=True))
        return self.kv_bytes * sum(spilled) // max(1, len(self.windows))

    def kv_read(self, attended: Sequence[int]) -> float:
        """Bytes of keys and values that one token reads on any tier. `attended`: number of tokens attended to, by layer."""
        if self.kv_bytes_by_layer:
            return sum(nbytes * tokens for nbytes, tokens in zip(self.kv_bytes_by_layer, attended, strict=True))
        return self.kv_bytes * sum(attended) / max(1, len(attended))

    def kv_at(self, depth: int) -> int:
        """Bytes of keys and values for one token after `depth` tokens."""
        return round(self.kv_read([depth if window is None else min(window, depth) for window in self.windows]))

    def by_width(self, values: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Values by attention layer, grouped: (products per attended token, the values of the layers of that width)."""
        if not self.attention_widths:
            return [(self.attention_width, list(values))]
        pairs = list(zip(self.attention_widths, values, strict=True))
        return [(width, [value for other, value in pairs if other == width]) for width in sorted(set(self.attention_widths))]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one token reads, on any tier."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a token or a prompt."""

    seconds: float
    disk_s: float
    memory_s: float
    processor_s: float
    limit: str  # the bottleneck: disk, memory or processor
    error: float  # relative: the time is between seconds / (1 + error) and seconds * (1 + error)

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.seconds

    @property
    def range(self) -> tuple[float, float]:
        """The plausible range of tokens per second."""
        return self.tokens_per_s / (1 + self.error), self.tokens_per_s * (1 + self.error)


def decode(work: Work, rates: Rates, depth: int = 0) -> Prediction | None:
    """One token after `depth` others. None if weights stream and the disk is unknown."""
    if (work.streamed or work.missed_bytes or work.kv_disk_bytes(depth)) and not rates.disk:
        return None
    weights = sum(part.nbytes / _kind(rates, part.kind).decode_at(work.bytes_per_token) for part in work.parts)
    attended = [min(depth, depth if window is None else window) for window in work.windows]
    kv_s, states_s = work.kv_read(attended) / rates.memory, work.state_bytes / rates.memory
    attention_rate = _attention(rates, work.kv)
    attention = max(sum(attention_rate.attention_s(width, tokens) for width, tokens in work.by_width(attended)), kv_s) + states_s
    fixed = rates.token_s + rates.choice_s + work.layers * rates.layer_s
    memory = work.bytes_per_token / rates.memory + kv_s + states_s
    # Missing neurons are known, and read, only after a layer's gates: the CPU waits for them.
    stall_s = work.missed_bytes / _neuron_rate(work, rates) if work.missed_bytes else 0.0
    page_bytes = work.kv_disk_bytes(depth)
    reread_bytes = page_bytes + (work.streamed if work.paged is None else 0)
    weights_s = work.streamed / _weights_rate(work, rates, 1, reread_bytes) if work.streamed else 0.0
    pages_s = page_bytes / _reread_rate(rates, reread_bytes, checked=True) if page_bytes else 0.0
    if work.paged is not None:
        fixed += work.paged.repack_s(1) + work.paged.layers * EXPERT_LAYER_COST * rates.choice_s
        stall_s, weights_s = stall_s + weights_s, 0.0
    return _combine(work, rates, weights + attention + fixed, memory, weights_s, pages_s, stall_s)


def window_gain(work: Work, rates: Rates) -> float | None:
    """Disk seconds of streaming the same matrices with equal memory, over those of a neuron window: above 1 the window pays. None without a
    window or a known disk."""
    if not work.neuron_bytes or not work.missed_bytes or not rates.disk:
        return None
    return ((work.neuron_bytes - work.resident_neuron_bytes) / rates.disk) / (work.missed_bytes / _neuron_rate(work, rates))


def is_predictable(tokens: int) -> bool:
    """Whether to report a prediction for a prompt of this many tokens: it is too optimistic for a few, but not for one."""
    return tokens == 1 or tokens >= MIN_PROMPT


def prompt(work: Work, rates: Rates, tokens: int) -> Prediction | None:
    """From the start of a prompt to its first answer token.

    None as for `decode`, and if neither the format of most products was measured nor another with the same kernels."""
    passes = -(-tokens // work.chunk)
    spilled = sum(work.kv_disk_bytes(number * work.chunk) for number in range(passes))
    if (work.streamed or work.neuron_bytes or spilled) and not rates.disk:
        return None
    main_kind = max(work.parts, key=lambda part: 0 if part.last_only else part.products).kind
    main_group = _group(main_kind)
    similar = [rate.prefill for kind, rate in rates.kinds.items() if _group(kind) == main_group]
    if not similar:
        return None
    seconds = routed_s = 0.0
    for part in work.parts:
        rate = rates.kinds.get(part.kind)
        if part.last_only or tokens == 1:
            part_s = part.nbytes / _kind(rates, part.kind).decode
        else:
            # A few tokens use the decode kernels: a pass then costs at least one read of the weights.
            rate = rate or KindRate(DEFAULT_MEMORY_SHARE * rates.memory, min(similar))
            share = 1 - part.last_tokens_share * (1 - min(1.0, passes * work.num_last_tokens / max(1, tokens)))
            part_s = max(share * tokens * rate.prompt_s(part.products, part.features), part.nbytes / rate.decode)
        seconds += part_s
        routed_s += part_s * part.routed
    layer_pairs = [_pairs(tokens, window) for window in work.windows]
    for layer in range(len(layer_pairs) - work.num_last_token_layers, len(layer_pairs)):
        layer_pairs[layer] = min(layer_pairs[layer], passes * work.num_last_tokens * tokens)
    for width, pairs in work.by_width(layer_pairs):
        seconds += sum(pairs) * width / _attention(rates, work.kv).prefill
    seconds += passes * work.state_bytes / rates.memory + tokens * work.state_bytes / (STATE_TRAFFIC * STATE_RATE)
    seconds += passes * (rates.token_s + work.layers * rates.layer_s)
    # The last pass of a prompt reads the most of the cache.
    pages_s = spilled / _reread_rate(rates, work.kv_disk_bytes((passes - 1) * work.chunk), checked=True) if spilled else 0.0
    weights_s = 0.0
    if work.streamed or work.neuron_bytes:
        streamed = work.streamed + work.neuron_bytes if work.paged is None else work.paged.nbytes(-(-tokens // passes))
        seconds += 0.0 if work.paged is None else passes * work.paged.repack_s(-(-tokens // passes))
        weights_s = passes * streamed / _weights_rate(work, rates, tokens)
    return _combine(work, rates, seconds, passes * work.bytes_per_token / rates.memory, weights_s, pages_s, routed_s=routed_s)


def load_seconds(work: Work, rates: Rates) -> float | None:
    """Seconds to read the weights from disk once; None if unknown. A recently read file comes from the page cache, faster."""
    return work.load / rates.disk if rates.disk else None


def _neuron_rate(work: Work, rates: Rates) -> float:
    """The disk rate for reads of single neurons."""
    return rates.small_read_rate(work.neuron_read_bytes) if rates.small_read_rate else rates.disk


def _weights_rate(work: Work, rates: Rates, tokens: int, reread_bytes: int = 0) -> float:
    """The disk rate for streamed weights. `reread_bytes`: bytes that every pass reads, these included; 0: never read before.

    A single token's experts are read one at a time if few are missing."""
    if work.paged is None:
        return _reread_rate(rates, reread_bytes) if reread_bytes else rates.disk
    return rates.disk_depth1 if tokens == 1 and work.paged.missed_per_layer < 1.5 and rates.disk_depth1 else rates.disk


def _reread_rate(rates: Rates, nbytes: int, checked: bool = False) -> float:
    """The disk rate for bytes that every pass re-reads. `checked`: with checksums, as for pages."""
    return rates.reread_rate(nbytes, checked) if rates.reread_rate else rates.disk


def _combine(work: Work, rates: Rates, processor_s: float, memory_s: float, weights_s: float, pages_s: float, stall_s: float = 0.0,
             routed_s: float = 0.0) -> Prediction:
    """Combine seconds of the CPU and the disk.

    weights_s: the disk reads weights, overlapping with the CPU's work; if they are experts, only with `routed_s` of it
    pages_s:   the disk reads the cache, overlapping with everything
    stall_s:   the CPU waits for the disk"""
    overlapping_s, disk_s = processor_s if work.paged is None else routed_s, weights_s + pages_s
    error = (ERROR + rates.memory_variation + (STREAMED_ERROR if disk_s or stall_s else 0) + (MIXTURE_ERROR if work.is_moe else 0)
             + (UNKNOWN_ERROR if work.is_sparsity_assumed else 0) + (CACHED_ERROR if work.bytes_per_token < MEMORY_NBYTES else 0))
    known = are_measured(work, rates)
    limit = "disk" if disk_s + stall_s > processor_s else "memory" if memory_s > 0.5 * processor_s else "processor"
    seconds = max(processor_s - overlapping_s + max(weights_s, overlapping_s), disk_s) + stall_s
    return Prediction(seconds, disk_s + stall_s, memory_s, processor_s, limit, round(error + (0 if known else UNKNOWN_ERROR), 2))


def are_measured(work: Work, rates: Rates) -> bool:
    """Whether a token's products and attention were measured, none of them assumed."""
    return (all(part.kind in rates.kinds or _token_kind(part.kind) in rates.kinds for part in work.parts)
            and work.kv in rates.attention)


def _token_kind(kind: str) -> str:
    """The kind whose rate a token of this kind has: the bytes of raw weights matter alone."""
    return RAW_KIND if kind == RAW_FLOAT32_KIND else kind


def _kind(rates: Rates, kind: str) -> KindRate:
    """The measured rate of a weight format, else a share of memory bandwidth."""
    default = DEFAULT_MEMORY_SHARE * rates.memory
    return rates.kinds.get(kind) or rates.kinds.get(_token_kind(kind)) or KindRate(default, default)


def _group(kind: str) -> str:
    """The kernels that multiply a format in prompts: kinds of one group have similar rates."""
    return kind if kind in (RAW_KIND, RAW_FLOAT32_KIND) else "low-bit"


def _attention(rates: Rates, kv: str) -> KindRate:
    """The measured rate, else the slowest other, else one product per byte of memory."""
    others = rates.attention.values()
    slowest = {name: min((getattr(rate, name) for rate in others), default=rates.memory) for name in ("decode", "prefill", "deep")}
    return rates.attention.get(kv) or KindRate(**slowest)


def _pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs of one layer for a prompt."""
    attended = min(tokens, tokens if window is None else window)
    return attended * (attended + 1) // 2 + (tokens - attended) * attended
