"""Google's Gemini API of `effllm serve`: over HTTP with the real model."""

import json
from pathlib import Path

import pytest
from packaged_embedder import embedder
from scripted_model import AFTER, calls, scripted
from server_process import QUESTION, Reply, ServerProcess, serving
from test_serve import thinking_model

from effllm.cli.server.gemini_requests import GenerateContentRequest
from effllm.cli.server.openai_requests import parse

CONTENTS = [{"role": "user", "parts": [{"text": QUESTION}]}]
PLACES = {"type": "OBJECT", "properties": {"place": {"type": "STRING", "enum": ["Oslo", "Bergen"]}}, "required": ["place"]}
TOOLS = [{"functionDeclarations": [{"name": "weather", "description": "Tells it.", "parameters": PLACES}]}]
ANY = {"functionCallingConfig": {"mode": "ANY"}}


def generate(server: ServerProcess, contents: object = CONTENTS, path: str = "/v1beta/models/fable:generateContent", most: int = 24,
             config: dict | None = None, **fields: object) -> Reply:
    settings = {"temperature": 0, "maxOutputTokens": most, **(config or {})}
    return server.request("POST", path, {"contents": contents, "generationConfig": settings, **fields})


def streamed(server: ServerProcess, query: str = "?alt=sse", **fields: object) -> Reply:
    return generate(server, path=f"/v1beta/models/fable:streamGenerateContent{query}", **fields)


def events_of(reply: Reply) -> list[dict]:
    blocks = [block for block in reply.body.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def text_of(*answers: dict, index: int = 0) -> str:
    return "".join(part.get("text", "") for each in answers for candidate in each["candidates"] if candidate["index"] == index
                   for part in candidate["content"]["parts"])


def error_of(reply: Reply) -> dict:
    """Google's object for errors, whose keys are these."""
    error = reply.json["error"]
    assert set(reply.json) == {"error"} and {"code", "message", "status"} <= set(error) <= {"code", "message", "status", "details"}
    assert error["code"] == reply.status and error["message"]
    return error


@pytest.mark.parametrize("contents", [QUESTION, [QUESTION], {"parts": QUESTION}, [{"role": "user", "parts": [QUESTION]}],
                                      {"parts": {"text": QUESTION}}], ids=str)
def test_a_text_stands_for_contents_and_for_parts(server: ServerProcess, contents: object) -> None:
    whole = generate(server, systemInstruction={"parts": [{"text": "Be brief."}]}).json
    short = generate(server, contents, systemInstruction="Be brief.", config={"stopSequences": "zzz"})
    assert short.status == 200 and text_of(short.json) == text_of(whole)
    assert short.json["usageMetadata"]["promptTokenCount"] == whole["usageMetadata"]["promptTokenCount"]
    path = "/v1beta/models/fable:countTokens"
    counted, expected = (server.request("POST", path, {"contents": each}).json for each in (contents, CONTENTS))
    assert counted["totalTokens"] == expected["totalTokens"]


def test_texts_in_a_row_are_parts_of_one_content() -> None:
    payload = parse(GenerateContentRequest, json.dumps({"contents": ["a", "b", {"role": "model", "parts": "c"}, "d"]}).encode())
    assert [(each.role, [part.text for part in each.parts]) for each in payload.contents] == [
        (None, ["a", "b"]), ("model", ["c"]), (None, ["d"])]


def test_an_answer_is_that_of_chat_completions(server: ServerProcess) -> None:
    said = server.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]).json
    text = said["choices"][0]["message"]["content"]
    by_buffers = server.request("POST", "/v1beta/models/fable:generateContent", {
        "contents": {"parts": {"text": QUESTION}}, "system_instruction": {"parts": {"text": "Be brief."}}, "safety_settings": [],
        "generation_config": {"temperature": 0, "max_output_tokens": 24}})
    for reply in (generate(server, systemInstruction={"role": "user", "parts": [{"text": "Be brief."}]}), by_buffers):
        whole = reply.json
        (candidate,) = whole["candidates"]
        assert candidate == {"content": {"parts": [{"text": text}], "role": "model"}, "index": 0, "finishReason": "MAX_TOKENS"}
        assert whole["modelVersion"] == "fable" and whole["responseId"] and reply.status == 200
        usage, prompt = whole["usageMetadata"], said["usage"]["prompt_tokens"]
        assert (usage["promptTokenCount"], usage["candidatesTokenCount"], usage["totalTokenCount"]) == (prompt, 24, prompt + 24)
    counted = server.request("POST", "/v1beta/models/fable:countTokens", {"generateContentRequest": {
        "model": "models/fable", "contents": CONTENTS, "systemInstruction": {"parts": [{"text": "Be brief."}]}}}).json
    alone = server.request("POST", "/v1beta/models/fable:countTokens", {"contents": CONTENTS}).json
    assert counted == {"totalTokens": prompt} and 0 < alone["totalTokens"] < prompt


