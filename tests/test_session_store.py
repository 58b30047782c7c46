"""The folder of saved sessions: names, sizes, eviction order; and failing files, processes or disks."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from session_samples import PAGE_NBYTES, SHARED, check, save

from effllm import EffllmError, UsageError
from effllm.offload.page_file import sync_folder
from effllm.runtime.sessions import session_store
from effllm.runtime.sessions.session_store import DamagedSession, NoSession, SessionStore, stuck_note

CHILD = [sys.executable, str(Path(__file__).resolve().parent / "session_samples.py")]
GENEROUS = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "state" / "sessions")


def child(store: SessionStore, name: str, *words: object) -> subprocess.Popen:
    return subprocess.Popen([*CHILD, str(store.folder), name, *map(str, words)], stderr=subprocess.PIPE, text=True)


def files(store: SessionStore) -> set[str]:
    return {path.name for path in store.pages.glob("*/*")}


# ---- what there is


def test_what_is_saved_is_read_and_listed(store: SessionStore) -> None:
    assert store.names() == [] and store.listed() == [] and store.nbytes() == 0
    save(store, "tale", 1, 6, saved=1000.0)
    save(store, "old one", 2, 5, saved=500.0)
    assert check(store, "tale") == 1 and check(store, "old one") == 2
    tale, old = store.listed()
    assert (tale.name, tale.model, tale.messages, tale.tokens, tale.kv, tale.saved) == ("tale", "made-up", 2, 768, "4bit", 1000.0)
    assert old.name == "old one" and store.names() == ["old one", "tale"]
    assert tale.nbytes - tale.own_nbytes == old.nbytes - old.own_nbytes >= SHARED * PAGE_NBYTES
    assert store.nbytes() == tale.nbytes + old.own_nbytes == sum(path.stat().st_size for path in store.pages.glob("*/*"))
    assert len(files(store)) == SHARED + 3 + 2 + 2, "pages that both begin with are there once"


def test_names_outlive_a_loss_of_power(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder that got a name is synced: those of pages, and the one that holds them, before the session names its pages."""
    synced: list[Path] = []
    monkeypatch.setattr(session_store, "sync_folder", lambda folder: synced.append(folder) or sync_folder(folder))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda one, two: synced.append(Path(two)) or rename(one, two))
    save(store, "tale", 1)
    named = synced.index(store.path("tale"))
    places = {store.pages / name for name in os.listdir(store.pages)}
    before = [path for path in synced[:named] if path.is_dir()]
    assert len(places) > 1 and set(before) == places | {store.pages} and before[-1] == store.pages
    assert synced[named + 1 :] == [store.folder]


