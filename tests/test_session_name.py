"""Session names: which are valid, and that commands in messages refer to the session that the message is about."""

import io
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from session_samples import save

from effllm import EffllmError, UsageError, typed
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.sessions.saved_cache import refuse_other
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_format import SavedCache, SavedSession
from effllm.runtime.sessions.session_name import MAX_NAME_NBYTES, check_name
from effllm.runtime.sessions.session_store import SessionStore, stuck_note

ODD = ("my tale", "$(x)", "it's", "a;b", "*", "~", "für Anna")


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "effllm" / "sessions")


def cut_short(store: SessionStore, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def of_tomorrow(store: SessionStore, path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))


def led_nowhere(store: SessionStore, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_suffix(".gone"))


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("spoil", [cut_short, of_tomorrow, led_nowhere])
def test_a_hint_of_reading_names_one_session(store: SessionStore, name: str, spoil: Callable[[SessionStore, Path], None]) -> None:
    save(store, name, 1)
    spoil(store, store.path(name))
    with pytest.raises(EffllmError) as caught:
        store.read(name)
    assert f"effllm session rm {typed(name)}" in caught.value.hint


@pytest.mark.parametrize("name", ODD)
def test_other_commands_with_a_name(store: SessionStore, name: str) -> None:
    assert stuck_note([name, "b"], 1000).endswith(f"(effllm session rm {typed(name)} b)")
    session = SavedSession(name, "fable", 0.0, {}, SavedCache({"kv": "8bit"}, (), (), None, None, None))
    with pytest.raises(UsageError) as caught:
        refuse_other(session, {"kv": "4bit"})
    assert f"effllm session rm {typed(name)} --cache," in caught.value.hint
    store.folder.mkdir(parents=True)
    store.write(SavedSession(name, "fable", 0.0, {"messages": 7}, None))
    with pytest.raises(EffllmError) as caught:
        list(SavedSessions(store, "fable", 1000).load(type("Idle", (), {"engine": None})(), name))
    assert caught.value.hint.startswith(f"effllm session rm {typed(name)}, or ")


def test_rm_names_the_session_that_it_asks_about(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquoted, the next step was to remove two other conversations."""
    monkeypatch.setenv("XDG_STATE_HOME", str(store.folder.parents[1]))
    for name in ("my tale", "my", "tale"):
        save(store, name, 1)

    def said(*words: str) -> tuple[int, str]:
        environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        return main(["session", "rm", *words], environment), environment.stderr.getvalue()

    code, err = said("my tale")
    assert code == 2
    words = shlex.split(err.rpartition("effllm session rm ")[2])
    assert said(*words)[0] == 0 and store.names() == ["my", "tale"]


def test_a_name_that_is_refused_is_told_what_is_taken() -> None:
    for name in (*ODD, "x" * MAX_NAME_NBYTES, "ü" * (MAX_NAME_NBYTES // 2), "a.b-c", "!", "日本"):
        assert check_name(name) == name
    for name in ("", ".hidden", "-rf", "a/b", "a\\b", "ü" * (MAX_NAME_NBYTES // 2 + 1), "two\nlines", "\u200b"):
        with pytest.raises(UsageError, match="is not a valid session name") as caught:
            check_name(name)
        assert caught.value.hint == r"use printable characters except / and \, at most 100 bytes, not starting with a dot or dash"
