"""Embeddings from `effllm serve`, in OpenAI's and Ollama's APIs: over HTTP, with the packaged model as an embedder."""

import base64
from pathlib import Path

import numpy as np
import pytest
from packaged_embedder import ENDS, FABLE, embedder, expected
from server_process import MESSAGES, Reply, ServerProcess, serving

from effllm.runtime.config import read_config
from effllm.runtime.tokenizer import Tokenizer

TEXTS = ["The fox wanted to be king.", "A king."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedder(tmp_path_factory.mktemp("model") / "vectors")


@pytest.fixture(scope="module")
def server(folder: Path):
    with serving("-c", "512", model=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def theirs(folder: Path) -> list[np.ndarray]:
    """What transformers makes of the texts, each with the token at its end."""
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    return [expected(FABLE, tokenizer.encode(text + ENDS)) for text in TEXTS]


def embed(server: ServerProcess, given: object, path: str = "/v1/embeddings", **fields: object) -> Reply:
    return server.request("POST", path, {"input": given, **fields})


def vectors(reply: Reply) -> list[np.ndarray]:
    assert reply.status == 200, reply.body
    assert [(each["object"], each["index"]) for each in reply.json["data"]] == [
        ("embedding", number) for number in range(len(reply.json["data"]))]
    return [np.array(each["embedding"], np.float32) for each in reply.json["data"]]


def test_vectors_are_those_of_transformers(server: ServerProcess, theirs: list[np.ndarray]) -> None:
    reply = embed(server, TEXTS, model="vectors", user="me")
    for own, other in zip(vectors(reply), theirs, strict=True):
        assert own.shape == (256,) and own @ other > 0.99999 and abs(np.linalg.norm(own) - 1) < 1e-6
    counted = sum(len(server.request("POST", "/tokenize", {"content": text}).json["tokens"]) + 1 for text in TEXTS)  # and the end
    assert reply.json["object"] == "list" and reply.json["model"] == "vectors"
    assert reply.json["usage"] == {"prompt_tokens": counted, "total_tokens": counted}
    server.wait_for_output(f"POST /v1/embeddings 200 · {counted} tokens in, 2 vectors")


def test_inputs_of_every_kind(server: ServerProcess) -> None:
    (first, second), ids = vectors(embed(server, TEXTS)), [server.request("POST", "/tokenize", {"content": text, "add_special": True}).json[
        "tokens"] for text in TEXTS]
    for given in (TEXTS[0], [TEXTS[0]], ids[0], [ids[0]]):
        (own,) = vectors(embed(server, given))
        assert np.array_equal(own, first)
    assert np.array_equal(vectors(embed(server, ids))[1], second)
    packed = embed(server, TEXTS[0], encoding_format="base64").json["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), first)
    (short,) = vectors(embed(server, TEXTS[0], dimensions=16))
    assert short.shape == (16,) and np.allclose(short, first[:16] / np.linalg.norm(first[:16]), atol=1e-6)


def test_as_ollama_has_it(server: ServerProcess) -> None:
    plain = vectors(embed(server, TEXTS))
    made = embed(server, TEXTS, "/api/embed", model="vectors:latest", keep_alive="5m").json
    assert made["model"] == "vectors:latest" and made["prompt_eval_count"] > 4 and made["total_duration"] > made["load_duration"] == 0
    assert all(np.array_equal(np.array(own, np.float32), other) for own, other in zip(made["embeddings"], plain, strict=True))
    assert len(embed(server, TEXTS[0], "/api/embed", dimensions=8).json["embeddings"][0]) == 8
    one = server.request("POST", "/api/embeddings", {"model": "vectors", "prompt": TEXTS[1]}).json
    assert set(one) == {"embedding"} and np.array_equal(np.array(one["embedding"], np.float32), plain[1])
    for nothing in ("", [], None):
        assert embed(server, nothing, "/api/embed").json["embeddings"] == []
    assert server.request("POST", "/api/show", {"model": "vectors"}).json["capabilities"] == ["completion", "embedding"]


def test_as_llama_server_has_it(server: ServerProcess) -> None:
    plain = vectors(embed(server, TEXTS))
    ids = server.request("POST", "/tokenize", {"content": TEXTS[0], "add_special": True}).json["tokens"]

    def asked(**fields: object) -> list[np.ndarray]:
        made = server.request("POST", "/embedding", fields).json
        assert [each["index"] for each in made] == [*range(len(made))] and all(len(each["embedding"]) == 1 for each in made)
        return [np.array(each["embedding"][0], np.float32) for each in made]

    for fields in ({"content": TEXTS}, {"input": TEXTS}, {"content": [ids, TEXTS[1]]}, {"content": TEXTS, "embd_normalize": 2}):
        assert all(np.array_equal(one, other) for one, other in zip(asked(**fields), plain, strict=True)), fields
    assert np.array_equal(*asked(content=[{"prompt_string": TEXTS[0]}, TEXTS[0]]))
    (one,), (three,), (largest,) = (asked(content=TEXTS[0], embd_normalize=norm) for norm in (1, 3, 0))
    assert abs(np.abs(one).sum() - 1) < 1e-5 and abs((np.abs(three) ** 3).sum() - 1) < 1e-5 and abs(np.abs(largest).max() - 32760) < 1e-2
    for made in (one, three, largest):
        assert np.allclose(made / np.linalg.norm(made), plain[0], atol=1e-6)
    (packed,) = server.request("POST", "/embedding", {"content": TEXTS[0], "encoding_format": "base64"}).json
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["embedding"][0]), "<f4"), plain[0])
    for fields, param in (({}, "content"), ({"content": ""}, "content"), ({"content": ["a", 1.5]}, "content"), ({"input": []}, "input"),
                          ({"content": "a", "embd_normalize": -1}, "embd_normalize")):
        refused = server.request("POST", "/embedding", fields)
        assert refused.status == 400 and refused.error["param"] == param, fields
    server.wait_for_output("POST /embedding 200 · ")


