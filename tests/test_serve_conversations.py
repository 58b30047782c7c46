"""OpenAI's Conversations API: a Responses request continues one by its id; items are listed, added and deleted."""


import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_process import MESSAGES, QUESTION, Reply, ServerProcess

from effllm.cli.server.conversations import Conversations, page_of
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.store_limits import ENTRY_NBYTES, nbytes_of

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


@pytest.mark.parametrize("digits", [10, 5000])
def test_a_number_of_any_length_in_a_path_is_refused(server: ServerProcess, digits: int) -> None:
    begun = server.request("POST", PATH, {}).json["id"]
    for query in (f"limit={'1' * digits}", f"limit={'0' * digits}1"):
        assert server.request("GET", f"{PATH}/{begun}/items?{query}").error["param"] == "limit"
    assert server.request("POST", f"/slots/{'1' * digits}?action=erase").error["param"] == "id_slot"


@pytest.mark.parametrize("metadata", [{"k" * 65: ""}, {"k": "v" * 513}])
def test_metadata_is_small(server: ServerProcess, metadata: dict) -> None:
    """It is stored: a body of 32 MiB may not be."""
    begun = server.request("POST", PATH, {}).json["id"]
    for path in (PATH, f"{PATH}/{begun}"):
        refused = server.request("POST", path, {"metadata": metadata})
        assert refused.status == 400 and refused.error["param"].startswith("metadata.k") and "at most 64" in refused.error["message"]
    assert server.request("POST", f"{PATH}/{begun}", {"metadata": {"k" * 64: "v" * 512}}).status == 200


ITEM = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=200)},
                             optional={"id": st.sampled_from(["a", "b"])})
STEPS = st.lists(st.tuples(st.sampled_from(["create", "add", "drop", "drop_item", "metadata", "read"]), st.integers(0, 9),
                           st.lists(ITEM, max_size=3)), max_size=20)


@given(STEPS)
def test_what_is_held_is_what_was_put_there(steps: list) -> None:
    """Against lists of texts: nothing is lost but what makes room, the sizes add up, and the limit holds."""
    held, expected = Conversations(12_000), dict[str, list[str]]()
    for action, number, items in steps:
        name = [*expected][number % len(expected)] if expected else "conv_none"
        try:
            if action == "create":
                expected[held.create(items, {"n": str(number)}).id] = [each["content"] for each in items]
            elif action == "add":
                added = held.add(name, items)
                assert len({each["id"] for each in added if each["id"] not in "ab"}) == sum("id" not in each for each in items)
                expected[name] += [each["content"] for each in items]
            elif action == "drop":
                held.drop(name)
                del expected[name]
            elif action == "drop_item" and (items := held.find(name).items):
                at = [each["id"] for each in items].index(items[number % len(items)]["id"])
                held.drop_item(name, items[at]["id"])
                del expected[name][at]
            elif action == "metadata":
                held.set_metadata(name, {"n": "x" * number})
        except Problem as problem:
            assert problem.code in ("conversation_not_found", "conversation_too_large")
        stored = held._conversations
        expected = {key: texts for key, texts in expected.items() if key in stored}  # others made room
        assert stored.keys() == expected.keys() and sum(each.nbytes for each in stored.values()) <= 12_000 + 100
        for key, conversation in stored.items():
            assert [each["content"][0]["text"] for each in conversation.items] == expected[key]
            assert conversation.nbytes == ENTRY_NBYTES + nbytes_of(conversation.metadata) + sum(map(nbytes_of, conversation.items))
            pages, after = [], ""
            while not pages or pages[-1]["has_more"]:
                pages.append(page_of(conversation.items, {"order": "asc", "limit": "3", "after": after}))
                after = pages[-1]["last_id"]
                if {each["id"] for each in conversation.items} & {"a", "b"}:
                    break  # ids of the client's may occur twice
            else:
                assert [each for page in pages for each in page["data"]] == conversation.items