def test_a_stream_builds_the_whole_as_events_and_as_a_list(server: ServerProcess) -> None:
    text = text_of(generate(server).json)
    reply = streamed(server)
    listed = streamed(server, query="")
    assert reply.headers["content-type"].startswith("text/event-stream") and listed.headers["content-type"] == "application/json"
    for pieces in (events_of(reply), listed.json):
        assert text_of(*pieces) == text and len(pieces) > 10
        assert [each["candidates"][0].get("finishReason") for each in pieces] == [None] * (len(pieces) - 1) + ["MAX_TOKENS"]
        assert pieces[-1]["usageMetadata"]["candidatesTokenCount"] == 24 and len({each["responseId"] for each in pieces}) == 1


def test_a_list_is_told_apart_before_it_is_whole(server: ServerProcess) -> None:
    """As Continue reads it, piece by piece as they come: what begins with a comma goes on, and a line that begins with one parts two."""
    response = server.open("POST", "/v1beta/models/fable:streamGenerateContent?key=none", {
        "contents": CONTENTS, "generationConfig": {"temperature": 0, "maxOutputTokens": 24}})
    buffer, read = "", []
    while piece := response.read1(200).decode():
        buffer = (buffer + piece).removeprefix("[").removesuffix("]").removeprefix(",")
        parts, is_whole = buffer.split("\n,"), True
        for part in parts:
            try:
                read.append(json.loads(part))
            except ValueError:
                is_whole = False
        buffer = "" if is_whole else parts[-1]
    response.connection.close()
    assert text_of(*read) == text_of(generate(server).json) and len(read) > 10 and not buffer.strip()


def test_several_answers_to_one_prompt(server: ServerProcess) -> None:
    warm = {"candidateCount": 2, "temperature": 1, "seed": 5}
    whole = generate(server, config=warm, most=8).json
    first, second = (candidate["content"]["parts"] for candidate in whole["candidates"])
    assert first != second and whole["usageMetadata"]["candidatesTokenCount"] == 16
    assert whole["usageMetadata"]["totalTokenCount"] == whole["usageMetadata"]["promptTokenCount"] + 16
    pieces = events_of(streamed(server, config=warm, most=8))
    assert [text_of(*pieces, index=index) for index in (0, 1)] == [first[0]["text"], second[0]["text"]]
    assert sum("finishReason" in candidate for each in pieces for candidate in each["candidates"]) == 2


def test_how_likely_tokens_were(server: ServerProcess) -> None:
    told = generate(server, config={"responseLogprobs": True, "logprobs": 2}, most=6).json["candidates"][0]
    chosen, top = told["logprobsResult"]["chosenCandidates"], told["logprobsResult"]["topCandidates"]
    assert "".join(each["token"] for each in chosen) == told["content"]["parts"][0]["text"] and len(top) == 6
    assert [each["logProbability"] for each in chosen] == [each["candidates"][0]["logProbability"] for each in top], "greedy"
    assert told["avgLogprobs"] == pytest.approx(sum(each["logProbability"] for each in chosen) / 6)
    pieces = events_of(streamed(server, config={"responseLogprobs": True}, most=6))
    assert [one["tokenId"] for each in pieces for one in each["candidates"][0].get("logprobsResult", {}).get("chosenCandidates", ())] == [
        each["tokenId"] for each in chosen]


