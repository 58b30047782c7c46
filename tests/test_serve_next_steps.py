"""Any bad request gets an error in its API's format that names the problem and the fix, and the next request is answered."""

import json

import pytest
from server_process import MESSAGES, Reply, ServerProcess

CHAT, TEXT, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"
POSTED = (CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens",
          "/v1/chat/completions/input_tokens", "/api/chat", "/api/generate", "/api/show", "/api/embed",
          LLAMA, "/completions", "/infill", "/tokenize", "/detokenize", "/apply-template", "/v1/embeddings", "/embedding", "/v1/rerank",
          "/slots/0?action=save", "/slots/0?action=jump", "/lora-adapters", "/props")
NO_BODY = (b"", b"{", b"null", b"1", b'"text"', b"[[[]]]", b'{"model": "fable",}', b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 50_000,
           b'{"messages": 3, "prompt": {"a": 1}, "input": {}, "content": 1.5, "query": [], "tokens": "x", "model": [], "id": {}}',
           b'{"messages": [null], "prompt": [null], "input": [null], "content": [{}], "documents": [1], "tokens": [-1], "stream": "yes"}')


def message(reply: Reply, path: str) -> str:
    """What the clients of the API that is spoken at a path show."""
    said = json.loads(reply.body)
    if path.startswith("/api/"):
        assert said.keys() == {"error"}
        return said["error"]
    if path.startswith("/v1/messages"):
        assert said["type"] == "error" and said["error"].keys() == {"type", "message"}
        return said["error"]["message"]
    return reply.error["message"]


@pytest.mark.parametrize("path", POSTED)
def test_what_is_no_request_is_refused_in_words(server: ServerProcess, path: str) -> None:
    for body in NO_BODY:
        reply = server.request("POST", path, body, **{"Content-Type": "application/json"})
        assert 400 <= reply.status < 500 or reply.status == 501, (path, body[:40], reply.status, reply.body[:300])
        said = message(reply, path)
        assert said and "internal" not in said and len(said) < 500, (path, body[:40], said)
    assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize(("path", "fields", "step"), [
    (CHAT, {"best_of": 3}, "leave it out"),
    (CHAT, {"logit_bias": {"99999999": 1}}, "/tokenize gives the ids of a text"),
    (CHAT, {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "leave one of them out"),
    (CHAT, {"tool_choice": "required"}, "send them, or leave tool_choice out"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "leave it out"),
    (TEXT, {"prompt": [5_000_000]}, "send ids of this model's tokenizer"),
    ("/detokenize", {"tokens": [5_000_000]}, "ids are those of /tokenize"),
    (LLAMA, {"prompt": "x", "json_schema": {}, "grammar": 'root ::= "a"'}, "leave one of them out"),
    (LLAMA, {"prompt": {"prompt_string": "x", "multimodal_data": ["AAAA"]}}, "send prompt_string alone"),
    (LLAMA, {"prompt": "x", "lora": [{"id": 0, "scale": 1.0}]}, "effllm serve MODEL --lora ADAPTER"),
    ("/api/chat", {"messages": [{**MESSAGES[0], "images": ["AAAA"]}]}, "`effllm list` shows which models here take images"),
    ("/v1/responses", {"input": [5]}, "an item is an object, as "),
    ("/v1/responses", {"input": [{"type": "reasoning_of_old"}]}, "leave it out"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "models for code have them"),
])
def test_a_refusal_says_what_would_be_right(server: ServerProcess, path: str, fields: dict[str, object], step: str) -> None:
    asked = {"messages": MESSAGES} if path in (CHAT, "/api/chat") else {}
    reply = server.request("POST", path, {"model": "fable", "max_tokens": 1, **asked, **fields})
    assert 400 <= reply.status <= 501 and step in message(reply, path), reply.body
