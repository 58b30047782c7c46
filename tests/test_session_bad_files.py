"""Invalid content under a session's name: pipes, devices, folders, sparse files, foreign JSON."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from session_samples import check, save

from effllm import EffllmError, UsageError
from effllm.cli.options import complete_session
from effllm.runtime.sessions.conversation_file import parse_conversation
from effllm.runtime.sessions.session_format import MAX_FILE_NBYTES, Malformed, _checksum, parse_saved
from effllm.runtime.sessions.session_store import DamagedSession, NoSession, SessionStore

HISTORY = {"format": "effllm-session", "version": 1, "system": None, "messages": []}


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    store = SessionStore(tmp_path / "sessions")
    save(store, "tale", 1)
    return store


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE_NBYTES + 1)


@pytest.mark.parametrize(("made", "said"), [
    (os.mkfifo, "not a regular file"), (Path.mkdir, "not a regular file"), (lambda path: path.symlink_to("/dev/zero"), "not a regular"),
    (hole, f"{MAX_FILE_NBYTES + 1:,} bytes, at most {MAX_FILE_NBYTES:,} are read")], ids=["a pipe", "a folder", "a device", "a hole"])
def test_what_is_no_file_is_reported_at_once_and_holds_up_nobody(store: SessionStore, made: Callable[[Path], None], said: str) -> None:
    """A pipe was waited for, by `session list` as well, and by every prompt that looked for its beginning."""
    made(store.path("odd"))
    assert store.has("odd"), "it is no new session: a run says so before it answers"
    with pytest.raises(DamagedSession, match=f"session odd is damaged: .*{said}") as caught:
        store.read("odd")
    assert "effllm session rm odd" in caught.value.hint
    assert [(each.name, said in each.problem) for each in store.listed()] == [("tale", False), ("odd", True)]
    assert store.unread() == [] and store.make_room(1 << 30, "tale") == [] and check(store, "tale") == 1
    if not store.path("odd").is_dir():
        store.remove(["odd"])
        assert store.names() == ["tale"]


def test_names_of_nothing_among_the_pages(store: SessionStore) -> None:
    """A name that is gone when it is looked at, as where another process removes pages meanwhile, and a folder that is not ours."""
    before, folder = store.nbytes(), next(store.pages.iterdir())
    (folder / "gone.kv").symlink_to("nowhere")
    (folder / "stray").mkdir()
    assert store.listed()[0].nbytes == before and store.nbytes() < before + 100
    save(store, "story", 2)
    assert store.remove(["story"]) > 0 and store.nbytes() == before, "what is no page of a session goes"
    assert (folder / "stray").is_dir() and not (folder / "gone.kv").is_symlink()


def test_a_session_that_goes_while_all_are_listed(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "names", lambda: ["gone", "tale"])
    with pytest.raises(NoSession):
        store.read("gone")
    assert [each.name for each in store.listed()] == ["tale"]


@pytest.mark.parametrize("name", ["-copy", "a" * 101, "two\nlines"])
def test_a_file_that_no_session_can_be_called_holds_up_nobody(store: SessionStore, name: str) -> None:
    """Such a copy ended every run with a new session, and no page was ever removed for its sake."""
    os.link(store.path("tale"), os.path.join(store.folder, f"{name}.json"))
    assert store.names() == store.newest() == ["tale"] and store.unread() == []
    assert [each.name for each in store.listed()] == ["tale"]
    assert store.remove(["tale"]) > 0 and store.nbytes() == 0


def test_a_link_that_leads_nowhere_is_no_new_session(store: SessionStore) -> None:
    """As to a disk that is not mounted: the run said that the session was new and put it in the place of the link."""
    elsewhere = store.folder.parent / "tale.json"
    store.path("tale").rename(elsewhere)
    store.path("tale").symlink_to(elsewhere)
    assert check(store, "tale") == 1
    elsewhere.rename(elsewhere.with_suffix(".gone"))
    assert store.has("tale")
    with pytest.raises(EffllmError, match="session tale: .* is a dangling link") as caught:
        store.read("tale")
    assert "effllm session rm tale" in caught.value.hint and not isinstance(caught.value, DamagedSession)
    save(store, "story", 2)
    assert [(each.name, "dangling link" in each.problem) for each in store.listed()] == [("story", False), ("tale", True)]
    before = store.nbytes()
    assert store.make_room(0, "story") == [] and store.nbytes() == before, "its pages wait for it"
    elsewhere.with_suffix(".gone").rename(elsewhere)
    assert check(store, "tale") == 1
    elsewhere.unlink()
    assert store.remove(["tale"]) > 0 and store.names() == ["story"]


@pytest.mark.parametrize("call", ["listed", "names", "has"])
def test_a_folder_that_nobody_may_look_into_is_reported_with_a_next_step(
        store: SessionStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As another user's: a list was empty, or a line whose next step was --debug."""
    def closed(path: object, *more: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", closed)
    monkeypatch.setattr(Path, "lstat", closed)
    with pytest.raises(EffllmError, match="the sessions in .* cannot be read: Permission denied") as caught:
        getattr(store, call)(*(["tale"] if call == "has" else []))
    assert caught.value.hint == f"check the folder: ls -ld {store.folder}"
    monkeypatch.setenv("XDG_STATE_HOME", str(store.folder.parent))
    assert complete_session("") == [], "a shell is not told in the middle of a line"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
@pytest.mark.parametrize("mode", [0, 0o400])
def test_a_folder_whose_names_alone_may_be_seen(store: SessionStore, mode: int) -> None:
    store.folder.chmod(mode)
    try:
        for call in (store.listed, lambda: store.has("tale")):
            with pytest.raises(EffllmError, match="cannot be read: Permission denied"):
                call()
    finally:
        store.folder.chmod(0o700)


# ---- whole checksums around what no effllm wrote


def forged(store: SessionStore, change: Callable[[dict], object]) -> bytes:
    content = json.loads(store.path("tale").read_bytes())
    del content["checksum"]
    change(content)
    return json.dumps({**content, "checksum": _checksum(content)}).encode()


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(("change", "said"), [
    (lambda content: content["cache"]["identity"].update(more=nested(200)), "it describes no cache"),
    (lambda content: content["cache"]["identity"].update(kv=None), "it describes no cache"),
    (lambda content: content["cache"].update(spoken={"text": "a", "ids": [0], "prompt": "x"}), "lacks its messages"),
    (lambda content: content.update(name="x" * 5000), r"it is of session 'x{79}$")])
def test_forged_sessions(store: SessionStore, change: Callable[[dict], object], said: str) -> None:
    with pytest.raises(Malformed, match=said):
        parse_saved(forged(store, change), "tale")


def test_a_session_that_does_not_say_how_its_last_answer_began(store: SessionStore) -> None:
    """It cannot be gone on with token by token; the word missing was an error of the program."""
    data = forged(store, lambda content: content["cache"].update(spoken={"text": "a", "ids": [2, 7]}))
    assert parse_saved(data, "tale").cache.tokenized_text.prompt is None


def test_what_nests_as_deeply_as_can_just_be_read() -> None:
    """The checksum is that of the text which JSON makes of it again, which goes a few levels less deep."""
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
        text = '{"format": "effllm-saved-session", "version": 1, "conversation": ' + '{"a":' * depth + "1" + "}" * depth + "}"
        with pytest.raises(Malformed, match="altered"):
            parse_saved(text.encode(), "tale")


def test_a_version_of_any_length_is_reported_in_one_line(store: SessionStore) -> None:
    store.path("tale").write_text(json.dumps({"format": "effllm-saved-session", "version": "9" * 5000}))
    with pytest.raises(UsageError, match="session tale is of version '9{39}, which") as caught:
        store.read("tale")
    assert "effllm session rm tale" in caught.value.hint


@pytest.mark.parametrize(("settings", "said"), [
    ({"presence_penalty": None}, "presence_penalty must be a number, not None"), ({"temperature": None}, "temperature must be a number"),
    ({"colour": 1}, "unknown setting 'colour'"), ([1], "the settings are malformed"), ({"top_p": 2}, "top_p must be above 0")])
def test_settings_that_a_sampler_cannot_have_are_named_with_the_file(settings: object, said: str) -> None:
    """A penalty of null was an error of the program at the first token."""
    with pytest.raises(EffllmError, match=f"^talk: {said}") as caught:
        parse_conversation(HISTORY | {"settings": settings}, "talk", "another file")
    assert caught.value.hint == "another file"
    assert parse_conversation(HISTORY | {"settings": {"seed": None}}, "talk").settings.seed is None
