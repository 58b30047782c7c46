"""What the runtime tells whoever listens: small frozen values, yielded in order. Nothing here knows a terminal."""

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
    """A long operation moved on: `done` of `total` in `unit` (bytes, kernels, tokens). `detail` names what it is at, a tensor say.

    `rate` in units a second, of late, where the operation knows it better than done over time: one that began with a part done.
    """

    phase: str
    done: int
    total: int
    unit: str
    detail: str = ""
    rate: float | None = None


@dataclass(frozen=True)
class Notice:
    """A decision or a fallback, in one line."""

    text: str

    @property
    def is_detail(self) -> bool:
        return isinstance(self.text, Detail)


@dataclass(frozen=True)
class Yield:
    """An answer that is written beside others lets them go on. `want`: the pass that it waits for before it is asked for more, of
    `batching.py`; None where it has a piece of a prompt to read next. Whoever writes several answers at once sees it, nobody else."""

    want: object | None = None


@dataclass(frozen=True)
class PromptRead:
    """A prompt of so many tokens was read, of which some were held already. It comes before the first text of an answer for programs."""

    tokens: int
    cached: int


@dataclass(frozen=True)
class TextDelta:
    """New text of the answer. `kind` is answer or thinking; `tokens` are those of it, where a wish asks how likely they were."""

    text: str
    kind: str = "answer"
    tokens: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool that the model asks for: `arguments` is the text of a JSON object, `id` what the model itself calls it, if anything."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Stats:
    """What an answer cost. Times in seconds, rates in tokens a second, sizes in bytes.

    Of a prompt's tokens some were held already (`cached_tokens`) and `read_tokens` were run; where its middle was dropped, or reading was
    stopped, that is not all of them. `planned_bytes`: what the plan allowed the process, with a full context; `peak_rss_bytes`: its most.

    `ttft_s` counts from the request, or for `run` from the start of the process; `decode_tps` is what a person sees: sampling and text
    included. `disk_bytes_read` and `disk_wait_s` (what the processor stood still for) since the model was opened. `speculation`: passes,
    tokens drafted and accepted, why none was; None without. `reasoning_tokens`: those of the answer's that were reasoning. `stop_string`:
    the one that ended it, None where none did. `is_whole`: whether it came to its end as its form wants it, None without a form.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    load_s: float
    ttft_s: float
    prefill_s: float
    decode_s: float
    peak_rss_bytes: int
    planned_bytes: int
    weights_bytes: int
    kv_bytes: int
    kv_bits_per_value: float
    packed_bits: float
    kv_packed: bool
    exact_tokens: int
    packed_tokens: int
    disk_bytes_read: int
    disk_wait_s: float
    placement: Mapping[str, object]
    context_used: int
    context_max: int
    truncated: bool
    speculation: Mapping[str, object] | None = None
    reasoning_tokens: int = 0
    stop_string: str | None = None
    is_whole: bool | None = None

    @property
    def prefill_tps(self) -> float:
        return self.read_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        """The first token comes out of the prompt's pass, so it is not counted."""
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
    """The vectors of texts, float32 [D] of length 1 each, and how many tokens these had together."""

    vectors: Sequence[np.ndarray]
    tokens: int


@dataclass(frozen=True)
class Ranked:
    """How well each of some documents answers a query, 0 to 1, and how many tokens were read for it."""

    scores: Sequence[float]
    tokens: int


@dataclass(frozen=True)
class SlotDone:
    """What a sequence holds was saved, restored or forgotten: so many tokens, bytes on the disk, and seconds."""

    tokens: int
    nbytes: int = 0
    seconds: float = 0.0


Event = Progress | Notice | PromptRead | TextDelta | Call | Done | Embedded | Ranked | SlotDone
