"""Parsing MODEL, what effllm stores and where, the user's aliases, and removal without touching what belongs to others."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub
from hub_user import FABLE, HubUser, sharded, tiny
from hypothesis import example, given
from hypothesis import strategies as st

from effllm import EffllmError, UsageError
from effllm.offload.folder_writer import partial_folder
from effllm.runtime.catalog import resolve
from effllm.runtime.conversion import on_load
from effllm.runtime.library import storage
from effllm.runtime.library.aliases import own_file
from effllm.runtime.library.listing import local_models, model_names
from effllm.runtime.library.model_name import parse_reference

REPO = "org/name"


# -- references ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "name", "revision", "variant", "file"), [
    ("llama3", "llama3", None, None, None), ("org/name", "org/name", None, None, None), ("org/name@v1.0", "org/name", "v1.0", None, None),
    ("llama3:4bit", "llama3", None, "4bit", None), ("org/name@refs/pr/1:ternary", "org/name", "refs/pr/1", "ternary", None),
    ("org/name:a-Q4_0.gguf", "org/name", None, None, "a-Q4_0.gguf"), ("org/name@v1:B.GGUF", "org/name", "v1", None, "B.GGUF"),
    ("org/name:b.gguf:4bit", "org/name", None, "4bit", "b.gguf"), (" llama3 ", "llama3", None, None, None)])
def test_names(text: str, name: str, revision: str | None, variant: str | None, file: str | None) -> None:
    found = parse_reference(text, {"HOME": "/nowhere"})
    assert (found.name, found.revision, found.variant, found.file, found.path) == (name, revision, variant, file, None)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "odd@name:4bit").mkdir()
    monkeypatch.chdir(tmp_path)
    env = {"HOME": str(tmp_path)}
    for text, path, variant, file in (("./org", Path("org"), None, None), ("org/name", Path("org/name"), None, None),
                                      ("org/name:4bit", Path("org/name"), "4bit", None), ("~/org", tmp_path / "org", None, None),
                                      ("./org:m.gguf", Path("org"), None, "m.gguf"), ("./odd@name:4bit", Path("odd@name:4bit"), None, None),
                                      ("/a/b.gguf", Path("/a/b.gguf"), None, None), ("~", tmp_path, None, None)):
        found = parse_reference(text, env)
        assert (found.path, found.variant, found.file, found.name) == (path, variant, file, ""), text


@pytest.mark.parametrize(("text", "said"), [("", "no model"), ("a:4bit:3bit", "two formats"), ("a:9bit", "not a known weight format"),
                                            ("a@", "not a revision"), ("a@../b", "not a revision")])
def test_what_has_no_such_form(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_reference(text, {})


@pytest.mark.parametrize(("address", "name"), [
    ("https://huggingface.co/org/name", "org/name"), ("https://huggingface.co/org/name/", "org/name"),
    ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"), ("https://hub.example/org/name/tree/v1.0", "org/name@v1.0"),
    ("https://huggingface.co/org/name/tree/main", "org/name"),
    ("http://hf.co/org/name/blob/main/sub/m-Q8_0.gguf?download=true", "org/name:sub/m-Q8_0.gguf")])
def test_an_address_of_a_browser_is_answered_with_the_name_in_it(user: HubUser, address: str, name: str) -> None:
    for command in (("pull",), ("show",), ("run",), ("rm",)):
        assert f"did you mean '{name}'?" in user.run(*command, address).refused(2)
    assert parse_reference(name, user.env).name == "org/name"


@given(st.text(max_size=40))
@example("@0")
@example("@main:4bit")
@example(":4bit")
def test_any_text_is_a_reference_or_one_line(text: str) -> None:
    try:
        found = parse_reference(text, {"HOME": "/nowhere"})
    except EffllmError as error:
        assert error.message.isprintable() and error.hint.isprintable()
    else:
        assert bool(found.name) != (found.path is not None) or found.path is not None or not found.base


# -- folders ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"XDG_DATA_HOME": "{0}/d", "XDG_CONFIG_HOME": "{0}/c"}, {"XDG_DATA_HOME": " "}])
def test_folders_are_where_the_platform_puts_them(tmp_path: Path, variables: dict[str, str]) -> None:
    env = {"HOME": str(tmp_path), **{name: value.format(tmp_path) for name, value in variables.items()}}
    code = "import platformdirs as p; print(p.user_data_path('effllm', appauthor=False), p.user_config_path('effllm', appauthor=False))"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.split()
    assert [str(storage.data_folder(env)), str(storage.config_folder(env))] == theirs


def test_a_folder_made_elsewhere_is_listed_until_it_is_gone(user: HubUser) -> None:
    out = user.home / "elsewhere" / "fable-4bit"
    out.parent.mkdir()
    assert user.run("quantize", "fable", "-o", out, "--bits", "4").code == 0
    rows = {model["name"]: model for model in user.run("list", "--json").json["models"]}
    assert rows[str(out)]["source"] == "folder" and 4 < rows[str(out)]["bits_per_weight"] < 5
    assert rows[str(out)]["context"] == 2048 and rows[str(out)]["chat_template"] is True
    (out / "mine.txt").write_text("mine")
    assert "mine.txt" in user.run("rm", out).refused(2) and (out / "effllm.json").exists()
    (out / "mine.txt").unlink()
    assert user.run("rm", out, "-y").code == 0 and not out.exists() and out.parent.exists()
    assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable"]


def measured(folder: Path) -> Path:
    """The folder with what effllm records beside a model: a profile of its cache, sparsity, predictors, and a write that was cut short."""
    from effllm.quant.kv_basis import KVBasis
    from effllm.runtime.config import read_config
    from effllm.runtime.kv.kv_profile import Profile
    from effllm.runtime.kv.kv_profile_file import save_profile
    from effllm.runtime.sparse.activation_predictors import Predictor, Predictors
    from effllm.runtime.sparse.sparsity_file import Sparsity, save

    config = read_config(folder)
    count, ones = config.num_hidden_layers, np.ones((4, 4), np.float32)
    save_profile(Profile((KVBasis.plain(config.num_key_value_heads, config.head_dim),) * count, (None,) * count, "weights", 600), folder)
    save(Sparsity(100, (0.5,) * count, {0.5: (0.1,) * count}), folder)
    Predictors((Predictor(ones, ones, ones[0]),) * count).save(folder)
    (folder / ".kv_profile.json.4711.partial").write_text("{")
    return folder


def test_what_is_recorded_beside_a_model_goes_with_it(user: HubUser) -> None:
    out, words = user.home / "fable-4bit", ("quantize", "fable", "--bits", "4", "-o")
    assert user.run(*words, out).code == 0
    (measured(out) / "mine.txt").write_text("mine")
    for command in (("rm", out), (*words, out, "--force")):
        assert "mine.txt" in user.run(*command).refused(2) and (out / "kv_profile.f32").exists()
    (out / "mine.txt").unlink()
    again = user.run(*words, out, "--force")
    assert again.code == 0, again.err
    assert not (out / "kv_profile.json").exists(), "a profile of other weights was left beside the new ones"
    assert user.run("rm", measured(out), "-y").code == 0 and not out.exists()


@pytest.mark.slow
def test_a_kept_copy_is_found_after_its_model_was_measured(user: HubUser) -> None:
    folder, words = user.home / "model", ("Once", "--raw", "-n", "1", "--bits", "2")
    shutil.copytree(FABLE, folder)
    assert "--keep" not in user.run("run", folder, *words, "--keep").err
    measured(folder)
    (folder / "README.md").write_text("# Notes of mine\n")
    assert "2bit weights from" in user.run("run", folder, *words).err
    (folder / "generation_config.json").write_text("{}")
    assert "2bit weights from" not in user.run("run", folder, *words).err, "another model"


def test_every_revision_that_is_here_is_listed_and_can_be_removed(hub: Hub, user: HubUser) -> None:
    commits = []
    for branch in ("v1", "v2", "main"):
        made = hub.add(REPO, FABLE, files={"LICENSE": branch.encode()}, branches=(branch,))
        assert user.run("pull", f"{REPO}@{branch}").code == 0
        commits.append(made.commit)
    older = {f"{REPO}@{commit[:12]}": commit for commit in commits[:2]}
    listed = {each["name"]: each["revision"] for each in user.run("list", "--json").json["models"] if each["source"] == "hub cache"}
    assert listed == {REPO: commits[2], **older} and set(listed) <= set(model_names(user.env))
    for name, commit in older.items():
        assert resolve(name, user.env).revision == commit and user.run("rm", name, "-y").code == 0
    assert [each["name"] for each in user.run("list", "--json").json["models"] if each["source"] == "hub cache"] == [REPO]


def test_what_keep_has_kept_of_a_file_or_a_folder_is_named_shown_and_removed(user: HubUser) -> None:
    file, folder = user.home / "m.gguf", user.home / "own"
    assert user.run("export", "fable", "-o", file, "--type", "Q8_0").code == 0
    shutil.copytree(FABLE, folder)
    for model in (file, folder):
        ref = resolve(str(model), user.env)
        request = on_load.Request(ref, "4bit", storage.models_folder(user.env), keep=True)
        request.folder.parent.mkdir(parents=True)
        list(on_load.quantize_on_load(request, request.folder))
        assert f"{model}:4bit" in [each["name"] for each in user.run("list", "--json").json["models"]]
        assert user.run("show", f"{model}:4bit", "--json").json["folder"] == str(request.folder)
        assert user.run("rm", f"{model}:4bit", "-y").code == 0 and not request.folder.exists() and model.exists()
        assert "not stored" in user.run("rm", f"{model}:4bit").refused(3)


def test_what_a_stopped_keep_of_a_file_has_left_is_removed(user: HubUser) -> None:
    ref = resolve("fable:4bit", user.env)
    out = on_load.Request(ref, "4bit", storage.models_folder(user.env), keep=True).folder
    partial_folder(out).mkdir(parents=True)
    assert user.run("rm", "fable:4bit", "-y").code == 0 and not partial_folder(out).exists()


def test_a_folder_with_an_alias_is_listed_once(user: HubUser) -> None:
    made = user.home / "made"
    assert user.run("quantize", FABLE, "-o", made, "--bits", "4").code == 0
    assert user.run("alias", "mine", made).code == 0 and user.run("alias", "also", made).code == 0
    listed = [each for each in user.run("list", "--json").json["models"] if each["folder"] == str(made)]
    assert [each["name"] for each in listed] == ["mine", "also"], "by the names that were given, not by the path"


def test_a_damaged_list_of_folders_is_an_empty_one(user: HubUser) -> None:
    path = user.home / "data" / "effllm" / "folders.json"
    path.parent.mkdir(parents=True)
    for text in ("", "{", "[]", '{"format": "effllm-folders", "folders": [1, "relative", "/absent"]}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        assert storage.registered(user.env) == []
    storage.register(user.env, FABLE)
    assert json.loads(path.read_text())["folders"] == []  # no model that effllm made


def test_every_name_that_is_listed_leads_to_its_folder(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=sharded(FABLE))
    for words in ((REPO,), (REPO, "--bits", "4"), (f"{REPO}:3bit",)):
        assert user.run("pull", *words).code == 0
    assert user.run("run", "fable", "Once", "--raw", "-n", "1", "--bits", "2", "--keep").code == 0
    models = local_models(user.env)
    assert [model.name for model in models] == ["fable", "fable:2bit", f"{REPO}:3bit", f"{REPO}:4bit", REPO]
    assert sorted(model_names(user.env)) == sorted(model.name for model in models)
    for model in models:
        assert resolve(model.name, user.env).folder == model.folder
    said = user.run("list").out.splitlines()
    assert said[0].split() == ["model", "family", "parameters", "bits", "size", "context", "licence", "from"] and len(said) == 6


# -- aliases ---------------------------------------------------------------------------------------------------------------------


def test_an_alias_of_ones_own(hub: Hub, user: HubUser) -> None:
    assert user.run("alias", "story", "fable").code == 0
    assert user.run("run", "story", "Once", "--raw", "-n", "2").code == 0
    assert user.run("alias", "big", "llama3@v9").code == 0
    assert "effllm pull big" in user.run("run", "big", "hi").refused(3)
    hub.add(REPO, FABLE)
    assert user.run("pull", REPO).code == 0 and user.run("alias", "mine", REPO).code == 0
    assert resolve("mine", user.env).folder == resolve(REPO, user.env).folder
    listed = user.run("alias", "--json").json
    assert list(listed["aliases"]) == ["story", "big", "mine"] and listed["aliases"]["big"]["revision"] == "v9"
    assert listed["aliases"]["big"]["gated"] is True and listed["aliases"]["mine"]["repo"] == REPO
    assert "mine" in user.run("alias").out
    names = [model["name"] for model in user.run("list", "--json").json["models"]]
    assert "story" in names and "mine" in names
    assert user.run("alias", "--rm", "story").code == 0 and "did you mean" not in user.run("alias", "--rm", "mine").err
    assert user.run("run", "story", "hi").code == 3
    assert "comes with effllm" in user.run("alias", "--rm", "llama3").refused(3)


def test_ones_own_alias_comes_before_the_packaged_one(user: HubUser) -> None:
    assert "`effllm alias --rm llama3` restores" in user.run("alias", "llama3", "qwen3-4b").err
    assert "restores" not in user.run("alias", "story", "fable").err
    assert "Qwen/Qwen3-4B" in user.run("run", "llama3", "hi").refused(3)
    assert user.run("alias", "--rm", "llama3").code == 0
    assert "Llama-3.1" in user.run("run", "llama3", "hi").refused(3)


@pytest.mark.parametrize(("words", "code", "said"), [
    (("x",), 2, "MODEL is missing"), (("X!", "fable"), 2, "cannot be an alias"), (("x", "org/unknown"), 3, "effllm pull org/unknown"),
    (("--rm",), 2, "one NAME"), (("--rm", "nothing"), 3, "no alias of yours"), (("x", "fable:4bit"), 2, "would be quantized"),
    (("x", "fabel"), 3, "did you mean fable")])
def test_aliases_that_cannot_be(user: HubUser, words: tuple[str, ...], code: int, said: str) -> None:
    assert said in user.run("alias", *words).refused(code)
    assert not own_file(user.env).exists()


def test_a_broken_file_of_aliases_is_named(user: HubUser) -> None:
    path = own_file(user.env)
    path.parent.mkdir(parents=True)
    for text, said in (("{", "not valid YAML"), ("a: {path: relative, licence: x, gated: false, params: 1M, size_gb: 1, default_bits: 4}",
                                                 "absolute"), ("a: {repo: org/name, license: MIT}", "license")):
        path.write_text(text)
        ran = user.run("run", "llama3", "hi")
        assert ran.code == 1 and said in ran.err and str(path) in ran.err
    path.write_text("")
    assert user.run("list").code == 0


# -- removing --------------------------------------------------------------------------------------------------------------------


def test_the_shared_cache_is_not_touched_without_a_yes(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    assert user.run("pull", REPO).code == 0
    folder = user.snapshot(REPO, repo.commit)
    said = user.run("rm", REPO).refused(2)
    assert "other programs share" in said and "-y" in said and folder.exists()
    for reply in ("n\n", "\n", ""):
        assert user.run("rm", REPO, answers=reply).code == 0 and folder.exists(), repr(reply)
    planned = user.run("rm", REPO, "--dry-run", "--json").json
    assert planned["removed"] is False and planned["owner"] == "hub cache" and folder.exists()
    assert planned["bytes"] >= sum(map(len, repo.files.values()))
    assert user.run("rm", REPO, answers="y\n").code == 0 and not folder.parents[1].exists()


def test_a_revision_takes_only_its_own_files(hub: Hub, user: HubUser) -> None:
    old = hub.add(REPO, files=tiny(seed=1), branches=("main", "v1"))
    assert user.run("pull", f"{REPO}@v1").code == 0
    new = hub.add(REPO, files=tiny(seed=2))
    assert user.run("pull", REPO).code == 0
    assert user.run("rm", f"{REPO}@v1", "-y").code == 0
    assert not user.snapshot(REPO, old.commit).exists()
    assert user.run("verify", REPO, "--json").json["damaged"] == []
    assert len(user.blobs(REPO)) == len(new.files)
    from huggingface_hub import scan_cache_dir

    assert not scan_cache_dir(user.home / "hf" / "hub").warnings


def test_folders_of_a_user_are_never_removed(user: HubUser) -> None:
    folder = user.home / "model"
    folder.mkdir()
    for path in FABLE.iterdir():
        (folder / path.name).symlink_to(path)
    assert "was not quantized by effllm" in user.run("rm", folder, "-y").refused(2)
    assert "comes with effllm" in user.run("rm", "fable", "-y").refused(2)
    assert len(list(folder.iterdir())) == len(list(FABLE.iterdir()))


def test_a_model_of_our_own_and_a_part_of_a_download(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=sharded(FABLE))
    assert user.run("pull", f"{REPO}:4bit").code == 0
    hub.swap["model-00003-of-00003.safetensors"] = b"x" * len(hub.repos[REPO].files["model-00003-of-00003.safetensors"])
    assert user.run("pull", REPO).code == 6
    assert user.run("rm", f"{REPO}:4bit", "-y").code == 0
    assert not (user.home / "data" / "effllm" / "models" / "org--name").exists()
    assert user.blobs(REPO) and user.run("rm", REPO, "-y").code == 0 and not user.blobs(REPO)
    assert "effllm list shows what is here" in user.run("rm", REPO).refused(3)


def test_verify_names_a_damaged_download(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    assert user.run("pull", REPO).code == 0
    blob = (user.snapshot(REPO, repo.commit) / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x00")
    assert "model.safetensors" in user.run("verify", REPO).refused(1)
