"""`effllm serve MODEL --lora ADAPTER`: requests choose adapter scales, by number as in llama-server or by name as in vLLM. A real process
with the packaged model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaged_embedder import embedder
from server_process import MESSAGES, ServerProcess, serving
from test_adapters import of_all_matrices

import effllm

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SEA, FOX = [{"id": 0, "scale": 1}], [{"id": 1, "scale": 0.5}, {"id": 0, "scale": 0.0}]
BOTH = [{"id": 0, "scale": 0.4}, {"id": 1, "scale": 0.5}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters of the packaged model, strong enough to change every answer."""
    folder = tmp_path_factory.mktemp("adapters")
    return [str(of_all_matrices(FABLE, folder / name, seed, 0.12)) for name, seed in (("sea", 1), ("fox", 50))]


@pytest.fixture(scope="module")
def server(pair: list[str]) -> Iterator[ServerProcess]:
    """The first is for those who ask for it, the second has half for all; two answers at once."""
    with serving("--lora", f"{pair[0]}:0", "--lora", f"{pair[1]}:0.5", "--parallel", "2") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


def text(server: ServerProcess, **fields: object) -> str:
    reply = server.complete(**fields)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


@pytest.fixture(scope="module")
def texts(server: ServerProcess) -> dict[str, str]:
    """What is written with each choice."""
    found = {"none": text(server, lora=[]), "sea": text(server, lora=SEA), "fox": text(server, lora=FOX), "both": text(server, lora=BOTH)}
    assert len({*found.values()}) == 4
    return found


def test_a_request_has_what_it_says_and_no_more(server: ServerProcess, plain: ServerProcess, texts: dict[str, str],
                                                pair: list[str]) -> None:
    assert texts["none"] == text(plain) and texts["fox"] == text(server)
    with serving("--lora", pair[0]) as alone:
        assert text(alone) == texts["sea"] != text(alone, lora=[])
    said = server.request("POST", "/completion", {"prompt": "Once upon a time", "temperature": 0, "n_predict": 24, "lora": SEA}).json
    assert said["content"] == texts["sea"]
    assert said["generation_settings"]["lora"] == [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.0}]
    chats = [said_by(server.chat(lora=lora).json) for lora in ([], SEA, FOX)]
    assert len({*chats}) == 3 and chats[0] == said_by(plain.chat().json)


