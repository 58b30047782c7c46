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
from .options import NO_BREAKERS, RunFlags, SamplingFlags, WeightFlags, demand_room, token_limit

if TYPE_CHECKING:
    from .conversation import Conversation

# name in /set -> (field of SamplerSettings, type): the same names as on the command line
SETTINGS = names_and_types(SamplingFlags)

BREAKERS = "dry-sequence-breaker"
LIMITS = {"predict": "max_tokens", "reasoning-budget": "max_reasoning_tokens"}  # of tokens: their names in a session
STOP, WORDS = "stop", re.compile(r'"(?:[^"\\]|\\.)*"?|\S+')
FORMS = ("schema", "grammar")  # of which the answers are held to one
# What Ollama calls them after /set, and what it sets there that is no setting of an answer.
OLLAMAS = {"temperature": "temp", "format": "schema", "num_predict": "predict", "n": "predict", "n_predict": "predict",
           "typical_p": "typical", "top_n_sigma": "top-nsigma", "mirostat_tau": "mirostat-ent", "mirostat_eta": "mirostat-lr",
           "dry_sequence_breakers": BREAKERS}
ELSEWHERE = {"system": "/system TEXT sets the system prompt",
             **dict.fromkeys(("noverbose", "quiet"), "statistics are off; effllm chat MODEL --stats shows them after each answer"),
             "nohistory": "input history is always saved, in the file history of effllm's state folder",
             "noformat": "/set schema off, or /set grammar off",
             **dict.fromkeys(("wordwrap", "nowordwrap"), "on a terminal, lines break between words; /export FILE has the text unbroken"),
             **dict.fromkeys(("num-ctx", "ctx", "c"), "set the context at the start: effllm chat MODEL -c 4096"),
             "verbose": "/stats shows speed and memory of the last answer; effllm chat MODEL --stats, of each",
             "history": "input history is always saved",
             "nothink": "/set think off", "lora": "/lora NAME SCALE sets the scale of an adapter"}


def change(chat: Conversation, rest: str) -> None:
    """`/set`, `/set NAME`, `/set NAME VALUE`."""
    name, _, value = rest.strip().removeprefix("parameter ").partition(" ")
    name = OLLAMAS.get(name, name.replace("_", "-"))
    if not name:
        for each in settable():
            chat.screen.note(f"  {each:<20} {current(chat, each)}")
        return
    if name in ELSEWHERE:
        raise UsageError(f"/set does not change {name}", ELSEWHERE[name])
    if name not in settable() and name in {**names_and_types(RunFlags), **names_and_types(WeightFlags)}:
        raise UsageError(f"/set does not change {name}", f"--{name} is set at the start: effllm chat --help")
    if name not in settable():
        raise UsageError(f"there is no setting {name!r}{suggestion(name, settable())}", "/set lists them")
    if value:
        assign(chat, name, value.strip())
    chat.screen.note(f"{name} is {current(chat, name)}")


def settable() -> list[str]:
    """The names that `/set` accepts."""
    return [*SETTINGS, *LIMITS, STOP, "think", "markdown", *FORMS]


def current(chat: Conversation, name: str) -> object:
    session = chat.session
    if name in LIMITS:
        tokens = getattr(session, LIMITS[name])
        return "unlimited" if tokens is None else tokens
    if name == STOP:
        return " ".join(json.dumps(text, ensure_ascii=False) for text in session.stops) or "off"
    if name == "think":
        return session.think
    if name in FORMS:
        return session.constraint.name if session.constraint and session.constraint.flag == f"--{name}" else "off"
    if name == "markdown":
        return "on" if chat.screen.markdown else "off"
    value = getattr(session.settings, SETTINGS[name][0])
    if name == BREAKERS:
        return " ".join(json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"') for text in value) or NO_BREAKERS
    return "random" if value is None else value


def assign(chat: Conversation, name: str, value: str) -> None:
    session = chat.session
    if name == "think":
        if value not in ("auto", "on", "off"):
            raise UsageError(f"think is auto, on or off, not {value!r}", "/set think off")
        session.think = value
    elif name == STOP:
        session.stops = () if value == "off" else parse_stops(value)
    elif name in FORMS:
        from ..runtime.constraints.constraint import read_constraint_flags

        session.hold_to(None if value == "off" else read_constraint_flags(**{**dict.fromkeys(FORMS), name: value}))
    elif name == "markdown":
        if value not in ("on", "off"):
            raise UsageError(f"markdown is on or off, not {value!r}", "/set markdown on")
        chat.screen.markdown = value == "on"
        if value == "on" and not chat.screen.markdown:
            raise UsageError("the output does not show styles", "a terminal other than TERM=dumb, without NO_COLOR")
    elif name in LIMITS:
        tokens = token_limit(converted(name, value, int), "-n" if name == "predict" else f"--{name}")
        if name == "predict":
            demand_room(tokens, "/set predict -1 is no limit")
        setattr(session, LIMITS[name], tokens)
    elif name == BREAKERS:
        session.settings = replace(session.settings, **SamplingFlags(dry_sequence_breakers=value.split()).said())
    else:
        field, kind = SETTINGS[name]
        free = name == "seed" and value in ("random", "-1")
        session.settings = replace(session.settings, **{field: None if free else converted(name, value, kind)})


def converted(name: str, value: str, kind: type) -> object:
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(f"{name} takes a {'whole number' if kind is int else 'number'}, not {value!r}", f"/set {name} shows it") from error


def parse_stops(value: str) -> tuple[str, ...]:
    """`END "###" "\\n\\n"`: words, or JSON strings. Raises UsageError."""
    from ..runtime.tokens.stream_filters import StopStrings

    hint = '/set stop END, or /set stop "\\n\\n"'
    try:
        return StopStrings([json.loads(each) if each.startswith('"') else each for each in WORDS.findall(value)]).stops
    except ValueError as error:
        raise UsageError(f"{value} is not a quoted string", hint) from error
    except UsageError as error:
        raise UsageError(error.message, hint) from None


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A close match of an unknown name, as the end of a message; empty if there is none."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
