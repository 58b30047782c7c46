"""Sessions on the command line: `run --session`, a chat that is resumed, `effllm session list|rm`; real processes, the real model."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CliRun

import effllm
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.options import SessionFlags
from effllm.offload.size import parse_size
from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.sessions.session_store import DEFAULT_BUDGET
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
STORY, MORE, THIRD = "Tell me a story about the fox and the king.", "And then?", "What did the fox say?"
FLAGS = ("--temp", "0", "-n", "24", "-c", "512")
MINUTE = 60


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "effllm" / "sessions"


def process(*argv: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-P", "-m", "effllm", *argv], capture_output=True, text=True, timeout=MINUTE, check=False,
                          stdin=subprocess.DEVNULL, env={**os.environ, **variables})


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Kernels are compiled once, so that no chat below waits for it."""
    assert main(["run", "fable", "hi", "-n", "1"], Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)) == 0


@pytest.fixture(scope="module")
def told() -> list[str]:
    """Three answers of one process that keeps running in between."""
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=512, kv="4bit")))[-1]
    session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(temperature=0.0, repetition_penalty=1.2), max_tokens=24)
    said = [list(session.ask(text))[-1].stats.text for text in (STORY, MORE, THIRD)]
    engine.close()
    return said


@pytest.mark.parametrize("command", [CliRun, pytest.param(process, marks=pytest.mark.slow)], ids=["engines", "processes"])
def test_runs_that_end_say_what_one_that_continues_says(home: Path, told: list[str], command: Callable) -> None:
    used = 0
    for text, wanted in zip((STORY, MORE, THIRD), told, strict=True):
        ran = command("run", "fable", text, "--session", "tale", "--kv", "4bit", "--json", *FLAGS)
        out, err = (ran.out, ran.err) if isinstance(ran, CliRun) else (ran.stdout, ran.stderr)
        answer = json.loads(out)
        assert answer["text"] == wanted
        assert answer["usage"]["cached_tokens"] >= used - 1, "what was held is not read again"
        used = answer["usage"]["prompt_tokens"] + 23
    assert "session tale: 4 messages, " in err and "tokens restored" in err
    saved = json.loads((home / "tale.json").read_text())
    assert [message["content"] for message in saved["conversation"]["messages"]] == [STORY, told[0], MORE, told[1], THIRD, told[2]]


def test_a_session_begins_continues_and_is_listed_and_removed(home: Path) -> None:
    first = CliRun("run", "fable", STORY, "--session", "tale", *FLAGS)
    assert first.code == 0 and "session tale is new" in first.err and len(first.out.split()) > 8
    piped = CliRun("chat", "fable", "--session", "tale", *FLAGS, stdin=MORE)
    assert piped.code == 0 and re.search(r"session tale: 2 messages, \d+ tokens restored", piped.err)
    shown = json.loads(CliRun("session", "list", "--json").out)
    (entry,) = shown["sessions"]
    assert shown["folder"] == str(home) and shown["bytes"] == entry["size_bytes"] == entry["own_bytes"] > 0
    assert (entry["name"], entry["model"], entry["messages"], entry["kv"], entry["problem"]) == ("tale", "fable", 4, "16bit", None)
    table = CliRun("session", "list")
    assert re.search(r"^tale +fable +4 +\d+ +16bit ", table.out, re.MULTILINE) and str(home) in table.err

    refused = CliRun("session", "rm", "tale")
    assert refused.code == 2 and "this conversation would be lost" in refused.err and "effllm session rm tale -y" in refused.err
    assert CliRun("session", "rm", "tale", "--cache").err.startswith("tale: cache removed, ")
    again = CliRun("run", "fable", THIRD, "--session", "tale", *FLAGS)
    assert again.code == 0 and "session tale: 4 messages, its text is recomputed" in again.err
    removed = CliRun("session", "rm", "tale", "-y", "--json")
    assert json.loads(removed.out)["removed"] == ["tale"] and json.loads(removed.out)["freed_bytes"] > 0
    assert list(home.rglob("*.kv")) == [] == list(home.glob("*.json"))
    assert CliRun("session", "rm", "tale", "-y").code == 2 and "no session is saved" in CliRun("session", "list").err


def test_what_a_session_cannot_go_on_with_is_refused_before_a_word_is_said(home: Path, tmp_path: Path) -> None:
    assert CliRun("run", "fable", STORY, "--session", "tale", "--kv", "4bit", *FLAGS).code == 0
    before = (home / "tale.json").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    for file in FABLE.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    for argv, said in ((("fable", MORE, "--kv", "8bit"), "session tale was saved with --kv 4bit, this run has 8bit"),
                       (("fable", MORE, "--kv", "4bit", "--kv-sink", "16"), "session tale was saved with --kv-sink 64, this run has 16"),
                       (("fable", MORE, "--kv", "4bit", "--exact"), "session tale was saved with --exact off, this run has on"),
                       ((str(other), MORE, "--kv", "4bit"), "session tale was saved with another model"),
                       (("fable", MORE, "--kv", "4bit", "-c", "20"), "tokens and the context 20")):
        ran = CliRun("run", *argv[:1], *argv[1:], "--session", "tale", "--temp", "0", "-n", "4")
        assert ran.code in (2, 5) and ran.out == "" and said in ran.err and ran.err.splitlines()[-1].startswith("hint: "), ran.err
    assert (home / "tale.json").read_bytes() == before
    for argv, said in ((("--raw", "--session", "x"), "--session keeps a conversation"),
                       (("--session", "a/b"), "is not a valid session name"),
                       (("--session", "x", "--session-disk", "much"), "much")):
        ran = CliRun("run", "fable", STORY, *argv, *FLAGS)
        assert ran.code == 2 and ran.out == "" and said in ran.err, ran.err


