"""Untrusted folders, and concurrent processes: no user's file is overwritten, waited for without end or lost."""

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import EffllmError, UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.errors import describe_error
from effllm.runtime.config import ConfigError, parse_config
from effllm.runtime.files import atomic_write
from effllm.runtime.files.atomic_write import atomic_file
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.library import aliases
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.sessions.conversation_file import load_conversation
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.sparse.sparsity import Trace
from effllm.runtime.sparse.sparsity_file import require_writable
from effllm.runtime.tokenizer import Tokenizer, TokenizerError
from effllm.runtime.tokens.tokenizer_files import normalizer_growth

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
FOX = "a" * 31


def said(*words: str, **variables: str) -> tuple[int, str, str]:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {**os.environ, **variables})
    return main(words, environment), environment.stdout.getvalue(), environment.stderr.getvalue()


@pytest.mark.parametrize("lies", ["nothing", "a link", "a pipe", "a file"])
def test_a_new_file_is_new_whatever_lies_under_its_hidden_name(tmp_path: Path, lies: str) -> None:
    target, victim = tmp_path / "profile.json", tmp_path / "precious"
    victim.write_text("precious")
    hidden = tmp_path / f".profile.json.{os.getpid()}.partial"
    make = {"nothing": lambda: None, "a link": lambda: hidden.symlink_to(victim), "a pipe": lambda: os.mkfifo(hidden),
            "a file": lambda: hidden.write_text("left by a process that was killed")}
    make[lies]()
    with atomic_file(target) as file:
        file.write(b"new")
    assert target.read_text() == "new" and victim.read_text() == "precious" and not os.path.lexists(hidden)
    umask = os.umask(0o22)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    trace = Trace(8, (np.ones((2, 1), np.uint8),))
    trace.save(path)
    before = path.read_bytes()

    def full(file: object, **arrays: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(EffllmError, match="No space left"):
        trace.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["trace.npz"]


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    target, others = tmp_path / "profile[1].json", [tmp_path / ".profile1.json.7.partial", tmp_path / ".profile[1].json.gguf.partial"]
    for other in others:
        other.write_text("of another file")
    write = ("import os, signal, sys; from pathlib import Path; from effllm.runtime.files.atomic_write import atomic_file\n"
             "with atomic_file(Path(sys.argv[1])) as file:\n    file.write(b'half'); file.flush(); print(flush=True); input()")
    with subprocess.Popen([sys.executable, "-P", "-c", write, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        writer.stdout.readline()
        hidden = tmp_path / f".profile[1].json.{writer.pid}.partial"
        atomic_write.check_writable(target)
        assert hidden.read_text() == "half"
        writer.kill()
    assert hidden.exists()
    atomic_write.write_text_atomic(target, "whole", "nothing")
    assert {*tmp_path.iterdir()} == {target, *others} and target.read_text() == "whole"


def test_a_name_may_be_long_and_what_is_no_file_stays(tmp_path: Path) -> None:
    long = tmp_path / ("日" * 79 + ".json")  # 242 bytes
    atomic_write.write_text_atomic(long, "whole", "nothing")
    assert long.read_text() == "whole"
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("."), Path("/"), tmp_path / "pipe"):
        with pytest.raises(EffllmError, match="^cannot write"):
            atomic_write.write_text_atomic(path, "whole", "nothing")
    assert {*tmp_path.iterdir()} == {long, tmp_path / "pipe"} and stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_a_conversation_is_no_pipe_and_has_an_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(EffllmError, match="not a regular file") as caught:
            load_conversation(path)
        assert caught.value.hint == "give a file that /save wrote"


def test_trying_whether_a_file_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("precious")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / f".sparsity.json.{os.getpid()}.partial").symlink_to(victim)
    require_writable(tmp_path / "model")
    assert os.listdir(tmp_path / "model") == [] and victim.read_text() == "precious"


def test_aliases_that_are_made_at_once_are_all_there(tmp_path: Path) -> None:
    variables = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "effllm").mkdir()
    entry = next(entry for entry in aliases.packaged() if entry.alias == "fable")
    begin = threading.Barrier(8)

    def add(number: int) -> None:
        from dataclasses import replace

        begin.wait()
        aliases.write_alias(variables, replace(entry, alias=f"a{number}", path=str(FABLE), own=True))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.alias for each in aliases.own_aliases(variables)) == [f"a{number}" for number in range(8)]


@pytest.mark.parametrize(("text", "why"), [("2020-99-99: {path: /x}", "not valid YAML"),
                                           ('a: {path: "/a\\0b", params: 1M}', "absolute path")])
def test_odd_aliases_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        aliases.parse_catalog(text, own=True)


