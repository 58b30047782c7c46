"""A model for lm-evaluation-harness: `lm_eval --model effllm --model_args pretrained=fable --tasks ...`.

The harness finds `EffllmLM` through the entry point in pyproject.toml. The class is built from the harness's base class on first use, so
that importing this needs no harness. Requests are scored one after the other with the same kernels, chunks and cache as generation;
requests with a common prefix are sorted together and share it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from .. import EffllmError, UsageError, typed
from .engine import open_engine
from .measuring.evaluate import log_softmax
from .prepare import EngineOptions
from .sampler import Sampler, SamplerSettings
from .tokenizer import Tokenizer
from .tokens.stream_filters import StopStrings

Answer = TypeVar("Answer")
LONGEST_ANSWER = 256  # tokens, where a task does not say
EXACT_CACHES = ("32bit", "16bit")  # in others a token may have been packed, or not yet, by the time that it is read again
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def __getattr__(name: str) -> object:
    """`EffllmLM`, on first use."""
    if name == "EffllmLM":
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def model_class() -> type:
    """The class that the harness loads, registered as `effllm`. Raises EffllmError if the harness is not installed."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise EffllmError("lm-evaluation-harness is not installed", "pip install 'effllm[eval]'") from error

    return register_model("effllm")(type("EffllmLM", (Scoring, LM), {"__doc__": Scoring.__doc__, "__module__": __name__}))


