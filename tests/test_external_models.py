"""Models of Ollama, LM Studio, llama.cpp, Jan and GPT4All: found in place, run by a name, and never changed."""

import json
import os
from pathlib import Path

import pytest
from gguf_bytes import small_model
from hub_user import FABLE, HubUser
from hypothesis import given
from hypothesis import strategies as st
from library_trees import OllamaTree, put, state

from effllm import EffllmError, ModelNotFound, UsageError, __version__
from effllm.cli.ollama_parameters import SETTING_NAMES, as_setting, settings_of, to_toml
from effllm.cli.server.model_registry import ModelRegistry
from effllm.cli.server.problems import Problem
from effllm.cli.settings import known_settings
from effllm.runtime.catalog import resolve
from effllm.runtime.gguf.projector_lookup import sibling_projectors
from effllm.runtime.library import external_models, listing_cache, local_model, model_name, ollama, storage
from effllm.runtime.library.listing import local_models, model_names

SMALL, OTHER = small_model(), small_model({"general.name": "another"})


@pytest.fixture(scope="module")
def fable(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """As a GGUF file."""
    from effllm.runtime.gguf.export import export_gguf

    out = tmp_path_factory.mktemp("fable") / "fable-Q8_0.gguf"
    list(export_gguf(FABLE, out, "Q8_0", "fable"))
    return out.read_bytes()


@pytest.fixture
def user(tmp_path: Path) -> HubUser:
    return HubUser(tmp_path, "http://127.0.0.1:9")


@pytest.fixture
def tree(tmp_path: Path) -> OllamaTree:
    return OllamaTree(tmp_path / ".ollama" / "models")


def listed(env: dict[str, str]) -> dict[str, str]:
    return {model.name: model.source for model in local_models(env)}


def refused(text: str, env: dict[str, str], kind: type[EffllmError] = ModelNotFound) -> str:
    with pytest.raises(kind) as caught:
        resolve(text, env)
    assert caught.value.hint and caught.value.message.isprintable()
    return f"{caught.value.message}\n{caught.value.hint}"


# -- Ollama ------------------------------------------------------------------------------------------------------------------------


def test_what_ollama_keeps_is_listed_by_its_names(user: HubUser, tree: OllamaTree) -> None:
    tree.add("tiny", SMALL, license="MIT License\n\nCopyright")
    tree.add("tiny:8b", SMALL)  # another name of the same file
    tree.add("other:q4", OTHER, namespace="someone")
    tree.add("repo:Q8_0", OTHER, namespace="org", host="hf.co")
    tree.add("cloud", None)  # runs elsewhere
    theirs = ("ollama:tiny", "ollama:tiny:8b", "ollama:someone/other:q4", "ollama:hf.co/org/repo:Q8_0")
    assert listed(user.env) == {"fable": "effllm", **dict.fromkeys(theirs, "Ollama")}
    licences = {model.name: model.licence for model in local_models(user.env)}
    assert licences["ollama:tiny"] == "MIT" and licences["ollama:tiny:8b"] is None
    for name in listed(user.env):
        assert name in model_names(user.env)
    for name in ("ollama:tiny", "ollama:tiny:latest", "Ollama:TINY", "ollama:library/tiny:8b", "ollama:registry.ollama.ai/library/tiny"):
        assert resolve(name, user.env).folder == tree.blob(SMALL), name
    assert resolve("ollama:hf.co/org/repo:Q8_0", user.env).folder == resolve("ollama:someone/other:q4", user.env).folder


def test_what_is_not_whole_is_not_listed_and_says_why(user: HubUser, tree: OllamaTree) -> None:
    tree.add("cut", SMALL)
    tree.blob(SMALL).write_bytes(SMALL[:-100])
    tree.add("gone", OTHER)
    tree.blob(OTHER).rename(tree.blobs / f"{tree.blob(OTHER).name}-partial")
    tree.add("elsewhere:cloud", None)
    (tree.folder / "manifests" / "registry.ollama.ai" / "library" / "torn").mkdir()
    for number, text in enumerate(("{", "[]", '{"layers": 5}', '{"layers": [5, {"mediaType": 3}]}', "")):
        (tree.folder / "manifests" / "registry.ollama.ai" / "library" / "torn" / f"{number}").write_text(text)
    assert listed(user.env).keys() == {"fable"}
    assert "ollama pull cut" in refused("ollama:cut", user.env) and "ollama pull gone" in refused("ollama:gone", user.env)
    assert "no GGUF file" in refused("ollama:elsewhere:cloud", user.env)
    assert "cannot be read\nollama pull torn:1 writes it anew" in refused("ollama:torn:1", user.env)


def test_words_without_end_are_counted(tree: OllamaTree, user: HubUser) -> None:
    tree.add("wordy", SMALL, params={f"k{number:02}": 1 for number in range(50)})
    _, said = settings_of(ollama.find("wordy", user.env), "wordy")
    assert said[0].endswith("k10, k11, 38 others")


def test_a_model_in_several_files_is_reported(user: HubUser, tree: OllamaTree) -> None:
    manifest = tree.add("split", SMALL)
    content = json.loads(manifest.read_text())
    content["layers"].append(tree.layer("model", OTHER))
    manifest.write_text(json.dumps(content))
    assert "2 files" in refused("ollama:split", user.env) and "ollama:split" not in listed(user.env)


def test_a_name_that_leads_nowhere_is_answered_with_what_ollama_has(user: HubUser, tree: OllamaTree) -> None:
    assert "no library of Ollama" in refused("ollama:x", {**user.env, "HOME": "/nonexistent"})
    tree.add("tiny:8b", SMALL)
    assert "did you mean ollama:tiny:8b?" in refused("tiny:8b", user.env, ModelNotFound)
    assert "did you mean ollama:tiny:8b?" in refused("ollama:tiny", user.env)
    tree.add("sole", SMALL)
    assert "did you mean ollama:sole?" in refused("sole", user.env)
    for wrong in ("ollama:../x", "ollama:a/b/c/d:e", "ollama:", "ollama:a//b", "ollama:-x"):
        refused(wrong, user.env, EffllmError)


def test_where_ollama_keeps_models_may_be_said(user: HubUser, tmp_path: Path) -> None:
    OllamaTree(tmp_path / "elsewhere").add("tiny", SMALL)
    assert "ollama:tiny" not in listed(user.env)
    assert "ollama:tiny" in listed({**user.env, "OLLAMA_MODELS": "~/elsewhere"})


def test_early_files_have_a_colon_in_their_name(user: HubUser, tree: OllamaTree) -> None:
    tree.add("tiny", SMALL)
    early = tree.blobs / tree.blob(SMALL).name.replace("-", ":")
    tree.blob(SMALL).rename(early)
    assert resolve("ollama:tiny", user.env).folder == early and "ollama:tiny" in listed(user.env)


def test_a_run_takes_what_ollama_says_beneath_what_the_user_does(user: HubUser, tree: OllamaTree, fable: bytes,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user.home / "config"))
    tree.add("fable", fable, system="You tell tales.", params={"temperature": 0, "num_ctx": 256, "stop": ["king"], "num_gpu": 1},
             messages=[{"role": "user", "content": "hi"}])
    first = user.run("run", "ollama:fable", "Tell me of the fox.", "-n", "12", "--stats")
    again = user.run("run", "ollama:fable", "Tell me of the fox.", "-n", "12")
    assert first.code == 0 and first.out == again.out, "at a temperature of 0 an answer is the same twice"
    assert "of 256 tokens" in first.err and "ignored parameters of the Ollama model: num_gpu" in first.err and "messages" in first.err
    config = user.home / "config" / "effllm" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("ctx-size = 512\n")
    assert "of 512 tokens" in user.run("run", "ollama:fable", "Tell me", "-n", "2", "--stats").err
    config.write_text('ctx-size = 512\n[model."ollama:fable"]\nctx-size = 400\n[model.ollama]\nctx-size = 128\n')
    for name in ("ollama:fable", "ollama:fable:4bit"):
        assert "of 400 tokens" in user.run("run", name, "Tell me", "-n", "2", "--stats").err, name
    assert "of 300 tokens" in user.run("run", "ollama:fable", "Tell me", "-n", "2", "--stats", "-c", "300").err
    alias = user.run("alias", "tale", "ollama:fable")
    assert alias.code == 0 and "tale" in listed(user.env)
    assert "of 300 tokens" in user.run("run", "tale", "Tell me", "-n", "2", "--stats", "-c", "300").err
    assert "num_gpu" in user.run("run", "tale", "Tell me", "-n", "2").err


