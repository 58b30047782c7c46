"""Events that the runtime yields: small frozen values, in order. Nothing here knows a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..offload.notes import Detail

if TYPE_CHECKING:
    import numpy as np

    from .sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Progress:
    """Progress of a long operation: `done` of `total` in `unit` (bytes, kernels, tokens)."""

    phase: str
    done: int
    total: int
    unit: str
    detail: str = ""  # the current item, a tensor for example
    rate: float | None = None  # recent units per second, if known better than `done` over time, as after a resumed download


@dataclass(frozen=True)
class Notice:
    """A decision or a fallback, in one line."""

    text: str

    @property
    def is_detail(self) -> bool:
        return isinstance(self.text, Detail)


@dataclass(frozen=True)
class Yield:
    """A cooperative yield of an answer that runs beside others; only the scheduler sees it.

    `pending`: the token whose pass it waits for (`batching.py`); None if it has a prefill chunk to run next.
    """

    pending: object | None = None


@dataclass(frozen=True)
class PromptRead:
    """The prompt was prefilled: its tokens, and how many of them were cached. Comes before the first text; for API answers."""

    tokens: int
    cached: int


@dataclass(frozen=True)
class TextDelta:
    """New text of the answer."""

    text: str
    kind: str = "answer"  # answer or thinking
    tokens: tuple[TokenLogprobs, ...] = ()  # its log-probabilities, if requested


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: str  # the text of a JSON object
    id: str = ""  # the model's own, if any


@dataclass(frozen=True)
class Stats:
    """What an answer cost. Times in seconds, rates in tokens per second, sizes in bytes."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt, in the KV cache already
    # Of the prompt, prefilled. With `cached_tokens` fewer than the prompt if its middle was dropped or prefill was cancelled.
    read_tokens: int
    load_s: float
    ttft_s: float  # time to first token, from the request, or for `run` from the start of the process
    prefill_s: float
    decode_s: float  # sampling and detokenizing included
    peak_rss_bytes: int
    planned_bytes: int  # what the plan allows the process with a full context
    weights_bytes: int
    kv_bytes: int
    kv_bits_per_value: float
    packed_bits: float
    kv_packed: bool
    exact_tokens: int
    packed_tokens: int
    disk_bytes_read: int  # since the model was opened
    disk_wait_s: float  # time stalled on the disk, since the model was opened
    placement: Mapping[str, object]
    context_used: int
    context_max: int
    truncated: bool
    speculation: Mapping[str, object] | None = None  # passes, tokens drafted and accepted, why none were; None without speculation
    reasoning_tokens: int = 0
    stop_string: str | None = None  # the one that ended the answer
    is_whole: bool | None = None  # whether the answer satisfies its constraint; None without one

    @property
    def prefill_tps(self) -> float:
        return self.read_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        """The first token comes from the prefill, so it is not counted."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s and len(self.token_ids) > 1 else 0.0

    def to_json(self) -> dict[str, object]:
        """The object that `--json` prints."""
        return {
            "text": self.text, "token_ids": list(self.token_ids), "finish_reason": self.finish_reason, "whole": self.is_whole,
            "seed": self.seed,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids), "cached_tokens": self.cached_tokens},
            "timings": {"load_s": self.load_s, "ttft_s": self.ttft_s, "prefill_tps": self.prefill_tps, "decode_tps": self.decode_tps},
            "memory": {"peak_rss_bytes": self.peak_rss_bytes, "planned_bytes": self.planned_bytes, "weights_bytes": self.weights_bytes,
                       "kv_bytes": self.kv_bytes, "kv_bits_per_value": self.kv_bits_per_value, "packed_bits": self.packed_bits},
            "io": {"disk_bytes_read": self.disk_bytes_read, "disk_wait_s": self.disk_wait_s},
            "placement": dict(self.placement), "truncated": self.truncated,
            "speculation": None if self.speculation is None else dict(self.speculation),
        }


@dataclass(frozen=True)
class Done:
    """The end of an answer."""

    stats: Stats


@dataclass(frozen=True)
class Embedded:
    """Embeddings of all texts of a request."""

    vectors: Sequence[np.ndarray]  # float32 [D], length 1
    tokens: int  # of all texts together


@dataclass(frozen=True)
class Ranked:
    """Relevance of each document, 0 to 1, and the tokens processed."""

    scores: Sequence[float]
    tokens: int


@dataclass(frozen=True)
class SlotDone:
    """A slot was saved, restored or erased."""

    tokens: int
    nbytes: int = 0  # on disk
    seconds: float = 0.0


Event = Progress | Notice | PromptRead | TextDelta | Call | Done | Embedded | Ranked | SlotDone
