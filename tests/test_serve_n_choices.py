"""Several choices per request (`n`) on `effllm serve`: each equals that of a request of its own."""


import pytest
from server_process import MESSAGES, ServerProcess, serving

PROMPTS = ["Once upon a time", "The king said", "A fox"]


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest):
    with serving("--parallel", request.param) as server:
        yield server


def texts(choices: list) -> list[str]:
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def test_each_prompt_has_its_answer(server: ServerProcess) -> None:
    alone = [server.complete(prompt).json for prompt in PROMPTS]
    whole = server.complete(PROMPTS).json
    assert texts(whole["choices"]) == [texts(each["choices"])[0] for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(each["usage"][name] for each in alone)
    assert whole["timings"]["predicted_n"] == 3 * 24
    ids = [server.request("POST", "/tokenize", {"content": prompt}).json["tokens"] for prompt in PROMPTS]
    assert server.complete(ids).json["choices"] == whole["choices"] == server.complete([ids[0], *PROMPTS[1:]]).json["choices"]
    assert server.complete([PROMPTS[0], 7]).error["param"] == server.complete([PROMPTS[0], ["x"]]).error["param"] == "prompt"
    assert "129" not in server.complete(PROMPTS * 43).error["message"] and server.complete(PROMPTS * 43).error["param"] == "n"


def test_a_prompt_that_is_wrong_is_reported_before_the_first_is_answered(server: ServerProcess) -> None:
    """Whatever it is: nothing was written by then, and a stream has a status."""
    before = server.err.count("tokens out")
    wrongs = (("the fox " * 3000, "and the context holds 2048", "context_length_exceeded"), ([4096], "is outside the vocabulary", None),
              ("", "is empty", None))
    for wrong, said, code in wrongs:
        for stream in (False, True):
            refused = server.complete([*PROMPTS, wrong], stream=stream)
            assert refused.status == 400 and refused.error["param"] == "prompt[3]" and refused.error["code"] == code
            assert refused.error["message"].startswith("prompt[3]: ") and said in refused.error["message"]
    assert server.complete("the fox " * 3000).error["code"] == "context_length_exceeded"
    assert server.err.count("tokens out") == before and len(server.complete(PROMPTS).json["choices"]) == 3


@pytest.mark.parametrize("ask", [lambda server, **fields: server.chat(**fields), lambda server, **fields: server.complete(**fields)])
def test_several_of_one_prompt_have_seeds_one_after_the_other(server: ServerProcess, ask) -> None:
    sampled = {"temperature": 1.2, "max_tokens": 12}
    alone = [ask(server, seed=seed, **sampled).json for seed in (7, 8, 9)]
    whole = ask(server, seed=7, n=3, **sampled).json
    assert texts(whole["choices"]) == [texts(each["choices"])[0] for each in alone]
    assert whole["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"] and len(set(texts(whole["choices"]))) == 3
    assert whole["usage"]["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in alone)
    assert len(set(texts(ask(server, n=3, temperature=1.2).json["choices"]))) == 3, "no seed is said: none is the same"


def test_streams_joined_are_the_whole(server: ServerProcess) -> None:
    for reply, whole in ((server.complete(PROMPTS, stream=True, logprobs=1, stream_options={"include_usage": True}),
                          server.complete(PROMPTS, logprobs=1).json),
                         (server.chat(n=2, stream=True, stream_options={"include_usage": True}), server.chat(n=2).json)):
        *pieces, usage = reply.events
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        for index, choice in enumerate(whole["choices"]):
            own = [each for piece in pieces for each in piece["choices"] if each["index"] == index]
            said = [each["text"] if "text" in each else each["delta"].get("content", "") for each in own]
            assert "".join(said) == texts(whole["choices"])[index] and own[-1]["finish_reason"] == choice["finish_reason"]
            assert {each["finish_reason"] for each in own[:-1]} == {None}
            if "text" in own[0]:
                tokens = [token for each in own if each["logprobs"] for token in each["logprobs"]["tokens"]]
                assert tokens == choice["logprobs"]["tokens"]
            else:
                assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert len({(piece["id"], piece["created"]) for piece in reply.events}) == 1


def test_who_leaves_ends_all_of_them(server: ServerProcess) -> None:
    response = server.open("POST", "/v1/completions", {"prompt": PROMPTS * 40, "stream": True, "max_tokens": 400, "temperature": 0})
    assert response.read(200)
    response.connection.close()
    assert server.chat(MESSAGES, max_tokens=4).status == 200
    server.wait_for_output("the client left")
