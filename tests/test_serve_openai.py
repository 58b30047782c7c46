"""OpenAI's own client against `effllm serve`: it understands every response."""

from pathlib import Path

import pytest
from packaged_embedder import embedder
from server_process import MESSAGES, serving

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.fixture(scope="module")
def client():
    with serving("--api-key", "k") as server, openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def test_chats_whole_and_streamed(client) -> None:
    whole = client.chat.completions.create(model="fable", messages=MESSAGES, temperature=0, max_completion_tokens=24, seed=1, user="me")
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24 and whole.usage.prompt_tokens_details.cached_tokens >= 0
    with client.chat.completions.stream(model="fable", messages=MESSAGES, temperature=0, max_completion_tokens=24,
                                        stream_options={"include_usage": True}) as stream:
        pieces = [event for event in stream if event.type == "content.delta"]
        assert "".join(event.delta for event in pieces) == whole.choices[0].message.content
    instructions = {"role": "system", "content": "Speak of foxes, kings and the sea, and of nothing else. " * 3}
    longer = [instructions, *MESSAGES]  # more tokens than a cached prompt prefills again
    whole = client.chat.completions.create(model="fable", messages=longer, temperature=0, max_tokens=24)
    pieces = [*client.chat.completions.create(model="fable", messages=longer, temperature=0, max_tokens=24, stream=True,
                                              stream_options={"include_usage": True})]
    assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == 24 and pieces[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_objects_of_a_class(client) -> None:
    from pydantic import BaseModel

    class Fox(BaseModel):
        is_king: bool

    parsed = client.chat.completions.parse(model="fable", messages=MESSAGES, response_format=Fox, temperature=0, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Fox)


def test_texts_and_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["fable"] and client.models.retrieve("fable").owned_by == "effllm"
    whole = client.completions.create(model="fable", prompt="Once upon a time", temperature=0, max_tokens=12)
    streamed = client.completions.create(model="fable", prompt="Once upon a time", temperature=0, max_tokens=12, stream=True)
    assert "".join(each.choices[0].text for each in streamed) == whole.choices[0].text != ""


def test_how_likely_tokens_were(client) -> None:
    asked = {"model": "fable", "temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **asked).choices
    told = choice.logprobs.content
    assert "".join(each.token for each in told) == choice.message.content and len(told[0].top_logprobs) == 3
    with client.chat.completions.stream(messages=MESSAGES, max_tokens=12, **asked) as stream:
        pieces = [event for event in stream if event.type == "logprobs.content.delta"]
    assert [each.token for each in pieces[-1].snapshot] == [each.token for each in told]
    (scored,) = client.completions.create(model="fable", prompt="Once upon a time", echo=True, logprobs=2, max_tokens=0).choices
    assert scored.text == "Once upon a time" and scored.logprobs.token_logprobs[0] is None and len(scored.logprobs.tokens) == 4
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12}
    response = client.responses.create(model="fable", input="Hello", **wanted)
    (part,) = response.output[0].content
    assert "".join(each.token for each in part.logprobs) == part.text and len(part.logprobs[0].top_logprobs) == 2


def test_errors_are_of_their_classes(client) -> None:
    def ask(**fields: object) -> object:
        return client.chat.completions.create(**{"model": "fable", "messages": MESSAGES, "max_tokens": 1, **fields})

    with pytest.raises(openai.NotFoundError, match="this server serves fable"):
        ask(model="gpt-4o")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(n=0)
    assert caught.value.param == "n"
    assert [choice.index for choice in ask(n=2).choices] == [0, 1]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(messages=[{"role": "user", "content": "fox " * 3000}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_vectors(tmp_path: Path) -> None:
    """As numbers, and in base64, which the client asks for by itself."""
    folder = embedder(tmp_path / "vectors")
    with serving(model=str(folder)) as server, openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        packed, plain = (client.embeddings.create(model="vectors", input=["The fox.", "The king."], **fields).data
                         for fields in ({}, {"encoding_format": "float"}))
        for one, other in zip(packed, plain, strict=True):
            assert one.embedding == pytest.approx(other.embedding) and len(one.embedding) == 256
        assert len(client.embeddings.create(model="vectors", input="The fox.", dimensions=8).data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError, match="the context holds"):
            client.embeddings.create(model="vectors", input="fox " * 3000)


def test_models_by_name() -> None:
    with serving("--api-key", "k", model=None) as server, openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        assert "fable" in [model.id for model in client.models.list()] and client.models.retrieve("fable").owned_by == "effllm"
        asked = {"model": "fable", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
        with client.chat.completions.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == client.chat.completions.create(**asked).choices[0].message.content != ""
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(**{**asked, "model": "no-such-model"})
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked, n=0)
        assert caught.value.param == "n"
