"""The Xet hash computed in a separate process: right, wrong, killed, and chosen where a download would otherwise wait for sha256."""

import errno
import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hub_server import Hub, running, xet_hash
from hub_user import MINUTE, HubUser, tiny
from test_pull_resume import wait_until
from test_transfer import Quiet

from effllm import DownloadFailed
from effllm.offload import running_hash
from effllm.offload.partial_file import Digest, PartialFile
from effllm.offload.running_hash import Read, Xet, begin_hash
from effllm.offload.transfer import transfer
from effllm.offload.transfer_types import Complete, Download, Received, Retrying
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.download import download
from effllm.runtime.pull.repository import describe

CONTENT = os.urandom((5 << 20) + 12345)
OTHER = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]  # whatever the first one is
SHA256 = Digest("sha256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(scope="module")
def named() -> str:
    return xet_hash(CONTENT)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[PartialFile]:
    part = PartialFile(tmp_path / "data", tmp_path / "journal", len(CONTENT), SHA256)
    yield part
    part.close()


@pytest.fixture
def whole(empty: PartialFile) -> PartialFile:
    empty.write(0, CONTENT)
    return empty


@pytest.fixture
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_hash, "sha256_is_slow", lambda: True)
    monkeypatch.setattr(running_hash, "LARGE_NBYTES", 1 << 20)


class Body:
    def __init__(self, content: bytes, begin: int) -> None:
        self.content, self.at = content, begin

    def readinto(self, view: memoryview) -> int:
        count = min(len(view), len(self.content) - self.at)
        view[:count] = self.content[self.at : self.at + count]
        self.at += count
        return count

    def close(self) -> None:
        """Nothing is open."""


def taken(hashed: Xet | Read, part: PartialFile, end: int = len(CONTENT)) -> bool:
    at = 0
    while at < end:
        at += hashed.take(part, at, end - at)
    return hashed.is_right()


def test_it_is_the_hash_that_hubs_name(whole: PartialFile, named: str) -> None:
    with closing(Xet(named)) as hashed:
        assert taken(hashed, whole)
    with closing(Xet(xet_hash(OTHER))) as hashed:
        assert not taken(hashed, whole)
    with closing(Xet(named)) as hashed:
        assert not taken(hashed, whole, len(CONTENT) - 1)
    assert hashed._process.poll() is not None


def test_a_process_that_is_closed_before_it_has_all_ends_by_itself(whole: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_hash, "LEAVE_S", 60.0)
    with closing(Xet(named)) as hashed:
        assert hashed.take(whole, 0, 100) == 100 and hashed._process.poll() is None
    assert hashed._process.poll() == 0


@pytest.fixture
def has_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was asked to: on a machine that does other work beside, to die takes a moment too."""
    usual = subprocess.Popen.terminate

    def asked(process: subprocess.Popen) -> None:
        monkeypatch.setattr(running_hash, "LEAVE_S", 60.0)
        usual(process)

    monkeypatch.setattr(subprocess.Popen, "terminate", asked)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"


@pytest.mark.parametrize(("program", "ended"), [("print('ready', flush=True); import time; time.sleep(1000)", signal.SIGTERM),
                                                (STUBBORN, signal.SIGKILL)])
@pytest.mark.parametrize("how", ["close", "stop"])
def test_a_process_that_does_not_end_is_asked_to_and_then_ended(whole: PartialFile, monkeypatch: pytest.MonkeyPatch, program: str,
                                                                ended: signal.Signals, how: str, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(running_hash, "XET", program)
    if ended == signal.SIGTERM:
        request.getfixturevalue("has_time_to_end")
    with closing(Xet("0" * 64)) as hashed:
        assert hashed._process.stdout.readline() == b"ready\n"
        getattr(hashed, how)()
        assert hashed._process.returncode == -ended
        if how == "stop":
            with pytest.raises(OSError):
                hashed.take(whole, 0, 100)


def test_a_transfer_that_is_left_ends_the_process_that_its_hash_waits_for(
        empty: PartialFile, monkeypatch: pytest.MonkeyPatch, slow_processor: None) -> None:
    """The thread that checks would wait for it for a minute (END_S)."""
    made = begun(monkeypatch)
    monkeypatch.setattr(running_hash, "XET", STUBBORN)
    events = transfer([Download("weights", empty, lambda: "0" * 64)], lambda name, begin, end: Body(CONTENT, begin), Quiet())
    for event in events:
        if made and event == Received(len(CONTENT)):
            break
    assert made[0]._process.stdout.readline() == b"ready\n"
    events.close()
    assert made[0]._process.returncode == -signal.SIGKILL
    assert not any(thread.name == "effllm-check" for thread in threading.enumerate())


CHILD = f"""
import sys
from pathlib import Path
from effllm.cli.app import main
from effllm.offload import running_hash
usual = running_hash.Xet.__init__
def noted(self, value):
    usual(self, value)
    Path(sys.argv.pop(1)).write_text(str(self._process.pid))
