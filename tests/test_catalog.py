"""Model names to folders: the strict catalog, this machine's hub cache, and the message where a name resolves to nothing."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from effllm import EffllmError, ModelNotFound, UsageError
from effllm.runtime import families, hub
from effllm.runtime.catalog import Absent, catalog, entry_folder, parse_catalog, pull_hint, resolve
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.library.listing import local_models

ROOT = Path(__file__).resolve().parent.parent
ENTRY = "a: {repo: org/name, licence: MIT, gated: false, params: 1.1B, size_gb: 2.2, default_bits: 4}\n"
COMMIT, OTHER = "1234567" + "a" * 33, "7654321" + "b" * 33
CARD = "---\nlanguage: en\nlicense: mit\n---\n# A model\nlicense: not this\n"


def add_snapshot(env: Mapping[str, str], repo: str, commit: str = COMMIT, branch: str | None = "main", card: str = CARD) -> Path:
    """A small complete model in the cache, laid out as hub tools do: files are links to blobs."""
    root = hub.cache_folder(env) / ("models--" + repo.replace("/", "--"))
    folder, blobs = root / "snapshots" / commit, root / "blobs"
    for path in (folder, blobs, root / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    (blobs / f"{commit}-config").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads":
        2}))
    save_file({"model.embed_tokens.weight": np.zeros((32, 16), np.float16), "model.norm.weight": np.zeros(16, np.float16)},
              blobs / f"{commit}-weights")
    (folder / "config.json").symlink_to(blobs / f"{commit}-config")
    (folder / "model.safetensors").symlink_to(blobs / f"{commit}-weights")
    (folder / "README.md").write_text(card)
    if branch:
        (root / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / branch).write_text(commit)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A home of its own, with an empty cache."""
    return {"HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "cache")}


def failed(text: str, env: Mapping[str, str], kind: type[EffllmError] = ModelNotFound) -> EffllmError:
    """The name is refused in one line, with a next step."""
    with pytest.raises(EffllmError) as caught:
        resolve(text, env)
    assert isinstance(caught.value, kind), caught.value
    for line in (caught.value.message, caught.value.hint):
        assert line and line.isprintable() and len(line) < 400
    return caught.value


# ---- models.yaml


def test_the_packaged_catalog_holds_what_was_written() -> None:
    entries = {entry.alias: entry for entry in catalog()}
    aliases = re.findall(r"^([\w.-]+):", (ROOT / "models.yaml").read_text(), re.MULTILINE)
    assert aliases == list(entries)  # a repeated alias would silently replace the first
    assert {"fable", "llama3"} <= entries.keys()
    assert entries["llama3"].gated and entries["llama3"].repo.startswith("meta-llama/")
    assert entry_folder(entries["fable"]) == ROOT / "models" / "fable"
    for entry in entries.values():
        stem = entry.alias.split("-")[0]
        assert entry.path or any(family in f"{entry.repo} llama".lower() for family in families.FAMILIES), stem


def test_sizes_agree_with_parameter_counts() -> None:
    """Two bytes a parameter; a checkpoint that stores a tied head twice is larger, by its head, one with experts of 4 bits smaller,
    one of 8 bits, one with ternary layers and an embedding of 16 bits too; what makes vectors or ranks may be published in float32."""
    for entry in catalog():
        params = float(entry.params[:-1]) * {"M": 1e6, "B": 1e9}[entry.params[-1]]
        least, most = (0.27, 0.35) if entry.alias.startswith("gpt-oss") else (0.23, 0.27) if entry.alias == "bitnet" else (
            0.48, 0.62) if entry.alias == "kolibri" or "FP8" in entry.note else (
            0.97, 2.1 if entry.note.startswith(("embedding model", "reranker")) else 1.3)
        assert least <= entry.size_bytes / (2 * params) <= most, entry.alias


def test_an_alternative_is_of_about_the_same_size_and_open() -> None:
    entries = {entry.alias: entry for entry in catalog()}
    for entry in entries.values():
        assert bool(entry.alternative) == entry.gated, entry.alias
        if entry.alternative:
            other = entries[entry.alternative]
            assert not other.gated and 0.6 <= other.size_bytes / entry.size_bytes <= 1.6, entry.alias


@pytest.mark.parametrize(("change", "word"), [
    (("licence: MIT", "license: MIT"), "license"), (("gated: false", "gated: maybe"), "gated"),
    (("gated: false, ", ""), "gated is missing"), (("size_gb: 2.2", "size_gb: lots"), "size_gb"),
    (("size_gb: 2.2", "size_gb: -1"), "size_gb"), (("default_bits: 4", "default_bits: 7"), "default_bits"),
    (("default_bits: 4", "default_bits: true"), "default_bits"), (("params: 1.1B", "params: 1.1"), "params"),
    (("params: 1.1B", "params: many"), "params"), (("repo: org/name, ", ""), "exactly one"),
    (("repo: org/name", "repo: org/name, path: models/a"), "exactly one"), (("org/name", "name"), "exactly one"),
    (("org/name", "../name"), "exactly one"), (("repo:", "revision: ../main, repo:"), "revision"),
    (("repo:", "sha256: 1, repo:"), "sha256"), (("a: {", "A: {"), "'A'"), (("a: {", "1: {"), "1"),
    (("}", ""), "not valid YAML"), ((ENTRY, "a: 5"), "'a'"), ((ENTRY, ""), "no aliases")])
def test_a_wrong_catalog_is_refused_by_name(change: tuple[str, str], word: str) -> None:
    assert change[0] in ENTRY
    with pytest.raises(ConfigError) as caught:
        parse_catalog(ENTRY.replace(*change))
    assert word in caught.value.message and "\n" not in caught.value.message


def test_a_right_entry_and_its_defaults() -> None:
    (entry,) = parse_catalog(ENTRY)
    assert (entry.repo, entry.revision, entry.size_bytes, entry.default_bits, entry.exclude) == ("org/name", "main", 2_200_000_000, 4, "")
    assert pull_hint(entry) == "effllm pull a"
    (gated,) = parse_catalog(ENTRY.replace("gated: false", "gated: true, exclude: x/*, alternative: b"))
    assert pull_hint(gated, "a@v1") == "accept the licence on the model's page, hf auth login, then: effllm pull a@v1 (without a gate: b)"


def test_a_name_is_resolved_without_the_libraries_that_are_slow_to_import() -> None:
    """The first word waits for this."""
    code = ("import os, sys\nfrom effllm.runtime.catalog import resolve\nresolve('fable', os.environ)\n"
            "print(sorted({'numpy', 'numba', 'torch', 'pydantic', 'huggingface_hub', 'jinja2', 'tokenizers'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- resolve


def test_the_packaged_model(env: dict[str, str]) -> None:
    for text in ("fable", "Fable", " fable "):
        ref = resolve(text, env)
        assert ref.folder == ROOT / "models" / "fable" and ref.alias == "fable" and ref.licence == "Apache-2.0" and not ref.gated
    assert "no other revision" in failed("fable@main", env, UsageError).message


def test_folders(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("mine", "org/name", "home/models", "with:colon"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text in (str(tmp_path / "mine"), "./mine", "mine", "mine/", "org/name", "./with:colon", "../" + tmp_path.name + "/mine"):
        assert resolve(text, env).folder.samefile(text)
        assert resolve(text, env).alias is None
    assert resolve("~/models", env).folder == tmp_path / "home" / "models"
    (tmp_path / "fable").mkdir()
    assert resolve("fable", env).alias == "fable" and resolve("./fable", env).alias is None
    assert "'./absent'" in failed("./absent", env).message
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.safetensors").touch()
    for text in ("./m.gguf", "m.gguf"):
        assert resolve(text, env).folder == Path(text)
    assert resolve("m.gguf:4bit", env).variant == "4bit"
    assert "no file './absent.gguf'" in failed("./absent.gguf", env).message
    assert "a model is a folder" in failed("m.safetensors", env, UsageError).message


def test_a_repository_in_the_cache(env: dict[str, str]) -> None:
    folder = add_snapshot(env, "org/name")
    for text in ("org/name", "org/name@main", f"org/name@{COMMIT}", f"org/name@{COMMIT[:7]}"):
        ref = resolve(text, env)
        assert ref.folder == folder and ref.repo == "org/name" and ref.revision == COMMIT and ref.licence == "mit"
    tagged = add_snapshot(env, "org/name", OTHER, branch="refs/pr/1")
    assert resolve("org/name@refs/pr/1", env).folder == tagged and resolve("org/name", env).folder == folder
    assert resolve("old", {**env, "HF_HUB_CACHE": str(add_snapshot(env, "old").parents[2])}).repo == "old"
    missing = failed("org/name@v2", env)
    assert "v2" in missing.message and missing.hint == "effllm pull org/name@v2"


def test_an_alias_whose_files_are_in_the_cache(env: dict[str, str]) -> None:
    folder = add_snapshot(env, "meta-llama/Llama-3.1-8B-Instruct")
    for text in ("llama3", "LLAMA3", "meta-llama/Llama-3.1-8B-Instruct"):
        ref = resolve(text, env)
        assert ref.folder == folder and ref.alias == "llama3" and ref.licence == "llama3.1" and ref.gated and ref.default_bits == 4


def test_an_alias_whose_files_are_absent(env: dict[str, str]) -> None:
    error = failed("llama3", env)
    assert "14.99 GiB" in error.message and "gated" in error.message and "effllm pull llama3 (without a gate: qwen3-8b)" in error.hint
    open_one = failed("qwen3-0.6b", env)
    assert "gated" not in open_one.message and open_one.hint == "effllm pull qwen3-0.6b"
    assert failed("org/name", env).hint == "effllm pull org/name"
    for text, repo in (("llama3", "meta-llama/Llama-3.1-8B-Instruct"), ("org/name@v1", "org/name"), ("org/name:4bit", "org/name"),
                       ("org/name:model.Q4_0.gguf", "org/name")):
        error = failed(text, env, Absent)
        assert error.repo == repo and error.reference.text == text


def test_names_that_are_nearly_right(env: dict[str, str]) -> None:
    add_snapshot(env, "someone/storyteller-2b")
    for typed, meant in (("fabel", "fable"), ("lama3", "llama3"), ("qwen3-8", "qwen3-8b"), ("qwen3-14", "qwen3-14b"),
                         ("qwen3.8", "qwen3.8-27b"),
                         ("Qwen/Qwen3-0.6b", "Qwen/Qwen3-0.6B"),
                         ("tinylama", "tinyllama"),
                         ("someone/storyteler-2b", "someone/storyteller-2b"), ("qwen", "qwen2.5-0.5b")):
        assert failed(typed, env).hint.startswith(f"did you mean {meant}")
    assert "effllm list" in failed("zzz", env).hint


def test_what_this_version_cannot_take(env: dict[str, str]) -> None:
    for text, kind in (("fable:7bit", UsageError), ("fable:", ModelNotFound), ("llama3:model.bin", ModelNotFound)):
        assert text.split(":")[1] in failed(text, env, kind).message
    assert "no model given" in failed("  ", env, UsageError).message
    assert "'../x'" in failed("org/name@../x", env, UsageError).message
    failed("org/name@", env, UsageError)


@given(st.text(max_size=60))
def test_any_text_is_a_model_or_one_line(text: str) -> None:
    env = {"HOME": "/nonexistent", "HF_HUB_CACHE": "/nonexistent"}
    try:
        assert resolve(text, env).folder.exists()
    except EffllmError as error:
        assert error.message.isprintable() and error.hint.isprintable()


# ---- the cache


@pytest.mark.parametrize("variables", [
    {}, {"HF_HOME": "{0}/hf"}, {"HF_HUB_CACHE": "{0}/direct", "HF_HOME": "{0}/hf"}, {"XDG_CACHE_HOME": "{0}/xdg"},
    {"HF_HOME": "~/elsewhere"},
    {"HUGGINGFACE_HUB_CACHE": "{0}/old"}, {"HF_HUB_CACHE": "$HOME/var"}])
def test_the_cache_is_where_its_library_looks(variables: dict[str, str], tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), **{name: value.format(tmp_path) for name, value in variables.items()}}
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.strip()
    assert hub.cache_folder(env) == Path(theirs)
    assert constants.REPO_ID_SEPARATOR == "--"


def test_a_partial_download_names_what_is_missing(env: dict[str, str]) -> None:
    folder = add_snapshot(env, "org/name")
    (folder / "model.safetensors").resolve().unlink()  # the link stays, as after a pruned blob
    error = failed("org/name", env)
    assert "partly" in error.message and "model.safetensors" in error.message and error.hint == "to complete it: effllm pull org/name"
    (folder / "model.safetensors").unlink()
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (folder / "model-1.safetensors").touch()
    assert hub.missing_files(folder) == ("model-2.safetensors",)
    (folder / "model-2.safetensors").touch()
    assert hub.missing_files(folder) == () and resolve("org/name", env).folder == folder
    (folder / hub.INDEX).write_text("{")
    assert hub.missing_files(folder) == (hub.INDEX,)
    (folder / "config.json").unlink()
    assert "config.json" in failed("org/name", env).message


def test_names_cannot_leave_the_cache(env: dict[str, str]) -> None:
    add_snapshot(env, "org/name")
    root = hub.cache_folder(env) / "models--org--name"
    for repo in ("../cache", "org/..", "org--name", "-x/y", "a/b/c", ""):
        assert hub.find(env, repo) is None
    for revision in ("../../x", "..", "/etc", "", "-x"):
        assert hub.find(env, "org/name", revision) is None
    (root / "refs" / "main").write_text("../../../..")
    assert hub.find(env, "org/name") is None
    (root / "refs" / "main").write_text("0" * 40)  # a branch whose files were deleted
    assert hub.find(env, "org/name") is None


def test_the_list_of_local_models(env: dict[str, str]) -> None:
    (fable,) = local_models(env)
    assert (fable.name, fable.family, fable.source, fable.licence) == ("fable", "llama", "effllm", "Apache-2.0")
    assert fable.params > 1e6 and fable.size_bytes < (ROOT / "models" / "fable" / "model.safetensors").stat().st_size
    add_snapshot(env, "Qwen/Qwen3-0.6B")
    add_snapshot(env, "org/name", card="no head\nlicense: mit\n")
    add_snapshot(env, "org/pinned", branch=None)
    broken = add_snapshot(env, "org/broken")
    (broken / "model.safetensors").resolve().write_bytes(b"\xff" * 20)
    strange = add_snapshot(env, "org/strange")
    (strange / "config.json").resolve().write_text('{"model_type": "t5"}')
    (hub.cache_folder(env) / "datasets--org--name").mkdir()
    (hub.cache_folder(env) / "version.txt").touch()
    models = local_models(env)
    assert [model.name for model in models] == ["fable", "qwen3-0.6b", "org/name", f"org/pinned@{COMMIT[:12]}"]
    assert [model.licence for model in models[1:]] == ["Apache-2.0", None, "mit"]
    assert {(model.params, model.size_bytes, model.source) for model in models[1:]} == {(32 * 16 + 16, 2 * (32 * 16 + 16), "hub cache")}
    for model in models:
        assert resolve(model.name, env).folder == model.folder  # what is listed can be typed
    shutil.rmtree(hub.cache_folder(env))
    assert len(local_models(env)) == 1


def test_the_licence_that_a_card_states(tmp_path: Path) -> None:
    for text, licence in (("---\nlicense: apache-2.0\n---\n", "apache-2.0"), ("---\nlicense: other\nlicense_name: 'mrl'\n---\n", "mrl"),
                          ("---\nx: 1\n---\nlicense: mit", None),
                          ("---\nlicense: \x1b[2J\n---\n", None)):
        (tmp_path / "README.md").write_text(text)
        assert hub.stated_licence(tmp_path) == licence
    assert hub.stated_licence(tmp_path / "absent") is None


def test_a_path_that_is_nearly_right(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tales-4bit", "unlike"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "tales-3bit").mkdir()  # no model
    (tmp_path / "tales-Q8_0.gguf").write_bytes(b"GGUF")
    for typed, meant in (("./tale-4bit", "did you mean 'tales-4bit'?"), ("tals-4bit", "did you mean 'tales-4bit'?"),
                         (str(tmp_path / "tale-4bit"), "did you mean 'tales-4bit'?"), ("tale-Q8_0.gguf", "tales-Q8_0.gguf'?"),
                         ("./nothing-like-it", "effllm list")):
        with pytest.raises(ModelNotFound) as caught:
            resolve(typed, env)
        assert meant in caught.value.hint, caught.value.hint


def test_what_is_wrong_at_the_end_of_a_long_path_is_seen(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-with-a-long-name" / "and-one-below-it-with-another"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "config.json").write_text("{}")
    (folder / "Tales-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    for name in ("Tales-135M-Instruct.Q4_1.ggufx", "Tales-135M-Instruct.Q5_1.gguf", "kpt"):
        with pytest.raises(ModelNotFound) as caught:
            resolve(str(folder / name), env)
        assert f"/{name}'" in caught.value.message
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(folder / ("x" * 200) / ("y" * 200) / "end"), env)
    assert len(caught.value.message) < 500 and caught.value.message.endswith("y/end'")


def test_a_revision_or_a_tag_after_a_path_is_to_be_left_away(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tales-Q4_1.gguf").write_bytes(b"GGUF")
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "config.json").write_text("{}")
    for name, end in (("tales-Q4_1.gguf", ":Q4_1"), ("tales-Q4_1.gguf", "@main"), ("tales", "@v1.0"), ("tales", "@main:4bit")):
        with pytest.raises(ModelNotFound, match="neither revisions nor tags") as caught:
            resolve(f"{tmp_path / name}{end}", env)
        assert caught.value.hint == f"leave that out: {tmp_path / name}"
    with pytest.raises(ModelNotFound, match="there is no folder"):
        resolve(str(tmp_path / "tails@main"), env)


def test_a_file_that_is_no_model_is_answered_with_the_model_that_it_belongs_to(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear fox")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    for path, hint in ((tmp_path / "letter.txt", "effllm list"), (tmp_path / "model" / "model.safetensors", f"try {tmp_path / 'model'}")):
        with pytest.raises(UsageError, match="is a file; a model is") as caught:
            resolve(str(path), env)
        assert caught.value.hint.startswith(hint)
