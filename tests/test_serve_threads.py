"""Threads of Anthropic's Messages API: a request names the previous answer and continues its conversation."""


import pytest
from server_process import MESSAGES, QUESTION, Reply, ServerProcess

from effllm.cli.server.message_threads import MessageThreads
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.openai_requests import parse
from effllm.cli.server.problems import Problem

NEXT = [{"role": "user", "content": [{"type": "text", "text": "And then?"}]}]
TOOLS = [{"name": "f", "description": "x", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}]
BEGIN = {"type": "create"}


def going_on(before: Reply | dict) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": before["id"] if isinstance(before, dict) else before.json["id"]}


def test_a_thread_is_resumed(server: ServerProcess) -> None:
    first = server.message(system="Be brief.", thread=BEGIN)
    second = server.message(NEXT, thread=going_on(first), stream=True).named_events
    sent = server.message([*MESSAGES, {"role": "assistant", "content": first.json["content"]}, *NEXT], system="Be brief.").json
    text = "".join(event["delta"]["text"] for event in second if event["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == sent["content"]
    third = server.message(NEXT, thread=going_on(second[0]["message"])).json
    said = [{"role": "assistant", "content": each["content"]} for each in (first.json, sent)]
    history = [*MESSAGES, said[0], *NEXT, said[1], *NEXT]
    assert third["content"] == server.message(history, system="Be brief.").json["content"]
    counted = server.message(NEXT, path="/v1/messages/count_tokens", thread=going_on(first)).json["input_tokens"]
    assert counted == sent["usage"]["input_tokens"] + sent["usage"]["cache_read_input_tokens"]


def test_tools_are_those_of_the_thread(server: ServerProcess) -> None:
    """The requests of anthropic-python's `tool_runner`: the second has neither tools nor what was said before."""
    first = server.message(tools=TOOLS, tool_choice={"type": "any"}, thread=BEGIN, max_tokens=160).json
    call, = first["content"]
    result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "Rain."}]}]
    second = server.message(result, tool_choice={"type": "any"}, thread=going_on(first), max_tokens=160)
    history = [*MESSAGES, {"role": "assistant", "content": [call]}, *result]
    sent = server.message(history, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=160)
    assert second.status == 200 and second.json["content"][0]["input"] == sent.json["content"][0]["input"]
    other = server.message(result, system="Be long.", thread=going_on(first))
    assert other.status == 400 and other.json["error"]["details"] == {"error_code": "thread_fingerprint_mismatch"}


def test_a_thread_that_has_gone_is_told_by_its_code(server: ServerProcess) -> None:
    """Upon which the client sends everything again."""
    for before in ("msg_1", server.message().json["id"]):
        for more in ({}, {"stream": True}):
            gone = server.message(NEXT, thread={"type": "continue", "previous_message_id": before}, **more)
            assert gone.status == 404 and gone.json["error"]["type"] == "not_found_error"
            assert gone.json["error"]["details"] == {"error_code": "thread_not_found"}
    assert server.message(NEXT, thread={"type": "fork"}).status == 400


def test_the_newest_are_held_as_they_were_sent() -> None:
    def asked(text: str, **fields: object) -> MessagesRequest:
        turn = {"role": "user", "content": [{"type": "text", "text": text}]}
        return MessagesRequest.model_validate({"max_tokens": 1, "messages": [turn], **fields})

    held = MessageThreads(8000)  # two of them
    first = asked("x" * 900, thread=BEGIN)
    whole = held.with_history(first)
    whole.messages[0].content[0] = {"type": "text", "text": "mark"}
    held.keep(first, whole, "a", [{"type": "text", "text": "y"}])
    second = held.with_history(asked("z", thread=going_on({"id": "a"})))
    assert [turn.content[0]["text"] for turn in second.messages] == ["x" * 900, "y", "z"]
    for name in ("b", "c"):
        held.keep(first, whole, name, [])
    held.keep(asked("x" * 9000, thread=BEGIN), whole, "large", [])
    held.keep(asked("x"), whole, "without", [])
    for name in ("a", "large", "without"):
        with pytest.raises(Problem, match="start a"):
            held.with_history(asked("z", thread=going_on({"id": name})))
    assert len(held.with_history(asked("z", thread=going_on({"id": "c"}))).messages) == 3
    assert held.with_history(plain := asked(QUESTION)) is plain
    with pytest.raises(Problem):
        parse(MessagesRequest, b'{"max_tokens": 1, "messages": [], "thread": {"type": "continue", "previous_message_id": 1}}')
