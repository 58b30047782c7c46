"""`effllm serve --keep-prompts`: clients with long prompts take turns, and no prompt is computed twice."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CliRun
from server_process import MINUTE, ServerProcess, serving

FOX, SEA = ("The fox asked the king for bread and the king gave him none. " * 24,
            "The sea was calm and the boat was far from the shore. " * 30)


def asked(server: ServerProcess, messages: list[dict[str, str]]) -> int:
    """Go on with a conversation; how many tokens of it were not read again."""
    reply = server.chat(messages).json
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def both() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in (FOX, SEA)]


def held(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("served-*.json")]


@pytest.mark.slow
def test_conversations_take_turns(tmp_path: Path) -> None:
    alone, talks = both(), both()
    with serving("--session-disk", "0", XDG_STATE_HOME=str(tmp_path)) as server:
        for talk in alone:
            assert asked(server, talk) < 20 and asked(server, talk) > 256
        assert asked(server, alone[0]) < 20, "another conversation came between"
        assert not held(tmp_path)
    with serving(XDG_STATE_HOME=str(tmp_path)) as server:
        assert all(asked(server, talk) < 20 for talk in talks)
        assert all(asked(server, talk) > 256 for talk in talks)
        assert [talk[:4] for talk in talks] == [talk[:4] for talk in alone]
        assert server.chat([{"role": "user", "content": FOX * 9}]).status == 400
        (folder,) = {path.parent for path in tmp_path.rglob("served-*.json")}
        assert len(held(tmp_path)) == 2 and server.err.count(f"are kept in {folder} until the server ends") == 1
        with serving(XDG_STATE_HOME=str(tmp_path)):
            assert len(held(tmp_path)) == 2, "the first server runs"
    assert len(held(tmp_path)) == 2, "it was killed"
    with serving(XDG_STATE_HOME=str(tmp_path)) as server:
        assert not held(tmp_path) and asked(server, talks[0]) < 20
        asked(server, talks[1])
        assert len(held(tmp_path)) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(MINUTE) == 0 and not held(tmp_path)


def test_the_next_server_continues(tmp_path: Path) -> None:
    talks = both()
    with serving("--keep-prompts", "--session-disk", "1G", XDG_STATE_HOME=str(tmp_path)) as server:
        assert all(asked(server, talk) < 20 for talk in talks)
    with serving("--keep-prompts", XDG_STATE_HOME=str(tmp_path)) as server:
        assert asked(server, talks[0]) > 256
    listed = subprocess.run([sys.executable, "-P", "-m", "effllm", "session", "list"], capture_output=True, text=True, timeout=MINUTE,
                            env={"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}, check=True).stdout
    assert listed.count("served-") == 1 and listed.count("fable") == 1


def test_a_folder_that_cannot_be_made_costs_reading_alone(tmp_path: Path) -> None:
    (tmp_path / "effllm").write_text("in the way")
    with serving(XDG_STATE_HOME=str(tmp_path)) as server:
        assert "KV caches of inactive conversations cannot be saved: " in server.err
        assert all(asked(server, talk) < 20 for talk in both())


@pytest.mark.parametrize(("flags", "said"), [(("--kv", "4bit+mikv"), "--kv 4bit+mikv"),
                                             (("--kv", "4bit", "--kv-read", "sparse"), "--kv-read sparse")])
def test_what_cannot_be_kept_is_refused_before_the_weights_are_read(flags: tuple[str, ...], said: str) -> None:
    ran = CliRun("serve", "fable", "--port", "0", "--keep-prompts", *flags)
    assert ran.code == 2 and f"with {said} prompt caches cannot be stored" in ran.err