def test_words_of_ollama_are_settings() -> None:
    assert set(SETTING_NAMES.values()) <= known_settings().keys()
    assert as_setting("top_k", "40", "x") == ("top-k", 40) and as_setting("top_k", 40.0, "x") == ("top-k", 40)
    assert as_setting("stop", "<|end|>", "x") == ("stop", ["<|end|>"]) and as_setting("temperature", 1, "x") == ("temp", 1.0)
    for name, said in (("num_gpu", 1), ("temperature", "hot"), ("top_p", 7), ("stop", ""), ("num_ctx", -5)):
        with pytest.raises(UsageError):
            as_setting(name, said, "x")


@given(st.recursive(st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.text(
    st.characters(exclude_categories=("Cs",))), lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_a_value_is_read_back_as_it_was(value: object) -> None:
    import tomllib

    assert tomllib.loads(f"a = {to_toml(value)}")["a"] == value


def test_a_server_of_several_takes_ollamas_own_names(user: HubUser, tree: OllamaTree) -> None:
    tree.add("tiny:8b", SMALL)
    tree.add("fable", SMALL)
    registry = ModelRegistry(user.env)
    assert {each.name for each in registry.models()} == {"fable", "ollama:tiny:8b", "ollama:fable"}
    for name in ("tiny:8b", "ollama:tiny:8b", "Tiny:8b"):
        assert registry.find(name).folder == tree.blob(SMALL), name
    assert registry.find("fable").folder == FABLE, "what is called so here goes before"
    with pytest.raises(Problem):
        registry.find("tiny:9b")


# -- folders of GGUF files ---------------------------------------------------------------------------------------------------------

FILES = {
    ".lmstudio/models/pub/repo-GGUF/m-Q8_0.gguf": "lmstudio:m-Q8_0", ".lmstudio/models/other/repo-GGUF/same-Q4_0.gguf": None,
    ".lmstudio/models/pub/repo-GGUF/same-Q4_0.gguf": None, ".cache/lm-studio/models/old/one/early.gguf": "lmstudio:early",
    ".cache/llama.cpp/org_repo_m-Q8_0.gguf": "llamacpp:org_repo_m-Q8_0",
    ".local/share/Jan/data/llamacpp/models/Menlo/Nano/model.gguf": "jan:Nano",
    ".local/share/nomic.ai/GPT4All/Meta Llama.Q4_0.gguf": "gpt4all:Meta Llama.Q4_0"}
UNFINISHED = (".lmstudio/models/pub/repo-GGUF/n-Q8_0.gguf.part", ".cache/llama.cpp/org_repo_n.gguf.downloadInProgress",
              ".local/share/nomic.ai/GPT4All/incomplete-n.gguf", ".local/share/Jan/data/llamacpp/models/Menlo/Two/model.gguf.tmp",
              ".lmstudio/models/pub/repo-GGUF/k-00001-of-00002.gguf")


def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_models.sys, "platform", "linux")


def test_folders_of_other_programs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    env = {"HOME": str(tmp_path)}
    put(tmp_path, dict.fromkeys((*FILES, *UNFINISHED), SMALL))
    put(tmp_path, {".lmstudio/models/pub/repo-GGUF/mmproj-m-f16.gguf": b"x", ".lmstudio/models/pub/cut.gguf": SMALL[:200]})
    ours = {name for name, source in listed(env).items() if source != "effllm"}
    assert ours == {*filter(None, FILES.values()), "lmstudio:pub/repo-GGUF/same-Q4_0", "lmstudio:other/repo-GGUF/same-Q4_0"}
    seen = {model.name: model.mmproj for model in local_models(env)}
    assert seen["lmstudio:m-Q8_0"].name == "mmproj-m-f16.gguf" and seen["jan:Nano"] is None
    for name in ours | {"lmstudio:PUB/repo-gguf/M-q8_0.gguf", "jan:Menlo/Nano", "jan:Nano/model.gguf"}:
        assert resolve(name, env).folder.read_bytes() == SMALL, name
    said = refused("lmstudio:same-Q4_0", env, UsageError)
    assert "lmstudio:pub/repo-GGUF/same-Q4_0 or" in said or "or lmstudio:pub/repo-GGUF/same-Q4_0" in said
    assert "did you mean lmstudio:m-Q8_0?" in refused("lmstudio:m-Q8", env)


def test_where_programs_keep_models_on_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, places in (("darwin", ("Library/Caches/llama.cpp", "Library/Application Support/nomic.ai/GPT4All",
                                         "Library/Application Support/Jan/data/models")),
                             ("win32", ("AppData/Local/llama.cpp", "AppData/Local/nomic.ai/GPT4All", "AppData/Roaming/Jan/data/models"))):
        monkeypatch.setattr(external_models.sys, "platform", platform)
        folders = {folder for program in external_models.PROGRAMS.values() for folder in program.folders({"HOME": str(tmp_path)})}
        assert {tmp_path / place for place in (*places, ".lmstudio/models", ".ollama/models")} <= folders


def test_a_folder_that_a_program_was_told_of_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    put(tmp_path, {"disk/pub/repo/m.gguf": SMALL, "llama/a_b_c.gguf": SMALL, ".lmstudio/settings.json":
                   f'{{"downloadsFolder": "{tmp_path}/disk"}}'.encode()})
    assert {"lmstudio:m", "llamacpp:a_b_c"} <= listed({"HOME": str(tmp_path), "LLAMA_CACHE": str(tmp_path / "llama")}).keys()
    for torn in (b"{", b"[]", b'{"downloadsFolder": 5}', b'{"downloadsFolder": "relative"}'):
        (tmp_path / ".lmstudio/settings.json").write_bytes(torn)
        assert "lmstudio:m" not in listed({"HOME": str(tmp_path)})


def test_in_llamacpps_cache_each_model_has_its_own_mmproj(tmp_path: Path) -> None:
    put(tmp_path, {name: b"" for repo in ("a_one", "a_two") for file in ("m-Q8_0.gguf", "mmproj-m-f16.gguf")
                   for name in (f"{repo}_{file}", f"{repo}_{file}.etag")} | {"a_three_m.gguf": b"", "a_three_m.gguf.json": b""})
    assert [path.name for path in sibling_projectors(tmp_path / "a_one_m-Q8_0.gguf")] == ["a_one_mmproj-m-f16.gguf"]
    assert sibling_projectors(tmp_path / "a_three_m.gguf") == []


def test_links_that_lead_back_and_closed_folders_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    put(tmp_path, {".lmstudio/models/pub/repo/m.gguf": SMALL, "far/linked.gguf": OTHER, ".lmstudio/models/closed/repo/n.gguf": SMALL})
    models = tmp_path / ".lmstudio" / "models"
    (models / "pub" / "again").symlink_to(models)
    (models / "pub" / "repo" / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (models / "pub" / "far").symlink_to(tmp_path / "far")
    (models / "closed").chmod(0)
    try:
        found = listed({"HOME": str(tmp_path)})
    finally:
        (models / "closed").chmod(0o755)
    assert {"lmstudio:m", "lmstudio:linked"} <= found.keys() and "lmstudio:gone" not in found


# -- what is never done ------------------------------------------------------------------------------------------------------------


def test_nothing_of_them_is_removed_pulled_or_written(user: HubUser, tree: OllamaTree, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    tree.add("tiny", SMALL)
    put(user.home, {place: SMALL for place, name in FILES.items() if name})
    before = state(tree.folder), state(user.home / ".lmstudio")
    assert "ollama rm tiny" in user.run("rm", "ollama:tiny", "-y").refused(2)
    assert "remove it in LM Studio" in user.run("rm", "lmstudio:m-Q8_0", "-y").refused(2)
    for path in (tree.blob(SMALL), user.home / ".lmstudio/models/pub/repo-GGUF/m-Q8_0.gguf"):
        assert "never changes" in user.run("rm", path, "-y").refused(2)
    user.run("rm", "ollama:nothing", "-y").refused(3)
    assert "ollama pull tiny" in user.run("pull", "ollama:tiny").refused(2)
    assert user.run("alias", "mine", "ollama:tiny").code == 0
    assert "effllm alias --rm mine" in user.run("rm", "mine", "-y").refused(2)
    assert "needs no download" in user.run("pull", "mine").err
    assert user.run("verify", "ollama:tiny").code == 0 and user.run("list").code == 0
    assert (state(tree.folder), state(user.home / ".lmstudio")) == before
    tree.blob(SMALL).write_bytes(SMALL[:-1] + b"\1")
    assert user.run("verify", tree.blob(SMALL)).code == 1


def test_what_is_measured_of_them_is_kept_elsewhere_or_refused(user: HubUser, tree: OllamaTree, fable: bytes) -> None:
    """What effllm stores next to a model would lie in another program's folder."""
    tree.add("fable", fable)
    before = state(tree.folder)
    said = user.run("eval", "kv-profile", "ollama:fable").refused(2)
    assert "effllm writes nothing there" in said and "ln -s" in said
    assert "effllm writes nothing there" in user.run("eval", "kv-profile", tree.blob(fable)).refused(2)
    user.run("calibrate-sparsity", "ollama:fable").refused(2)
    assert user.run("quantize", "ollama:fable", "-o", user.home / "small", "--bits", "4").code == 0
    assert user.run("run", "ollama:fable:4bit", "A fox", "-n", "2", "--keep").code == 0
    assert "ollama:fable:4bit" in listed(user.env)
    assert user.run("rm", "ollama:fable:4bit", "-y").code == 0
    assert state(tree.folder) == before


def test_a_projector_that_is_not_read_leaves_the_text(user: HubUser, tree: OllamaTree, fable: bytes) -> None:
    tree.add("sees", fable, projector=b"GGUF of another kind", params={"num_ctx": 1 << 20, "temperature": -1})
    run = user.run("run", "ollama:sees", "A fox", "-n", "2")
    assert run.code == 0 and "cannot take images here" in run.err and "ignored parameters of the Ollama model: temperature" in run.err
    assert {row["name"]: row["mmproj"] is not None for row in user.run("list", "--json").json["models"]} == {
        "fable": False, "ollama:sees": True}
    user.run("run", "ollama:sees", "A fox", "--image", user.home / "x.png").refused(2)


def test_an_alias_of_what_has_gone_says_so(user: HubUser, tree: OllamaTree) -> None:
    manifest = tree.add("tiny", SMALL)
    assert user.run("alias", "mine", "ollama:tiny").code == 0
    manifest.unlink()
    assert "mine: Ollama has no model" in user.run("show", "mine").refused(3)
    assert "mine" not in listed(user.env)


def test_a_name_without_a_program_looks_through_no_library(user: HubUser, tree: OllamaTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a run waits for nobody's disk."""
    tree.add("tiny", SMALL)
    looked = []
    monkeypatch.setattr(ollama, "roots", lambda env: looked.append(env) or [])
    resolve("fable", user.env)
    assert user.run("show", "fable").code == 0 and not looked


def test_a_second_list_reads_no_headers_and_says_the_same(user: HubUser, tree: OllamaTree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.add("tiny", SMALL)
    tree.add("other", OTHER)
    tree.add("none", b"GGUF" + bytes(100))
    first, read = local_models(user.env), []
    noted = storage.data_folder(user.env) / listing_cache.FILE
    monkeypatch.setattr(local_model, "_local_file", lambda name, path, *more: read.append(path))
    assert local_models(user.env) == first and read == [tree.blob(b"GGUF" + bytes(100))], "what could not run is looked at anew"
    kept = noted.read_text()
    odd = kept.replace('"bits": ', '"bits": "x", "bit": ')
    for damaged in ("", "[]", kept[:-20], odd, kept.replace(__version__, "0.0"), '{"files": 3}'):
        noted.write_text(damaged)
        assert listed(user.env) == {"fable": "effllm"}
        noted.write_text(kept)
    os.utime(tree.blob(OTHER), ns=(1, 1))
    assert "ollama:tiny" in listed(user.env) and "ollama:other" not in listed(user.env)


def test_programs_are_those_whose_names_are_taken_apart() -> None:
    assert tuple(external_models.PROGRAMS) == model_name.PROGRAMS


@pytest.mark.parametrize("program", model_name.PROGRAMS)
def test_a_program_alone_is_no_model(program: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a model name") as refused:
        model_name.parse_reference(f"{program}:", {"HOME": str(tmp_path)})
    assert refused.value.hint == f"effllm list shows the names that begin so: {program}:NAME"
