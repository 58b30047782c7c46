"""Several completions per request in llama.cpp's `/completion`: one or `n_cmpl` for each prompt."""


from server_process import ServerProcess
from test_serve_llama import ONCE, completed, events

PROMPTS = [ONCE, "The king said", "A fox"]
SAMPLED = {"temperature": 1.2, "seed": 7}


def told(answers: list[dict]) -> list[str]:
    assert [each["index"] for each in answers] == list(range(len(answers))) and all(each["stop"] for each in answers)
    return [each["content"] for each in answers]


def ids_of(server: ServerProcess, text: str) -> list[int]:
    return server.request("POST", "/tokenize", {"content": text}).json["tokens"]


def test_each_prompt_has_its_answer(server: ServerProcess) -> None:
    alone = [completed(server, prompt=prompt).json for prompt in PROMPTS]
    ids = [ids_of(server, prompt) for prompt in PROMPTS]
    for prompts in (PROMPTS, ids, [{"prompt_string": PROMPTS[0]}, ids[1], PROMPTS[2]], [[ids[0][0], *ids[0][1:]], *PROMPTS[1:]]):
        several = completed(server, "/completions", prompt=prompts).json
        assert told(several) == [each["content"] for each in alone] and [each["prompt"] for each in several] == PROMPTS
        assert [each["tokens_evaluated"] for each in several] == [each["tokens_evaluated"] for each in alone]
    assert completed(server, prompt=[ONCE]).json["content"] == alone[0]["content"], "one of one is not a list"
    few = completed(server, prompt=PROMPTS, response_fields=["content"]).json
    assert few == [{"content": each["content"]} for each in alone]


def test_several_answers_to_one_prompt_have_seeds_one_after_the_other(server: ServerProcess) -> None:
    alone = [completed(server, **{**SAMPLED, "seed": seed}).json for seed in (7, 8, 9)]
    for field in ("n_cmpl", "n"):
        several = completed(server, **SAMPLED, **{field: 3}).json
        assert told(several) == [each["content"] for each in alone] and len(set(told(several))) == 3
        assert [each["generation_settings"]["seed"] for each in several] == [7, 8, 9]
    both = completed(server, prompt=PROMPTS[:2], n_cmpl=2, **SAMPLED).json
    assert [each["prompt"] for each in both] == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert told(both)[:2] == told(several)[:2]
    assert len(set(told(completed(server, n_cmpl=3, temperature=1.2).json))) == 3, "no seed is said: none is the same"


def test_streams_joined_are_the_whole(server: ServerProcess) -> None:
    asked = {"prompt": PROMPTS, "n_probs": 1, "return_tokens": True}
    whole, pieces = completed(server, **asked).json, events(completed(server, **asked, stream=True))
    for index, answer in enumerate(whole):
        *own, last = [each for each in pieces if each["index"] == index]
        assert last["stop"] and not any(each["stop"] for each in own) and last["prompt"] == answer["prompt"]
        assert "".join(each["content"] for each in own) == answer["content"]
        assert [token for each in (*own, last) for token in each["tokens"]] == answer["tokens"]
        assert [row for each in own for row in each["completion_probabilities"]] == answer["completion_probabilities"]
    assert [each["index"] for each in pieces] == sorted(each["index"] for each in pieces)


def test_the_token_that_ends_an_answer_is_the_last_of_a_stream(server: ServerProcess) -> None:
    ends = {ids_of(server, mark)[0] for mark in ("<|end|>", "<|endoftext|>")}
    stop = completed(server, n_predict=40).json["content"][20:25]
    for asked in ({"grammar": 'root ::= "yes" | "no"'}, {"n_predict": 40, "stop": [stop]}):
        whole = completed(server, **asked, return_tokens=True).json
        *pieces, last = events(completed(server, **asked, return_tokens=True, stream=True))
        assert whole["stop_type"] == last["stop_type"] in ("eos", "word")
        assert [token for each in pieces for token in each["tokens"]] + last["tokens"] == whole["tokens"]
        assert last["tokens"] and (whole["stop_type"] == "word" or last["tokens"][-1] in ends)
    assert events(completed(server, stream=True, n_predict=3))[-1]["tokens"] == []


def test_what_cannot_be_answered_is_reported_first(server: ServerProcess) -> None:
    for wrong, said in (("the fox " * 3000, "and the context holds 2048"), ([4096], "is outside the vocabulary"), ("", "is empty")):
        for stream in (False, True):
            refused = completed(server, prompt=[ONCE, wrong], stream=stream)
            assert refused.status == 400 and refused.error["param"] == "prompt[1]" and said in refused.error["message"]
    for field, value in (("n_cmpl", 0), ("n_cmpl", 129), ("n", -1), ("n_cmpl", 65)):
        refused = completed(server, prompt=[ONCE, ONCE], **{field: value})
        assert refused.status == 400 and refused.error["param"] == field
        assert refused.error["message"].startswith(f"{field} has to be 1 or more")
    assert completed(server, prompt=[ONCE, [1.5]]).error["param"] == "prompt"
    assert completed(server).status == 200


def test_who_leaves_ends_all_of_them(server: ServerProcess) -> None:
    response = server.open("POST", "/completion", {"prompt": PROMPTS * 40, "stream": True, "n_predict": 400, "temperature": 0})
    assert response.read(200)
    response.connection.close()
    server.wait_for_output("the client left")
    assert completed(server).status == 200
