"""Stored responses: a request names one, or its items, with the effect of sending them again."""


import pytest
from server_process import MESSAGES, QUESTION, ServerProcess
from test_serve_responses import TOOL

from effllm.cli.server.problems import Problem
from effllm.cli.server.response_store import ResponseStore
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.store_limits import ENTRY_NBYTES, nbytes_of

NEXT = "And then?"


def response(name: str, *items: dict) -> dict:
    return {"id": name, "output": [*items]}


def said(whole: dict) -> list:
    return [part["text"] for item in whole["output"] for part in item.get("content") or ()]


def test_a_response_is_resumed_by_its_name(server: ServerProcess) -> None:
    first = server.respond(instructions="Be brief.").json
    second = server.respond(NEXT, previous_response_id=first["id"]).json
    sent = server.respond([*MESSAGES, *first["output"], {"role": "user", "content": NEXT}], store=False).json
    assert said(second) == said(sent)
    assert second["usage"]["input_tokens"] == sent["usage"]["input_tokens"], "instructions are each request's own"
    assert second["previous_response_id"] == first["id"] and second["store"] is True and sent["store"] is False
    asked = {"role": "user", "content": "Why?"}
    last = server.respond([asked], previous_response_id=second["id"], stream=True).named_events[-1]["response"]
    history = [*MESSAGES, *first["output"], {"role": "user", "content": NEXT}, *second["output"], asked]
    assert said(last) == said(server.respond(history).json)
    counted = server.request("POST", "/v1/responses/input_tokens", {"input": "Why?", "previous_response_id": second["id"]}).json
    assert counted["input_tokens"] == last["usage"]["input_tokens"]
    lost = server.respond(NEXT, previous_response_id=sent["id"])
    assert lost.status == 400 and lost.error["code"] == "previous_response_not_found"


def test_items_are_meant_by_their_names(server: ServerProcess) -> None:
    """AI SDK's tools in their rounds."""
    given = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 160}
    first = server.respond(**given).json
    call, = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    sent = server.respond([*MESSAGES, call, result], tools=[TOOL]).json
    for named in ({"type": "item_reference", "id": call["id"]}, {"id": call["id"]}):
        assert said(server.respond([*MESSAGES, named, result], tools=[TOOL]).json) == said(sent)
    lost = server.respond([*MESSAGES, {"type": "item_reference", "id": "fc_1"}])
    assert lost.status == 400 and (lost.error["code"], lost.error["param"]) == ("item_not_found", "input[1]")


def test_the_newest_are_kept_as_far_as_there_is_room() -> None:
    own = [{"role": "user", "content": "x" * 900}]
    kept = ResponseStore(3 * (ENTRY_NBYTES + nbytes_of([*own, response("r0", {"id": "0", "text": "y" * 90})])))
    for number in range(5):
        asked = ResponsesRequest(input=own[0]["content"], previous_response_id=f"r{number - 1}" if number == 4 else None)
        kept.keep(asked, kept.input_items(asked), response(f"r{number}", {"id": str(number), "text": "y" * 90}))
    kept.keep(ResponsesRequest(input="x", store=False), own, response("never", {"id": "never"}))
    kept.keep(ResponsesRequest(input="x"), [{"role": "user", "content": "x" * 9000}], response("large", {"id": "large"}))
    for name in ("r2", "r3", "r4"):
        asked = ResponsesRequest(input="so", previous_response_id=name)
        assert kept.with_history(asked, kept.input_items(asked)).input[-1] == {"role": "user", "content": "so"}
        assert kept.input_items(ResponsesRequest(input=[{"id": name[1:]}])) == [{"id": name[1:], "text": "y" * 90}]
    assert len(kept.with_history(asked, kept.input_items(asked)).input) == 5
    for name in ("r0", "r1", "never", "large"):
        with pytest.raises(Problem, match="send the whole conversation"):
            kept.with_history(ResponsesRequest(input="so", previous_response_id=name), own)
        with pytest.raises(Problem, match="send the whole conversation"):
            kept.input_items(ResponsesRequest(input=[{"id": name.removeprefix("r")}]))


def test_what_is_kept_is_what_was_sent() -> None:
    """Placeholders stand for images in the answer, not in what is stored."""
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    kept, asked = ResponseStore(), ResponsesRequest(input=[picture])
    own = kept.input_items(asked)
    kept.with_history(asked, own).input[0]["content"][0] = {"type": "text", "text": "mark"}
    kept.keep(asked, own, response("r"))
    assert kept.with_history(ResponsesRequest(input="so", previous_response_id="r"), []).input == [picture]
    assert kept.with_history(ResponsesRequest(input=QUESTION), own).input == QUESTION


def test_a_response_is_told_again_until_it_is_forgotten(server: ServerProcess) -> None:
    """openai-python's `responses.retrieve`, `input_items.list` and `delete`."""
    first = server.respond(instructions="Be brief.", metadata={"a": "b"}).json
    second = server.respond([{"role": "user", "content": [{"type": "input_text", "text": NEXT}]}], previous_response_id=first["id"],
                            stream=True).named_events[-1]["response"]
    for told in (first, second):
        assert server.request("GET", f"/v1/responses/{told['id']}?include=reasoning.encrypted_content").json == told
    read = server.request("GET", f"/v1/responses/{second['id']}/input_items?order=asc").json
    assert [item["content"][0]["text"] for item in read["data"]] == [QUESTION, *said(first), NEXT] and read["has_more"] is False
    assert read["data"][0] == {"id": read["first_id"], "type": "message", "status": "completed", "role": "user",
                               "content": [{"type": "input_text", "text": QUESTION}]}
    assert len({item["id"] for item in read["data"]}) == 3 and read["data"][1]["id"] == first["output"][0]["id"]
    newest = server.request("GET", f"/v1/responses/{second['id']}/input_items?limit=2").json
    assert newest["data"] == read["data"][:0:-1] and newest["has_more"] is True
    rest = server.request("GET", f"/v1/responses/{second['id']}/input_items?after={newest['last_id']}").json
    assert rest["data"] == read["data"][:1] and rest["has_more"] is False
    assert server.request("DELETE", f"/v1/responses/{first['id']}").json == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        gone = server.request(method, f"/v1/responses/{first['id']}{path}")
        assert gone.status == 404 and gone.error["code"] == "response_not_found"
    assert server.respond(NEXT, previous_response_id=first["id"]).error["code"] == "previous_response_not_found"
    assert server.respond([{"type": "item_reference", "id": first["output"][0]["id"]}]).error["code"] == "item_not_found"


def test_what_is_asked_of_a_response_and_cannot_be_had(server: ServerProcess) -> None:
    path = f"/v1/responses/{server.respond().json['id']}"
    for method, asked, code in (("POST", f"{path}/cancel", "not_cancellable"), ("GET", f"{path}?stream=true", "unsupported_parameter")):
        assert (reply := server.request(method, asked)).status == 400 and reply.error["code"] == code
    for query, param in (("order=up", "order"), ("limit=0", "limit"), ("limit=x", "limit"), ("after=msg_1", "after")):
        assert (reply := server.request("GET", f"{path}/input_items?{query}")).status == 400 and reply.error["param"] == param
    assert server.respond(None).error["param"] == "input"