def test_answers_of_a_form(server: ServerProcess) -> None:
    schema = {"type": "OBJECT", "properties": {"is_king": {"type": "BOOLEAN"}, "name": {"type": "STRING", "maxLength": "5"}},
              "required": ["is_king", "name"], "propertyOrdering": ["name", "is_king"]}
    made = json.loads(text_of(generate(server, config={"responseMimeType": "application/json", "responseSchema": schema}, most=100).json))
    assert list(made) == ["name", "is_king"] and isinstance(made["is_king"], bool) and len(made["name"]) <= 5
    plain = {"type": "object", "properties": {"king": {"type": "boolean"}}, "required": ["king"]}
    made = text_of(generate(server, config={"responseMimeType": "application/json", "responseJsonSchema": plain}, most=100).json)
    assert isinstance(json.loads(made)["king"], bool)
    enum = {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["fox", "king"]}}
    assert text_of(generate(server, config=enum).json) in ("fox", "king")


def test_a_call_is_made_and_its_result_is_read(tmp_path: Path) -> None:
    """Without names for calls, as programs of it send them."""
    script = {AFTER: "It rains.", "True": calls(("weather", {"place": "Oslo"}), ("weather", {"place": "Bergen"}))}
    with serving(model=str(scripted(tmp_path / "caller", script))) as server:
        path = "/v1beta/models/caller:generateContent"
        content = generate(server, path=path, most=400, tools=TOOLS).json["candidates"][0]
        made = [part["functionCall"] for part in content["content"]["parts"]]
        assert [(each["name"], each["args"]) for each in made] == [("weather", {"place": "Oslo"}), ("weather", {"place": "Bergen"})]
        assert content["finishReason"] == "STOP" and made[0]["id"] != made[1]["id"]
        unnamed = [{"functionCall": {"name": each["name"], "args": each["args"]}} for each in made]
        results = [{"functionResponse": {"name": "weather", "response": {"output": said}}} for said in ("Rain.", "Sun.")]
        told = [*CONTENTS, {"role": "model", "parts": unnamed}, {"role": "function", "parts": results}]
        assert text_of(generate(server, told, path=path, tools=TOOLS).json) == "It rains."


