"""Seeds in the requests of every API: OpenAI's are signed, llama.cpp's have -1 for a random one, others are refused in one line. And the
smallest values of other settings, which are greedy."""

import pytest
from server_process import MESSAGES, Reply, ServerProcess

WARM = 1.5


def openai(server: ServerProcess, seed: object) -> Reply:
    return server.chat(seed=seed, temperature=WARM, max_tokens=8)


def text(server: ServerProcess, seed: object) -> Reply:
    return server.complete(seed=seed, temperature=WARM, max_tokens=8)


def llama(server: ServerProcess, seed: object) -> Reply:
    return server.request("POST", "/completion", {"prompt": "Once", "n_predict": 8, "temperature": WARM, "seed": seed})


def generate(server: ServerProcess, seed: object) -> Reply:
    return server.request("POST", "/api/generate", {"model": "fable", "prompt": "Once", "raw": True, "stream": False, "options": {
        "num_predict": 8, "temperature": WARM, "seed": seed}})


def ollama(server: ServerProcess, seed: object) -> Reply:
    return server.request("POST", "/api/chat", {"model": "fable", "messages": MESSAGES, "stream": False, "options": {
        "num_predict": 8, "temperature": WARM, "seed": seed}})


def gemini(server: ServerProcess, seed: object) -> Reply:
    return server.request("POST", "/v1beta/models/fable:generateContent", {"contents": "Once", "generationConfig": {
        "maxOutputTokens": 8, "temperature": WARM, "seed": seed}})


def answer_of(reply: Reply) -> object:
    body = reply.json
    return body.get("choices") or body.get("content") or body.get("response") or body.get("message") or body["candidates"]


APIS = [openai, text, llama, generate, ollama, gemini]


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize("seed", [-1, -2, 0, 2**32 - 1, 2**63, 2**64 - 1, -2**63, 7.0])
def test_a_seed_in_range_is_taken(server: ServerProcess, ask, seed: object) -> None:
    first, second = ask(server, seed), ask(server, seed)
    assert first.status == second.status == 200
    assert answer_of(first) == answer_of(second) or seed == -1


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize("seed", [2**64, -2**63 - 1, -2**64, 1e30, -1e300, 10**500])
def test_a_seed_out_of_range_is_refused_in_one_line(server: ServerProcess, ask, seed: object) -> None:
    refused = ask(server, seed)
    error = refused.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert refused.status == 400 and "seed has to be between -2**63 and 2**64 - 1" in message and len(message) < 150 and "\n" not in message


def test_the_seeds_of_several_answers_wrap(server: ServerProcess) -> None:
    whole = server.complete(n=2, seed=2**64 - 1, temperature=WARM).json["choices"]
    alone = [server.complete(seed=seed, temperature=WARM).json["choices"][0]["text"] for seed in (2**64 - 1, 0)]
    assert [each["text"] for each in whole] == alone


def test_minus_one_is_another_one_each_time(server: ServerProcess) -> None:
    seeds = {llama(server, -1).json["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize("fields", [{"top_p": 0, "temperature": WARM}, {"top_p": 0.0, "temperature": WARM}, {"temperature": 1e-8},
                                    {"temperature": 1e-300}], ids=str)
def test_the_least_of_openais_ranges_is_greedy(server: ServerProcess, fields: dict) -> None:
    greedy = server.chat(temperature=0).json["choices"]
    assert server.chat(**fields, seed=3).json["choices"] == greedy != server.chat(temperature=WARM, seed=3).json["choices"]
    refused = server.chat(top_p=-1e-9)
    assert refused.status == 400 and refused.error["param"] == "top_p"