def test_damage_is_one_line_with_a_way_on(home: Path) -> None:
    assert CliRun("run", "fable", STORY, "--session", "my tale", *FLAGS).code == 0
    tail = max(home.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(tail.read_bytes())
    data[200] ^= 1
    tail.write_bytes(data)
    ran = CliRun("run", "fable", MORE, "--session", "my tale", *FLAGS)
    assert ran.code == 1 and ran.out == "" and "effllm: session my tale is damaged: the file of" in ran.err
    assert "hint: effllm session rm 'my tale' --cache keeps its text" in ran.err
    assert CliRun("session", "rm", "my tale", "--cache").code == 0
    assert CliRun("run", "fable", MORE, "--session", "my tale", *FLAGS).code == 0
    path = home / "my tale.json"
    path.write_bytes(path.read_bytes()[:-40])
    ran = CliRun("run", "fable", MORE, "--session", "my tale", *FLAGS)
    assert ran.code == 1 and "session my tale is damaged: it is cut short, or was altered" in ran.err
    listed = CliRun("session", "list")
    assert listed.code == 0 and "session my tale is damaged" in listed.err
    assert CliRun("session", "rm", "my tale", "-y").code == 0 and not path.exists()


def test_an_answer_is_there_also_where_its_session_cannot_be_saved(home: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    ran = CliRun("run", "fable", STORY, "--session", "tale", *FLAGS)
    assert ran.code == 1 and len(ran.out.split()) > 8
    assert ran.err.endswith(f"\neffllm: session tale cannot be saved: Not a directory\nhint: check its folder: ls -ld {home.parent}\n")


def test_the_budget_is_kept_and_told(home: Path) -> None:
    assert CliRun("run", "fable", STORY, "--session", "old", *FLAGS).code == 0
    size = json.loads(CliRun("session", "list", "--json").out)["bytes"]
    ran = CliRun("run", "fable", THIRD, "--session", "new", "--session-disk", str(int(1.5 * size)), *FLAGS)
    assert ran.code == 0 and "kept only the text of old" in ran.err
    shown = json.loads(CliRun("session", "list", "--json").out)
    assert {entry["name"]: entry["tokens"] > 0 for entry in shown["sessions"]} == {"new": True, "old": False}
    assert shown["bytes"] <= 1.5 * size
    ran = CliRun("run", "fable", MORE, "--session", "new", "--session-disk", "1000", *FLAGS)
    assert ran.code == 0 and "only the text is saved" in ran.err
    assert json.loads(CliRun("session", "list", "--json").out)["bytes"] == 0
    assert parse_size(DEFAULT_BUDGET) == 4_000_000_000


def test_a_prompt_that_begins_like_a_saved_session_takes_its_pages(home: Path) -> None:
    long = "Once there was a fox who lived at the edge of the wood. " * 20
    first = CliRun("run", "fable", long + STORY, "--session", "one", "--json", *FLAGS)
    other = CliRun("run", "fable", long + THIRD, "--session", "two", "--json", *FLAGS)
    fresh = CliRun("run", "fable", long + THIRD, "--json", *FLAGS)
    first, other, fresh = (json.loads(ran.out) for ran in (first, other, fresh))
    assert first["usage"]["cached_tokens"] == fresh["usage"]["cached_tokens"] == 0
    assert other["usage"]["cached_tokens"] in (64 + 128, 64 + 256) and other["text"] == fresh["text"]


def test_what_was_restored_is_reported_with_whose_it_was(home: Path) -> None:
    """And only `--session` looks for it: a run without one depends on nothing that was said before."""
    long = "Once there was a fox who lived at the edge of the wood. " * 20
    assert CliRun("run", "fable", long + STORY, "--session", "one", *FLAGS).code == 0
    ran, fresh = (CliRun("run", "fable", long + THIRD, "--stats", *flags, *FLAGS) for flags in (("--session", "two"), ()))
    assert re.search(r"^(192|320) tokens of the prompt restored from session one$", ran.err, re.MULTILINE), ran.err
    assert re.search(r"^prompt \d+ tokens, (192|320) of them cached", ran.err, re.MULTILINE), ran.err
    assert "restored" not in fresh.err and "cached" not in fresh.err and ran.out == fresh.out
    key, digest, _ = json.loads((home / "one.json").read_text())["cache"]["pages"][0]
    page = home / "pages" / key[:2] / f"{key}-{digest}.kv"
    page.write_bytes(page.read_bytes()[:-1] + b"x")
    ran = CliRun("run", "fable", long + THIRD, "--session", "three", *FLAGS)
    assert ran.code == 0 and ran.out == fresh.out and len(re.findall("^session .* is damaged: .* --cache\\)$", ran.err, re.MULTILINE)) == 1


def test_settings_and_help_know_the_flags(home: Path) -> None:
    shown = json.loads(CliRun("config", "show", "--json").out)
    assert shown["session-disk"] == {"value": DEFAULT_BUDGET, "origin": "built in"} and shown["session"]["value"] is None
    assert SessionFlags() == SessionFlags(None, None)
    for command in ("run", "chat"):
        page = process(command, "--help").stdout
        assert "--session NAME" in page and f"({DEFAULT_BUDGET})" in page


def test_names_are_completed(home: Path) -> None:
    for name in ("tale", "talk", "other"):
        (home / "x").parent.mkdir(parents=True, exist_ok=True)
        (home / f"{name}.json").write_text("{}")
    for words in ("effllm session rm ta", "effllm run fable --session ta"):
        ran = process(_EFFLLM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
        assert ran.stdout.split() == ["tale", "talk"], (words, ran.stdout, ran.stderr)
