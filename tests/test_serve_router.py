"""`effllm serve` without MODEL: a real router process with workers, one per model: fable, and a copy with another template."""

import contextlib
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server_process import MESSAGES, Reply, ServerProcess, serving, wait_until

import effllm
from effllm.cli.app import main
from effllm.cli.environment import Environment

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": -1}
ON_AND_ON = ("-t", "1", "--spec", "off", "--overflow", "shift")  # an endless answer is one, and leaves the others a core


def twin_of_fable(folder: Path) -> Path:
    """The same weights, whose template says more."""
    fable = Path(effllm.__path__[0]) / "models" / "fable"
    folder.mkdir()
    for path in fable.iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((fable / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "Long, long ago. " + settings["chat_template"]}))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a user who has an alias for it."""
    place = tmp_path_factory.mktemp("many")
    variables = {name: str(place / name) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME")}
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {**os.environ, **variables})
    assert main(["alias", "twin", str(twin_of_fable(place / "twin-folder"))], environment) == 0
    return variables


@pytest.fixture(scope="module")
def server(here: dict[str, str]) -> Iterator[ServerProcess]:
    with serving(*ON_AND_ON, "-c", "4096", model=None, **here) as server:
        yield server


def children(server: ServerProcess) -> dict[str, psutil.Process]:
    """The processes of models, by name."""
    found = {}
    for worker in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends at this moment
            found |= {word.removeprefix("--name="): worker for word in worker.cmdline() if word.startswith("--name=")}
    return found


def states(server: ServerProcess) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.request("GET", "/v1/models").json["data"]}


def endless(server: ServerProcess, model: str, **headers: str):
    """A stream that goes on until it is left, after its first piece; before that a comment may have come while it was loaded."""
    response = server.open("POST", TEXT, {**ENDLESS, "model": model}, **headers)
    next_piece(response)
    return response


def next_piece(response) -> None:
    while not (line := response.readline()).startswith(b"data: "):
        assert not line.strip() or line.startswith(b": ")


def demand_end(server: ServerProcess, number: signal.Signals) -> None:
    """A signal ends the server with a model that answers and one that is being loaded: no process of either is left."""
    stream = endless(server, "fable")
    (other,) = {*server.said["models"]} - {"fable"}
    loading = server.open_later("POST", TEXT, {"prompt": "Once", "model": other})
    wait_until(lambda: len(children(server)) == 2)
    left, began = [*children(server).values()], time.monotonic()
    server.process.send_signal(number)
    if number == signal.SIGINT:
        *_, last, done = stream.read().decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_closing" and done == "data: [DONE]"
        assert loading.getresponse().status == 503 and server.process.wait(5) == 0
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in left), 5)
    assert time.monotonic() - began < 5 and "Traceback" not in server.err


def prompt_tokens(reply: Reply) -> int:
    return reply.json["usage"]["prompt_tokens"]


def test_all_models_are_listed_and_none_is_loaded(server: ServerProcess) -> None:
    assert server.said == {"url": f"http://127.0.0.1:{server.port}/v1", "models": ["fable", "twin"]}
    assert "serves fable, twin, each loaded when a request names it; Ctrl-C stops it\n" in server.err
    listed = server.request("GET", "/v1/models").json
    assert (listed["object"], listed["first_id"], listed["last_id"]) == ("list", "fable", "twin")
    for card in listed["data"]:
        assert card["max_model_len"] == 2048 and card["object"] == "model" and card["writes"] is True
        assert server.request("GET", f"/v1/models/{card['id']}").json == card
    assert set(states(server).values()) == {"unloaded"} and not children(server)
    assert server.request("GET", "/health").json == {"status": "ok", "waiting": 0}
    reply = server.chat()
    assert reply.status == 400 and reply.error["param"] == "model" and "none is loaded" in reply.error["message"]


def test_a_request_loads_its_model(server: ServerProcess) -> None:
    fable = server.chat(model="fable")
    assert fable.status == 200 and fable.json["model"] == "fable" and states(server) == {"fable": "loaded", "twin": "unloaded"}
    assert server.chat().json["choices"] == fable.json["choices"], "of one that is loaded nobody has to say which"
    twin = server.chat(model="twin")
    assert twin.json["model"] == "twin" and prompt_tokens(twin) > prompt_tokens(fable) and set(states(server).values()) == {"loaded"}
    assert set(children(server)) == {"fable", "twin"}
    reply = server.chat()
    assert reply.status == 400 and "2 are loaded" in reply.error["message"]
    assert server.err.count("fable is loaded: context 2048 tokens, ") == 1
    assert "fable: a context of 4096 is more than the 2048 positions that the model was trained for: ignored" in server.err
    server.wait_for_output("fable: POST /v1/chat/completions 200 · ")


def test_names_that_lead_nowhere(server: ServerProcess, here: dict[str, str]) -> None:
    folder = Path(here["XDG_CONFIG_HOME"]).parent / "twin-folder"
    known = set(children(server))
    for name, said in (("no-such-model", "there is no model 'no-such-model'"), ("qwen3-4b", "effllm pull qwen3-4b"),
                       ("/etc", "there is no model '/etc'"), (str(folder.parent), "there is no model"), ("gpt-4o", "fable, twin")):
        for path, asked in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "Once"})):
            reply = server.request("POST", path, {**asked, "model": name})
            assert reply.status == 404 and (reply.error["param"], reply.error["code"]) == ("model", "model_not_found")
            assert said in reply.error["message"]
        assert server.request("GET", f"/v1/models/{name}").status == 404
    reply = server.message(model="no-such-model")
    assert reply.status == 404 and reply.json["type"] == "error" and reply.json["error"]["type"] == "not_found_error"
    assert set(children(server)) == known
    for asked in ({"model": 7}, {"model": "fable", "keep_alive": "soon"}, {"model": "fable", "stream": "yes"}):
        assert server.request("POST", TEXT, {"prompt": "Once", **asked}).status == 400
    assert server.request("POST", "/api/embed", {"model": "fable", "input": "the fox"}).status == 400
    assert server.request("GET", CHAT).status == 405
    assert server.chat(model=str(folder)).json["model"] == "twin", "by what leads to it as well"
    assert set(children(server)) == {"fable", "twin"}  # which judges what is asked of it


def test_every_api_is_passed_on(server: ServerProcess) -> None:
    assert server.complete(model="twin").json["object"] == "text_completion"
    assert server.respond(model="twin").json["model"] == "twin"
    assert server.message(model="twin").json["role"] == "assistant"
    events = server.message(model="twin", stream=True).named_events
    assert events[0]["message"]["model"] == "twin" and events[-1]["type"] == "message_stop"
    counted = server.message(model="twin", path="/v1/messages/count_tokens").json["input_tokens"]
    assert counted == prompt_tokens(server.chat(model="twin"))
    for path, asked in (("responses", {"input": MESSAGES}), ("chat/completions", {"messages": MESSAGES})):
        assert server.request("POST", f"/v1/{path}/input_tokens", {"model": "twin", **asked}).json["input_tokens"] == counted
    ids = server.request("POST", "/tokenize", {"model": "twin", "content": "the fox"}).json["tokens"]
    assert server.request("POST", "/detokenize", {"model": "twin", "tokens": ids}).json == {"content": "the fox"}
    first, *pieces, last, usage = server.chat(model="fable", stream=True, stream_options={"include_usage": True}).events
    whole = server.chat(model="fable").json["choices"][0]["message"]["content"]
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == whole and usage["usage"]["completion_tokens"] == 24
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntwin\r\n--x--\r\n'
    heard = server.request("POST", "/v1/audio/transcriptions", form, Content_Type="multipart/form-data; boundary=x")
    assert heard.status == 400 and heard.error["param"] == "file", "the form came whole, to a model's own server"
    refused = server.chat(model="fable", temperature=-1)
    assert refused.status == 400 and refused.error["param"] == "temperature"
    assert server.request("POST", CHAT, {"messages": MESSAGES, "model": "fable"}, Origin="https://evil.example").status == 403


def test_what_is_kept_is_found_without_its_model(server: ServerProcess) -> None:
    for name in ("fable", "twin"):
        response = server.respond(model=name).json
        assert server.request("GET", f"/v1/responses/{response['id']}").json == response
        begun = server.request("POST", f"/v1/conversations?model={name}", {"metadata": {"of": name}}).json
        server.respond(model=name, conversation=begun["id"])
        assert len(server.request("GET", f"/v1/conversations/{begun['id']}/items").json["data"]) == 2
        assert server.request("DELETE", f"/v1/responses/{response['id']}").json["deleted"] is True
        assert server.request("GET", f"/v1/responses/{response['id']}/input_items").error["code"] == "response_not_found"
    unnamed = server.request("POST", "/v1/conversations", {})
    assert unnamed.status == 400 and unnamed.error["param"] == "model"


def test_two_clients_of_two_models_are_answered_side_by_side(server: ServerProcess) -> None:
    streams = [endless(server, model) for model in ("fable", "twin")]
    try:
        for _ in range(5):
            for each in streams:
                next_piece(each)
    finally:
        for each in streams:
            each.connection.close()
            each.close()
    for name in ("fable", "twin"):  # who goes away ends the answer of the model
        server.wait_for_output(f"{name}: POST /v1/completions 200 · the client left")


def test_ollamas_api_is_of_all_models(server: ServerProcess) -> None:
    """Lists are of all; a model is shown without being loaded, and loaded by a chat, whose lines come as they are written."""
    studio = {each["id"]: each["state"] for each in server.request("GET", "/api/v0/models").json["data"]}
    assert studio == {name: "not-loaded" if state == "unloaded" else state for name, state in states(server).items()}
    tags = {each["name"]: each for each in server.request("GET", "/api/tags").json["models"]}
    assert set(tags) == {"fable:latest", "twin:latest"} and tags["twin:latest"]["details"]["quantization_level"] == "16bit"
    assert tags["twin:latest"]["digest"] != tags["fable:latest"]["digest"], "programs take models of one digest for one"
    assert all(each["digest"] == tags[each["name"]]["digest"] for each in server.request("GET", "/api/ps").json["models"])
    assert server.request("POST", "/models/unload", {"model": "twin"}).json == {"success": True}
    wait_until(lambda: states(server)["twin"] == "unloaded" and set(children(server)) == {"fable"})
    shown = server.request("POST", "/api/show", {"model": "twin:latest"}).json
    assert shown["template"].startswith("Long, long ago. ") and shown["model_info"]["llama.context_length"] == 2048
    assert shown["capabilities"] == ["completion"] and states(server)["twin"] == "unloaded"
    asked = {"model": "twin:latest", "messages": MESSAGES, "options": {"num_predict": 6, "temperature": 0}}
    loading = time.monotonic_ns()
    reply = server.request("POST", "/api/chat", asked, X_Effllm_Waited="9" * 15)
    took = time.monotonic_ns() - loading
    *pieces, last = map(json.loads, reply.body.splitlines())
    again = [server.request("POST", "/api/chat", {**asked, "stream": False}).json for _ in range(3)]
    whole = min(again, key=lambda each: each["total_duration"])  # one of which nothing else held up
    assert "".join(each["message"]["content"] for each in pieces) == whole["message"]["content"] != ""
    assert last["done"] and last["eval_count"] == whole["eval_count"] == 6
    assert took > last["total_duration"] > last["load_duration"] > took / 3 > whole["total_duration"] > whole["load_duration"] > 0
    running = {each["name"]: each for each in server.request("GET", "/api/ps").json["models"]}
    assert running["twin:latest"]["context_length"] == 2048 and running["twin:latest"]["size"] > 1 << 20
    for until_then in ("99999999999d", -1):
        assert server.request("POST", "/api/generate", {"model": "twin", "keep_alive": until_then}).json["done_reason"] == "load"
        assert server.request("GET", "/api/ps").json["models"][-1]["expires_at"] > "2100"
    for _ in range(2):  # nothing is loaded to be ended
        ended = server.request("POST", "/api/generate", {"model": "twin:latest", "keep_alive": 0})
        assert (ended.json["model"], ended.json["done_reason"], ended.json["response"]) == ("twin:latest", "unload", "")
        wait_until(lambda: "twin" not in children(server))
    unload = server.request("POST", "/api/chat", {"model": "twin", "keep_alive": "0s"}).json
    assert unload["message"] == {"role": "assistant", "content": ""}
    assert states(server)["twin"] == "unloaded"
    missing = server.request("POST", "/api/generate", {"model": "no-such-model", "prompt": "Once"})
    assert missing.status == 404 and missing.json["error"].startswith("model not found: ")
    assert "effllm pull qwen3-4b" in server.request("POST", "/api/pull", {"model": "qwen3-4b"}).json["error"]
    assert server.request("DELETE", "/api/delete", {"model": "twin"}).status == 501
    assert b"Ollama is running" in server.request("GET", "/").body


def test_a_model_whose_process_is_killed_is_loaded_again(server: ServerProcess) -> None:
    """By the next request, be it one that asks for nothing else."""
    plain = server.chat(model="fable").json["choices"]
    stream = endless(server, "fable")
    children(server)["fable"].kill()
    *_, last, done = stream.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_ended" and done == "data: [DONE]"
    reply = server.request("POST", "/models/unload", {"model": "fable"})
    assert reply.status == 400 and "fable is not loaded" in reply.error["message"], "that is known before the client is told"
    assert "fable ended by SIGKILL: the next request loads it again" in server.err and states(server)["fable"] == "unloaded"
    assert server.request("POST", "/models/load", {"model": "fable"}).json == {"success": True} and states(server)["fable"] == "loaded"
    assert server.chat(model="fable").json["choices"] == plain
    assert server.request("POST", "/models/load", {"model": "no-such-model"}).status == 404


@pytest.mark.slow
def test_memory_is_one_budget_and_what_nobody_asks_for_goes(server: ServerProcess, here: dict[str, str]) -> None:
    """One model has a place: who rests makes room, but not before it has answered, and whoever comes is told what it waits for."""
    server.complete(model="fable", max_tokens=2)
    planned = float(re.findall(r"fable is loaded: context \d+ tokens, ([\d.]+) MiB", server.err)[-1])
    ram, asked = psutil.Process(server.process.pid).memory_info().rss / 2**20 + 1.5 * planned, {"Authorization": "Bearer k"}
    flags = ("--ram", f"{ram:.0f}Mi", "--keep-alive", "0.4s", "--quiet", "--api-key", "k")
    with serving(*ON_AND_ON, *flags, model=None, **here) as server:
        assert server.chat(model="fable").status == 401
        stay = server.request("POST", TEXT, {"model": "fable", "prompt": "Once", "max_tokens": 2, "keep_alive": -1}, **asked)
        time.sleep(0.6)
        ((name, process),) = children(server).items()
        first = endless(server, "fable", **asked)
        second = server.open_later("POST", TEXT, {"model": "twin", "prompt": "Once", "max_tokens": 2}, **asked)
        server.wait_for_output("twin waits for fable to finish answers and make room")
        assert server.request("GET", "/health").json["waiting"] == 1 and stay.status == 200 and name == "fable"
        assert first.readline() and process.is_running(), "what answers is not ended"
        first.connection.close()
        first.close()
        assert json.loads(second.getresponse().read())["model"] == "twin" and not process.is_running()
        second.close()
        server.wait_for_output("twin is unloaded: idle for 0.4 seconds")
        wait_until(lambda: not children(server))
        order = [line for line in server.err.splitlines() if " is loaded" in line or " is unloaded" in line]
        said = [re.sub(r"^[-\d]+ [:\d]+ ", "", line).partition(":")[0] for line in order]
        assert said == ["fable is loaded", "fable is unloaded", "twin is loaded", "twin is unloaded"]
        assert "fable is unloaded: to make room for twin\n" in server.err and "POST" not in server.err


@pytest.mark.parametrize(("flags", "said"), [
    (("--name", "x"), "--name is for a server of one model"), (("--draft", "fable"), "--draft is for a server of one model"),
    (("--max-models", "0"), "--max-models 0 is out of range"), (("--keep-alive", "soon"), "--keep-alive soon is not a duration"),
    (("--load-timeout", "x"), "--load-timeout x is not a duration"),
    (("fable", "--load-timeout", "9s"), "--load-timeout is for a server of"),
    (("fable", "--max-models", "2"), "--max-models is for a server of several"), (("fable", "no-such-model"), "there is no model"),
    (("-c", "0"), "--ctx-size 0 is too small"), (("--parallel", "0"), "--parallel 0 is too small"), (("--ram", "6"), "--ram 6 is 6 bytes")])
def test_what_is_refused(flags: tuple[str, ...], said: str) -> None:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    code, err = main(["serve", "--port", "0", *flags], environment), environment.stderr.getvalue()
    assert code in (2, 3) and said in err and err.count("hint: ") == 1 and not environment.stdout.getvalue()


def test_models_that_are_named_are_those_alone(here: dict[str, str]) -> None:
    folder = Path(here["XDG_CONFIG_HOME"]).parent / "twin-folder"
    flags = (str(folder), "-n", "3", "-s", "Be brief.", "--kv", "8bit", "--stop", "@ @", "--stop", "@@", "--max-models", "1")
    with serving(*flags, model="fable", **here, EFFLLM_CACHE_TYPE_K="f16", EFFLLM_NAME="house") as server:
        assert server.said["models"] == ["fable", "twin-folder"], "no folder of this machine"
        reply = server.request("POST", CHAT, {"model": "twin-folder", "messages": MESSAGES})
        assert reply.json["usage"]["completion_tokens"] == 3 and reply.json["model"] == "twin-folder"
        assert "twin-folder: --kv 8bit: no profile of this model" in server.err and "EFFLLM_NAME is ignored" in server.err
        assert server.chat(model="fable:4bit").status == 404 and str(folder) not in server.chat(model="x").error["message"]
        demand_end(server, signal.SIGKILL)
        assert "twin-folder is unloaded: to make room for fable\n" in server.err


def test_a_folder_that_no_list_knows_is_listed_with_what_its_headers_tell(here: dict[str, str], tmp_path: Path) -> None:
    """Programs of Ollama's API show families and sizes of what they offer."""
    with serving(str(twin_of_fable(tmp_path / "elsewhere")), model="fable", **here) as server:
        listed = {each["name"]: each for each in server.request("GET", "/api/tags").json["models"]}
        shown = server.request("POST", "/api/show", {"model": "elsewhere"}).json
    known, other = listed["fable:latest"], listed["elsewhere:latest"]
    assert other["details"] == known["details"] == shown["details"] and other["details"]["family"] == "llama"
    assert other["size"] == known["size"] > 10_000_000 and shown["model_info"]["general.parameter_count"] > 5e6


def test_ctrl_c_ends_all(server: ServerProcess) -> None:
    """The last of those of this server."""
    server.request("POST", "/api/generate", {"model": "twin", "keep_alive": 0})
    wait_until(lambda: "twin" not in children(server))
    demand_end(server, signal.SIGINT)
