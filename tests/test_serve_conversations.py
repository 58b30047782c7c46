"""OpenAI's Conversations API: a Responses request continues one by its id; items are listed, added and deleted."""


import pytest
from server_process import MESSAGES, QUESTION, Reply, ServerProcess

from effllm.cli.server.conversations import Conversations
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest

NEXT = "And then?"
PATH = "/v1/conversations"


def texts(reply: Reply) -> list[str]:
    return [part["text"] for item in reply.json["data"] for part in item["content"]]


def test_a_conversation_is_resumed(server: ServerProcess) -> None:
    """What openai-python's `conversations` sends, and `responses.create(conversation=...)`."""
    system = {"role": "system", "content": "Be brief."}
    begun = server.request("POST", PATH, {"items": [{"type": "message", **system}], "metadata": {"a": "b"}}).json
    assert begun["object"] == "conversation" and begun["id"].startswith("conv_") and begun["metadata"] == {"a": "b"}
    first = server.respond(conversation=begun["id"]).json
    assert first["conversation"] == {"id": begun["id"]} and first["previous_response_id"] is None
    second = server.respond([{"role": "user", "content": NEXT}], conversation={"id": begun["id"]}, stream=True).named_events[-1]["response"]
    sent = server.respond([system, *MESSAGES, *first["output"], {"role": "user", "content": NEXT}], store=False).json
    assert second["output"][0]["content"] == sent["output"][0]["content"]
    assert second["usage"]["input_tokens"] == sent["usage"]["input_tokens"] and sent["conversation"] is None
    items = f"{PATH}/{begun['id']}/items"
    listed = server.request("GET", f"{items}?order=asc")
    answers = [each["output"][0]["content"][0]["text"] for each in (first, second)]
    assert texts(listed) == ["Be brief.", QUESTION, answers[0], NEXT, answers[1]]
    third = server.respond(NEXT, previous_response_id=second["id"], store=False).json
    assert third["usage"]["input_tokens"] == server.respond(NEXT, conversation=begun["id"]).json["usage"]["input_tokens"]


def test_items_are_added_told_and_removed(server: ServerProcess) -> None:
    begun = server.request("POST", PATH, {}).json
    items = f"{PATH}/{begun['id']}/items"
    function_call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    added = server.request("POST", items, {"items": [*MESSAGES, function_call]}).json
    message, call = added["data"]
    assert message["content"] == [{"type": "input_text", "text": QUESTION}] and call["name"] == "f" and call["id"].startswith("fc_")
    assert server.request("GET", f"{items}/{call['id']}").json == call
    assert server.request("DELETE", f"{items}/{call['id']}").json == begun
    assert server.request("GET", f"{items}/{call['id']}").error["code"] == "item_not_found"
    assert server.request("GET", items).json["data"] == [message]
    assert server.request("POST", f"{PATH}/{begun['id']}", {"metadata": {"topic": "fox"}}).json == {**begun, "metadata": {"topic": "fox"}}
    assert server.request("GET", f"{PATH}/{begun['id']}").json["metadata"] == {"topic": "fox"}
    removed = server.request("DELETE", f"{PATH}/{begun['id']}").json
    assert removed == {"id": begun["id"], "object": "conversation.deleted", "deleted": True}
    gone = server.request("GET", items), server.request("DELETE", f"{PATH}/{begun['id']}"), server.respond(conversation=begun["id"])
    for reply, status in zip(gone, (404, 404, 400), strict=True):
        assert reply.status == status and reply.error["code"] == "conversation_not_found"


def test_what_cannot_be_had_is_named(server: ServerProcess) -> None:
    first = server.respond().json
    begun = server.request("POST", PATH, {}).json
    both = server.respond(previous_response_id=first["id"], conversation=begun["id"])
    assert both.status == 400 and both.error["param"] == "conversation"
    for sent, param in (({"items": [{"type": "web_search_call"}]}, "items[0]"), ({"items": MESSAGES * 21}, "items"),
                        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"), ({"metadata": {"a": 1}}, "metadata.a")):
        assert (reply := server.request("POST", PATH, sent)).status == 400 and reply.error["param"] == param


def test_those_that_were_used_last_are_held() -> None:
    item = {"role": "user", "content": "x" * 900}
    held = Conversations(3 * Conversations().create([item], {}).nbytes)
    first, second, third = (held.create([item], {}) for _ in range(3))
    assert held.history(ResponsesRequest(conversation=first.id))[0]["content"][0]["text"] == item["content"]
    held.create([item], {})
    with pytest.raises(Problem, match="create a new one"):
        held.find(second.id)
    assert [held.find(each.id).id for each in (first, third)] == [first.id, third.id]
    with pytest.raises(Problem, match="would exceed"):
        held.add(first.id, [item] * 3)
    assert len(held.find(first.id).items) == 1
    held.drop(third.id)
    held.append_answer(third.id, [item])
    with pytest.raises(Problem, match="create a new one"):
        held.find(third.id)
