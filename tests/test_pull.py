"""`effllm pull` against a hub on the loopback: requests, where files go, what is reported beforehand, and what can go wrong."""

import json
from pathlib import Path

import pytest
from hub_server import Hub, Reply, Request, always, etag
from hub_user import FABLE, HubUser, measure_nothing, on_disk, sharded, tiny

REPO = "org/name"


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path, hub.endpoint)


# -- what comes, and where it goes ------------------------------------------------------------------------------------------------


def test_a_model_is_pulled_listed_shown_verified_run_and_removed(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, FABLE)
    pulled = user.run("pull", REPO, "--json").json
    folder = user.snapshot(REPO, repo.commit)
    assert Path(pulled["folder"]) == folder and on_disk(folder) == repo.files
    assert pulled["bytes_loaded"] == sum(map(len, repo.files.values())) == pulled["plan"]["bytes_to_load"]
    rows = {model["name"]: model for model in user.run("list", "--json").json["models"]}
    assert rows[REPO]["source"] == "hub cache" and rows[REPO]["bits_per_weight"] == 16 and rows[REPO]["revision"] == repo.commit
    assert user.run("show", REPO, "--json").json["revision"] == repo.commit
    assert user.run("verify", REPO, "--json").json == {"files": 6, "bytes": pulled["bytes_loaded"], "damaged": [], "not_recorded": []}
    assert user.run("run", REPO, "Once upon", "--raw", "-n", "3", "--temp", "0").out.strip()
    assert user.run("rm", REPO, "-y").code == 0
    assert not folder.exists() and user.run("run", REPO, "hi").code == 3


def test_other_tools_find_the_files(hub: Hub, user: HubUser) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download

    repo = hub.add(REPO, files=tiny())
    assert user.run("pull", REPO).code == 0
    cache = user.home / "hf" / "hub"
    assert snapshot_download(REPO, cache_dir=cache, local_files_only=True) == str(user.snapshot(REPO, repo.commit))
    path = hf_hub_download(REPO, "model.safetensors", cache_dir=cache, local_files_only=True)
    assert Path(path).is_symlink() and Path(path).resolve().name == etag("model.safetensors", repo.files["model.safetensors"])
    report = scan_cache_dir(cache)
    (found,) = report.repos
    assert not report.warnings and found.repo_id == REPO and found.size_on_disk == sum(map(len, repo.files.values()))


def test_what_another_tool_has_downloaded_is_not_fetched_again(hub: Hub, user: HubUser) -> None:
    """And with that the library of the hub says that this server is one."""
    from huggingface_hub import HfApi, snapshot_download

    repo = hub.add(REPO, files=tiny())
    info = HfApi(endpoint=hub.endpoint).model_info(REPO, files_metadata=True)
    assert info.sha == repo.commit and {each.rfilename: each.size for each in info.siblings} == {k: len(v) for k, v in repo.files.items()}
    snapshot_download(REPO, cache_dir=user.home / "hf" / "hub", endpoint=hub.endpoint)
    hub.forget()
    assert user.run("pull", REPO, "--json").json["bytes_loaded"] == 0
    assert not hub.requests_for("model.safetensors") and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_one_copy_of_the_weights_and_no_pickles(hub: Hub, user: HubUser) -> None:
    unwanted = {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "original/model.safetensors": b"x", "onnx/model.onnx": b"x",
                "model.fp16.safetensors": b"x", "model-q4.gguf": b"x", "tf_model.h5": b"x", "modeling_custom.py": b"x",
                "tokenizer.bin": b"x", ".gitattributes": b"x", "adapter_model.safetensors": b"x"}
    wanted = tiny() | {"LICENSE": b"l", "chat_template.jinja": b"t", "generation_config.json": b"{}", "tokenizer.model": b"m",
                       "preprocessor_config.json": b"{}", "processor_config.json": b"{}"}
    repo = hub.add(REPO, files=wanted | unwanted)
    assert user.run("pull", REPO).code == 0
    assert set(on_disk(user.snapshot(REPO, repo.commit))) == set(wanted)
    assert not [request for request in hub.requests for name in unwanted if name in request.path]


