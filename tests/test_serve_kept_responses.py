"""Responses that a server keeps: a request names one, or its items, and means what it would else have sent again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from effllm.cli.server.kept_responses import KeptResponses, nbytes_of
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_fields import ResponsesAsked

sys.path.insert(0, str(Path(__file__).resolve().parent))
from served import ASKED, QUESTION, Served, serving
from test_serve_responses import TOOL

NEXT = "And then?"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as server:
        yield server


def said(whole: dict) -> list:
    return [part["text"] for item in whole["output"] for part in item.get("content") or ()]


def test_a_response_is_gone_on_with_by_its_name(server: Served) -> None:
    first = server.respond(instructions="Be brief.").json
    second = server.respond(NEXT, previous_response_id=first["id"]).json
    sent = server.respond([*ASKED, *first["output"], {"role": "user", "content": NEXT}], store=False).json
    assert said(second) == said(sent)
    assert second["usage"]["input_tokens"] == sent["usage"]["input_tokens"], "instructions are each request's own"
    assert second["previous_response_id"] == first["id"] and second["store"] is True and sent["store"] is False
    asked = {"role": "user", "content": "Why?"}
    last = server.respond([asked], previous_response_id=second["id"], stream=True).named_events[-1]["response"]
    history = [*ASKED, *first["output"], {"role": "user", "content": NEXT}, *second["output"], asked]
    assert said(last) == said(server.respond(history).json)
    counted = server.ask("POST", "/v1/responses/input_tokens", {"input": "Why?", "previous_response_id": second["id"]}).json
    assert counted["input_tokens"] == last["usage"]["input_tokens"]
    lost = server.respond(NEXT, previous_response_id=sent["id"])
    assert lost.status == 400 and lost.error["code"] == "previous_response_not_found"


def test_items_are_meant_by_their_names(server: Served) -> None:
    """AI SDK's tools in their rounds."""
    given = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 160}
    first = server.respond(**given).json
    call, = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    sent = server.respond([*ASKED, call, result], tools=[TOOL]).json
    for named in ({"type": "item_reference", "id": call["id"]}, {"id": call["id"]}):
        assert said(server.respond([*ASKED, named, result], tools=[TOOL]).json) == said(sent)
    lost = server.respond([*ASKED, {"type": "item_reference", "id": "fc_1"}])
    assert lost.status == 400 and (lost.error["code"], lost.error["param"]) == ("item_not_found", "input[1]")


def test_the_newest_are_kept_as_far_as_there_is_room() -> None:
    own = [{"role": "user", "content": "x" * 900}]
    kept = KeptResponses(3 * nbytes_of([*own, {"id": "0", "text": "y" * 90}]))
    for number in range(5):
        asked = ResponsesAsked(input=own[0]["content"], previous_response_id=f"r{number - 1}" if number == 4 else None)
        kept.keep(f"r{number}", asked, kept.own(asked), [{"id": str(number), "text": "y" * 90}])
    kept.keep("never", ResponsesAsked(input="x", store=False), own, [{"id": "never"}])
    kept.keep("large", ResponsesAsked(input="x"), [{"role": "user", "content": "x" * 9000}], [{"id": "large"}])
    for name in ("r2", "r3", "r4"):
        asked = ResponsesAsked(input="so", previous_response_id=name)
        assert kept.whole(asked, kept.own(asked)).input[-1] == {"role": "user", "content": "so"}
        assert kept.own(ResponsesAsked(input=[{"id": name[1:]}])) == [{"id": name[1:], "text": "y" * 90}]
    assert len(kept.whole(asked, kept.own(asked)).input) == 5
    for name in ("r0", "r1", "never", "large"):
        with pytest.raises(Problem, match="send the whole conversation"):
            kept.whole(ResponsesAsked(input="so", previous_response_id=name), own)
        with pytest.raises(Problem, match="send the whole conversation"):
            kept.own(ResponsesAsked(input=[{"id": name.removeprefix("r")}]))


def test_what_is_kept_is_what_was_sent() -> None:
    """Marks take the places of pictures in what is answered, not in what is kept."""
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    kept, asked = KeptResponses(), ResponsesAsked(input=[picture])
    own = kept.own(asked)
    kept.whole(asked, own).input[0]["content"][0] = {"type": "text", "text": "mark"}
    kept.keep("r", asked, own, [])
    assert kept.whole(ResponsesAsked(input="so", previous_response_id="r"), []).input == [picture]
    assert kept.whole(ResponsesAsked(input=QUESTION), own).input == QUESTION
