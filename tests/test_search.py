"""`effllm search` against a hub on the loopback: requests, the line for each model, and what can go wrong."""

import json
from pathlib import Path

import pytest
from hub_server import Hub, always
from hub_user import FABLE, HubUser, Terminal, tiny

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.offload import hardware
from effllm.runtime.pull.search import EXPANDED_FIELDS, SearchResult

GIB = 1 << 30
MEMORY = 9 * GIB


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    monkeypatch.setattr(hardware, "memory_available", lambda: MEMORY)
    return HubUser(tmp_path, hub.endpoint)


def config(**keys: object) -> bytes:
    return json.dumps(keys).encode()


def header(dtype: str, *shape: int) -> bytes:
    """The head of a file of one tensor, without its bytes."""
    text = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.fixture
def models_hub(hub: Hub) -> Hub:
    """Models of one name, in the order in which the hub answers."""
    hub.add("org/tale-1b", FABLE, downloads=9_000)
    hub.add("org/tale-14b", files={"config.json": config(model_type="qwen3"), "model.safetensors": header("BF16", 14, 10**9)},
            downloads=8_000, gate="secret")
    hub.add("org/tale-70b", files={"config.json": config(model_type="llama"), "model.safetensors": header("BF16", 70, 10**9)},
            downloads=7_000)
    hub.add("org/tale-awq", files={"config.json": config(model_type="qwen2", quantization_config={"quant_method": "awq", "bits": 4}),
                                   "model.safetensors": header("I32", 10**9)}, downloads=6_000)
    hub.add("org/Tale-GGUF", files={"tale-Q4_K_M.gguf": b"x"}, gguf={"architecture": "llama", "total": 8 * 10**9}, downloads=5_000)
    hub.add("org/tale-bert", files={"config.json": config(model_type="bert"), "model.safetensors": header("F32", 10**8)}, downloads=4_000,
            task="feature-extraction")
    hub.add("org/tale-odd", files={"config.json": config(model_type="oddity"), "model.safetensors": header("F16", 10**6)}, downloads=3_000)
    hub.add("org/tale-old", files={"config.json": config(model_type="llama"), "pytorch_model.bin": b"x"}, downloads=2_000)
    hub.add("org/tale-quanto", files={"config.json": config(model_type="llama", quantization_config={"quant_method": "quanto"}),
                                      "model.safetensors": header("I8", 10**6)}, downloads=1_000)
    hub.add("org/other", files=tiny(), downloads=10**6)
    return hub


def test_the_library_of_the_hub_reads_the_same(models_hub: Hub) -> None:
    from huggingface_hub import HfApi

    listed = HfApi(endpoint=models_hub.endpoint).list_models(search="tale", expand=list(EXPANDED_FIELDS), sort="downloads", limit=100)
    found = {each.id: each for each in listed}
    assert [*found][:2] == ["org/tale-1b", "org/tale-14b"] and len(found) == 9
    assert found["org/tale-1b"].config["model_type"] == "llama" and found["org/tale-14b"].safetensors.total == 14 * 10**9
    assert found["org/Tale-GGUF"].gguf == {"architecture": "llama", "total": 8 * 10**9} and found["org/tale-14b"].gated == "manual"