def test_an_adapter_that_is_described_beside_a_model_comes_with_it(hub: Hub, user: HubUser) -> None:
    """Granite Speech takes audio through one; nothing of it is read before it is named."""
    repo = hub.add(REPO, files=sharded(FABLE) | {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"x"})
    assert user.run("pull", REPO).code == 0
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert user.run("run", REPO, "Once", "--raw", "-n", "2").code == 0


def test_shards_and_their_index(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=sharded(FABLE))
    assert user.run("pull", REPO).code == 0
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert user.run("run", REPO, "Once", "--raw", "-n", "2").code == 0
    lost = hub.add("org/lost", files={name: content for name, content in sharded(FABLE).items() if "00002" not in name})
    assert "00002" in user.run("pull", "org/lost").refused(6)
    assert user.run("run", "org/lost", "hi").code == 3 and lost.commit


@pytest.mark.parametrize(("files", "said"), [
    ({"pytorch_model.bin": b"x"}, "pickle"),
    ({"model-Q4_K_S.gguf": b"x", "model-F16.gguf": b"x"}, f"effllm pull {REPO}:model-F16.gguf or {REPO}:model-Q4_K_S.gguf"),
    ({"adapter_model.safetensors": b"x"}, "LoRA"), ({"a.safetensors": b"x", "b.safetensors": b"x"}, "no index"), ({}, "no weights")])
def test_repositories_without_usable_weights(hub: Hub, user: HubUser, files: dict[str, bytes], said: str) -> None:
    hub.add(REPO, files={"config.json": tiny()["config.json"], **files})
    assert said in user.run("pull", REPO).refused(3)


def test_one_file_after_a_colon(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny() | {"model-Q4_K_M.gguf": b"g" * 1000, "model-F16.gguf": b"f" * 2000})
    assert user.run("pull", f"{REPO}:model-F16.gguf").code == 0
    assert on_disk(user.snapshot(REPO, repo.commit)) == {"model-F16.gguf": b"f" * 2000}
    assert "model-Q4_K_M.gguf" in user.run("pull", f"{REPO}:model-Q4_K_S.gguf").refused(3)


def test_revisions(hub: Hub, user: HubUser) -> None:
    old = hub.add(REPO, files=tiny(seed=1), branches=("main", "v1.0"))
    assert user.run("pull", f"{REPO}@v1.0").code == 0
    short = f"{REPO}@{old.commit[:12]}"
    assert [row["name"] for row in user.run("list", "--json").json["models"]] == ["fable", short]
    said = user.run("show", REPO).refused(3)
    assert f"{REPO} is here at another revision only: {old.commit[:12]}" in said
    assert f"hint: name it, {short}, or: effllm pull {REPO}" in said
    new = hub.add(REPO, files=tiny(seed=2))
    assert user.run("pull", REPO).code == 0
    assert on_disk(user.snapshot(REPO, old.commit)) == old.files and on_disk(user.snapshot(REPO, new.commit)) == new.files
    refs = user.snapshot(REPO, new.commit).parents[1] / "refs"
    assert (refs / "v1.0").read_text() == old.commit and (refs / "main").read_text() == new.commit
    assert "no such revision" in user.run("pull", f"{REPO}@v2").refused(3)
    hub.forget()
    assert user.run("pull", f"{REPO}@{new.commit}").code == 0 and not (refs / new.commit).exists()


def test_a_repository_that_was_renamed(hub: Hub, user: HubUser) -> None:
    hub.add("org/new", files=tiny())
    hub.add("org/old", files=tiny(), renamed_to="org/new")
    ran = user.run("pull", "org/old")
    assert ran.code == 0 and "org/old is called org/new now" in ran.err
    assert user.run("verify", "org/old").code == 0  # found by the name that was typed