def test_texts_that_are_too_long(server: ServerProcess) -> None:
    """Cut where Ollama's API has them cut, but for the token at the end; elsewhere refused with the number."""
    long = "The fox saw the king. " * 200
    made = embed(server, long, "/api/embed").json
    ids = server.request("POST", "/tokenize", {"content": long, "add_special": True}).json["tokens"]
    (own,) = vectors(embed(server, [*ids[:511], ids[-1]]))
    assert made["prompt_eval_count"] == 512 and np.array_equal(np.array(made["embeddings"][0], np.float32), own)
    server.wait_for_output(f"a text of {len(ids)} tokens is cut: the context is 512 tokens (-c)")
    said = f"a text has {len(ids)} tokens and the context holds 512"
    assert embed(server, long).error["code"] == "context_length_exceeded" and said in embed(server, long).error["message"]
    assert said in embed(server, long, "/api/embed", truncate=False).json["error"]


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"input": ""}, "input", "input[0] is empty"), ({"input": []}, "input", "input is empty"), ({"input": ["a", ""]}, "input", "input[1]"),
    ({"input": 3}, "input", "input has to be a string"), ({"input": ["a", 3]}, "input", "input has to be a string"),
    ({}, "input", "required"),
    ({"input": [True]}, "input", "input has to be a string"), ({"input": ["a"] * 2049}, "input", "at most 2048"),
    ({"input": [4096]}, None, "token id 4096 is outside"), ({"input": [-1]}, None, "token id -1 is outside"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1 to 256"), ({"input": "a", "dimensions": 257}, "dimensions", "1 to 256"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, param: str | None, said: str) -> None:
    reply = server.request("POST", "/v1/embeddings", fields)
    assert reply.status == 400 and reply.error["param"] == param and said in reply.error["message"]


def test_another_model_is_not_here(server: ServerProcess) -> None:
    for path in ("/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings"):
        assert server.request("POST", path, {"model": "other", "input": "a", "prompt": "a"}).status == 404


def test_answers_continue_as_they_were(server: ServerProcess) -> None:
    """What the cache held of a conversation is kept while vectors are made."""
    long = [{"role": "user", "content": "The fox saw the king and the king saw the fox. " * 24}]
    first = server.chat(long, max_tokens=8).json
    assert first["usage"]["prompt_tokens"] >= 256
    embed(server, TEXTS)
    again = server.chat(long, max_tokens=8).json
    assert again["choices"] == first["choices"] and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256


def test_a_model_that_was_not_made_for_it_says_so() -> None:
    with serving() as server:
        for path in ("/v1/embeddings", "/embeddings", "/embedding"):
            reply = embed(server, "a", path)
            assert reply.status == 400 and "this model is not an embedding model" in reply.error["message"]
        assert "not an embedding model" in embed(server, "a", "/api/embed").json["error"]
        assert server.chat(MESSAGES).status == 200


def test_several_at_once(folder: Path) -> None:
    """Beside an answer that is being written."""
    with serving("-c", "512", "--parallel", "2", model=str(folder)) as server:
        alone = vectors(embed(server, TEXTS))
        text = server.chat(max_tokens=60).json["choices"][0]["message"]["content"]
        stream = server.open("POST", "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "stream": True})
        beside = vectors(embed(server, TEXTS))
        events = Reply(200, {}, stream.read()).events
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text
        assert all(np.array_equal(one, other) for one, other in zip(alone, beside, strict=True))