def test_what_goes_with_its_process_waits_for_no_disk(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(os, "fsync", lambda *_: waited.append(True))
    passing = SessionStore(store.folder, lasting=False)
    save(passing, "tale", 1)
    assert check(passing, "tale") == 1 and not waited
    save(store, "other", 2)
    assert waited


def test_files_are_private(store: SessionStore) -> None:
    save(store, "tale", 1)
    for path in (store.folder, *store.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("name", ["", ".hidden", "-rf", "a/b", "a\\b", "x" * 101, "new\nline", "../out"])
def test_names_that_no_session_can_have(store: SessionStore, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid session name"):
        store.path(name)


def test_a_session_that_is_not_there_names_those_that_are(store: SessionStore) -> None:
    with pytest.raises(NoSession, match="there is no session 'tale'") as caught:
        store.read("tale")
    assert caught.value.hint == "none is saved yet" and caught.value.exit_code == 2
    save(store, "story", 1)
    with pytest.raises(NoSession) as caught:
        store.remove(["story", "tale"])
    assert caught.value.hint == "there are: story" and check(store, "story") == 1


def test_removing_leaves_what_others_use(store: SessionStore) -> None:
    save(store, "tale", 1)
    save(store, "story", 2)
    before = store.nbytes()
    own = next(each.own_nbytes for each in store.listed() if each.name == "tale")
    assert store.remove(["tale"]) >= own
    assert store.names() == ["story"] and check(store, "story") == 2 and store.nbytes() == before - own
    store.remove(["story"])
    assert store.names() == [] and files(store) == set()


def test_the_cache_can_go_and_the_text_stay(store: SessionStore) -> None:
    kept = save(store, "tale", 1)
    assert store.remove(["tale"], cache_only=True) > 6 * PAGE_NBYTES
    session = store.read("tale")
    assert session.cache is None and session.conversation == kept.conversation and session.saved == kept.saved and files(store) == set()


# ---- the budget


def test_the_cache_that_saves_least_for_its_bytes_goes_first(store: SessionStore) -> None:
    now = time.time()
    save(store, "old", 1, 6, saved=now - 30 * 86400)
    save(store, "large", 2, 12, saved=now - 86400)
    save(store, "small", 3, 5, saved=now - 86400)
    save(store, "newest", 4, 6, saved=now)
    everything = store.nbytes()
    assert store.make_room(everything, "newest") == [], "nothing goes that fits"
    assert store.make_room(everything - 1, "newest") == ["old"]
    assert store.read("old").cache is None and store.read("old").messages, "the text stays"
    assert store.make_room(store.nbytes() - 1, "newest") == ["large"], "768 more tokens, but more bytes for each than `small`"
    assert [check(store, name) for name in ("small", "newest")] == [3, 4]
    assert store.make_room(0, "newest") == ["small", "newest"], "the one that was just saved is the last"
    assert files(store) == set() and store.names() == ["large", "newest", "old", "small"]


def test_pages_that_another_session_uses_do_not_go(store: SessionStore) -> None:
    now = time.time()
    save(store, "long ago", 1, 6, saved=now - 86400)
    save(store, "now", 2, 6, saved=now)
    assert store.make_room(store.nbytes() - 1, "now") == ["long ago"]
    assert check(store, "now") == 2


def test_pages_that_no_session_uses_any_more_go_with_every_saving(store: SessionStore) -> None:
    save(store, "tale", 1, 9)
    save(store, "tale", 2, 5)
    assert store.make_room(GENEROUS, "tale") == [] and check(store, "tale") == 2
    assert len(files(store)) == 5 + 1


# ---- damage


def altered(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_saving_reads_no_other_session_again(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps thousands of prompts would read all of them for each that it saves, and know every page that ever was."""
    for seed in range(5):
        save(store, f"n{seed}", seed)
        store.make_room(1 << 30, f"n{seed}")
    read, real = [], SessionStore.read
    monkeypatch.setattr(SessionStore, "read", lambda own, name, *more: read.append(name) or real(own, name, *more))
    save(store, "new", 9)
    store.make_room(1 << 30, "new")
    assert read == ["new"] and len(store.listed()) == 6
    save(SessionStore(store.folder), "n0", 77)
    assert not store.make_room(1 << 30, "") and read == ["new", "n0"]
    store.path("n1").write_text("{}")
    assert [each.name for each in store.listed() if each.problem] == ["n1"]
    store.remove(["n1", "n2", "n3"])
    assert store._verified <= {*store._sizes()} and {*store._infos} == {"n0", "n4", "new"}


def test_a_session_file_that_was_cut_short_or_altered_is_refused_by_name(store: SessionStore) -> None:
    save(store, "tale", 1)
    path = store.path("tale")
    whole = path.read_bytes()
    for data, said in ((whole[: len(whole) // 2], "cut short"), (whole.replace(b'"1 pages', b'"2 pages'), "checksum differs"),
                       (whole.replace(b"effllm-saved-session", b"effllm-saved-sessiom"), "not a saved session"),
                       (b"[]", "not a saved session"),
                       (b"[" * 100_000, "cut short"), (b"\xff" + whole, "cut short"), (b"", "cut short")):
        path.write_bytes(data)
        with pytest.raises(DamagedSession, match=f"session tale is damaged: it .*{said}") as caught:
            store.read("tale")
        assert "effllm session rm tale" in caught.value.hint and caught.value.exit_code == 1
        assert store.listed()[0].problem.startswith("session tale is damaged")


def test_a_session_file_under_another_name_is_refused(store: SessionStore) -> None:
    save(store, "tale", 1)
    store.path("tale").rename(store.path("story"))
    with pytest.raises(DamagedSession, match="session story is damaged: it is of session 'tale'"):
        store.read("story")


def test_a_session_of_another_version_is_refused_and_its_pages_stay(store: SessionStore) -> None:
    save(store, "tale", 1)
    path = store.path("tale")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(UsageError, match="session tale is of version 2, which this effllm does not read"):
        store.read("tale")
    save(store, "story", 2)
    assert store.make_room(GENEROUS, "story") == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    assert check(store, "tale") == 1


def test_no_cache_is_taken_where_nothing_would_be_freed(store: SessionStore) -> None:
    """Pages stay while a session of another version may use them, so no other session loses its own for them."""
    save(store, "old", 1)
    save(store, "mine", 2)
    path, before = store.path("old"), files(store)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    assert store.unread() == ["old"] == store.stuck(0) and store.stuck(store.nbytes()) == []
    assert store.make_room(0, "mine") == [] and files(store) == before and check(store, "mine") == 2
    said = stuck_note(store.unread(), 1000)
    assert "session old is unreadable" in said and "effllm session rm old" in said
    path.write_text("cut")
    assert store.unread() == [], "what is damaged is nobody's"
    assert store.make_room(0, "mine") == ["mine"] and files(store) == set()


@pytest.mark.parametrize(("at", "said"), [(0, "corrupt"), (4, "version"), (20, "corrupt"), (64, "corrupt"), (PAGE_NBYTES, "corrupt"),
                                          (None, "bytes instead of")])
def test_a_page_that_is_not_what_it_was_is_refused_and_written_again(store: SessionStore, at: int | None, said: str) -> None:
    session = save(store, "tale", 1)
    path = store.pages / session.cache.pages[4].name
    if at is None:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        altered(path, at)
    other = SessionStore(store.folder)
    with pytest.raises(EffllmError, match=said):
        other.read_page(session.cache.pages[4])
    other.read_page(session.cache.pages[3])
    save(SessionStore(store.folder), "tale", 1)
    assert check(other, "tale") == 1, "whoever saves the same page again finds that it is damaged"


def test_a_page_that_is_gone(store: SessionStore) -> None:
    session = save(store, "tale", 1)
    (store.pages / session.cache.pages[2].name).unlink()
    with pytest.raises(EffllmError, match="is gone"):
        store.read_page(session.cache.pages[2])
    save(store, "tale", 1)
    assert check(store, "tale") == 1, "also by the process that wrote it before"


# ---- processes


def test_a_process_killed_at_any_step_of_saving_leaves_the_old_session_whole(store: SessionStore) -> None:
    """SIGKILL at every sync, rename and removal in turn: before the last rename the session is the old one, afterwards the new one."""
    save(store, "tale", 1)
    found, step = [], 0
    while not found or found[-1][1] == -signal.SIGKILL:
        step += 1
        ended = child(store, "tale", 2, 6, 1, step)
        ended.wait()
        ended.stderr.close()
        found.append((check(SessionStore(store.folder), "tale"), ended.returncode))
        if found[-1][0] == 2:
            save(SessionStore(store.folder), "tale", 1)
    seeds, codes = zip(*found)
    assert len(found) > 12 and codes[-1] == 0 and seeds[-1] == 2
    first_new = seeds.index(2)
    assert set(seeds[:first_new]) == {1} and set(seeds[first_new:]) == {2} and first_new > 8
    store.make_room(GENEROUS, "tale")
    assert not [path for path in store.folder.rglob(".*")], "what the killed ones left is gone"
    assert len(files(store)) == 6 + 1


def test_two_processes_saving_one_name_leave_one_of_them_whole(store: SessionStore) -> None:
    """Readers meanwhile see nothing but whole sessions."""
    save(store, "tale", 1)
    writers = [child(store, "tale", 1000, 6, 12), child(store, "tale", 2000, 9, 12)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(check(SessionStore(store.folder), "tale"))
    assert [writer.returncode for writer in writers] == [0, 0], [writer.stderr.read() for writer in writers]
    for writer in writers:
        writer.stderr.close()
    assert check(store, "tale") in (1011, 2011) and len(seen) > 1
    store.make_room(GENEROUS, "tale")
    assert len(files(store)) == len(store.read("tale").cache.files)


def test_no_page_goes_while_another_process_saves(store: SessionStore) -> None:
    """Removing waits for those that write: their pages belong to no session yet."""
    save(store, "tale", 1)
    with store.writing("story"):
        file = store.store_page("0" * 32, [b"not used yet"])
        code = ("import sys; from pathlib import Path; from effllm.runtime.sessions.session_store import SessionStore\n"
                "SessionStore(Path(sys.argv[1])).make_room(0, 'tale')")
        remover = subprocess.Popen([sys.executable, "-c", code, str(store.folder)])
        with pytest.raises(subprocess.TimeoutExpired):
            remover.wait(1.0)
        assert bytes(store.read_page(file)) == b"not used yet"
    assert remover.wait() == 0
    assert files(store) == set()


# ---- disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_disk_that_fills_while_saving(store: SessionStore, monkeypatch: pytest.MonkeyPatch, code: int, at: int) -> None:
    save(store, "tale", 1)
    before = files(store)
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EffllmError, match=f"session tale cannot be saved: {os.strerror(code)}") as caught:
        save(store, "tale", 2, 12)
    assert "effllm session list" in caught.value.hint and len(calls) == at
    monkeypatch.undo()
    assert check(store, "tale") == 1 and not [path for path in store.folder.rglob(".*")]
    assert files(store) == before, "what was written of the other would keep the room that it lacked"
    save(store, "tale", 2, 12)
    assert check(store, "tale") == 2


def test_a_file_that_grows_beyond_its_limit(store: SessionStore) -> None:
    """A real refusal in the midst of a file."""
    save(store, "tale", 1)
    ended = subprocess.run(
        [sys.executable, "-c", "import resource, runpy, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
         "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\nsys.argv = sys.argv[1:]\n"
         "runpy.run_path(sys.argv[0], run_name='__main__')",
         CHILD[1], str(store.folder), "tale", "2", "6", "1"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "DiskFull: session tale cannot be saved: File too large" in ended.stderr
    assert check(store, "tale") == 1 and not [path for path in store.folder.rglob(".*")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(store: SessionStore) -> None:
    save(store, "tale", 1)
    for path in (store.folder, *store.folder.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        refused(store)
    finally:
        for path in (store.folder, *store.folder.rglob("*")):
            path.chmod(0o700)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_read_only(store: SessionStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As root sees it: the system refuses new files."""
    save(store, "tale", 1)
    real = os.open

    def closed(path, flags, *more, **options):
        if flags & (os.O_CREAT | os.O_WRONLY):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *more, **options)

    def no_removal(self, missing_ok=False):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(os, "open", closed)
    monkeypatch.setattr(Path, "unlink", no_removal)
    refused(store)


def refused(store: SessionStore) -> None:
    assert check(store, "tale") == 1, "reading goes on"
    with pytest.raises(EffllmError, match="session tale cannot be saved: (Read-only file system|Permission denied)") as caught:
        save(SessionStore(store.folder), "tale", 2)
    assert str(store.folder) in caught.value.hint
    with pytest.raises(EffllmError, match="session tale cannot be removed: (Read-only file system|Permission denied)"):
        store.remove(["tale"])
    assert store.make_room(0, "x") == [] and check(store, "tale") == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    store = SessionStore(tmp_path / "state" / "sessions")
    with pytest.raises(EffllmError, match="session tale cannot be saved: Not a directory"):
        save(store, "tale", 1)
    assert store.names() == [] and store.listed() == []