class Scoring:
    """The three request types of the harness, answered by an Engine.

    Arguments (`--model_args`): `pretrained` is an alias or a folder; `ctx`, `threads`, `kv`, `device`, `exact` are the flags of that name;
    the harness's own `batch_size` and `max_batch_size` are accepted and have no effect, since one sequence runs at a time.
    """

    def __init__(self, pretrained: str, ctx: int | None = None, threads: int | None = None, kv: str | None = None,
                 device: str | None = None, exact: bool = False, batch_size: object = 1, max_batch_size: object = None,
                 **unknown: object) -> None:
        if unknown:
            raise UsageError(f"--model_args: there is no {', '.join(sorted(unknown))}", "pretrained, ctx, threads, kv, device, exact")
        super().__init__()
        from .catalog import resolve

        given = {"ctx": ctx, "threads": threads, "kv": kv, "exact": exact, "device": device if device in ("cpu", "cuda") else None}
        ref = resolve(str(pretrained), os.environ)
        if ref.variant:
            from .stores.container import refuse_quantized

            refuse_quantized(ref.folder, str(pretrained).rpartition(":")[0], f":{ref.variant}")
            raise UsageError(f"{pretrained} would be quantized as it is loaded, which an evaluation does not do",
                             f"effllm quantize {typed(str(pretrained).rpartition(':')[0])} -o DIR --spec {ref.variant}, "
                             "then pretrained=DIR")
        *_, self.engine = open_engine(ref.folder, EngineOptions(**{name: value for name, value in given.items() if value is not None}))
        self.text = Tokenizer.load(ref.folder, self.engine.config)
        self._name = ref.text

    @property
    def tokenizer_name(self) -> str:
        return self._name

    @property
    def begin(self) -> int:
        """The token before a text without context: BOS, else EOS."""
        return self.text.bos_id if self.text.bos_id is not None else min(self.text.stop_ids)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, which identifies results."""
        return self.text.template.source if chat_template and self.text.template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.text.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy continuation) of each continuation after its context."""
        pairs = [self._pair(*request.args) for request in requests]

        def answer(pair: tuple[list[int], list[int]]) -> tuple[float, bool]:
            return self._scored(*pair)

        return self._in_order(requests, pairs, lambda pair: pair[0] + pair[1], answer, "loglikelihood")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts. A text longer than the context is split: each token is scored once, with as much context as
        fits."""
        def answer(ids: list[int]) -> float:
            return sum(self._scored(context, target)[0] for context, target in rolling(ids, self.begin, self.engine.n_ctx))

        texts = [self._without_begin(self.text.encode(request.args[0])) for request in requests]
        return self._in_order(requests, texts, list, answer, "loglikelihood_rolling")

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its `until` strings, which is left out."""
        prompts = [(self._prompt_ids(request.args[0]), dict(request.args[1])) for request in requests]
        return self._in_order(requests, prompts, lambda prompt: prompt[0], lambda prompt: self._generated(*prompt), "generate_until")

    # -- one request -----------------------------------------------------------------------------------------------------------

    def _in_order(self, requests: Sequence[Any], parts: Sequence[Any], ids_of: Callable[[Any], list[int]], answer: Callable[[Any], Answer],
                  kind: str) -> list[Answer]:
        """Results in request order, computed in token order."""
        answers: dict[int, Answer] = {}
        for index in sorted(range(len(parts)), key=lambda index: ids_of(parts[index])):
            answers[index] = answer(parts[index])
            self.cache_hook.add_partial(kind, requests[index].args, answers[index])
        return [answers[index] for index in range(len(parts))]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split as in the tokenization of the whole: a space at the end of a context belongs to the continuation."""
        space = len(context) - len(context.rstrip())
        if space:
            context, continuation = context[:-space], context[-space:] + continuation
        if not context:
            return [self.begin], self._without_begin(self.text.encode(continuation))
        whole, first = self._prompt_ids(context + continuation), self._prompt_ids(context)
        return whole[: len(first)], whole[len(first) :]

    def _prompt_ids(self, text: str) -> list[int]:
        return self.text.encode(text) or [self.begin]

    def _without_begin(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.text.bos_id] else ids

    def _scored(self, context: list[int], target: list[int]) -> tuple[float, bool]:
        """Sum of the log-probabilities of `target` after the newest tokens of `context` that fit."""
        if not target:
            return 0.0, True
        if len(target) > self.engine.n_ctx:
            raise EffllmError(f"a continuation of {len(target)} tokens is longer than the context of {self.engine.n_ctx}", "a larger ctx=")
        ids = (context + target)[-self.engine.n_ctx - 1 : -1]  # the last token predicts nothing that is asked for
        first, total, greedy = len(ids) - len(target), 0.0, True
        for start, logits in self.engine.score(ids, num_cached=first if self.engine.options.kv in EXACT_CACHES else 0):
            rows = np.arange(max(start, first), start + len(logits))
            if len(rows):
                wanted = np.array([target[row - first] for row in rows], np.int64)
                scores = log_softmax(logits[rows - start])
                total += float(scores[np.arange(len(rows)), wanted].sum())
                greedy &= bool((scores.argmax(-1) == wanted).all())
        return total, greedy

    def _generated(self, prompt: list[int], options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        stops = StopStrings([until] if isinstance(until, str) else [text for text in until if text])
        limit = next((int(options[name]) for name in LENGTHS if options.get(name) is not None), LONGEST_ANSWER)
        sampler = Sampler(sampling_settings(options), self.engine.config.vocab_size)
        if limit <= 0:
            return ""
        room = self.engine.n_ctx - min(len(prompt), self.engine.n_ctx // 2)  # a long prompt keeps half of the context, its end
        limit = min(limit, room)
        for _ in self.engine.prefill(prompt[-(self.engine.n_ctx - limit) :]):
            continue
        stream, said = self.text.stream(), []
        for step in self.engine.generate(sampler, limit, self.text.stop_ids):
            if step.finish != "stop":
                said.append(stops.push(stream.push(step.token)))
            if stops.hit:
                break
        return "".join(said) if stops.hit else "".join(said) + stops.push(stream.flush()) + stops.flush()


def sampling_settings(options: Mapping[str, Any]) -> SamplerSettings:
    """Greedy unless the task asks to sample by a temperature."""
    if not options.get("do_sample", options.get("temperature")):
        return SamplerSettings(temperature=0.0)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplerSettings(**neutral | {name: options[name] for name in SAMPLING if options.get(name) is not None})


def rolling(ids: Sequence[int], begin: int, n_ctx: int) -> Iterable[tuple[list[int], list[int]]]:
    """(context, target) pairs that score every token of `ids` once, each after as many tokens as the context holds."""
    ids = list(ids)
    if not ids:
        return
    first = ids[:n_ctx]
    yield [begin], first
    for start in range(len(first), len(ids), n_ctx):
        target = ids[start : start + n_ctx]
        end = start + len(target)
        yield ids[max(0, end - n_ctx - 1) : start], target
