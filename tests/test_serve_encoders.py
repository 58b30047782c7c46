"""`effllm serve` and the informational commands with encoders, which generate no text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from encoder_models import made_encoder, random_model, states_of, unit
from server_process import Served, serving
from test_cli_config import Ran

from effllm.runtime.encoders.encoder_config import read_encoder_config
from effllm.runtime.tokenizer import Tokenizer

TEXTS = ["The fox is king.", "who rules all beasts?", "the sea was calm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    return (made_encoder(place / "vectors", random_model("Bert"), longest=64),
            made_encoder(place / "ranks", random_model("Bert", "ForSequenceClassification", num_labels=1), pooling=None))


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Served]:
    with serving(model=str(folders[0])) as server:
        yield server


def expected(folder: Path, text: str) -> np.ndarray:
    model = random_model("Bert")
    return unit(states_of(model, Tokenizer.load(folder, read_encoder_config(folder)).encode(text)).mean(0))


def test_vectors_by_all_three_paths(server: Served, folders: tuple[Path, Path]) -> None:
    wanted = np.array([expected(folders[0], text) for text in TEXTS])
    whole = server.ask("POST", "/v1/embeddings", {"model": "vectors", "input": TEXTS}).json
    np.testing.assert_allclose([each["embedding"] for each in whole["data"]], wanted, atol=2e-6)
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 15
    llama = server.ask("POST", "/embedding", {"content": TEXTS}).json
    np.testing.assert_allclose([each["embedding"][0] for each in llama], wanted, atol=2e-6)
    ollama = server.ask("POST", "/api/embed", {"model": "vectors:latest", "input": TEXTS}).json
    np.testing.assert_allclose(ollama["embeddings"], wanted, atol=2e-6)
    short = server.ask("POST", "/v1/embeddings", {"input": TEXTS[0], "dimensions": 8}).json["data"][0]["embedding"]
    np.testing.assert_allclose(short, unit(wanted[0][:8]), atol=2e-6)
    server.until("POST /embedding 200 · ")


def test_a_text_that_is_too_long(server: Served) -> None:
    long = "fox " * 80
    refused = server.ask("POST", "/v1/embeddings", {"input": long})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert "a text has 82 tokens and the context holds 64" in refused.error["message"]
    cut = server.ask("POST", "/api/embed", {"input": long}).json
    assert cut["prompt_eval_count"] == 64 and server.ask("POST", "/api/embed", {"input": long, "truncate": False}).status == 400


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "a"}), ("/completion", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": []}), ("/api/chat", {}), ("/api/generate", {})])
def test_what_writes_is_told_what_the_model_is_for(server: Served, path: str, body: dict) -> None:
    refused = server.ask("POST", path, body)
    assert refused.status == 501
    assert "it embeds texts and generates no text: use POST /v1/embeddings" in refused.body.decode()


def test_what_is_told_of_it(server: Served) -> None:
    assert server.said["context"] == 64
    assert [each["id"] for each in server.ask("GET", "/v1/models").json["data"]] == ["vectors"]
    shown = server.ask("POST", "/api/show", {"model": "vectors"}).json
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["bert.embedding_length"] == 48
    (held,) = server.ask("GET", "/api/ps").json["models"]
    assert held["size"] > 0 and held["context_length"] == 64
    assert server.ask("GET", "/api/tags").json["models"][0]["details"]["family"] == "bert"
    assert [(each["type"], each["capabilities"]) for each in server.ask("GET", "/api/v0/models").json["data"]] == [("embeddings", [])]
    ids = server.ask("POST", "/tokenize", {"content": "the fox", "add_special": True}).json["tokens"]
    assert ids[0] == 2 and ids[-1] == 3 and server.ask("POST", "/detokenize", {"tokens": ids[1:-1]}).json["content"] == "the fox"
    assert server.ask("POST", "/v1/embeddings", {"input": "a", "model": "other"}).status == 404
    ranked = server.ask("POST", "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert ranked.status == 501 and "it has no ranking head" in ranked.error["message"]


@pytest.mark.slow
def test_several_models_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A server of several loads an encoder as any other, with what it takes planned beforehand."""
    other = shutil.copytree(folders[1], tmp_path / "ranks")
    with serving(str(folders[0]), str(other), model=None, HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "d")) as many:
        vector = many.ask("POST", "/v1/embeddings", {"model": "vectors", "input": TEXTS[0]}).json["data"][0]["embedding"]
        np.testing.assert_allclose(vector, expected(folders[0], TEXTS[0]), atol=2e-6)
        ranked = many.ask("POST", "/v1/rerank", {"model": "ranks", "query": TEXTS[1], "documents": TEXTS}).json["results"]
        scores = [each["relevance_score"] for each in ranked]
        assert sorted(each["index"] for each in ranked) == [0, 1, 2] and scores == sorted(scores, reverse=True)
        assert all(0 <= each <= 1 for each in scores)
        assert many.ask("POST", "/v1/chat/completions", {"model": "ranks", "messages": []}).status == 501
        assert many.ask("POST", "/api/show", {"model": "ranks"}).json["capabilities"] == ["rerank"]
        refused = many.ask("POST", "/v1/embeddings", {"model": "ranks", "input": "a"})
        assert refused.status == 400 and "is a reranker and makes no embeddings" in refused.error["message"]
        assert [each["writes"] for each in many.ask("GET", "/v1/models").json["data"]] == [False, False]
        many.until("ranks is loaded: context 400 tokens")


def test_commands_that_look_around(folders: tuple[Path, Path]) -> None:
    vectors, ranks = map(str, folders)
    shown = json.loads(Ran("show", vectors, "--json").out)
    assert (shown["family"], shown["context"], shown["pooling"], shown["vector"], shown["ranks"]) == ("bert", 64, "mean", 48, False)
    assert "embeddings of 48 dimensions (mean)" in Ran("show", vectors).out and "scores of documents" in Ran("show", ranks).out
    planned = json.loads(Ran("plan", ranks, "--json").out)
    assert planned["context"] == 400 and planned["memory"]["total_bytes"] > planned["memory"]["weights_bytes"] > 0
    assert "activations" in Ran("plan", vectors).out
    small = Ran("plan", vectors, "--ram", "1M")
    assert small.code == 4 and "for weights" in small.err
    for command in (("run", vectors, "a"), ("bench", vectors), ("quantize", vectors, "-o", f"{vectors}-q", "--bits", "4")):
        refused = Ran(*command)
        assert refused.code == 2 and refused.err.startswith(
            "effllm: this is an embedding model, which does not generate text (bert)\nhint: ")
    assert "/v1/rerank" in Ran("run", ranks, "a").err


@pytest.mark.parametrize(("flags", "code", "said"), [
    (("--kv", "4bit"), 2, "--kv is for models that generate text"), (("--temp", "1"), 2, "--temp is for models that generate text"),
    (("-c", "65"), 2, "-c 65 is more than the 64 tokens"), (("--ram", "1M"), 4, "for weights")])
def test_what_cannot_be_said_of_one(folders: tuple[Path, Path], flags: tuple[str, ...], code: int, said: str) -> None:
    refused = Ran("serve", str(folders[0]), "--port", "0", *flags)
    assert refused.code == code and said in refused.err and "hint: " in refused.err