def test_what_runs_is_shown_in_the_hubs_order_and_whether_it_fits(models_hub: Hub, user: HubUser) -> None:
    asked = user.run("search", "TALE", "--json").json
    found = {each["repo"]: each for each in asked["found"]}
    assert [*found] == ["org/tale-1b", "org/tale-14b", "org/tale-70b", "org/tale-awq", "org/Tale-GGUF", "org/tale-bert"]
    assert [each["fits"] for each in asked["found"]] == ["yes", "at 4 bits", "larger", "yes", "yes", "yes"]
    assert asked["memory_bytes"] == MEMORY and found["org/tale-1b"]["licence"] == "apache-2.0"
    own = found["org/tale-1b"]
    assert (own["type"], own["format"], own["parameters"], own["size_bytes"]) == ("llama", "safetensors", 5_770_496, 11_540_992)
    assert [each["repo"] for each in asked["found"] if each["gated"]] == ["org/tale-14b"]
    assert [each["repo"] for each in asked["found"] if each["makes_vectors"]] == ["org/tale-bert"]
    awq, file = found["org/tale-awq"], found["org/Tale-GGUF"]
    assert (awq["format"], awq["parameters"], awq["size_bytes"]) == ("awq", None, 4 * 10**9)  # words hold eight weights
    assert (file["type"], file["format"], file["parameters"], file["size_bytes"]) == ("llama", "GGUF", 8 * 10**9, None)
    (request,) = models_hub.requests_for("/api/models")
    assert request.path.count("expand=") == len(EXPANDED_FIELDS) and "search=TALE" in request.path and "sort=downloads" in request.path


