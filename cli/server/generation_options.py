"""Generation options of a request: what it leaves out comes from the command line, and nothing carries over to the next request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ... import UsageError
from ...runtime.generation.served_model import GenerationOptions
from ...runtime.sampler import BANNED_BIAS, MIN_TEMPERATURE, SamplerSettings
from ...runtime.tokenizer import WITHOUT_REASONING, Tokenizer
from ...runtime.tokens.stream_filters import StopStrings
from .openai_requests import ChatRequest, CompletionRequest, GenerationRequest
from .problems import Problem
from .reasoning import reasoning_settings
from .structured_output import requested_constraint

# Field of a request -> field of SamplerSettings, including the names that other servers use.
SAMPLING = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", **{
    each.name: each.name for each in fields(SamplerSettings) if each.name not in ("penalty_last_n", "logit_bias")}}
NO_LIMIT = RANDOM = -1
LEAST_TOP_P = 1e-9
ALONE = "top_logprobs goes with logprobs true"
MAX_TOP_LOGPROBS = 20  # the limit on top_logprobs
SEEDS = 1 << 64
LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OF_HARMONY = {"minimal": "low", "xhigh": "high", "max": "high"}
BUDGET = "thinking_budget"  # a template variable
NO_REASONING = f"a client requests reasoning, or limits it: {WITHOUT_REASONING}, and answers without"
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "self")  # template variables that a request may not set


@dataclass(frozen=True)
class Defaults:
    """The options of answers whose request does not state them, from the command line's flags. `system`: the system prompt of requests
    without one."""

    options: GenerationOptions
    system: str | None = None


def options_of(payload: GenerationRequest, defaults: Defaults, tokenizer: Tokenizer) -> GenerationOptions:
    """Raises Problem that names the field."""
    options = defaults.options
    return replace(options, settings=_biased(payload, _settings(payload, options.settings), tokenizer),
                   max_tokens=_length(payload, options.max_tokens),
                   constraint=requested_constraint(payload, options.constraint),
                   stops=options.stops if payload.stop is None else _stops(payload.stop),
                   ignore_eos=options.ignore_eos if payload.ignore_eos is None else payload.ignore_eos, logprobs=_tells(payload),
                   echo=isinstance(payload, CompletionRequest) and bool(payload.echo), skip_cache=payload.cache_prompt is False)


def _tells(payload: GenerationRequest) -> int | None:
    """How many top tokens to report per token; None for no log-probabilities. Raises Problem."""
    field, tokens, is_requested = "n_probs", getattr(payload, "n_probs", None), False
    if isinstance(payload, CompletionRequest) and payload.logprobs is not None and payload.logprobs is not False:
        field, tokens, is_requested = "logprobs", payload.logprobs, True
        if tokens is True:
            raise Problem(400, "logprobs has to be a number here, not a boolean: how many of the most likely tokens to report",
                          param="logprobs")
    elif isinstance(payload, ChatRequest) and (payload.logprobs or payload.top_logprobs):
        field, tokens, is_requested = "top_logprobs", payload.top_logprobs or 0, True
        if not payload.logprobs:
            raise Problem(400, ALONE, param=field)
    if not is_requested and not tokens:
        return None
    if tokens not in range(MAX_TOP_LOGPROBS + 1):
        raise Problem(400, f"{field} has to be between 0 and {MAX_TOP_LOGPROBS}, not {tokens}", param=field)
    return tokens


def apply_reasoning(payload: ChatRequest, options: GenerationOptions, tokenizer: Tokenizer) -> tuple[GenerationOptions, dict[str, Any]]:
    """The options with the request's reasoning settings, and its template variables. Raises Problem."""
    variables: Mapping[str, Any] = payload.chat_template_kwargs or {}
    for name in RESERVED_VARIABLES:
        if name in variables:
            where = f"chat_template_kwargs.{name}"
            raise Problem(400, f"{where} is not a variable of the template", param=where, hint="leave it out")
    thinking, template_variables = reasoning_settings(payload, variables), {}
    effort, names = thinking.effort, frozenset() if tokenizer.template is None else tokenizer.template.variables
    if effort is not None:
        if effort not in EFFORTS:
            raise Problem(400, f"reasoning_effort has to be one of {', '.join(EFFORTS)}, not {effort!r:.40}", param="reasoning_effort")
        if effort != "none" and "reasoning_effort" in names:
            template_variables["reasoning_effort"] = OF_HARMONY.get(effort, effort)
    if thinking.budget is not None:
        options = replace(options, max_reasoning_tokens=None if thinking.budget == NO_LIMIT else thinking.budget)
        if thinking.budget > 0 and BUDGET in names:  # a template that states the budget to its model, such as Seed's
            template_variables[BUDGET] = thinking.budget
    if thinking.switch is not None and tokenizer.thinks:
        options = replace(options, think="on" if thinking.switch else "off")
    return options, {**template_variables, **variables}


