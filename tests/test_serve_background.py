"""Background responses, and compaction of conversations: what OpenAI's clients request besides an answer."""

import json

import pytest
from server_process import MESSAGES, QUESTION, Reply, ServerProcess, serving, wait_until

from effllm.cli.server.encrypted_content import decode_summary

BEHIND = {"background": True}
GOING = ("queued", "in_progress")
LONG = 1800  # tokens of an answer that does not end while a test looks at it


def told(server: ServerProcess, name: str, more: str = "") -> Reply:
    return server.request("GET", f"/v1/responses/{name}{more}")


def ended(server: ServerProcess, name: str) -> dict:
    wait_until(lambda: told(server, name).json["status"] not in GOING)
    return told(server, name).json


def said(response: dict) -> list:
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_one_is_asked_for_later(server: ServerProcess) -> None:
    whole = server.respond().json
    begun = server.respond(**BEHIND)
    assert begun.status == 200 and begun.json["status"] == "queued" and begun.json["background"] is True and begun.json["output"] == []
    last = ended(server, begun.json["id"])
    assert said(last) == said(whole) and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert (last["status"], last["id"], last["background"]) == (whole["status"], begun.json["id"], True)
    again = server.respond("And then?", previous_response_id=last["id"]).json
    assert again["usage"]["input_tokens"] > last["usage"]["input_tokens"], "it is kept as any"
    lines = server.err
    assert f"{last['id']} continues in the background" in lines and f"{last['id']} has ended: 17 tokens in, 24 tokens out" in lines


def test_its_events_are_followed_from_any_on(server: ServerProcess) -> None:
    first = server.respond(**BEHIND, stream=True).named_events
    kinds = [event["type"].removeprefix("response.") for event in first]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"] and kinds[-1] == "incomplete"
    assert [event["sequence_number"] for event in first] == [*range(len(first))]
    name = first[0]["response"]["id"]
    assert told(server, name, "?stream=true").named_events == first
    assert told(server, name, "?stream=true&starting_after=4").named_events == first[5:]
    assert told(server, name, "?stream=true&starting_after=9999").named_events == []
    wrong = told(server, name, "?stream=true&starting_after=-1")
    assert wrong.status == 400 and wrong.error["param"] == "starting_after"
    unfollowed = told(server, server.respond(**BEHIND).json["id"], "?stream=true")
    assert unfollowed.status == 400 and unfollowed.error["param"] == "stream"
    assert "retrieve it without stream" in unfollowed.error["message"]


def test_a_client_that_leaves_ends_nothing_and_comes_back(server: ServerProcess) -> None:
    stream = server.open("POST", "/v1/responses", {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, **BEHIND, "stream": True})
    stream.readline()
    name = json.loads(stream.readline().removeprefix(b"data: "))["response"]["id"]
    stream.connection.close()
    followed = told(server, name, "?stream=true").named_events
    assert followed[-1]["type"] == "response.incomplete" and followed[-1]["response"]["usage"]["output_tokens"] == 60
    assert ended(server, name) == followed[-1]["response"]


def test_one_is_cancelled_while_it_continues_and_while_it_waits(server: ServerProcess) -> None:
    going, waiting = (server.respond(max_output_tokens=LONG, **BEHIND).json["id"] for _ in range(2))
    wait_until(lambda: told(server, going).json["status"] == "in_progress")
    assert told(server, waiting).json["status"] == "queued"
    early = server.respond("So?", previous_response_id=going)
    assert early.status == 400 and early.error["code"] == "response_in_progress"
    for name in (waiting, going, going):
        response = server.request("POST", f"/v1/responses/{name}/cancel")
        assert response.status == 200 and response.json["status"] == "cancelled" and told(server, name).json == response.json
    assert server.respond().status == 200, "the line goes on"
    gone = server.respond(max_output_tokens=LONG, **BEHIND).json["id"]
    assert server.request("DELETE", f"/v1/responses/{gone}").json["deleted"] and told(server, gone).status == 404


def test_what_goes_wrong_is_told_by_the_response(server: ServerProcess) -> None:
    failed = ended(server, server.respond("fox " * 3000, **BEHIND).json["id"])
    assert failed["status"] == "failed" and failed["error"]["code"] == "context_length_exceeded" and "3007" in failed["error"]["message"]
    for fields, param in (({"store": False}, "store"), ({"model": "gpt-5"}, "model"), ({"temperature": -1}, "temperature")):
        refused = server.respond(**BEHIND, **fields)
        assert refused.status in (400, 404) and refused.error["param"] == param


def test_a_conversation_gets_what_was_answered_in_the_background(server: ServerProcess) -> None:
    name = server.request("POST", "/v1/conversations", {}).json["id"]
    response = ended(server, server.respond(conversation=name, **BEHIND).json["id"])
    items = server.request("GET", f"/v1/conversations/{name}/items?order=asc").json["data"]
    assert [item["content"][0]["text"] for item in items] == [QUESTION, *said(response)]


@pytest.mark.slow
def test_a_model_stays_until_its_answer_has_ended() -> None:
    with serving("--keep-alive", "0", "models/fable", "models/fable-relu", model=None) as server:
        begun = server.respond(model="fable", max_output_tokens=120, stream=True, **BEHIND).named_events
        name = begun[0]["response"]["id"]
        assert begun[-1]["type"] == "response.incomplete"
        server.wait_for_output("fable is unloaded")
        lines = server.err.splitlines()
        order = [next(at for at, line in enumerate(lines) if words in line) for words in (f"{name} has ended", "fable is unloaded")]
        assert order == sorted(order)
        followed = server.respond(model="fable", max_output_tokens=200, stream=True, keep_alive="1m", **BEHIND).named_events
        assert told(server, followed[0]["response"]["id"], "?stream=true&starting_after=9").named_events == followed[10:]
        later = server.respond(model="fable", max_output_tokens=300, keep_alive=0, **BEHIND).json["id"]
        assert server.request("GET", f"/v1/responses/{later}").json["status"] in GOING
        server.wait_for_output(f"{later} has ended: 17 tokens in, 300 tokens out")