running_hash.Xet.__init__ = noted
running_hash.sha256_is_slow = lambda: True
running_hash.LARGE_NBYTES = 1 << 20
running_hash.XET = {STUBBORN!r}
sys.exit(main(sys.argv[2:]))
"""


def test_ctrl_c_leaves_no_process_behind(hub: Hub, user: HubUser, tmp_path: Path, named: str) -> None:
    hub.add("org/name", files=tiny() | {"model.safetensors": CONTENT})
    hub.xet["model.safetensors"] = named
    noted = tmp_path / "pid"
    process = user.start_python("-c", CHILD, noted, "pull", "org/name")
    assert wait_until(lambda: noted.exists() and noted.read_text() and hub.served.get("model.safetensors", 0) >= len(CONTENT), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=MINUTE)
    assert process.returncode == 130 and "continues from here" in said and "Traceback" not in said, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


@pytest.mark.parametrize("large, slow, value, usable, kind", [
    (True, True, "0" * 64, True, Xet), (False, True, "0" * 64, True, Read), (True, False, "0" * 64, True, Read),
    (True, True, None, True, Read), (True, True, "0" * 64, False, Read)])
def test_which_hash_is_begun(whole: PartialFile, monkeypatch: pytest.MonkeyPatch, large: bool, slow: bool, value: str | None, usable: bool,
                             kind: type) -> None:
    monkeypatch.setattr(running_hash, "LARGE_NBYTES", len(CONTENT) + (not large))
    monkeypatch.setattr(running_hash, "sha256_is_slow", lambda: slow)
    monkeypatch.setattr(running_hash, "can_xet", lambda: usable)
    with closing(begin_hash(whole, lambda: value)) as hashed:
        assert type(hashed) is kind
    with closing(begin_hash(whole, None)) as hashed:
        assert type(hashed) is Read


def test_where_no_process_is_to_be_had_sha256_checks(whole: PartialFile, monkeypatch: pytest.MonkeyPatch, slow_processor: None) -> None:
    monkeypatch.setattr(running_hash.sys, "executable", "/nowhere/python")
    with closing(begin_hash(whole, lambda: "0" * 64)) as hashed:
        assert isinstance(hashed, Read) and taken(hashed, whole)


def begun(monkeypatch: pytest.MonkeyPatch) -> list[Xet]:
    """Those that a transfer begins."""
    made: list[Xet] = []
    usual = Xet.__init__

    def noted(self: Xet, value: str) -> None:
        usual(self, value)
        made.append(self)

    monkeypatch.setattr(Xet, "__init__", noted)
    return made


def all_of(part: PartialFile, content: bytes, xet: str) -> list[object]:
    wanted = Download("weights", part, lambda: xet)
    events = transfer([wanted], lambda name, begin, end: Body(content, begin), Quiet())
    return [event for event in events if not isinstance(event, Received)]


def test_a_transfer_is_checked_by_it_alone(empty: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch,
                                               slow_processor: None) -> None:
    made = begun(monkeypatch)
    monkeypatch.setattr(Read, "take", None)
    assert [type(event) for event in all_of(empty, CONTENT, named)] == [Complete]
    assert len(made) == 1 and empty.path.read_bytes() == CONTENT


@pytest.mark.parametrize("xet", ["0" * 64, "nonsense", ""])
def test_sha256_decides_where_another_hash_was_named(empty: PartialFile, xet: str, monkeypatch: pytest.MonkeyPatch,
                                                     slow_processor: None) -> None:
    made = begun(monkeypatch)
    assert [type(event) for event in all_of(empty, CONTENT, xet)] == [Complete], "the bytes are right, and do not come twice"
    assert len(made) == 1


def test_bytes_that_are_wrong_come_again_and_are_refused_then(empty: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch,
                                                              slow_processor: None) -> None:
    made = begun(monkeypatch)
    events = []
    with pytest.raises(DownloadFailed, match="wrong checksum, twice"):
        for event in transfer([Download("weights", empty, lambda: named)], lambda name, begin, end: Body(OTHER, begin), Quiet()):
            events.append(event)
    assert [event.text for event in events if isinstance(event, Retrying)] == ["weights: wrong checksum; downloading it again"]
    assert not any(isinstance(event, Complete) for event in events) and len(made) == 1


def test_a_process_that_is_killed_in_between(empty: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch,
                                               slow_processor: None) -> None:
    usual, killed = Xet.take, []

    def killing(self: Xet, part: PartialFile, at: int, nbytes: int) -> int:
        if at:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            killed.append(at)
        return usual(self, part, at, min(nbytes, 1 << 20))

    monkeypatch.setattr(Xet, "take", killing)
    assert [type(event) for event in all_of(empty, CONTENT, named)] == [Complete]
    assert len(killed) == 1


def test_a_process_that_hangs_is_not_waited_for(empty: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch, slow_processor: None,
                                                has_time_to_end: None) -> None:
    made = begun(monkeypatch)
    monkeypatch.setattr(running_hash, "END_S", 0.3)
    monkeypatch.setattr(running_hash, "XET", "import time; time.sleep(1000)")
    assert [type(event) for event in all_of(empty, CONTENT, named)] == [Complete]
    assert len(made) == 1 and made[0]._process.poll() == -signal.SIGTERM


def test_a_file_system_that_cannot_feed_a_pipe(empty: PartialFile, named: str, monkeypatch: pytest.MonkeyPatch,
                                               slow_processor: None) -> None:
    def unable(*arguments: object, **more: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    made = begun(monkeypatch)
    monkeypatch.setattr(os, "splice", unable)
    assert [type(event) for event in all_of(empty, CONTENT, named)] == [Complete]
    assert len(made) == 1


def test_it_leaves_no_log_behind(whole: PartialFile, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home" / "hf"))
    with closing(Xet(named)) as hashed:
        assert taken(hashed, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "journal"], "the library keeps a log where it is not told otherwise"


def test_a_python_that_cannot_feed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert running_hash.can_xet.__wrapped__()
    monkeypatch.delattr(os, "splice")
    assert not running_hash.can_xet.__wrapped__()


def test_who_does_without_xet_is_asked_by_none(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch,
                                               slow_processor: None) -> None:
    made = begun(monkeypatch)
    assert pulled(tmp_path, named, HF_HUB_DISABLE_XET="1").name == SHA256.value and not made


def test_a_pull_asks_the_hub_for_it(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch,
                                               slow_processor: None) -> None:
    made = begun(monkeypatch)
    assert pulled(tmp_path, named).name == SHA256.value and len(made) == 1, "its name in the cache is the other hash"


def pulled(home: Path, xet: str, **variables: str) -> Path:
    """The blob of the weights that come from a hub which names this hash."""
    hub = Hub(xet={"model.safetensors": xet})
    hub.add("org/model", files={"config.json": b"{}", "model.safetensors": CONTENT})
    with running(hub):
        env = {"HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(home / "hub"), **variables}
        client = Client(env)
        repository = describe(client, "org/model", "main")
        *_, folder = download(repository, list(repository.files.values()), client, env)
        assert (folder / "model.safetensors").read_bytes() == CONTENT
        return (folder / "model.safetensors").resolve()