def test_a_terminal_sees_a_table_and_the_next_step(models_hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = user.run("search", "tale", "1", answers="")
    assert seen.code == 0 and seen.out.splitlines()[0].split()[0] == "model"
    assert [line.split()[0] for line in seen.out.splitlines()[1:]] == ["org/tale-1b", "org/tale-14b"]
    assert "gated" in seen.out and "8k" not in seen.out and "8.0k" in seen.out
    assert "`effllm pull org/tale-1b` fetches it" in " ".join(seen.err.split()) and "9.00 GiB of memory" in " ".join(seen.err.split())
    monkeypatch.setenv("COLUMNS", "60")
    narrow = Environment(Terminal(), Terminal(), Terminal(), user.env)
    assert main(["search", "tale"], narrow) == 0
    lines = narrow.stdout.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and [line.split()[0] for line in lines if "at 4 bits" in line] == ["org/tale-14b"]


def test_what_does_not_run_is_counted_and_with_all_said_why(models_hub: Hub, user: HubUser) -> None:
    seen = user.run("search", "tale")
    assert "3 more do not run here; --all says why" in seen.err and "org/tale-odd" not in seen.out
    assert "org/repo:Q4_K_M" in seen.err
    why = {each["repo"]: each["why_not"] for each in user.run("search", "tale", "--all", "--json").json["found"]}
    assert {name: said for name, said in why.items() if said} == {
        "org/tale-odd": "type oddity is not supported", "org/tale-old": "neither safetensors nor GGUF",
        "org/tale-quanto": "quantized by quanto, which is not read"}
    every = user.run("search", "tale", "--all")
    assert "no: type oddity is not supported" in every.out and "embeddings" in every.out and "more do not run" not in every.err
    nothing = user.run("search", "odd")
    assert nothing.code == 0 and not nothing.out and "none of the 1 models that were found by 'odd' runs here" in nothing.err


@pytest.mark.parametrize(("kind", "reads"), [("qwen3", True), ("gemma3", True), ("kimi_k25", True), ("glm4v", True), ("internvl", True),
                                             ("qwen3_5_moe", True), ("arcee", False), ("phi4mm", False), ("llama4", False)])
def test_families_of_which_mlx_is_not_read_are_reported(hub: Hub, user: HubUser, kind: str, reads: bool) -> None:
    section = {"bits": 4, "group_size": 64}
    hub.add("org/tale-mlx", files={"config.json": config(model_type=kind, quantization=section, quantization_config=section),
                                   "model.safetensors": header("U32", 10**6)})
    (found,) = user.run("search", "tale-mlx", "--all", "--json").json["found"]
    assert found["why_not"] == (None if reads else f"MLX-quantized weights are not supported for {kind} models")
    assert found["format"] == "mlx"


def test_as_many_as_are_wanted(models_hub: Hub, user: HubUser) -> None:
    found = user.run("search", "tale", "--limit", "2", "--json").json["found"]
    assert [each["repo"] for each in found] == ["org/tale-1b", "org/tale-14b"]
    for wrong in ("0", "-1", "101"):
        assert "1 to 100" in user.run("search", "tale", "--limit", wrong).refused(2)


def test_without_words_whatever_writes_text(models_hub: Hub, user: HubUser) -> None:
    found = [each["repo"] for each in user.run("search", "--sort", "trending", "--json").json["found"]]
    assert "org/other" in found and "org/tale-bert" not in found
    (request,) = models_hub.requests_for("/api/models")
    assert "sort=trendingScore" in request.path and "pipeline_tag=text-generation" in request.path and "search=" not in request.path


def test_no_model_and_no_network(models_hub: Hub, user: HubUser) -> None:
    nothing = user.run("search", "no", "such", "thing")
    assert nothing.code == 0 and "no model was found by 'no such thing'" in nothing.err
    assert user.run("search", "no such thing", "--json").json["found"] == []
    models_hub.forget()
    for asked in (("search", "tale", "--offline"), ("search", "tale")):
        assert "offline mode is on" in user.run(*asked, **({} if "--offline" in asked else {"HF_HUB_OFFLINE": "1"})).refused(6)
    assert not models_hub.requests


@pytest.mark.parametrize(("status", "body", "said"), [
    (404, b"", "does not search"), (200, b"<html>sign in</html>", "a web page"), (200, b'{"error": 1}', "something else"),
    (503, b"", "is unavailable")])
def test_hubs_that_do_not_answer_as_one(hub: Hub, user: HubUser, status: int, body: bytes, said: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effllm.runtime.pull.client.time.sleep", lambda seconds: None)
    hub.disturb = always(status, {"Content-Type": "text/html" if body.startswith(b"<") else "application/json"}, body)
    assert said in user.run("search", "tale").refused(6)


@pytest.mark.parametrize("odd", [
    None, [], "x", {"id": 5}, {"id": "../up"}, {"id": "org/a", "config": 3, "safetensors": [], "gguf": "x", "downloads": -1, "tags": 4},
    {"id": "org/a", "config": {"model_type": ["llama"], "quantization_config": {"quant_method": {}}},
     "safetensors": {"parameters": {"BF16": "many"}}},
    {"id": "org/a", "safetensors": {"parameters": {"E2M9": 5}, "total": 1e9}}, {"id": "org/a", "gguf": {"architecture": 7, "total": True}}])
def test_odd_answers_are_no_models_that_run(hub: Hub, user: HubUser, odd: object) -> None:
    hub.disturb = always(200, {"Content-Type": "application/json"}, json.dumps([odd]).encode())
    assert user.run("search", "a", "--json").json["found"] == []
    found = user.run("search", "a", "--all", "--json").json["found"]
    assert [each["repo"] for each in found] == (["org/a"] if isinstance(odd, dict) and odd["id"] == "org/a" else [])
    assert user.run("search", "a", "--all").code == 0


@pytest.mark.parametrize(("form", "parameters", "nbytes", "gib", "said"), [
    ("safetensors", 10**9, 2 * 10**9, 4, "yes"), ("safetensors", 10**9, 2 * 10**9, 2, "at 4 bits"),
    ("safetensors", 10**9, 2 * 10**9, 1, "larger"), ("safetensors", None, None, 8, ""),
    ("GGUF", 10**9, None, 2, "yes"), ("GGUF", 4 * 10**9, None, 4, "at 4 bits"), ("GGUF", 8 * 10**9, None, 2, "larger"),
    ("GGUF", None, None, 8, ""), ("gptq", None, 4 * 10**9, 8, "yes"), ("gptq", None, 4 * 10**9, 2, "larger")])
def test_what_fits_by_its_size(form: str, parameters: int | None, nbytes: int | None, gib: int, said: str) -> None:
    assert SearchResult("org/a", "llama", form, parameters, nbytes, None, False, 0, 0, False, "").fits(gib * GIB) == said
