"""Answers in the format of llama.cpp's own API: one object, or events with a chunk each, the last with the statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...runtime.events import Call, PromptRead, Stats, TextDelta
from ...runtime.generation.served_model import GenerationOptions
from ...runtime.tokenizer import Tokenizer
from .generation_options import RANDOM, SAMPLING
from .llama_requests import max_tokens_of
from .logprobs import LogprobList
from .multiple_answers import AnswerEnded
from .serializers import AnswerSerializer, timings

# In the order in which they run here, by llama.cpp's names.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "min_p", "typ_p", "xtc")
NOT_REPORTED = ("repetition_penalty",)  # of the names that a request may use


@dataclass(frozen=True)
class LlamaAnswerContext:
    """What is reported with an answer."""

    values: Mapping[str, object]  # generation settings
    prompt: str = ""
    fields: tuple[str, ...] | None = None  # the requested fields of the response, None for all
    tokens: bool = False  # include token ids
    tokenizer: Tokenizer | None = None  # to include log-probabilities
    is_cut: bool = False  # part of the prompt was left out


def generation_settings(options: GenerationOptions, stream: bool, grammar: str = "") -> dict[str, object]:
    """The options of an answer under llama.cpp's names."""
    values = {name: getattr(options.settings, field) for name, field in SAMPLING.items() if name not in NOT_REPORTED}
    return {**values, "seed": RANDOM if options.settings.seed is None else options.settings.seed,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in options.settings.logit_bias], "stop": list(options.stops),
            "max_tokens": max_tokens_of(options), "n_predict": max_tokens_of(options), "ignore_eos": options.ignore_eos, "stream": stream,
            "n_probs": options.logprobs or 0, "grammar": grammar, "samplers": [*SAMPLERS, *(["infill"] if options.infill_sampling else [])],
            "lora": [{"id": number, "scale": scale} for number, scale in enumerate(options.choice or ())]}


class LlamaSerializer(AnswerSerializer):
    """Serializes one answer. `index`: its number among several."""

    terminator = b""

    def __init__(self, model: str, settings: LlamaAnswerContext | None = None) -> None:
        self.model, self.settings, self.text, self.index, self._sent = model, settings or LlamaAnswerContext({}), "", 0, 0
        self._logprob_list = self.settings.tokenizer and LlamaLogprobs(self.settings.tokenizer)
        self._logprobs: list[dict[str, object]] = []

    def add(self, event: PromptRead | TextDelta | Call) -> list[dict[str, object]]:
        if not isinstance(event, TextDelta):
            return []
        self.text += event.text
        logprobs = self._logprob_list.to_json(event.tokens) if self._logprob_list else []
        self._logprobs += logprobs
        tokens = [each.token for each in event.tokens] if self.settings.tokens else []
        self._sent += len(tokens)
        return [{"index": self.index, "content": event.text, "tokens": tokens, "stop": False, **_probabilities(logprobs)}]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        """The last chunk, with the tokens that have no text: the one that ended the answer, and those of a stop string."""
        return [self._end("", list(stats.token_ids[self._sent :]) if self.settings.tokens else [], stats)]

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        return self._end(self.text, list(stats.token_ids) if self.settings.tokens else [], stats, **_probabilities(self._logprobs))

    def _end(self, content: str, tokens: list[int], stats: Stats, **more: object) -> dict[str, object]:
        settings = self.settings
        ended = {"index": self.index, "content": content, "tokens": tokens, "stop": True, "model": self.model,
                 "tokens_predicted": len(stats.token_ids), "tokens_evaluated": stats.prompt_tokens,
                 "generation_settings": {**settings.values, "seed": stats.seed}, "prompt": settings.prompt,
                 "has_new_line": "\n" in self.text, "truncated": settings.is_cut or stats.truncated, "stop_type": stop_type(stats),
                 "stopping_word": stats.stop_string or "", "tokens_cached": stats.context_used, "timings": timings(stats), **more}
        return ended if settings.fields is None else select_fields(ended, settings.fields)


class LlamaListSerializer(AnswerSerializer):
    """Several answers in sequence: a list, or chunks with the `index` of their answer."""

    terminator = LlamaSerializer.terminator

    def __init__(self, answers: Sequence[LlamaSerializer]) -> None:
        self._answers: Sequence[LlamaSerializer] = answers
        self._finished: list[dict[str, object]] = []  # whole answers of those that have ended
        for index, answer in enumerate(answers):
            answer.index = index

    def add(self, event: PromptRead | TextDelta | Call | AnswerEnded) -> list[dict[str, object]]:
        if not isinstance(event, AnswerEnded):
            return self._answers[len(self._finished)].add(event)
        answer = self._answers[len(self._finished)]
        self._finished.append(answer.whole_answer(event.stats))
        return answer.last_chunks(event.stats)

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        return self._answers[-1].last_chunks(stats)

    def whole_answer(self, stats: Stats) -> list[dict[str, object]]:
        return [*self._finished, self._answers[-1].whole_answer(stats)]


def stop_type(stats: Stats) -> str:
    if stats.finish_reason == "stop":
        return "eos" if stats.stop_string is None else "word"
    return "limit" if stats.finish_reason == "length" else "none"


def select_fields(ended: Mapping[str, object], fields: Iterable[str]) -> dict[str, object]:
    """The requested fields of an answer; `timings/prompt_n` is a nested one. Unknown ones are left out."""
    selected = {}
    for field in fields:
        value: object = ended
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            selected[field] = value
    return selected


def _probabilities(logprobs: list[dict[str, object]]) -> dict[str, object]:
    return {"completion_probabilities": logprobs} if logprobs else {}


class LlamaLogprobs(LogprobList):
    """Log-probabilities with token ids."""

    def _one(self, token: int, logprob: float | None) -> dict[str, object]:
        return {"id": token, **super()._one(token, logprob)}
