"""`/set` in a chat: generation settings, under the names of their flags."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import UsageError
from .flags import names_and_types
from .options import NO_SEQUENCE_BREAKERS, RunFlags, SamplingFlags, WeightFlags, require_answer_tokens, token_limit

if TYPE_CHECKING:
    from .conversation import Conversation

SETTINGS = names_and_types(SamplingFlags)  # flag name -> (field of SamplerSettings, type)

BREAKERS = "dry-sequence-breaker"
TOKEN_LIMITS = {"predict": "max_tokens", "reasoning-budget": "max_reasoning_tokens"}  # flag name -> attribute of Session
STOP, STOP_STRING = "stop", re.compile(r'"(?:[^"\\]|\\.)*"?|\S+')  # a JSON string, or a word
CONSTRAINTS = ("schema", "grammar")  # at most one is active
# Names of settings in Ollama and llama.cpp -> ours.
OLLAMA_NAMES = {"temperature": "temp", "format": "schema", "num_predict": "predict", "n": "predict", "n_predict": "predict",
           "typical_p": "typical", "top_n_sigma": "top-nsigma", "mirostat_tau": "mirostat-ent", "mirostat_eta": "mirostat-lr",
           "dry_sequence_breakers": BREAKERS}
# What Ollama's /set changes and ours does not -> hint.
NOT_SETTABLE = {"system": "/system TEXT sets the system prompt",
             **dict.fromkeys(("noverbose", "quiet"), "statistics are off; effllm chat MODEL --stats shows them after each answer"),
             "nohistory": "input history is always saved, in the file history of effllm's state folder",
             "noformat": "/set schema off, or /set grammar off",
             **dict.fromkeys(("wordwrap", "nowordwrap"), "on a terminal, lines break between words; /export FILE has the text unbroken"),
             **dict.fromkeys(("num-ctx", "ctx", "c"), "set the context at the start: effllm chat MODEL -c 4096"),
             "verbose": "/stats shows speed and memory of the last answer; effllm chat MODEL --stats, of each",
             "history": "input history is always saved",
             "nothink": "/set think off", "lora": "/lora NAME SCALE sets the scale of an adapter"}


def run_set(chat: Conversation, rest: str) -> None:
    """`/set` lists the settings, `/set NAME` shows one, `/set NAME VALUE` changes it. Raises UsageError."""
    name, _, value = rest.strip().removeprefix("parameter ").partition(" ")
    name = OLLAMA_NAMES.get(name, name.replace("_", "-"))
    if not name:
        for setting in setting_names():
            chat.screen.note(f"  {setting:<20} {current_value(chat, setting)}")
        return
    if name in NOT_SETTABLE:
        raise UsageError(f"/set does not change {name}", NOT_SETTABLE[name])
    if name not in setting_names() and name in {**names_and_types(RunFlags), **names_and_types(WeightFlags)}:
        raise UsageError(f"/set does not change {name}", f"--{name} is set at the start: effllm chat --help")
    if name not in setting_names():
        raise UsageError(f"there is no setting {name!r}{suggestion(name, setting_names())}", "/set lists them")
    if value:
        assign(chat, name, value.strip())
    chat.screen.note(f"{name} is {current_value(chat, name)}")


def setting_names() -> list[str]:
    """The names that `/set` accepts."""
    return [*SETTINGS, *TOKEN_LIMITS, STOP, "think", "markdown", *CONSTRAINTS]


def current_value(chat: Conversation, name: str) -> object:
    session = chat.session
    if name in TOKEN_LIMITS:
        tokens = getattr(session, TOKEN_LIMITS[name])
        return "unlimited" if tokens is None else tokens
    if name == STOP:
        return " ".join(json.dumps(text, ensure_ascii=False) for text in session.stops) or "off"
    if name == "think":
        return session.think
    if name in CONSTRAINTS:
        if session.constraint is None or session.constraint.flag != f"--{name}":
            return "off"
        return "set" if session.constraint.name == f"the {name}" else session.constraint.name  # its file, if it was read from one
    if name == "markdown":
        return "on" if chat.screen.markdown else "off"
    value = getattr(session.settings, SETTINGS[name][0])
    if name == BREAKERS:
        return " ".join(json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"') for text in value) or NO_SEQUENCE_BREAKERS
    return "random" if value is None else value


def assign(chat: Conversation, name: str, value: str) -> None:
    session = chat.session
    if name == "think":
        if value not in ("auto", "on", "off"):
            raise UsageError(f"think is auto, on or off, not {value!r}", "/set think off")
        session.think = value
    elif name == STOP:
        session.stops = () if value == "off" else parse_stops(value)
    elif name in CONSTRAINTS:
        from ..runtime.constraints.constraint import read_constraint_flags

        session.set_constraint(None if value == "off" else read_constraint_flags(**{**dict.fromkeys(CONSTRAINTS), name: value}))
    elif name == "markdown":
        if value not in ("on", "off"):
            raise UsageError(f"markdown is on or off, not {value!r}", "/set markdown on")
        chat.screen.markdown = value == "on"
        if value == "on" and not chat.screen.markdown:
            raise UsageError("the output does not show styles", "a terminal other than TERM=dumb, without NO_COLOR")
    elif name in TOKEN_LIMITS:
        tokens = token_limit(parse_number(chat, name, value, int), "-n" if name == "predict" else f"--{name}")
        if name == "predict":
            require_answer_tokens(tokens, "/set predict -1 is no limit")
        setattr(session, TOKEN_LIMITS[name], tokens)
    elif name == BREAKERS:
        session.settings = replace(session.settings, **SamplingFlags(dry_sequence_breakers=value.split()).overrides())
    else:
        field, kind = SETTINGS[name]
        is_random = name == "seed" and value in ("random", "-1")
        number = None if is_random else parse_number(chat, name, value, kind)
        try:
            session.settings = replace(session.settings, **{field: number})
        except UsageError as error:  # it begins with the name of the field
            raise UsageError(f"{name} {error.message.partition(' ')[2]}", f"/set {name} {example(chat, name)}") from None


def example(chat: Conversation, name: str) -> object:
    """A valid value of a setting that is a number: the present one."""
    value = current_value(chat, name)
    return value if isinstance(value, int | float) else {"predict": 200, "seed": 1}.get(name, 1000)


def parse_number(chat: Conversation, name: str, value: str, number_type: type) -> object:
    try:
        return number_type(value)
    except ValueError as error:
        expected = "whole number" if number_type is int else "number"
        raise UsageError(f"{name} takes a {expected}, not {value!r}", f"/set {name} {example(chat, name)}") from error


def parse_stops(value: str) -> tuple[str, ...]:
    """Parse stop strings: words or JSON strings, such as `END "###" "\\n\\n"`. Raises UsageError."""
    from ..runtime.tokens.stream_filters import StopStrings

    hint = '/set stop END, or /set stop "\\n\\n"'
    try:
        return StopStrings([json.loads(each) if each.startswith('"') else each for each in STOP_STRING.findall(value)]).stops
    except ValueError as error:
        raise UsageError(f"{value} is not a quoted string", hint) from error
    except UsageError as error:
        raise UsageError(error.message, hint) from None


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error message that suggests a similar name; empty if there is none."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
