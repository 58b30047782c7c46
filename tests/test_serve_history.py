"""Conversation histories as clients send them back: reasoning under each of its names, texts as documents, and fields that only other
servers produce."""

import pytest

from effllm.cli.server import messages_requests, responses_requests
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.openai_requests import ChatRequest, Message, messages_of
from effllm.cli.server.problems import Problem
from effllm.cli.server.responses_requests import ResponsesRequest

THOUGHT = "It is a question of foxes."


def chat(message: dict) -> dict:
    made, = messages_of(ChatRequest(messages=[Message(**message)]))
    return made


@pytest.mark.parametrize("told", [{"reasoning_content": THOUGHT}, {"reasoning": THOUGHT}, {"thinking": THOUGHT},
                                  {"reasoning_content": "", "reasoning": THOUGHT}, {"reasoning_content": THOUGHT, "reasoning": "else"}])
def test_what_was_reasoned_has_one_name(told: dict) -> None:
    assert chat({"role": "assistant", "content": "Yes.", **told})["reasoning_content"] == THOUGHT
    assert "reasoning_content" not in chat({"role": "user", "content": "Yes.", "reasoning": THOUGHT})


@pytest.mark.parametrize("inside", [THOUGHT, [{"type": "text", "text": THOUGHT[:5]}, {"type": "text", "text": THOUGHT[5:]}]])
def test_what_was_reasoned_may_be_a_part(inside: object) -> None:
    made = chat({"role": "assistant", "content": [{"type": "thinking", "thinking": inside}, {"type": "text", "text": "Yes."}]})
    assert made["reasoning_content"] == THOUGHT and made["content"] == [{"type": "text", "text": "Yes."}]
    for wrong, param in (([{"type": "x"}], "messages[0].content[0].thinking[0]"), (None, "messages[0].content[0]")):
        with pytest.raises(Problem) as raised:
            chat({"role": "assistant", "content": [{"type": "thinking", "thinking": wrong}]})
        assert raised.value.param == param


def test_what_another_model_refused_is_what_it_said() -> None:
    refusal = {"type": "refusal", "refusal": "I will not."}
    assert chat({"role": "assistant", "content": [refusal]})["content"] == [{"type": "text", "text": "I will not."}]
    _, messages, _ = responses_requests.chat_of(ResponsesRequest(input=[
        {"role": "user", "content": "Go."}, {"role": "assistant", "content": [refusal]}]))
    assert messages[1]["content"] == [{"type": "text", "text": "I will not."}]


SOURCES = ({"type": "text", "media_type": "text/plain", "data": "Foxes rule."}, {"type": "content", "content": "Foxes rule."},
           {"type": "content", "content": [{"type": "text", "text": "Foxes rule."}]})


@pytest.mark.parametrize("source", SOURCES)
def test_documents_of_text_are_read(source: dict) -> None:
    block = {"type": "document", "source": source, "title": "Of foxes", "context": "A book.", "citations": {"enabled": True}}
    told = ["Of foxes", "A book.", "Foxes rule."]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block, {"type": "tool_reference", "tool_name": "look"}]}
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [{"role": "user", "content": [block]}, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    _, messages = messages_requests.chat_of(MessagesRequest(max_tokens=1, messages=turns))
    assert [part["text"] for part in messages[0]["content"]] == told
    assert messages[2] == {"role": "tool", "tool_call_id": "a", "content": "\n".join([*told, "look"])}


def test_what_a_search_found_is_read() -> None:
    found = {"type": "search_result", "source": "a.txt", "title": "Of foxes", "content": [{"type": "text", "text": "Foxes rule."}]}
    _, messages = messages_requests.chat_of(MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": [found]}]))
    assert [part["text"] for part in messages[0]["content"]] == ["Of foxes", "a.txt", "Foxes rule."]