def test_a_conversation_becomes_short_and_continues(server: ServerProcess) -> None:
    talk = [{"role": "developer", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "There was a fox. " * 40},
            {"role": "user", "content": "And the king?"}]
    made = server.request("POST", "/v1/responses/compact", {"input": talk, "max_output_tokens": 40, "temperature": 0})
    short = made.json
    assert made.status == 200 and short["object"] == "response.compaction" and short["usage"]["output_tokens"] == 40
    *messages, item = short["output"]
    assert [each["role"] for each in messages] == ["developer", "user", "user"] and all(each["id"] for each in messages)
    assert {*item} == {"id", "type", "encrypted_content"} and item["type"] == "compaction"
    asked = [*short["output"], {"role": "user", "content": "Go on."}]
    next_one = server.respond(asked).json
    assert next_one["status"] == "incomplete" and next_one["usage"]["input_tokens"] < short["usage"]["input_tokens"]
    again = server.request("POST", "/v1/responses/compact", {"previous_response_id": next_one["id"], "max_output_tokens": 8}).json
    assert [each["type"] for each in again["output"]] == ["message"] * 4 + ["compaction"]
    alone = server.request("POST", "/v1/responses/compact", {"input": QUESTION, "max_output_tokens": 8, "stream": True}).json
    assert alone["output"][0]["content"] == [{"type": "input_text", "text": QUESTION}]


TALK = [{"role": "developer", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "There was a fox. " * 40},
        {"role": "user", "content": "And the king?"}]
SHORT = {"context_management": [{"type": "compaction", "compact_threshold": 150}]}


def test_a_long_conversation_becomes_short_by_itself(server: ServerProcess) -> None:
    plain, made = server.respond(TALK).json, server.respond(TALK, **SHORT).json
    assert [item["type"] for item in plain["output"]] == ["message"]
    assert [item["type"] for item in made["output"]] == ["compaction", "message"]
    notes = decode_summary(made["output"][0]["encrypted_content"], "here")
    expected = server.respond([TALK[0], {"role": "user", "content": [{"type": "input_text", "text": text}
                                                                     for text in (notes, TALK[-1]["content"])]}])
    assert said(expected.json) == said({"output": made["output"][1:]}), "notes and the newest are what it was asked"
    assert made["usage"]["input_tokens"] == expected.json["usage"]["input_tokens"]
    go_on = {"role": "user", "content": "Go on."}
    whole, newest = server.respond([*TALK, *made["output"], go_on]).json, server.respond([TALK[0], *made["output"], go_on]).json
    named = server.respond([go_on], previous_response_id=made["id"]).json
    assert said(whole) == said(newest) == said(named) and len({each["usage"]["input_tokens"] for each in (whole, newest, named)}) == 1
    assert server.respond(QUESTION, **SHORT).json["output"][0]["type"] == "message", "it is short"
    assert server.respond("fox " * 400, **SHORT).json["output"][0]["type"] == "message", "there is nothing before"


def test_it_is_told_as_it_becomes_short(server: ServerProcess) -> None:
    plain = server.respond(TALK, **SHORT).json
    for fields in ({}, BEHIND):
        events = [event for event in server.respond(TALK, stream=True, **SHORT, **fields).named_events if event["type"] != "keepalive"]
        item = next(event for event in events if event["type"] == "response.output_item.done")["item"]
        assert item["type"] == "compaction" and item == events[-1]["response"]["output"][0]
        assert said({"output": events[-1]["response"]["output"][1:]}) == said({"output": plain["output"][1:]})
    talk = [*TALK[:3], {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "There is a king."}]
    looked = server.respond(talk, **SHORT)
    assert looked.status == 200 and [item["type"] for item in looked.json["output"]] == ["compaction", "message"]


@pytest.mark.parametrize(("given", "param"), [
    ([{"type": "other"}], "context_management[0].type"), ([7], "context_management[0]"), ({}, "context_management"),
    ([{"type": "compaction", "compact_threshold": 0}], "context_management[0].compact_threshold"),
    ([{"type": "compaction", "compact_threshold": "many"}], "context_management[0].compact_threshold")])
def test_what_says_no_bound_of_a_conversation(server: ServerProcess, given: object, param: str) -> None:
    refused = server.respond(context_management=given)
    assert refused.status == 400 and refused.error["param"] == param


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({}, "input", "missing"), ({"input": []}, "input", "missing"), ({"previous_response_id": "resp_1"}, "previous_response_id",
                                                                    "not stored"),
    ({"input": [{"type": "compaction", "encrypted_content": "gAAAAB"}]}, "input[0]", "not made by effllm"),
    ({"input": [{"type": "compaction", "encrypted_content": 1}]}, "input[0]", "send what was said before")])
def test_what_cannot_be_made_short(server: ServerProcess, fields: dict, param: str, words: str) -> None:
    refused = server.request("POST", "/v1/responses/compact", fields)
    assert refused.status == 400 and refused.error["param"] == param and words in refused.error["message"]