def test_answers_at_once_have_each_its_own(server: ServerProcess, texts: dict[str, str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            made = pool.map(lambda lora: text(server, lora=lora), ([], SEA, FOX, BOTH))
            assert [*made] == [*texts.values()]


def test_adapters_are_models_by_their_names(server: ServerProcess, texts: dict[str, str]) -> None:
    """In OpenAI's, Anthropic's and Ollama's API; each as it was at the start, one that was nothing then whole."""
    base, *cards = server.request("GET", "/v1/models").json["data"]
    assert base["id"] == "fable" and "parent" not in base
    assert [(card["id"], card["parent"]) for card in cards] == [("sea", "fable"), ("fox", "fable")]
    assert server.request("GET", "/v1/models/sea").json == cards[0] and server.request("GET", "/v1/models/boat").status == 404
    for name in ("sea", "fox"):
        reply = server.complete(model=name)
        assert (reply.json["model"], reply.json["choices"][0]["text"]) == (name, texts[name])
    assert text(server, model="fable") == texts["fox"]
    said, chat = (said_by(server.chat(**asked).json) for asked in ({"lora": SEA}, {"model": "sea"}))
    message, response = server.message(model="sea").json, server.respond(model="sea").json
    ollama = server.request("POST", "/api/chat", {"model": "sea:latest", "messages": MESSAGES, "stream": False,
                                                  "options": {"temperature": 0, "num_predict": 24}}).json
    assert chat == said == message["content"][0]["text"] == response["output"][-1]["content"][0]["text"] == ollama["message"]["content"]
    assert server.chat(model="sea").json["model"] == message["model"] == response["model"] == "sea"


def said_by(chat: dict) -> str:
    return chat["choices"][0]["message"]["content"]


def test_what_is_usual_is_reported_and_changed(server: ServerProcess, texts: dict[str, str]) -> None:
    def listed() -> list[tuple[int, str, float]]:
        return [(each["id"], each["path"], each["scale"]) for each in server.request("GET", "/lora-adapters").json]

    before = listed()
    assert before == [(0, "sea", 0), (1, "fox", 0.5)]
    try:
        for asked, name, scales in ((SEA, "sea", (1, 0)), (BOTH, "both", (0.4, 0.5)), ([], "none", (0, 0))):
            reply = server.request("POST", "/lora-adapters", asked)
            assert (reply.status, reply.json) == (200, {"success": True})
            assert text(server) == texts[name] and tuple(scale for *_, scale in listed()) == scales
            assert text(server, model="fox") == texts["fox"]  # whatever is usual now
        settings = server.request("GET", "/props").json["default_generation_settings"]["params"]
        assert settings["lora"] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]
    finally:
        server.request("POST", "/lora-adapters", [{"id": number, "scale": scale} for number, _, scale in before])
    assert listed() == before


def test_what_was_read_serves_the_same_choice_alone(server: ServerProcess) -> None:
    """The prompt of one is not read for the other from what is held."""
    prompt, cached = "The fox asked the king for bread. " * 20, []
    for lora in (SEA, SEA, [], SEA):
        cached.append(server.complete(prompt, lora=lora).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 64)
    assert cached == [False, True, False, True]


@pytest.mark.parametrize(("asked", "said"), [
    ({"lora": [{"id": 2, "scale": 1}]}, "lora: there is no adapter 2: there are 2, from 0 on"),
    ({"lora": [{"id": -1, "scale": 1}]}, "there is no adapter -1"),
    ({"lora": [{"id": 0}]}, "lora[0].scale: field required"), ({"lora": [{"id": 0, "scale": "1"}]}, "lora[0].scale: "),
    ({"lora": [{"id": 0, "scale": 1e300}]}, "lora: 1e+300 is not a valid adapter scale"), ({"lora": "sea"}, "lora: "),
    ({"lora": SEA, "model": "fox"}, "lora and model 'fox' both select an adapter")])
def test_what_means_nothing_is_refused_by_name(server: ServerProcess, asked: dict, said: str) -> None:
    reply = server.complete(**asked)
    assert reply.status == 400 and said in reply.error["message"] and reply.error["param"].startswith("lora")


def test_scales_that_mean_nothing_change_nothing(server: ServerProcess) -> None:
    before = server.request("GET", "/lora-adapters").json
    for body in ([{"id": 5, "scale": 1}], {"id": 0, "scale": 1}, [{"id": 0, "scale": True}], b"[", None):
        reply = server.request("POST", "/lora-adapters", body)
        assert reply.status == 400 and reply.error["message"]
    assert server.request("GET", "/lora-adapters").json == before


def test_a_server_without_any_says_so(plain: ServerProcess) -> None:
    reply = plain.complete(lora=SEA)
    assert reply.status == 400 and "this server has none (effllm serve MODEL --lora ADAPTER)" in reply.error["message"]
    assert plain.complete(lora=[]).status == 200
    assert plain.request("GET", "/lora-adapters").json == [] and plain.request("POST", "/lora-adapters", []).json == {"success": True}


def test_flags_of_other_servers_are_told_what_does_it_here(user) -> None:
    for flag, said in (("--lora-init-without-apply", "--lora ADAPTER:0"), ("--lora-modules", "by the name of its folder")):
        told = user.run("serve", "fable", flag, "x")
        assert told.code == 2 and said in told.err


def test_vectors_are_of_the_adapter_that_is_named(pair: list[str], tmp_path: Path) -> None:
    """Of a model that was made for embeddings; what was usual before is again."""
    model = embedder(tmp_path / "vectors")
    with serving("-c", "512", "--lora", f"{pair[0]}:0", model=str(model)) as server:

        def vector(name: str) -> list[float]:
            reply = server.request("POST", "/v1/embeddings", {"input": "the sea", "model": name})
            assert reply.status == 200 and reply.json["model"] == name
            return reply.json["data"][0]["embedding"]

        first, named, again = map(vector, ("vectors", "sea", "vectors"))
        assert first == again != named == vector("sea")
        refused = server.request("POST", "/v1/embeddings", {"input": "the sea", "lora": SEA})
        assert refused.status == 400 and "name the adapter as model instead" in refused.error["message"]
