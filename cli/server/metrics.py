"""Prometheus metrics of a server's answers, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterable

from ...runtime.events import Stats
from .answer_queue import AnswerQueue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Totals over all answers that have ended; `max_context_tokens` is a maximum."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_generated_tokens = self.num_drafted = self.num_accepted = 0
        self.max_context_tokens = 0
        self.prefill_s = self.decode_s = 0.0

    def add(self, stats: Stats) -> None:
        self.num_prompt_tokens += stats.read_tokens
        self.num_generated_tokens += len(stats.token_ids)
        self.prefill_s += stats.prefill_s
        self.decode_s += stats.decode_s
        self.max_context_tokens = max(self.max_context_tokens, stats.context_used)
        drafts = stats.speculation or {}
        self.num_drafted += drafts.get("drafted", 0)
        self.num_accepted += drafts.get("accepted", 0)

    def render(self, answer_queue: AnswerQueue) -> str:
        """In Prometheus' text format, with the state of the queue."""
        # (name, Prometheus type, description, value)
        rows: Iterable[tuple[str, str, str, float]] = (
            ("prompt_tokens_total", "counter", "Prompt tokens processed.", self.num_prompt_tokens),
            ("prompt_seconds_total", "counter", "Prompt processing time in seconds.", self.prefill_s),
            ("tokens_predicted_total", "counter", "Generated tokens.", self.num_generated_tokens),
            ("tokens_predicted_seconds_total", "counter", "Generation time in seconds.", self.decode_s),
            ("n_tokens_max", "counter", "Largest context so far, in tokens.", self.max_context_tokens),
            ("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.", self.num_drafted),
            ("spec_decode_num_accepted_tokens_total", "counter", "Accepted draft tokens.", self.num_accepted),
            ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s.",
             tokens_per_second(self.num_prompt_tokens, self.prefill_s)),
            ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s.",
             tokens_per_second(self.num_generated_tokens, self.decode_s)),
            ("requests_processing", "gauge", "Requests being processed.", answer_queue.running),
            ("requests_deferred", "gauge", "Requests waiting in the queue.", answer_queue.waiting))
        return "".join(f"# HELP llamacpp:{name} {description}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.15g}\n"
                       for name, kind, description, value in rows)


def tokens_per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
