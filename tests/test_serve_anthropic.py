"""Anthropic's own client against `effllm serve`: it understands every response."""


import pytest
from server_process import MESSAGES, serving
from test_serve_messages import TOOL

anthropic = pytest.importorskip("anthropic")
pytestmark = [pytest.mark.peer, pytest.mark.slow]
GIVEN = {"model": "fable", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client():
    with serving("--api-key", "k") as server, anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="k",
                                                                  max_retries=0) as client:
        yield client


def test_answers_whole_and_streamed(client) -> None:
    whole = client.messages.create(**GIVEN, system="Be brief.")
    assert (whole.type, whole.role, whole.stop_reason, whole.usage.output_tokens) == ("message", "assistant", "max_tokens", 24)
    (block,) = whole.content
    with client.messages.stream(**GIVEN, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == block.text != ""
        final = stream.get_final_message()
    assert final.content[0].text == block.text and final.stop_reason == "max_tokens"
    used = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (whole, final)]
    counted = client.messages.count_tokens(model="fable", messages=MESSAGES, system="Be brief.")
    assert used == [counted.input_tokens] * 2 and final.usage.output_tokens == 24 and final.usage.cache_read_input_tokens > 0
    assert client.models.list().data[0].display_name == "fable" == client.models.retrieve("fable").id
    kinds = [event.type for event in client.beta.messages.create(**GIVEN, stream=True, betas=["unknown-2026-01-01"])]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-1] == "message_stop"


def test_calls_whole_streamed_and_answered(client) -> None:
    given = {**GIVEN, "max_tokens": 160, "tools": [TOOL], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**given)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "weather" and call.input["place"]
    with client.messages.stream(**given) as stream:
        (final,) = stream.get_final_message().content
    assert final.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    told = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**GIVEN, "messages": told, "tools": [TOOL]}).usage.output_tokens > 0


def test_objects_of_a_class(client) -> None:
    from pydantic import BaseModel

    class Fox(BaseModel):
        is_king: bool

    parsed = client.messages.parse(**{**GIVEN, "max_tokens": 100}, output_format=Fox)
    assert isinstance(parsed.parsed_output, Fox)


def test_errors_are_of_their_classes(client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server serves fable"):
        client.messages.create(**{**GIVEN, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="this model does not support image input"):
        client.messages.create(**{**GIVEN, "messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": "http://a.example/b.png"}}]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**GIVEN, "messages": [{"role": "user", "content": "fox " * 3000}]}, stream=True)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**GIVEN)


def test_models_by_name() -> None:
    with serving(model=None) as server, anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="x", max_retries=0) as client:
        assert "fable" in [model.id for model in client.models.list()]
        with client.messages.stream(**GIVEN) as stream:
            text = "".join(stream.text_stream)
        assert text == client.messages.create(**GIVEN).content[0].text != ""
        with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
            client.messages.create(**{**GIVEN, "model": "no-such-model"})


def test_its_runner_of_tools_continues_by_threads(client) -> None:
    """Its second request has neither the tools nor what was said before, and one whose thread has gone sends everything again."""
    asked_for: list[str] = []

    @anthropic.beta_tool
    def weather(place: str) -> str:
        """Tells the weather.

        Args:
            place: A town.
        """
        asked_for.append(place)
        return "Rain."

    given = {**GIVEN, "max_tokens": 160, "tools": [weather], "tool_choice": {"type": "any"}}
    replies = [*client.beta.messages.tool_runner(**given, max_iterations=2)]
    assert [reply.stop_reason for reply in replies] == ["tool_use"] * 2 and len(asked_for) >= 1
    begun = client.beta.messages.create(**GIVEN, thread={"type": "create"})
    going = {**GIVEN, "messages": [{"role": "user", "content": "And then?"}]}
    more = client.beta.messages.create(**going, thread={"type": "continue", "previous_message_id": begun.id})
    assert more.usage.input_tokens + more.usage.cache_read_input_tokens > begun.usage.output_tokens + 24
    with pytest.raises(anthropic.NotFoundError) as lost:
        client.beta.messages.create(**going, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert lost.value.body["error"]["details"]["error_code"] == "thread_not_found"
