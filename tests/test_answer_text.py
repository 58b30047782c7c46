"""The text of an answer from its tokens: where stop strings end it, and how many of its tool calls are reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.runtime.events import Call
from effllm.runtime.generation.answer_text import AnswerText
from effllm.runtime.sampling.logprobs import TokenLogprobs
from effllm.runtime.tokens.reasoning import ChannelFilter, ThinkFilter
from effllm.runtime.tool_calls.filter import CallFilter
from effllm.runtime.tool_calls.formats import FORMATS
from effllm.runtime.tool_calls.reader import CallReader

BY_NAME = {each.name: each for each in FORMATS}
WRAPPED = [("<answer>", "</answer>")]
TIMES = {"time": {"type": "object", "properties": {}}}
HERMES = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LIST = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'


class Spoken:
    """A stream whose tokens are the texts themselves."""

    retracted = ""

    def push(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return ""


def written(pieces: Sequence[str], think=None, stops: Sequence[str] = (), calls: CallFilter | None = None, tells: int | None = None):
    """An answer of these token strings, which ends where its stop strings or its calls say; with each event that came."""
    answer = SimpleNamespace(think=calls or think, stops=tuple(stops), answer_prefix="", indent=0, sampler=SimpleNamespace(logprobs=tells),
                             content_parts=[""], reasoning_parts=[], calls=[], visible_tokens=None if calls is None else {})
    text, events = AnswerText(answer, Spoken()), []
    for number, piece in enumerate(pieces):
        events += text.push(SimpleNamespace(token=piece, finish=None, logprobs=TokenLogprobs(number, 0.0)))
        if text.is_over:
            break
    events += text.flush()
    return SimpleNamespace(answer="".join(answer.content_parts), thought="".join(answer.reasoning_parts), calls=answer.calls, events=events,
                           text=text,
                           stopped_by=text.stop_filter.matched)


def calling(format: str, most: int | None = 1, think=None) -> CallFilter:
    return CallFilter(think, CallReader(BY_NAME[format], TIMES), most)


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


CHANNELS = ("<|channel|>analysis<|message|>Q: is it END?<|end|><|start|>assistant<|channel|>final<|message|>It is.END Not"
            "<|return|>")
CASES = [("<think>Q: is it END?</think>\n\nIt is.END Not", ThinkFilter),
         ("Q: is it END?</think>It is.END Not", lambda: ThinkFilter(starts_inside=True)),
         ("<think>Q: is it END?</think><answer>It is.END Not</answer>", lambda: ThinkFilter(answer_tags=WRAPPED)),
         (CHANNELS, lambda: ChannelFilter("<|start|>assistant"))]


@pytest.mark.parametrize(("raw", "make"), CASES)
@given(places=st.lists(st.integers(0, 200), max_size=12))
def test_a_stop_string_ends_the_answer_and_not_its_reasoning(raw, make, places):
    """However the text is cut into tokens."""
    made = written(cut(raw, places), make(), ["END"])
    assert (made.thought, made.answer, made.stopped_by) == ("Q: is it END?", "It is.", "END")
    made = written(cut(raw, places), make(), ["is it", "</think>", "<|end|>"])
    assert made.thought == "Q: is it END?" and made.answer.startswith("It is.END Not") and made.stopped_by is None


def test_a_stop_string_counts_in_the_text_of_a_model_that_could_have_reasoned():
    """Also where it may become a tag that opens reasoning, until that is decided."""
    for pieces, stop, answer in ((["It", " is", ". E", "ND", "x"], " END", "It is."), (["\n", "It is"], "\n", ""), (["\n"], "\n", ""),
                                 (["a<th", "ink>b"], "<think>", "a"), (["<", "th"], "<", "")):
        made = written(pieces, ThinkFilter(), [stop])
        assert (made.answer, made.thought, made.stopped_by) == (answer, "", stop) and made.text.is_over
    assert written(["Q: E", "ND"], None, ["END"]).answer == "Q: "  # where reasoning is a part of the text
    made = written(["<think>a", "</think>", "b E", "N"], ThinkFilter(), ["END"])
    assert (made.answer, made.stopped_by, made.text.is_over) == ("b EN", None, False)


@given(places=st.lists(st.integers(0, 200), max_size=12))
def test_stop_strings_among_calls(places):
    raw = f"<think>I call END</think>\n\nI look.\n{HERMES}\nEND and more"
    made = written(cut(raw, places), None, ["END"], calling("Hermes", None, ThinkFilter()))
    assert (made.thought, made.answer, [call.name for call in made.calls]) == ("I call END", "I look.", ["time"])
    assert made.stopped_by == "END"
    made = written(cut(raw, places), None, ["argum"], calling("Hermes", None, ThinkFilter()))  # in a call that it cuts
    assert not made.calls and made.answer == 'I look.\n<tool_call>\n{"name": "time", "'


@pytest.mark.parametrize("raw", [f"{HERMES}\n{HERMES}\nDone.", f"I look.\n{HERMES}{HERMES}", f"{HERMES}Done.{HERMES}"])
@given(places=st.lists(st.integers(0, 200), max_size=12))
def test_one_call_where_there_is_to_be_one(raw, places):
    for pieces in (cut(raw, places), [raw]):  # the second case: all of it ends with one token
        made = written(pieces, calls=calling("Hermes"))
        assert [(call.name, json.loads(call.arguments)) for call in made.calls] == [("time", {})] and made.text.is_over
        assert made.answer == ("I look." if raw.startswith("I") else "")
        assert sum(isinstance(event, Call) for event in made.events) == 1 and isinstance(made.events[-1], Call)
    assert len(written([raw], calls=calling("Hermes", None)).calls) == 2


@given(places=st.lists(st.integers(0, 200), max_size=12))
def test_one_call_of_a_list_that_has_two(places):
    for most in (1, None):
        made = written(cut(LIST, places), calls=calling("Mistral", most))
        assert len(made.calls) == (most or 2) and made.answer == "" and made.text.is_over == (most == 1)


def test_one_call_that_comes_to_light_at_the_end():
    """Of a format in which a call may go on as long as the text does."""
    made = written(['to=functions.time<|message|>{}', "<|call|>"], calls=calling("harmony"))
    assert len(made.calls) == 1 and made.text.is_over


def test_tokens_leave_with_the_text_that_they_are_of():
    """Logprobs are sent with the chunk that holds the token's first character; a stop string's are not sent."""
    pieces = ["<think>", "E", "ND", "</think>", "\n\n", "so. E", "x", " E", "ND", "!"]
    made = written(pieces, ThinkFilter(), [" END"], tells=0)
    assert [(each.kind, each.text, [token.token for token in each.tokens]) for each in made.events] == [
        ("thinking", "E", [0, 1]), ("thinking", "ND", [2]), ("answer", "so.", [4, 5]), ("answer", " Ex", [6])]
    made = written(["<think>", "a", "</think>", "b E", "N"], ThinkFilter(), ["END"], tells=0)
    assert [(each.text, [token.token for token in each.tokens]) for each in made.events] == [("a", [0, 1]), ("b ", [3]), ("EN", [4])]
    made = written(["\n", "\n"], ThinkFilter(), ["\n\n"], tells=0)  # which comes to light at the end
    assert made.stopped_by == "\n\n" and not made.events