def test_runs_under_one_new_name_keep_all_that_was_said(tmp_path: Path) -> None:
    """Each looked whether the name is free, found it so, and saved: the last one won."""
    variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    asked = {f"Tell me of {word}." for word in ("foxes", "kings", "hens", "snow")}
    runs = [subprocess.Popen([sys.executable, "-m", "effllm", "run", "fable", text, "-n", "3", "--session", "tale"], env=variables,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for text in asked]
    heard = [run.communicate(timeout=120)[1] for run in runs]
    assert all(run.returncode == 0 for run in runs), heard
    kept = [json.loads(path.read_text())["conversation"]["messages"] for path in (tmp_path / "effllm" / "sessions").glob("tale*.json")]
    assert {message["content"] for messages in kept for message in messages} >= asked, heard  # one that began late goes on with another's


def test_a_session_saved_between_looking_and_beginning_is_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    has, asked = SessionStore.has, []

    def has_and_then_it_is_there(store: SessionStore, name: str) -> bool:
        found = has(store, name)
        asked.append(name)
        if len(asked) == 2:  # before the weights are read and after
            code, _, err = said("run", "fable", "Tell me of kings.", "-n", "3", "--session", "tale", **places)
            assert code == 0, err
        return found

    monkeypatch.setattr(SessionStore, "has", has_and_then_it_is_there)
    code, _, err = said("run", "fable", "Tell me of foxes.", "-n", "3", "--session", "tale", **places)
    assert code == 0 and "saved as tale-2" in err, err
    kept = {path.stem: json.loads(path.read_text())["conversation"]["messages"][0]["content"]
            for path in (tmp_path / "effllm" / "sessions").glob("tale*.json")}
    assert kept == {"tale": "Tell me of kings.", "tale-2": "Tell me of foxes."}


def tokenizer_of(folder: Path, **changes: object) -> Path:
    """A copy of fable's files without weights, its tokenizer changed: values replace keys, functions are applied."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FABLE / name, folder / name)
    content = json.loads((FABLE / "tokenizer.json").read_text())
    for key, value in changes.items():
        content[key] = value(content[key]) if callable(value) else value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, parse_config(json.loads((FABLE / "config.json").read_text())))


@pytest.mark.parametrize("changes", [
    {"model": lambda model: model | {"continuing_subword_prefix": "##"}}, {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP//////////YWJj"}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}},
    {"model": lambda model: model | {"unk_token": "nope", "vocab": {"a": 0}, "merges": []}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 7}},
], ids=["prefix", "length", "charsmap", "unigram", "unknown", "growth"])
def test_a_tokenizer_that_breaks_its_library_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load(tokenizer_of(tmp_path, **changes)).encode("fox " + FOX)


def test_how_much_a_normalizer_makes_of_a_text() -> None:
    longer = {"type": "Replace", "pattern": {"String": "ab"}, "content": "x" * 8}
    assert normalizer_growth(longer) == 4 and normalizer_growth({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "bcd"}) == 3
    assert normalizer_growth({"type": "Sequence", "normalizers": [{"type": "NFC"}, longer,
                                                                  {"type": "Sequence", "normalizers": [longer]}]}) == 4
    hidden = [{"type": "Sequence", "normalizers": [longer]}, {"type": "Replace", "pattern": {"String": "x"}, "content": "y" * 20}]
    assert normalizer_growth({"type": "Sequence", "normalizers": hidden}) == 80, "what a nested one makes is replaced as well"
    lines = [{"type": "Replace", "pattern": {"String": sign}, "content": f"<{name}>"} for sign, name in (("\n", "newline"), ("\t", "tab"))]
    assert normalizer_growth({"type": "Sequence", "normalizers": lines}) == 9, "each of another character"
    assert normalizer_growth({"type": "Prepend", "prepend": "x" * 10**6}) > 64


def test_a_tokenizer_answers_the_same_twice(tmp_path: Path) -> None:
    """Dropout is for training."""
    dropping = load(tokenizer_of(tmp_path, model=lambda model: model | {"dropout": 0.5}))
    text = "Once upon a time there was a fox who told the king a story."
    assert {tuple(dropping.encode(text)) for _ in range(5)} == {tuple(Tokenizer.load(FABLE, parse_config(json.loads(
        (FABLE / "config.json").read_text()))).encode(text))}


def test_special_tokens_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    folder = tokenizer_of(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "\ud800", "bos_token": "\udfff"}))
    assert load(folder).stop_ids


def test_settings_from_a_pipe_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "effllm.toml")
    monkeypatch.chdir(tmp_path)
    code, _, err = said("config", "show")
    assert code == 2 and "effllm.toml: not a regular file" in err


def test_a_companion_of_any_size_is_not_read(tmp_path: Path) -> None:
    folder = shutil.copytree(FABLE, tmp_path / "m")
    os.truncate(folder / "README.md", 40 << 30)
    code, _, err = said("quantize", str(folder), "-o", str(tmp_path / "q"), "--bits", "4", "--no-kv-profile")
    assert code == 2 and "README.md is 42,949,672,960 bytes" in err and not (tmp_path / "q").exists()


def test_a_text_without_end_is_refused() -> None:
    code, _, err = said("run", "fable", "-f", "/dev/zero")
    assert code == 2 and "/dev/zero is larger than 256 MiB" in err


def test_what_is_piped_beside_a_file_is_left_where_it_is_and_said(tmp_path: Path) -> None:
    """The input may be that of a script's loop."""
    (tmp_path / "p.txt").write_text("of the king")
    words = [sys.executable, "-m", "effllm", "run", "fable", "--raw", "-f", str(tmp_path / "p.txt"), "-n", "1", "--json"]
    reading, writing = os.pipe()
    for piped in (b"", b"Once upon a time"):
        os.write(writing, piped)
        ran = subprocess.run(words, stdin=reading, capture_output=True, text=True, timeout=120, check=True)
        assert ("standard input is not read beside -f FILE" in ran.stderr) is bool(piped)
        alone = len(Tokenizer.load(FABLE, parse_config(json.loads((FABLE / "config.json").read_text()))).encode("of the king"))
        assert json.loads(ran.stdout)["usage"]["prompt_tokens"] == alone
    assert os.read(reading, 100) == b"Once upon a time"
    os.close(reading)
    os.close(writing)


def test_memory_that_the_system_refuses_is_memory() -> None:
    assert describe_error(OSError(12, "Cannot allocate memory")) == describe_error(MemoryError())


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1e-39}, {"repetition_penalty": 1e30}, {"presence_penalty": -1e308},
                                      {"frequency_penalty": 1e39}, {"seed": 10**400}, {"temperature": -(10**400)}], ids=str)