def test_a_call_may_be_demanded_or_forbidden(server: ServerProcess) -> None:
    only = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["tides"]}}
    tools = [{"functionDeclarations": [*TOOLS[0]["functionDeclarations"], {"name": "tides", "parametersJsonSchema": {
        "type": "object", "properties": {"hour": {"type": "integer", "maximum": 9}}, "required": ["hour"]}}]}]
    (part,) = generate(server, most=160, tools=tools, toolConfig=only).json["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["name"] == "tides" and isinstance(part["functionCall"]["args"]["hour"], int)
    (part,) = generate(server, most=160, tools=TOOLS, toolConfig=ANY).json["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["args"]["place"] in ("Oslo", "Bergen")
    none = generate(server, tools=TOOLS, toolConfig={"functionCallingConfig": {"mode": "NONE"}}).json
    assert text_of(none) == text_of(generate(server).json)


def test_reasoning_is_counted_and_told_where_it_is_asked_for(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        path = "/v1beta/models/thinker:generateContent"
        whole = generate(server, path=path).json
        used = whole["usageMetadata"]
        assert text_of(whole) == "" and (used["thoughtsTokenCount"], used["candidatesTokenCount"]) == (24, 0)
        told = generate(server, path=path, config={"thinkingConfig": {"includeThoughts": True}}).json["candidates"][0]["content"]["parts"]
        assert [part["thought"] for part in told] == [True] and told[0]["text"]
        none = generate(server, path=path, config={"thinkingConfig": {"thinkingBudget": 0}}).json
        assert text_of(none) and "thoughtsTokenCount" not in none["usageMetadata"]
        card = server.request("GET", "/v1beta/models/thinker").json
        assert card["thinking"] is True and card["supportedGenerationMethods"] == ["generateContent", "countTokens"]


@pytest.mark.parametrize(("body", "field", "said"), [
    ({}, "contents", "field required"), ({"contents": []}, "contents", "is empty"),
    ({"contents": [{"role": "assistant", "parts": [{"text": "a"}]}]}, "contents[0].role", "user or model"),
    ({"contents": [{"parts": [{"videoMetadata": {}}]}]}, "contents[0].parts[0]", "no text"),
    ({"contents": [{"parts": [{"text": 1}]}]}, "contents[0].parts[0].text", "string"),
    ({"contents": CONTENTS, "cachedContent": "cachedContents/a"}, "cachedContent", "not supported"),
    ({"contents": CONTENTS, "tools": [{"googleSearch": {}}]}, "tools[0].googleSearch", "functionDeclarations"),
    ({"contents": CONTENTS, "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig.mode", "AUTO"),
    ({"contents": CONTENTS, "toolConfig": ANY}, "toolConfig.functionCallingConfig", "no tools"),
    ({"contents": CONTENTS, "generationConfig": {"topP": 7}}, "generationConfig.topP", "topP"),
    ({"contents": CONTENTS, "generationConfig": {"maxOutputTokens": -9}}, "generationConfig.maxOutputTokens", "-9"),
    ({"contents": CONTENTS, "generationConfig": {"candidateCount": 999}}, "generationConfig.candidateCount", "128"),
    ({"contents": CONTENTS, "generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities", "not supported"),
    ({"contents": CONTENTS, "generationConfig": {"responseMimeType": "text/csv"}}, "generationConfig.responseMimeType", "text/csv"),
    ({"contents": CONTENTS, "generationConfig": {"thinkingConfig": {"thinkingLevel": "SOME"}}},
     "generationConfig.thinkingConfig.thinkingLevel", "some"),
    ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]}]}, "contents[0].parts[0]",
     "does not support image input"),
    ({"contents": [{"parts": [{"fileData": {"fileUri": "https://a.example/b.pdf"}}]}]}, "contents[0].parts[0]", "not fetched")])
def test_what_is_refused_is_named(server: ServerProcess, body: dict, field: str, said: str) -> None:
    reply = server.request("POST", "/v1beta/models/fable:generateContent", body)
    error = error_of(reply)
    assert reply.status == 400 and error["status"] == "INVALID_ARGUMENT" and said in error["message"]
    assert error["details"][0]["fieldViolations"][0]["field"] == field


def test_errors_have_googles_words_at_its_paths_alone(server: ServerProcess) -> None:
    lost = generate(server, path="/v1beta/models/gemini-pro:generateContent")
    assert lost.status == 404 and error_of(lost)["status"] == "NOT_FOUND" and "serves fable" in error_of(lost)["message"]
    for reply in (server.request("GET", "/v1beta/models/nobody"), server.request("POST", "/v1beta/cachedContents", {})):
        assert error_of(reply)["code"] == 404
    assert server.request("POST", "/v1/nothing", {}).error["code"] == "unknown_url"
    long = generate(server, [{"parts": [{"text": "fox " * 3000}]}])
    assert "maximum context length is 2048" in error_of(long)["message"] and long.status == 400
    late = streamed(server, contents=[{"parts": [{"text": "fox " * 3000}]}])
    assert late.status == 400 and error_of(late)["status"] == "INVALID_ARGUMENT", "a stream that does not begin has a status"


def test_models_at_each_version_and_beside_openais(server: ServerProcess) -> None:
    """google-genai 3 asks at /v1, where OpenAI's models are as well: it is known by its headers, or by what it asks of a model."""
    listed = server.request("GET", "/v1beta/models?pageSize=50").json
    (card,) = listed["models"]
    assert card["name"] == "models/fable" and card["inputTokenLimit"] == 2048
    for version in ("v1alpha", "v1"):
        assert server.request("GET", f"/{version}/models", x_goog_api_key="x").json == listed
    assert server.request("GET", "/v1/models/fable", x_goog_api_client="google-genai-sdk/3.6.1").json == card
    assert server.request("GET", "/v1/models").json["data"][0]["id"] == "fable" == server.request("GET", "/v1/models/fable").json["id"]
    assert text_of(generate(server, path="/v1/models/fable:generateContent").json) == text_of(generate(server).json)
    assert error_of(generate(server, path="/v1/models/other:generateContent"))["status"] == "NOT_FOUND"


