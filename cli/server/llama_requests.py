"""Requests of llama.cpp's own API: completions and FIM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ...runtime.generation.served_model import GenerationOptions
from ...runtime.sampler import SamplerSettings
from ...runtime.tokenizer import Tokenizer
from ...runtime.tokens.infill import InfillContext
from .generation_options import NO_LIMIT, Defaults, options_of
from .multiple_answers import choice_count
from .openai_requests import UNSUPPORTED_FIELDS, Body, GenerationRequest
from .problems import Problem

A_PROMPT = "{} has to be a string, token ids, a list of both, or a list of such prompts"
# A sampler's names in `samplers`, the letter first -> what settings are without it.
WITHOUT: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("e", "penalties"): {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ("d", "dry"): {"dry_multiplier": 0.0}, ("s", "top_n_sigma"): {"top_n_sigma": -1.0}, ("k", "top_k"): {"top_k": 0},
    ("y", "typ_p", "typical_p", "typical"): {"typical_p": 1.0}, ("p", "top_p"): {"top_p": 1.0}, ("m", "min_p"): {"min_p": 0.0},
    ("x", "xtc"): {"xtc_probability": 0.0}, ("t", "temperature"): {"temperature": 1.0}}
INFILL = ("i", "infill")
# Names of llama.cpp's, now or once, without a sampler here: SillyTavern names them in every request.
IGNORED_SAMPLERS = ("a", "adaptive_p", "tfs_z")
SAMPLER_NAMES = (*(names[1] for names in WITHOUT), INFILL[1])
KNOWN_SAMPLERS = frozenset((*(name for names in WITHOUT for name in names), *INFILL, *IGNORED_SAMPLERS))
LONGEST_MS = 1e12  # longer than any answer


class LlamaCompletionRequest(GenerationRequest):
    """Fields about caches and slots (`id_slot`, `n_keep`, `n_cache_reuse`, `t_max_prompt_ms`) do not change an answer here and are ignored,
    as is `logprobs`, which SillyTavern sends beside `n_probs`."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: nothing for name, nothing in UNSUPPORTED_FIELDS.items() if name not in ("logprobs", "top_logprobs")}

    prompt: Any = None
    n: int | None = None
    n_cmpl: int | None = None
    n_probs: int | None = None
    samplers: str | list[str] | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | float | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


    def answers(self, prompts: int) -> int:
        """The number of answers per prompt, by either name. Raises Problem."""
        return choice_count(self.n, prompts) if self.n_cmpl is None else choice_count(self.n_cmpl, prompts, "n_cmpl")


class File(Body):
    text: str
    filename: str | None = None


class InfillRequest(LlamaCompletionRequest):
    prompt: str | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[File] | None = None

    @property
    def gap(self) -> InfillContext:
        return InfillContext(self.input_prefix or "", self.input_suffix or "", self.prompt or "",
                   tuple((each.filename or "tmp", each.text) for each in self.input_extra or ()))


def llama_options(payload: LlamaCompletionRequest, defaults: Defaults, tokenizer: Tokenizer) -> GenerationOptions:
    """Raises Problem that names the field."""
    options = options_of(payload, defaults, tokenizer)
    # The tokens of a chunk are known by their log-probabilities.
    logprobs = 0 if payload.return_tokens and payload.stream and options.logprobs is None else options.logprobs
    max_seconds = min(payload.t_max_predict_ms, LONGEST_MS) / 1000 if payload.t_max_predict_ms and payload.t_max_predict_ms > 0 else None
    infill = payload.samplers is not None and not frozenset(payload.samplers).isdisjoint(INFILL)
    return replace(options, settings=_chosen(payload, options.settings), logprobs=logprobs, max_seconds=max_seconds,
                   indent=max(0, payload.n_indent or 0), infill_sampling=infill)


def _chosen(payload: LlamaCompletionRequest, settings: SamplerSettings) -> SamplerSettings:
    """The settings with only the samplers that the request names; their order is ours. Raises Problem for an unknown name."""
    if payload.samplers is None:
        return settings
    if (unknown := next((each for each in payload.samplers if each not in KNOWN_SAMPLERS), None)) is not None:
        letters = ", or their letters in one text: " + "".join(names[0] for names in (*WITHOUT, INFILL))
        raise Problem(400, f"samplers: {unknown!r:.40} is not a sampler", param="samplers",
                      hint=f"the names are {', '.join(SAMPLER_NAMES)}{letters if isinstance(payload.samplers, str) else ''}")
    named = frozenset(payload.samplers)  # letters of a text
    for names, without in WITHOUT.items():
        if named.isdisjoint(names) and not ("temperature" in without and settings.temperature == 0):  # what is greedy stays so
            settings = replace(settings, **without)
    return settings


def completion_prompts(payload: LlamaCompletionRequest, tokenizer: Tokenizer) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids; a mix of both becomes ids. A list that contains a number is one prompt, any other
    a list of prompts. Raises Problem."""
    return prompts_in(payload.prompt, tokenizer)


def prompts_in(prompt: object, tokenizer: Tokenizer, param: str = "prompt") -> list[str | list[int]]:
    """`completion_prompts` for the field `param`. Raises Problem."""
    if prompt is None:
        raise Problem(400, f"{param} is missing", param=param)
    is_one = not isinstance(prompt, list) or not prompt or any(type(each) is int for each in prompt)
    return [_one_prompt(each, tokenizer, param) for each in ([prompt] if is_one else prompt)]


def _one_prompt(prompt: object, tokenizer: Tokenizer, param: str) -> str | list[int]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise Problem(400, f"{param}.multimodal_data is not supported: only text is supported here", param=param,
                          hint="send prompt_string alone")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return prompt
    texts = [isinstance(each, str) for each in prompt] if isinstance(prompt, list) else [True, True]
    if len(texts) > 1 and all(texts) or not all(is_text or type(each) is int for each, is_text in zip(prompt, texts, strict=True)):
        raise Problem(400, A_PROMPT.format(param), param=param)
    made: list[int] = []
    for number, part in enumerate(prompt):
        made += [part] if isinstance(part, int) else tokenizer.encode(part, number == 0)
    return made


def max_tokens_of(options: GenerationOptions) -> int:
    """The limit in llama.cpp's notation, -1 for none."""
    return NO_LIMIT if options.max_tokens is None else options.max_tokens
