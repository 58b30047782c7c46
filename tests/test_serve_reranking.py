"""Reranking on `effllm serve`, in the APIs of Jina, llama-server and Text Embeddings Inference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from packaged_embedder import FABLE
from reranker_models import WORDS, ranker
from server_process import MESSAGES, Reply, ServerProcess, serving
from test_serve_router import here  # noqa: F401  a fixture

from effllm.runtime.config import read_config
from effllm.runtime.tokenizer import Tokenizer

QUERY, DOCUMENTS = "Who is king?", ["The fox was made king of all beasts.", "The sea was calm.", "A boat came."]
PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    (yes,), (no,) = (tokenizer.encode(word, False) for word in WORDS)
    return ranker(tmp_path_factory.mktemp("model") / "ranks", {"true_token_id": yes, "false_token_id": no})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("-c", "512", model=str(folder)) as server:
        yield server


def rank(server: ServerProcess, path: str = PATHS[0], **fields: object) -> Reply:
    return server.request("POST", path, {"query": QUERY, "documents": DOCUMENTS, **fields})


def test_documents_come_in_order(server: ServerProcess) -> None:
    whole = rank(server, model="ranks").json
    results = whole["results"]
    assert set(whole) == {"model", "object", "results", "data", "usage"} and whole["data"] == results
    assert (whole["model"], whole["object"]) == ("ranks", "list")
    assert sorted(each["index"] for each in results) == [0, 1, 2] and all(set(each) == {"index", "relevance_score"} for each in results)
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True) and all(0 < each < 1 for each in scores) and len(set(scores)) == 3
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 60
    assert all(rank(server, path).json == whole for path in PATHS)
    assert rank(server, top_n=2).json["results"] == results[:2] and rank(server, top_n=9).json["results"] == results
    alone = [rank(server, documents=[each]).json["results"][0]["relevance_score"] for each in DOCUMENTS]
    assert alone == [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])], "whatever is ranked beside it"
    told = rank(server, documents=[{"text": each} for each in DOCUMENTS], return_documents=True).json["results"]
    assert [each.pop("document")["text"] for each in told] == [DOCUMENTS[each["index"]] for each in results] and told == results
    bare = rank(server, top_k=2, return_documents=True).json["data"]
    assert [each["document"] for each in bare] == [DOCUMENTS[each["index"]] for each in results[:2]], "as Voyage's clients take them"
    assert rank(server, instruction="Find boats.").json["results"] != results
    server.wait_for_output("POST /reranking 200 · ")
    assert "3 documents ranked" in server.err


def test_texts_as_text_embeddings_inference_has_them(server: ServerProcess) -> None:
    results = rank(server).json["results"]
    texts = server.request("POST", "/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json
    assert [(each["index"], each["score"], each["text"]) for each in texts] == [
        (each["index"], each["relevance_score"], DOCUMENTS[each["index"]]) for each in results]
    assert all(set(each) == {"index", "score"} for each in server.request("POST", "/rerank", {"query": QUERY, "texts": DOCUMENTS}).json)


@pytest.mark.parametrize(("fields", "param", "said"), [
    ({"top_k": 0}, "top_k", "1 or more"),
    ({"query": ""}, "query", "empty"), ({"query": None}, "query", ""), ({"documents": None}, "documents", "missing"),
    ({"documents": []}, "documents", "empty"), ({"documents": ["a", ""]}, "documents", "a list of non-empty strings"),
    ({"documents": ["a", 3]}, "documents", "a list of non-empty strings"),
    ({"documents": [{"image": "a"}]}, "documents", "a list of non-empty strings"),
    ({"top_n": 0}, "top_n", "1 or more"), ({"documents": ["a"] * 2049}, "documents", "at most 2048")])
def test_what_is_refused_is_named(server: ServerProcess, fields: dict, param: str, said: str) -> None:
    refused = rank(server, **fields)
    assert refused.status == 400 and refused.error["param"] == param and said in refused.error["message"]


def test_what_has_no_room_is_told_by_number(server: ServerProcess) -> None:
    refused = rank(server, documents=["a fox", "the sea was calm " * 200])
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert "the context holds 512" in refused.error["message"]
    assert rank(server).status == 200 and rank(server, model="other").status == 404 and server.request("GET", "/rerank").status == 405


def test_conversations_continue_as_they_were(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "The fox saw the king and the king saw the fox. " * 24}]
    first = server.chat([{"role": "query", "content": "a"}])
    assert first.status == 400, "a chat has no such role"
    text = server.complete(long[0]["content"], max_tokens=8).json
    rank(server)
    again = server.complete(long[0]["content"], max_tokens=8).json
    assert again["choices"] == text["choices"] and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200


def test_a_model_that_was_not_made_for_it_says_so(here: dict[str, str]) -> None:  # noqa: F811
    with serving(model=None, **here) as many:
        for path in PATHS:
            refused = rank(many, path, model="fable")
            assert refused.status == 501 and refused.error["type"] == "not_supported_error"
            assert "this model is not a reranker" in refused.error["message"]
            assert "use a reranker, such as qwen3-reranker-0.6b" in refused.error["message"]
        assert many.chat(MESSAGES, model="fable").status == 200
