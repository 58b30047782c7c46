"""Several answers to one request: `n` to each of its prompts. They are generated one after the other as a single job of the queue; each has
an index of its own, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...runtime.events import Call, Done, Event, PromptRead, Stats, TextDelta
from ...runtime.generation.served_model import GenerationOptions
from .answer_queue import Start
from .generation_options import SEEDS
from .problems import Problem
from .serializers import AnswerSerializer, CompletionSerializer, timings, usage

MAX_ANSWERS = 128  # answers to a request


@dataclass(frozen=True)
class AnswerEnded:
    """One of several answers has ended, and the next one follows."""

    stats: Stats


def choice_count(n: int | None, prompts: int = 1, field: str = "n") -> int:
    """How many answers each prompt gets (the request's `n`). Raises Problem."""
    count = 1 if n is None else n
    if count < 1 or count * prompts > MAX_ANSWERS:
        raise Problem(400, f"{field} has to be 1 or more, with at most {MAX_ANSWERS} answers per request", param=field)
    return count


def with_seeds(options: GenerationOptions, count: int) -> list[GenerationOptions]:
    """The options of `count` answers to one prompt: where a seed is given, each answer has the next one."""
    settings, seed = options.settings, options.settings.seed
    if seed is None:
        return [options] * count
    return [replace(options, settings=replace(settings, seed=(seed + i) % SEEDS)) for i in range(count)]


def in_sequence(starts: Sequence[Start]) -> Start:
    """One job that generates the answers one after the other. Cancelling it cancels all of them."""
    if len(starts) == 1:
        return starts[0]

    def begin(cancelled: Callable[[], bool]) -> Iterator[Event | AnswerEnded]:
        for start in starts[:-1]:
            for event in start(cancelled):
                yield AnswerEnded(event.stats) if isinstance(event, Done) and not cancelled() else event
            if cancelled():
                return
        yield from starts[-1](cancelled)

    return begin


def total_stats(stats: Sequence[Stats]) -> Stats:
    """The summed statistics of several answers."""
    if len(stats) == 1:
        return stats[0]
    total = lambda name: sum(getattr(each, name) for each in stats)  # noqa: E731
    sums = ("prompt_tokens", "cached_tokens", "read_tokens", "prefill_s", "decode_s", "reasoning_tokens")
    return replace(stats[-1], text="".join(each.text for each in stats), token_ids=sum((each.token_ids for each in stats), ()),
                   ttft_s=stats[0].ttft_s, **{name: total(name) for name in sums})


class MultipleAnswers(AnswerSerializer):
    """Serializes `count` answers, `per_prompt` of them to each prompt, with a serializer from `make` for each."""

    def __init__(self, make: Callable[[], CompletionSerializer], count: int, per_prompt: int) -> None:
        self._answers, self._per_prompt, self._ended = [make() for _ in range(count)], per_prompt, []
        for index, answer in enumerate(self._answers):
            answer.index, answer.id, answer.created = index, self._answers[0].id, self._answers[0].created

    @property
    def _current(self) -> CompletionSerializer:
        return self._answers[len(self._ended)]

    def first_chunks(self) -> list[dict[str, object]]:
        return self._current.first_chunks()

    def add(self, event: PromptRead | TextDelta | Call | AnswerEnded) -> list[dict[str, object]]:
        return self._current.add(event) if not isinstance(event, AnswerEnded) else [self._end(event.stats), *self._current.first_chunks()]

    def last_chunks(self, stats: Stats) -> list[dict[str, object]]:
        chunks, first = [self._end(stats)], self._answers[0]
        return [*chunks, first.chunk(None, usage=self._usage())] if first.include_usage else chunks

    def whole_answer(self, stats: Stats) -> dict[str, object]:
        self._ended.append(stats)
        objects = [answer.whole_answer(own) for answer, own in zip(self._answers, self._ended, strict=True)]
        choices = [choice for each in objects for choice in each["choices"]]
        return {**objects[0], "choices": choices, "usage": self._usage(), "timings": timings(total_stats(self._ended))}

    def _end(self, stats: Stats) -> dict[str, object]:
        chunk = self._current.finish_chunk(stats)
        self._ended.append(stats)
        return chunk

    def _usage(self) -> dict[str, object]:
        """Prompt tokens are counted once per prompt, however many answers it has."""
        prompts = total_stats(self._ended[:: self._per_prompt])
        return usage(replace(total_stats(self._ended), prompt_tokens=prompts.prompt_tokens, cached_tokens=prompts.cached_tokens))
