"""Slots of `effllm serve`, saved, restored and erased through llama-server's API: real processes, real files."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import CliRun
from packaged_embedder import FABLE
from server_process import MINUTE, Reply, ServerProcess, serving
from test_adapters import of_all_matrices
from test_serve_llama import completed
from test_serve_router import here, states  # noqa: F401  a fixture

FOX, SEA = ("The fox asked the king for bread and the king gave him none. " * 12,
            "The sea was calm and the boat was far from the shore. " * 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots") / "made"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--slot-save-path", str(folder)) as server:
        yield server


def act(server: ServerProcess, action: str, filename: str | None = None, slot: int | str = 0, **fields: object) -> Reply:
    named = {} if filename is None else {"filename": filename}
    return server.request("POST", f"/slots/{slot}?action={action}", {**named, **fields} or None)


def held(server: ServerProcess) -> int:
    return server.request("GET", "/slots").json[0]["n_prompt_tokens"]


def cached(reply: Reply) -> int:
    return reply.json["timings"]["cache_n"]


def test_what_a_slot_held_comes_back(server: ServerProcess, folder: Path) -> None:
    assert f"{folder} is a new folder, for slots that are saved" in server.err
    tale = f"Once more: {FOX}"  # whose pages no other test has saved
    first, before = completed(server, prompt=tale), {*folder.rglob("*")}
    holds = held(server)
    saved = act(server, "save", "fox.bin").json
    assert set(saved) == {"id_slot", "filename", "n_saved", "n_written", "timings"} and saved["timings"]["save_ms"] > 0
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "fox.bin", holds)
    files = [path for path in {*folder.rglob("*")} - before if path.is_file()]
    assert saved["n_written"] == sum(path.stat().st_size for path in files) and folder / "fox.bin.json" in files
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "fox.bin.json"))
    assert act(server, "erase").json == {"id_slot": 0, "n_erased": holds} and held(server) == 0
    assert cached(completed(server, prompt=tale)) == 0
    completed(server, prompt=SEA)
    restored = act(server, "restore", "fox.bin").json
    assert set(restored) == {"id_slot", "filename", "n_restored", "n_read", "timings"} and restored["timings"]["restore_ms"] > 0
    assert (restored["n_restored"], restored["n_read"]) == (holds, saved["n_written"]) and held(server) == holds
    again = completed(server, prompt=tale)
    assert again.json["content"] == first.json["content"] and cached(again) > 140
    server.wait_for_output(f"POST /slots/0 200 · {holds} tokens restored")
    with serving("--slot-save-path", str(folder), "-c", "1024") as other:
        assert act(other, "restore", "fox.bin").json["n_restored"] == holds
        after = completed(other, prompt=tale)
        assert after.json["content"] == first.json["content"] and cached(after) == cached(again), "in another process"


def test_a_conversation_continues_from_its_own_tokens(server: ServerProcess) -> None:
    """An answer's tokens are those that were sampled, which its text cut anew need not give."""
    talk = [{"role": "user", "content": "Tell me about the fox."}]
    talk += [server.chat(talk, temperature=1.5, seed=3).json["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    holds = held(server)
    assert act(server, "save", "talk").json["n_saved"] == holds
    straight = server.chat(talk).json
    assert act(server, "erase").status == act(server, "restore", "talk").status == 200
    restored = server.chat(talk).json
    assert restored["choices"] == straight["choices"] and restored["usage"] == straight["usage"]
    assert restored["usage"]["prompt_tokens_details"]["cached_tokens"] >= holds - 1


def test_an_empty_slot(server: ServerProcess) -> None:
    act(server, "erase")
    assert act(server, "erase").json["n_erased"] == act(server, "save", "empty").json["n_saved"] == 0
    completed(server)
    assert act(server, "restore", "empty").json["n_restored"] == held(server) == 0
    assert completed(server).status == 200


def test_names_and_numbers_that_are_none(server: ServerProcess, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for name in ("../up", "/etc/passwd", "a/b", "a\\b", "", ".hidden", "-flag", "a\nb", "a" * 101, None):
        for action in ("save", "restore"):
            refused = act(server, action, name)
            assert refused.status == 400 and refused.error["param"] == "filename", name
            assert refused.error["message"].startswith("filename has to be a file name: ")
    assert sorted(folder.rglob("*")) == before and sorted(folder.parent.iterdir()) == [folder]
    for slot in (1, -1, "x", "1.5", "%D9%A3"):
        assert act(server, "erase", slot=slot).error["param"] == "id_slot"
    for action in ("", "copy"):
        assert act(server, action, "fox.bin").error["message"] == "action has to be save, restore or erase"
    nothing = act(server, "restore", "nobody.bin")
    assert nothing.status == 400 and nothing.error["message"].startswith("nothing is saved as 'nobody.bin': there is: ")
    assert act(server, "erase", model="fable").status == 200 and act(server, "erase", model="other").status == 404
    assert server.request("POST", "/slots/0?action=erase&model=other").status == 404 and server.request("GET", "/slots/0").status == 405


def test_what_does_not_belong_here_leaves_the_slot_alone(server: ServerProcess, folder: Path) -> None:
    completed(server, prompt=FOX)
    assert act(server, "save", "own").status == 200
    holds = held(server)
    with serving("--slot-save-path", str(folder), "--kv", "8bit") as other:
        completed(other, prompt=SEA)
        refused, before = act(other, "restore", "own"), held(other)
        assert refused.status == 400 and "'own' was saved with --kv 16bit, this run has 8bit" in refused.error["message"]
        assert held(other) == before > 0
        assert act(other, "save", "packed").status == 200
    assert "'packed' was saved with --kv 8bit" in act(server, "restore", "packed").error["message"] and held(server) == holds
    with serving("--slot-save-path", str(folder), "-c", "64") as other:
        refused = act(other, "restore", "own")
        assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
        assert f"'own' holds {holds} tokens and the context 64" in refused.error["message"]


def test_damaged_files_are_reported_and_the_prompt_is_read(server: ServerProcess, folder: Path) -> None:
    said = completed(server, prompt=SEA).json["content"]
    assert act(server, "save", "sea").status == 200
    page = max(folder.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    page.write_bytes(page.read_bytes()[:-100])
    refused = act(server, "restore", "sea")
    assert refused.status == 400 and refused.error["message"].startswith("'sea' is damaged: ") and str(folder) not in refused.body.decode()
    assert held(server) == 0 and completed(server, prompt=SEA).json["content"] == said
    (folder / "sea.json").write_text("{")
    refused = act(server, "restore", "sea")
    assert refused.status == 400 and "'sea' is damaged: it is cut short" in refused.error["message"] and held(server) > 0


def test_nothing_makes_room_for_another(tmp_path: Path) -> None:
    with serving("--slot-save-path", str(tmp_path), "--session-disk", "1M") as server:
        completed(server, prompt=FOX)
        for _ in range(3):
            assert act(server, "save", "first").status == 200, "it takes the place of itself"
        completed(server, prompt=SEA)
        completed(server, prompt=SEA[::-1][:400])
        refused = act(server, "save", "second")
        assert refused.status == 400 and "--session-disk is 976.56 KiB" in refused.error["message"]
        assert not (tmp_path / "second.json").exists() and act(server, "restore", "first").json["n_restored"] > 150


def test_the_sessions_of_a_user_are_read_and_not_overwritten(server: ServerProcess, folder: Path) -> None:
    from effllm.runtime.sessions.session_format import SavedSession
    from effllm.runtime.sessions.session_store import SessionStore

    talk = {"messages": [{"role": "user", "content": "mine"}], "system": None, "settings": {}}
    store = SessionStore(folder)
    with store.writing("mine"):
        store.write(SavedSession("mine", "fable", 0.0, talk, None))
    refused = act(server, "save", "mine")
    assert refused.status == 400 and "'mine' is a session with a conversation" in refused.error["message"]
    assert store.read("mine").messages == talk["messages"]


@pytest.mark.slow
def test_without_a_folder_slots_are_erased_alone() -> None:
    with serving("--parallel", "2") as server:
        for action in ("save", "restore"):
            refused = act(server, action, "fox.bin", slot=1)
            assert refused.status == 501 and refused.error["type"] == "not_supported_error"
            assert refused.error["message"] == "this server does not save slots: start it with --slot-save-path DIR"
        assert act(server, "erase", slot=1).json == {"id_slot": 1, "n_erased": 0}
        assert act(server, "erase", slot=2).error["message"] == "there is no slot '2': 0 to 1 (--parallel)"


def test_a_busy_slot_is_waited_for(tmp_path: Path) -> None:
    with serving("--parallel", "2", "--slot-save-path", str(tmp_path)) as server, ThreadPoolExecutor(2) as pool:
        asked = {"prompt": FOX, "ignore_eos": True, "n_predict": 600, "stream": True, "temperature": 0}
        running = server.open("POST", "/completion", asked)
        running.readline()
        (busy,) = [each["id"] for each in server.request("GET", "/slots").json if each["is_processing"]]
        saving = pool.submit(act, server, "save", "busy", busy)
        assert act(server, "erase", slot=1 - busy).json["n_erased"] == 0, "the other one need not wait"
        running.read()
        running.connection.close()
        tokens = server.request("GET", "/slots").json[busy]["n_prompt_tokens"]
        assert saving.result(MINUTE).json["n_saved"] == tokens > 700, "behind the answer"
        assert act(server, "restore", "busy", slot=1 - busy).json["n_restored"] == tokens, "in whichever slot"
        assert [each["n_prompt_tokens"] for each in server.request("GET", "/slots").json] == [tokens, tokens]


@pytest.mark.slow
def test_adapters_are_had_again_as_they_were(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    """Whatever the slot, and the server, would have by themselves."""
    adapter = str(of_all_matrices(FABLE, tmp_path / "sea", 1, 0.12))
    with serving("--lora", f"{adapter}:0", "--slot-save-path", str(folder)) as adapted:
        half = [{"id": 0, "scale": 0.5}]
        said = completed(adapted, prompt=SEA, lora=half).json["content"]
        saved = act(adapted, "save", "half").json
        assert completed(adapted, prompt=SEA).json["content"] != said
        assert act(adapted, "restore", "half").json["n_restored"] == saved["n_saved"]
        again = completed(adapted, prompt=SEA, lora=half)
        assert again.json["content"] == said and cached(again) > 60
    completed(server)
    refused = act(server, "restore", "half")
    assert refused.status == 400 and "'half' was saved with another --lora, or none" in refused.error["message"] and held(server) > 0


@pytest.mark.slow
def test_of_several_models_a_request_names_its_own(here: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    with serving("--slot-save-path", str(tmp_path), model=None, **here) as many:
        assert act(many, "erase").status == 400, "none is loaded"
        assert completed(many, model="fable", prompt=SEA).status == 200
        saved = act(many, "save", "sea", model="fable").json
        assert saved["n_saved"] > 50 and act(many, "erase").json["n_erased"] == saved["n_saved"], "the one that is loaded"
        assert states(many)["twin"] == "unloaded"
        assert many.request("POST", "/slots/0?action=restore&model=fable", {"filename": "sea"}).json["n_restored"] == saved["n_saved"]
        assert act(many, "erase", model="nobody").status == 404


@pytest.mark.parametrize(("flags", "said"), [(("--kv", "4bit", "--kv-read", "sparse"), "leave out --kv-read sparse or --slot-save-path"),
                                             (("--slot-save-path", "/proc/none"), "--slot-save-path /proc/none is not writable: "),
                                             (("--slot-save-path", "/nowhere/slots"), "correct the path, or make it: mkdir -p /nowhere\n")])
def test_what_cannot_be_saved_is_reported_before_the_weights_are_read(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ran = CliRun("serve", "fable", "--port", "0", "--slot-save-path", tmp_path, *flags)
    assert ran.code in (1, 2) and said in ran.err