def test_settings_that_no_float_holds_or_no_logit_survives_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        SamplerSettings(**settings)


LONG = "a" * 300  # more than a file's name may have: `Path.exists` raises for it


@pytest.mark.parametrize(("words", "code", "says", "next_step"), [
    (("run", "Tell me a story. " * 20), 3, "is not a model: the model comes first, then the prompt", 'effllm run fable "Tell me'),
    (("serve", LONG), 3, "there is no model", "effllm list"),
    (("run", "fable", "hi", "--lora", LONG), 2, "does not exist", "a folder with"),
    (("run", "fable", "hi", "--lora", f"{LONG}:0.5"), 2, "does not exist", "a folder with"),
    (("export", "fable", "-o", "FOLDER/merged", "--lora", LONG), 2, "does not exist", "a folder with"),
    (("run", "FOLDER/m.gguf", "hi", "--mmproj", LONG), 3, "there is no file", "--mmproj takes the")], ids=lambda each: str(each)[:30])
def test_a_name_that_no_file_can_have_is_one_of_no_file(tmp_path: Path, words: tuple[str, ...], code: int, says: str,
                                                       next_step: str) -> None:
    """A prompt in the place of the model, which is the first thing that goes wrong."""
    if "FOLDER/m.gguf" in words:
        list(export_gguf(FABLE, tmp_path / "m.gguf", "Q4_0", "a name"))
    result, _, err = said(*(word.replace("FOLDER", str(tmp_path)) for word in words))
    assert result == code and says in err and f"hint: {next_step}" in err and "--debug" not in err, err


def test_a_variable_is_for_one_meaning_of_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run --spec off` and `run --force` are not what quantize means by these words: a folder was replaced for a variable of runs."""
    quantize = ("quantize", "fable", "-o", str(tmp_path / "q"), "--bits", "4", "--no-kv-profile")
    monkeypatch.setenv("EFFLLM_SPEC", "off")
    monkeypatch.setenv("EFFLLM_FORCE", "1")
    assert said(*quantize)[0] == 0
    code, _, err = said(*quantize)
    assert code == 2 and "exists" in err
    assert "EFFLLM_FORCE has no effect on quantize: the variable of its --force is EFFLLM_QUANTIZE_FORCE\n" in err
    assert "EFFLLM_SPEC has no effect on quantize: the variable of its --spec is EFFLLM_QUANTIZE_SPEC\n" in err
    assert "has no effect" not in said("plan", "fable", "--no-probe")[2]
    code, _, err = said("export", "fable", "-o", str(tmp_path / "q"))
    assert code == 2 and "EFFLLM_FORCE has no effect on export: the variable of its --force is EFFLLM_EXPORT_FORCE\n" in err
    assert "has no effect" not in said("export", "fable", "-o", str(tmp_path / "q"), "--force")[2]
    monkeypatch.setenv("EFFLLM_QUANTIZE_FORCE", "1")
    code, _, err = said(*quantize)
    assert code == 0 and "--force" not in err


def test_a_name_with_a_line_break_is_one_row(tmp_path: Path) -> None:
    variables = {"XDG_DATA_HOME": str(tmp_path / "data")}
    made = tmp_path / "two\nlines"
    assert said("quantize", "fable", "-o", str(made), "--bits", "4", "--no-kv-profile", **variables)[0] == 0
    listed = said("list", **variables)[1]
    assert "two lines" in listed and "two\nlines" not in listed


def test_nobody_waits_long_for_a_process_that_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "LOCK_TIMEOUT_S", 0.05)
    order = []
    with atomic_write.file_lock(tmp_path / "lock"):
        with atomic_write.file_lock(tmp_path / "lock"):  # another descriptor is another process to the lock
            order.append("went on")
    assert order and len(os.listdir(tmp_path)) == 1
