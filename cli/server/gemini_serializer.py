"""Answers in the format of Google's Gemini API: candidates with parts (text, thoughts, calls), whole, or in chunks, as events or as
elements of one list."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.sampling.logprobs import TokenLogprobs
from ...runtime.tokenizer import Tokenizer
from ...runtime.tokens.token_bytes import token_bytes_of
from ...runtime.tool_calls.cursor import parse_json
from .logprobs import spelled
from .multiple_answers import AnswerEnded, total_stats
from .problems import Problem
from .serializers import AnswerSerializer
from .tools import CallList


@dataclass
class Candidate:
    """One answer so far."""

    index: int
    parts: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[TokenLogprobs] = field(default_factory=list)
    call_list: CallList = field(default_factory=CallList)

    def add(self, part: dict[str, Any]) -> None:
        """Consecutive text of one kind is one part."""
        previous = self.parts[-1] if self.parts else {}
        if "text" in part and "text" in previous and part.get("thought") == previous.get("thought"):
            previous["text"] += part["text"]
        else:
            self.parts.append({**part})


class GeminiSerializer(AnswerSerializer):
    """`is_json_list`: chunks are elements of one JSON list. Without `shows_thoughts` reasoning is counted but not sent. With a `tokenizer`
    log-probabilities are included."""

    terminator, has_comments = b"", False  # some clients take a comment for the beginning of a chunk

    def __init__(self, model: str, is_json_list: bool = False, shows_thoughts: bool = False, tokenizer: Tokenizer | None = None) -> None:
        self.model, self.is_json_list, self._shows_thoughts, self._tokenizer = model, is_json_list, shows_thoughts, tokenizer
        self.id, self.terminator = uuid.uuid4().hex, b"]" if is_json_list else b""
        self._candidates, self._ended = [Candidate(0)], list[Stats]()

    def add(self, event: PromptRead | TextDelta | Call | AnswerEnded) -> list[dict[str, object]]:
        if isinstance(event, PromptRead):
            return []
        candidate = self._candidates[-1]
        if isinstance(event, AnswerEnded):
            self._ended.append(event.stats)
            self._candidates.append(Candidate(candidate.index + 1))
            return [self._chunk(self._last(candidate, event.stats))]
        if isinstance(event, Call):
            call_id = candidate.call_list.add(event)["id"]
            part = {"functionCall": {"id": call_id, "name": event.name, "args": parse_json(event.arguments)}}
        elif event.kind == "answer":
            part = {"text": event.text}
            candidate.tokens += event.tokens
        elif self._shows_thoughts:
            part = {"text": event.text, "thought": True}
        else:
            return []
        candidate.add(part)
        tokens = event.tokens if isinstance(event, TextDelta) and event.kind == "answer" else ()
        return [self._chunk({**self._logprob_fields(tokens), **_candidate(candidate.index, [part])})]

    def keep_alive_chunks(self) -> list[dict[str, object]]:
        """An empty thought, which no client shows."""
        return [self._chunk(_candidate(self._candidates[-1].index, [{"text": "", "thought": True}]))]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        self._ended.append(stats)
        return [{**self._chunk(self._last(self._candidates[-1], stats)), "usageMetadata": usage(self._ended)}]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        self._ended.append(stats)
        candidates = [{**_candidate(each.index, each.parts), **self._logprob_fields(each.tokens), **_finish_reason(stats)}
                      for each, stats in zip(self._candidates, self._ended, strict=True)]
        return {**self._chunk(*candidates), "usageMetadata": usage(self._ended)}

    def error_chunks(self, problem: Problem) -> list[dict[str, object]]:
        return [problem.to_google()]

    def _chunk(self, *candidates: dict[str, object]) -> dict[str, object]:
        return {"candidates": [*candidates], "modelVersion": self.model, "responseId": self.id}

    def _last(self, candidate: Candidate, stats: Stats) -> dict[str, object]:
        return {**_candidate(candidate.index, []), **_finish_reason(stats)}

    def _logprob_fields(self, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
        """Log-probabilities of tokens; no fields if the request does not want them."""
        if self._tokenizer is None or not tokens:
            return {}
        text = token_bytes_of(self._tokenizer)

        def entry(token: int, logprob: float | None) -> dict[str, object]:
            return {"token": spelled(text(token)), "tokenId": token, "logProbability": logprob}

        total = sum(each.logprob or 0.0 for each in tokens)
        return {"avgLogprobs": total / len(tokens), "logprobsResult": {
            "topCandidates": [{"candidates": [entry(*alternative) for alternative in each.top]} for each in tokens],
            "chosenCandidates": [entry(each.token, each.logprob) for each in tokens], "logProbabilitySum": total}}


def _candidate(index: int, parts: list[dict[str, Any]]) -> dict[str, object]:
    """With at least one part: clients drop a turn that has none."""
    return {"content": {"parts": parts or [{"text": ""}], "role": "model"}, "index": index}


def _finish_reason(stats: Stats) -> dict[str, object]:
    return {"finishReason": "STOP" if stats.finish_reason == "stop" else "MAX_TOKENS"}


def usage(ended: Sequence[Stats]) -> dict[str, object]:
    """Prompt tokens are counted once, however many answers there are."""
    prompt, total = ended[0], total_stats(ended)
    num_tokens, num_reasoning_tokens = len(total.token_ids), total.reasoning_tokens
    cached = {"cachedContentTokenCount": prompt.cached_tokens} if prompt.cached_tokens else {}
    thoughts = {"thoughtsTokenCount": num_reasoning_tokens} if num_reasoning_tokens else {}
    return {"promptTokenCount": prompt.prompt_tokens, **cached, "candidatesTokenCount": num_tokens - num_reasoning_tokens, **thoughts,
            "totalTokenCount": prompt.prompt_tokens + num_tokens}
