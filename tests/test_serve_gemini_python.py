"""Google's own client against `effllm serve`: it understands every response."""

from pathlib import Path

import pytest
from packaged_embedder import embedder
from scripted_model import AFTER, calls, scripted
from server_process import QUESTION, serving
from test_serve import thinking_model

genai = pytest.importorskip("google.genai")
pytestmark = [pytest.mark.peer, pytest.mark.slow]
GREEDY = {"temperature": 0, "max_output_tokens": 24}


def client_of(server, version: str | None = None, key: str = "k"):
    options = genai.types.HttpOptions(base_url=server.url.removesuffix("/v1"), api_version=version)
    return genai.Client(api_key=key, http_options=options)


@pytest.fixture(scope="module", params=["v1", "v1beta"])
def client(request):
    with serving("--api-key", "k") as server:
        yield client_of(server, request.param)


def test_answers_whole_and_streamed(client) -> None:
    told = {**GREEDY, "system_instruction": "Be brief."}
    whole = client.models.generate_content(model="fable", contents=QUESTION, config=told)
    assert whole.text and whole.candidates[0].finish_reason == "MAX_TOKENS" and whole.usage_metadata.candidates_token_count == 24
    pieces = [*client.models.generate_content_stream(model="models/fable", contents=QUESTION, config=told)]
    assert "".join(piece.text for piece in pieces) == whole.text and len(pieces) > 10
    assert pieces[-1].usage_metadata.total_token_count == whole.usage_metadata.total_token_count
    counted = client.models.count_tokens(model="fable", contents=QUESTION).total_tokens
    assert 0 < counted < whole.usage_metadata.prompt_token_count
    assert [model.name for model in client.models.list()] == ["models/fable"] and client.models.get(model="fable").input_token_limit == 2048


def test_a_chat_keeps_its_turns(client) -> None:
    chat = client.chats.create(model="fable", config=GREEDY)
    first = chat.send_message(QUESTION).text
    pieces = "".join(piece.text for piece in chat.send_message_stream("And then?"))
    history = [(content.role, content.parts[0].text) for content in chat.get_history(curated=True)]
    assert history[:3] == [("user", QUESTION), ("model", first), ("user", "And then?")] and pieces
    assert len(history) >= 4, "no turn is forgotten as broken"


def test_objects_of_a_class_words_of_an_enum_and_chances(client) -> None:
    import enum

    from pydantic import BaseModel

    class Fox(BaseModel):
        is_king: bool
        name: str | None

    answer = client.models.generate_content(model="fable", contents="Fox?", config={
        **GREEDY, "max_output_tokens": 100, "response_mime_type": "application/json", "response_schema": Fox})
    assert isinstance(answer.parsed, Fox)
    kinds = enum.Enum("Kinds", {"FOX": "fox", "KING": "king"})
    answer = client.models.generate_content(model="fable", contents="Fox?", config={
        **GREEDY, "response_mime_type": "text/x.enum", "response_schema": kinds})
    assert answer.parsed in kinds
    told = client.models.generate_content(model="fable", contents="Fox?", config={
        "candidate_count": 2, "response_logprobs": True, "logprobs": 2, "max_output_tokens": 3})
    assert [len(each.logprobs_result.chosen_candidates) for each in told.candidates] == [3, 3]


def test_functions_are_called_and_told_what_came_of_it(tmp_path: Path) -> None:
    script = {AFTER: "It rains.", "True": calls(("weather", {"place": "Oslo"}))}
    asked = []

    def weather(place: str) -> str:
        """Tells the weather of a place."""
        asked.append(place)
        return "Rain."

    with serving(model=str(scripted(tmp_path / "caller", script))) as server:
        client, config = client_of(server), {"tools": [weather]}
        assert client.models.generate_content(model="caller", contents=QUESTION, config=config).text == "It rains."
        chat = client.chats.create(model="caller", config=config)
        assert "".join(piece.text or "" for piece in chat.send_message_stream(QUESTION)) == "It rains."
    assert asked == ["Oslo", "Oslo"]


def test_thoughts_and_vectors(tmp_path: Path) -> None:
    with serving(model=str(thinking_model(tmp_path / "thinker"))) as server:
        client = client_of(server)
        answer = client.models.generate_content(model="thinker", contents=QUESTION, config={
            **GREEDY, "thinking_config": {"include_thoughts": True}})
        assert answer.candidates[0].content.parts[0].thought and answer.usage_metadata.thoughts_token_count == 24
    with serving(model=str(embedder(tmp_path / "embedder"))) as server:
        client = client_of(server)
        made = client.models.embed_content(model="embedder", contents=["fox", "king"], config={"output_dimensionality": 8})
        assert [len(each.values) for each in made.embeddings] == [8, 8]


def test_errors_are_of_their_classes(client) -> None:
    for given, status in (({"model": "gemini-pro"}, "NOT_FOUND"), ({"contents": "fox " * 3000}, "INVALID_ARGUMENT")):
        with pytest.raises(genai.errors.ClientError) as caught:
            client.models.generate_content(**{"model": "fable", "contents": QUESTION, **given})
        assert caught.value.status == status
    with pytest.raises(genai.errors.ClientError, match="maximum context length"):
        [*client.models.generate_content_stream(model="fable", contents="fox " * 3000)]


def test_models_by_name_and_a_wrong_key() -> None:
    with serving("--api-key", "k", model=None) as server:
        client = client_of(server)
        assert "models/fable" in [model.name for model in client.models.list()]
        whole = client.models.generate_content(model="fable", contents=QUESTION, config=GREEDY).text
        pieces = client.models.generate_content_stream(model="fable", contents=QUESTION, config=GREEDY)
        assert "".join(piece.text for piece in pieces) == whole
        stranger = client_of(server, key="other")
        with pytest.raises(genai.errors.ClientError) as caught:
            stranger.models.get(model="fable")
        assert caught.value.status == "UNAUTHENTICATED"