def test_the_key_may_stand_where_googles_programs_have_it() -> None:
    with serving("--api-key", "k&y") as server:
        path = "/v1beta/models"
        assert server.request("GET", path, x_goog_api_key="k&y").status == 200 == server.request("GET", f"{path}?key=k%26y").status
        for query, key in (("", ""), ("?key=other", ""), ("", "é"), ("?key=%C3%A9", "k")):
            assert error_of(server.request("GET", path + query, x_goog_api_key=key))["status"] == "UNAUTHENTICATED"
        assert server.request("GET", "/v1/chat/completions?key=k%26y").status == 401, "addresses of others are kept in logs"
        assert "k%26y" not in server.err and "k&y" not in server.err


def test_vectors(tmp_path: Path) -> None:
    folder = embedder(tmp_path / "embedder")
    prompts = {"prompts": {"query": "Question: ", "document": "Text: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with serving(model=str(folder)) as server:
        path = "/v1beta/models/embedder:"

        def vectors(*texts: str, **fields: object) -> Reply:
            return server.request("POST", f"{path}batchEmbedContents", {"requests": [
                {"model": "models/embedder", "content": {"parts": [{"text": text}]}, **fields} for text in texts]})

        plain = server.request("POST", "/v1/embeddings", {"input": ["fox", "Question: fox", "Text: fox"]}).json["data"]
        expected = [each["embedding"] for each in plain]
        for task, number in ((None, 0), ("RETRIEVAL_QUERY", 1), ("RETRIEVAL_DOCUMENT", 2), ("CLUSTERING", 0)):
            made = vectors("fox", "fox", taskType=task).json["embeddings"]
            assert made[0]["values"] == made[1]["values"] == pytest.approx(expected[number], abs=1e-6)
        one = server.request("POST", f"{path}embedContent", {"content": {"parts": [{"text": "fox"}]}, "outputDimensionality": 8}).json
        assert len(one["embedding"]["values"]) == 8
        assert "requests[1].content" in error_of(server.request("POST", f"{path}batchEmbedContents", {"requests": [
            {"content": {"parts": [{"text": "a"}]}}, {"content": {"parts": [{"inlineData": {"data": "aGk="}}]}}]}))["message"]
        mixed = [{"content": {"parts": [{"text": "a"}]}, "taskType": task} for task in ("RETRIEVAL_QUERY", "CLUSTERING")]
        assert "taskType" in error_of(server.request("POST", f"{path}batchEmbedContents", {"requests": mixed}))["message"]
        assert error_of(vectors())["status"] == error_of(vectors("fox", outputDimensionality=10**6))["status"] == "INVALID_ARGUMENT"
        assert "embedContent" in server.request("GET", "/v1beta/models/embedder").json["supportedGenerationMethods"]


def test_models_by_name() -> None:
    with serving("--api-key", "k", model=None) as server:
        names = [each["name"] for each in server.request("GET", "/v1beta/models?key=k").json["models"]]
        assert "models/fable" in names
        whole = generate(server, path="/v1/models/fable:generateContent?key=k").json
        assert whole["modelVersion"] == "fable" and text_of(whole)
        for query in ("alt=sse&key=k", "key=k"):
            reply = streamed(server, query=f"?{query}")
            pieces = events_of(reply) if "alt" in query else reply.json
            assert text_of(*pieces) == text_of(whole) and pieces[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"
        assert server.request("POST", "/v1beta/models/fable:countTokens?key=k", {"contents": CONTENTS}).json["totalTokens"] > 0
        lost = generate(server, path="/v1beta/models/nobody:streamGenerateContent?alt=sse&key=k")
        assert lost.status == 404 and error_of(lost)["status"] == "NOT_FOUND"