# -- before anything is loaded ------------------------------------------------------------------------------------------------------


def test_the_plan_takes_kilobytes(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=sharded(FABLE))
    hub.forget()
    plan = user.run("pull", REPO, "--dry-run", "--json").json
    assert sum(hub.served.values()) <= 300_000 and plan["bytes_read_for_plan"] <= 300_000
    assert plan["bytes_total"] == plan["bytes_to_load"] == plan["bytes_kept"] == sum(map(len, repo.files.values()))
    assert plan["licence"] == "apache-2.0" and plan["gated"] is False and plan["disk_free_bytes"] > 0 and plan["memory"]["fits"]
    said = user.run("pull", REPO, "--dry-run").err
    assert all(word in said for word in ("licence", "download", "kept", "disk", "memory"))
    assert not (user.home / "hf").exists()


def test_ollama_10920_hours_of_download_for_a_model_that_cannot_run(hub: Hub, user: HubUser) -> None:
    huge = json.loads(tiny()["config.json"]) | {"hidden_size": 65536, "intermediate_size": 1 << 18, "num_hidden_layers": 200,
                                                "num_attention_heads": 512}
    hub.add(REPO, files=tiny() | {"config.json": json.dumps(huge).encode()})
    assert "--bits 4" in user.run("pull", REPO).refused(4)
    assert "-y" in user.run("pull", REPO, "--bits", "2").refused(4)
    assert user.run("pull", REPO, answers="n\n").code == 4
    assert not hub.requests_for("model.safetensors")
    assert user.run("pull", REPO, answers="y\n").code == 0
    assert user.run("pull", REPO, "-y").code == 0


