"""`effllm serve` and the informational commands with encoders, which generate no text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import CliRun
from encoder_models import made_encoder, random_model, states_of, unit
from server_process import ServerProcess, serving

from effllm.runtime.encoders.encoder_config import read_encoder_config
from effllm.runtime.tokenizer import Tokenizer

TEXTS = ["The fox is king.", "who rules all beasts?", "the sea was calm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    return (made_encoder(place / "vectors", random_model("Bert"), longest=64),
            made_encoder(place / "ranks", random_model("Bert", "ForSequenceClassification", num_labels=1), pooling=None))


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[ServerProcess]:
    with serving(model=str(folders[0])) as server:
        yield server


def expected(folder: Path, text: str) -> np.ndarray:
    model = random_model("Bert")
    return unit(states_of(model, Tokenizer.load(folder, read_encoder_config(folder)).encode(text)).mean(0))


def test_vectors_by_all_three_paths(server: ServerProcess, folders: tuple[Path, Path]) -> None:
    wanted = np.array([expected(folders[0], text) for text in TEXTS])
    whole = server.request("POST", "/v1/embeddings", {"model": "vectors", "input": TEXTS}).json
    np.testing.assert_allclose([each["embedding"] for each in whole["data"]], wanted, atol=2e-6)
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 15
    llama = server.request("POST", "/embedding", {"content": TEXTS}).json
    np.testing.assert_allclose([each["embedding"][0] for each in llama], wanted, atol=2e-6)
    ollama = server.request("POST", "/api/embed", {"model": "vectors:latest", "input": TEXTS}).json
    np.testing.assert_allclose(ollama["embeddings"], wanted, atol=2e-6)
    short = server.request("POST", "/v1/embeddings", {"input": TEXTS[0], "dimensions": 8}).json["data"][0]["embedding"]
    np.testing.assert_allclose(short, unit(wanted[0][:8]), atol=2e-6)
    server.wait_for_output("POST /embedding 200 · ")


def test_a_text_that_is_too_long(server: ServerProcess) -> None:
    long = "fox " * 80
    refused = server.request("POST", "/v1/embeddings", {"input": long})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert "a text has 82 tokens and the context holds 64" in refused.error["message"]
    cut = server.request("POST", "/api/embed", {"input": long}).json
    assert cut["prompt_eval_count"] == 64 and server.request("POST", "/api/embed", {"input": long, "truncate": False}).status == 400


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "a"}), ("/completion", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": []}), ("/api/chat", {}), ("/api/generate", {})])
def test_what_writes_is_told_what_the_model_is_for(server: ServerProcess, path: str, body: dict) -> None:
    refused = server.request("POST", path, body)
    assert refused.status == 501
    assert "it embeds texts and generates no text: use POST /v1/embeddings" in refused.body.decode()


def test_what_is_told_of_it(server: ServerProcess) -> None:
    assert server.said["context"] == 64
    assert [each["id"] for each in server.request("GET", "/v1/models").json["data"]] == ["vectors"]
    shown = server.request("POST", "/api/show", {"model": "vectors"}).json
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["bert.embedding_length"] == 48
    (held,) = server.request("GET", "/api/ps").json["models"]
    assert held["size"] > 0 and held["context_length"] == 64
    assert server.request("GET", "/api/tags").json["models"][0]["details"]["family"] == "bert"
    assert [(each["type"], each["capabilities"]) for each in server.request("GET", "/api/v0/models").json["data"]] == [("embeddings", [])]
    ids = server.request("POST", "/tokenize", {"content": "the fox", "add_special": True}).json["tokens"]
    assert ids[0] == 2 and ids[-1] == 3 and server.request("POST", "/detokenize", {"tokens": ids[1:-1]}).json["content"] == "the fox"
    assert server.request("POST", "/v1/embeddings", {"input": "a", "model": "other"}).status == 404
    ranked = server.request("POST", "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert ranked.status == 501 and "it has no ranking head" in ranked.error["message"]


@pytest.mark.slow
def test_several_models_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A server of several loads an encoder as any other, with what it takes planned beforehand."""
    other = shutil.copytree(folders[1], tmp_path / "ranks")
    with serving(str(folders[0]), str(other), model=None, HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "d")) as many:
        vector = many.request("POST", "/v1/embeddings", {"model": "vectors", "input": TEXTS[0]}).json["data"][0]["embedding"]
        np.testing.assert_allclose(vector, expected(folders[0], TEXTS[0]), atol=2e-6)
        ranked = many.request("POST", "/v1/rerank", {"model": "ranks", "query": TEXTS[1], "documents": TEXTS}).json["results"]
        scores = [each["relevance_score"] for each in ranked]
        assert sorted(each["index"] for each in ranked) == [0, 1, 2] and scores == sorted(scores, reverse=True)
        assert all(0 <= each <= 1 for each in scores)
        assert many.request("POST", "/v1/chat/completions", {"model": "ranks", "messages": []}).status == 501
        assert many.request("POST", "/api/show", {"model": "ranks"}).json["capabilities"] == ["rerank"]
        refused = many.request("POST", "/v1/embeddings", {"model": "ranks", "input": "a"})
        assert refused.status == 400 and "is a reranker and makes no embeddings" in refused.error["message"]
        assert [each["writes"] for each in many.request("GET", "/v1/models").json["data"]] == [False, False]
        many.wait_for_output("ranks is loaded: context 400 tokens")


def test_commands_that_look_around(folders: tuple[Path, Path]) -> None:
    vectors, ranks = map(str, folders)
    shown = json.loads(CliRun("show", vectors, "--json").out)
    assert (shown["family"], shown["context"], shown["pooling"], shown["vector"], shown["ranks"]) == ("bert", 64, "mean", 48, False)
    assert "embeddings of 48 dimensions (mean)" in CliRun("show", vectors).out and "scores of documents" in CliRun("show", ranks).out
    planned = json.loads(CliRun("plan", ranks, "--json").out)
    assert planned["context"] == 400 and planned["memory"]["total_bytes"] > planned["memory"]["weights_bytes"] > 0
    assert "activations" in CliRun("plan", vectors).out
    small = CliRun("plan", vectors, "--ram", "1M")
    assert small.code == 4 and "for weights" in small.err
    for command in (("run", vectors, "a"), ("bench", vectors), ("quantize", vectors, "-o", f"{vectors}-q", "--bits", "4")):
        refused = CliRun(*command)
        assert refused.code == 2 and refused.err.startswith(
            "effllm: this is an embedding model, which does not generate text (bert)\nhint: ")
    assert "/v1/rerank" in CliRun("run", ranks, "a").err


@pytest.mark.parametrize(("flags", "code", "said"), [
    (("--kv", "4bit"), 2, "--kv is for models that generate text"), (("--temp", "1"), 2, "--temp is for models that generate text"),
    (("-c", "65"), 2, "-c 65 is more than the 64 tokens"), (("--ram", "1M"), 4, "for weights")])
def test_what_cannot_be_said_of_one(folders: tuple[Path, Path], flags: tuple[str, ...], code: int, said: str) -> None:
    refused = CliRun("serve", str(folders[0]), "--port", "0", *flags)
    assert refused.code == code and said in refused.err and "hint: " in refused.err