def reasoning_notice(payload: ChatRequest, tokenizer: Tokenizer) -> str | None:
    """A notice for a request that asks for reasoning, or limits it, where the model has none; else None."""
    thinking = reasoning_settings(payload, payload.chat_template_kwargs or {})
    template = tokenizer.template
    passes_effort = thinking.effort is not None and template is not None and "reasoning_effort" in template.variables
    wants_reasoning = thinking.switch or thinking.budget is not None and thinking.budget > 0
    return NO_REASONING if wants_reasoning and not passes_effort and not tokenizer.thinks else None


def _settings(payload: GenerationRequest, settings: SamplerSettings) -> SamplerSettings:
    for field, name in SAMPLING.items():
        value = getattr(payload, field)
        if value is None:
            continue
        if field == "seed":
            value = _seed(value)
        elif field == "top_k" and value == -1:  # off, in other servers
            value = 0
        elif field == "top_p" and value == 0:  # within OpenAI's range: the likeliest token alone
            value = LEAST_TOP_P
        elif field == "temperature" and 0 < value < MIN_TEMPERATURE:  # from clients that cannot send 0
            value = 0.0
        try:
            settings = replace(settings, **{name: value})
        except UsageError as error:
            raise Problem(400, error.message.replace(name, field, 1), param=field) from error
    return settings


def _seed(value: int) -> int | None:
    """The seed of the random numbers, None for a random one. OpenAI's seeds are signed, llama.cpp's not. Raises Problem."""
    if not -SEEDS // 2 <= value < SEEDS:
        raise Problem(400, f"seed has to be between -2**63 and 2**64 - 1, not {value!r:.30}", param="seed", hint="-1 takes a random one")
    return None if value == RANDOM else value % SEEDS


def _biased(payload: GenerationRequest, settings: SamplerSettings, tokenizer: Tokenizer) -> SamplerSettings:
    """The settings with `logit_bias`: an object or a list of pairs. A token is an id, also as a string, or a text, meaning all its tokens;
    a bias is a number, or false to ban. Raises Problem."""
    requested = payload.logit_bias if payload.logit_bias is not None else ()
    if not isinstance(requested, dict | list | tuple):
        raise Problem(400, "logit_bias has to be an object or a list of pairs, each of a token and a number", param="logit_bias")
    biases: dict[int, float] = {}
    for pair in requested.items() if isinstance(requested, dict) else requested:
        token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        number = int(token) if isinstance(token, str) and isinstance(requested, dict) and token.isdecimal() and len(token) < 10 else token
        bias = BANNED_BIAS if bias is False else bias
        if isinstance(number, str):
            biases |= dict.fromkeys(tokenizer.encode(number, add_special_tokens=False), bias)
        elif type(number) is not int or number not in range(tokenizer.vocab_size):
            raise Problem(400, f"logit_bias: {token!r:.40} is not a token of this model", param="logit_bias",
                          hint="/tokenize gives the ids of a text")
        else:
            biases[number] = bias
    try:
        return replace(settings, logit_bias=tuple(biases.items())) if biases else settings
    except UsageError as error:
        raise Problem(400, error.message, param="logit_bias", hint="false bans a token") from error


def _length(payload: GenerationRequest, default: int | None) -> int | None:
    field = next((field for field in LENGTHS if getattr(payload, field) is not None), None)
    if field is None:
        return default
    tokens = getattr(payload, field)
    if tokens < NO_LIMIT:
        raise Problem(400, f"{field} has to be 0 or more, or -1 for no limit, not {tokens}", param=field)
    return None if tokens == NO_LIMIT else tokens


def _stops(stops: list[str]) -> tuple[str, ...]:
    if "" in stops:
        raise Problem(400, "stop: an empty string cannot end an answer", param="stop")
    return StopStrings(stops).stops