def test_ollama_14255_disk_space_is_looked_at_first(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.runtime.pull import disk

    hub.add(REPO, files=tiny())
    monkeypatch.setattr(disk, "free_nbytes", lambda folder: 1_000_000)
    assert "976.56 KiB free" in user.run("pull", REPO).refused(4)
    assert not hub.requests_for("model.safetensors")


def test_a_model_of_another_family_is_refused_before_it_is_loaded(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny() | {"config.json": b'{"model_type": "mamba9"}'})
    assert "mamba9" in user.run("pull", REPO).refused(1)
    assert not hub.requests_for("model.safetensors")


# -- gates and tokens ----------------------------------------------------------------------------------------------------------------


def test_localgpt_799_a_gated_repository_is_not_reported_as_missing(hub: Hub, user: HubUser) -> None:
    hub.add("meta-llama/Llama-3.1-8B-Instruct", files=tiny(), gate="good")
    said = user.run("pull", "llama3").refused(3)
    for word in ("gated", "ask for access at", "/meta-llama/Llama-3.1-8B-Instruct", "hf auth login", "effllm pull qwen3-8b", "llama3.1"):
        assert word in said, said
    assert "this token has none yet" in user.run("pull", "llama3", HF_TOKEN="other").refused(3)
    ran = user.run("pull", "llama3", HF_TOKEN="good")
    assert ran.code == 0 and "gated" in ran.err


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny(), gate="t0ps3cret")
    (user.home / "hf").mkdir()
    (user.home / "hf" / "token").write_text("t0ps3cret\n")
    ran = user.run("pull", REPO)
    assert ran.code == 0 and "t0ps3cret" not in ran.err + ran.out
    to_storage = [request for request in hub.requests if hub.storage.endswith(f":{request.port}")]
    to_hub = [request for request in hub.requests if hub.endpoint.endswith(f":{request.port}")]
    assert to_storage and not any("authorization" in request.headers for request in to_storage)
    assert to_hub and all(request.headers["authorization"] == "Bearer t0ps3cret" for request in to_hub)
    hub.forget()
    user.run("pull", REPO, "--dry-run", HF_TOKEN="", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    assert not any("authorization" in request.headers for request in hub.requests)


@pytest.mark.parametrize(("token", "said"), [(None, "it is private"), ("other", "the token may not see it"),
                                             ("expired", "rejected the configured token")])
def test_what_is_missing_or_private(hub: Hub, user: HubUser, token: str | None, said: str) -> None:
    hub.add(REPO, files=tiny(), gate="good", private=True)
    given = {"HF_TOKEN": token} if token else {}
    refused = user.run("pull", REPO, **given).refused(3)
    assert said in refused and "expired" not in refused
    if token != "expired":
        assert said in user.run("pull", "org/nothing-like-it", **given).refused(3)


# -- a bad network -------------------------------------------------------------------------------------------------------------------


def test_a_rate_limit_is_waited_for_and_one_that_lasts_is_reported(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    hub.disturb = always(429, {"Retry-After": "0"}, word="model.safetensors", times=2)
    ran = user.run("pull", REPO)
    assert ran.code == 0 and "too many requests; retrying" in ran.err
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    hub.disturb = always(429, {"Retry-After": "3600"})
    said = user.run("pull", "org/name@main").refused(6)
    assert "3600 s" in said and "hf auth login" in said


@pytest.mark.parametrize(("status", "reason"), [(429, "too many requests"), (503, "the server answered 503")])
def test_a_hub_that_answers_but_not_now_is_not_called_unreachable(hub: Hub, user: HubUser, status: int, reason: str) -> None:
    hub.add(REPO, files=tiny())
    hub.disturb = always(status)
    said = user.run("pull", REPO).refused(6)
    assert f"the hub is unavailable ({reason})" in said and "again in a few minutes" in said and "network" not in said


def test_server_errors_and_cuts_are_tried_again(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    hub.disturb, hub.cut_after, hub.cuts = always(503, word="tokenizer", times=1), 300_000, 2
    ran = user.run("pull", REPO)
    assert ran.code == 0 and "the server answered 503" in ran.err and "cut" in ran.err
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert hub.served["model.safetensors"] == len(repo.files["model.safetensors"]), "what came before a cut came twice"


def test_a_sign_in_page_instead_of_the_hub(hub: Hub, user: HubUser) -> None:
    page = b"<!DOCTYPE html><html><body>Welcome to the hotel</body></html>"
    hub.add(REPO, files=tiny())
    for word in ("/api/", "config.json", "model.safetensors"):
        hub.disturb = always(200, {"Content-Type": "text/html"}, page, word)
        said = user.run("pull", REPO).refused(6)
        assert "sign" in said and "browser" in said
    assert not [name for name in user.blobs(REPO) if name == etag("model.safetensors", tiny()["model.safetensors"])]


def test_a_network_that_sends_everybody_to_its_sign_in_page(hub: Hub, user: HubUser) -> None:
    """By a redirect, also of the files alone, and with an answer that does not say how long it is."""
    hub.add(REPO, files=tiny())
    page = b"<!DOCTYPE html><html>Welcome</html>"
    for word, named in (("/api/", "HTTPS_PROXY"), ("config.json", "checksum"), ("model.safetensors", "browser")):
        def portal(request: Request, word: str = word) -> Reply | None:
            if "login" in request.path:
                return 200, {"Content-Type": "text/html; charset=utf-8"}, page
            return (302, {"Location": f"{hub.storage}/login?from=you"}, b"") if word in request.path else None

        hub.disturb = portal
        said = user.run("pull", REPO).refused(6)
        assert "sign-in page" in said or named in said, said
    hub.disturb = None
    assert user.run("pull", REPO).code == 0


def test_no_network_and_offline(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    unreachable = HubUser(user.home, "http://127.0.0.1:9")
    assert "cannot be reached: 127.0.0.1:9: connection refused" in unreachable.run("pull", REPO).refused(6)
    for words, variables in ((("--offline",), {}), ((), {"HF_HUB_OFFLINE": "1"})):
        assert "downloads are off" in user.run("pull", REPO, *words, **variables).refused(6)
    assert not hub.requests
    assert user.run("pull", REPO).code == 0
    hub.forget()
    ran = user.run("pull", REPO, "--offline")
    assert ran.code == 0 and "everything is downloaded already" in ran.err and not hub.requests
    assert user.run("pull", "org/other", HF_ENDPOINT="ftp://x").refused(1)


def test_wrong_bytes_never_get_a_final_name(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    good = repo.files["model.safetensors"]
    hub.swap["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    assert "wrong checksum" in user.run("pull", REPO).refused(6)
    assert etag("model.safetensors", good) not in user.blobs(REPO)
    hub.swap.clear()
    assert user.run("pull", REPO).code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    hub.add("org/small", files=repo.files)
    hub.swap["config.json"] = repo.files["config.json"].replace(b"16", b"61")
    assert "config.json: wrong checksum" in user.run("pull", "org/small").refused(6)


def test_a_server_without_ranges(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.offload import transfer

    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 19)
    repo, hub.ranges = hub.add(REPO, files=tiny()), False
    ran = user.run("pull", REPO)
    assert ran.code == 0 and "no ranges" in ran.err and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_a_mirror_that_sends_the_bytes_itself(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.offload import transfer

    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 19)
    repo, hub.direct = hub.add(REPO, files=tiny(), gate="good"), True
    assert user.run("pull", REPO, HF_TOKEN="good").code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert hub.served["model.safetensors"] == len(repo.files["model.safetensors"])
    assert len({request.range for request in hub.requests_for("model.safetensors")}) > 3


@pytest.mark.parametrize("late", [(), ("one",)], ids=["changed", "changed, and an answer of before comes late"])
def test_bytes_of_two_versions_are_not_mixed(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch, late: tuple[str, ...]) -> None:
    from effllm.offload import transfer

    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 19)
    repo = hub.add(REPO, files=tiny())
    hub.tags["model.safetensors"] = iter(["one", "one", "two", *late] + ["two"] * 100)
    ran = user.run("pull", REPO)
    assert ran.code == 0 and "changed on the server" in ran.err and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_an_address_of_the_storage_that_has_expired(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.offload import transfer

    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 18)
    repo, seen = hub.add(REPO, files=tiny()), [0]

    def expire(request: Request) -> Reply | None:
        if "signed" in request.path and "model.safetensors" in request.path:
            seen[0] += 1
            return (403, {}, b"expired") if seen[0] == 5 else None
        return None

    hub.disturb = expire
    assert user.run("pull", REPO).code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert len(hub.requests_for("/resolve/")) > len(repo.files)


def test_a_cache_that_may_not_be_written(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    (user.home / "file").write_text("")
    said = user.run("pull", REPO, HF_HUB_CACHE=str(user.home / "file" / "cache"))
    assert said.code == 1 and "Traceback" not in said.err and "hint" in said.err


def test_a_proxy_is_used_and_exceptions_are_made(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=tiny())
    proxied = HubUser(user.home, "http://hub.invalid", {"HTTP_PROXY": hub.endpoint.replace("http://", "http://me:pa%20ss@")})
    proxied.run("pull", REPO, "--dry-run")
    (first, *_) = hub.requests
    assert first.path.startswith("http://hub.invalid/api/models/") and first.headers["proxy-authorization"] == "Basic bWU6cGEgc3M="
    hub.forget()
    direct = HubUser(user.home, "http://hub.invalid", proxied.variables | {"NO_PROXY": "localhost,.invalid"})
    assert "host name cannot be resolved" in direct.run("pull", REPO, "--dry-run").refused(6) and not hub.requests
    assert "socks5" in user.run("pull", REPO, HTTP_PROXY="socks5://127.0.0.1:1").refused(6)
    for text in ("http://[bad", "http://proxy:port", "http://a..b", "http://:80"):
        said = user.run("pull", REPO, HTTP_PROXY=text).refused(6)
        assert "the proxy's URL is malformed" in said and "http://host:port" in said
