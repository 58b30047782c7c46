"""Downloads that are stopped, killed, started twice: nothing received is lost or fetched again, and only the right bytes get a name."""

import fcntl
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hub_server import Hub, Reply, Request, etag
from hub_user import MINUTE, HubUser, on_disk, tiny
from hypothesis import given
from hypothesis import strategies as st

from effllm.offload import transfer
from effllm.offload.backoff import Backoff, moment, retry_after
from effllm.offload.connection import ConnectionFailed, Url, proxy_for
from effllm.offload.partial_file import ByteRanges, Digest, PartialFile, read_journal
from effllm.runtime.events import Notice, Progress
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.library.unfinished_downloads import JOURNAL
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.plan import plan_pull, pull_target
from effllm.runtime.pull.pull import Pulled, pull_model

REPO = "org/name"
SHARDS, SHARD_NBYTES = 3, 12_000_000
IN_FLIGHT = 1 << 20  # that a server has sent and a killed reader has not seen


def large(nbytes: int = SHARD_NBYTES) -> dict[str, bytes]:
    """Three shards of random bytes and an index."""
    files, rng = tiny(), random.Random(3)
    del files["model.safetensors"]
    names = [f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]
    index = ", ".join(f'"tensor.{n}": "{name}"' for n, name in enumerate(names))
    return files | {name: rng.randbytes(nbytes) for name in names} | \
        {"model.safetensors.index.json": ('{"weight_map": {' + index + "}}").encode()}


def wait_until(condition, process: subprocess.Popen) -> bool:
    """False where the process ended first."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def weights_served(hub: Hub) -> int:
    return sum(count for name, count in hub.served.items() if name.endswith(".safetensors"))


# -- killed ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_huggingface_hub_4196_a_killed_download_continues_in_the_next_process(hub: Hub, user: HubUser) -> None:
    """At ten random points; what a kill loses is at most what each connection had received and not noted yet."""
    repo = hub.add(REPO, files=large(40_000_000))
    hub.rate = 30e6
    total, kills = SHARDS * 40_000_000, 0
    rng = random.Random(os.urandom(8))
    for at in sorted(rng.uniform(0.02, 0.98) * total for _ in range(10)):
        process = user.start("pull", REPO)
        if wait_until(lambda goal=at: weights_served(hub) >= goal, process):
            process.kill()
            kills += 1
        process.communicate(timeout=MINUTE)
        if process.returncode == 0:
            break
    hub.rate = None
    ran = user.run("pull", REPO)
    assert ran.code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files and kills >= 8
    lost = kills * transfer.CONNECTIONS * (transfer.PIECE_NBYTES + IN_FLIGHT)
    assert total <= weights_served(hub) <= total + lost, f"{weights_served(hub) - total} bytes came twice after {kills} kills"
    begins = [int(request.range.removeprefix("bytes=").partition("-")[0]) for request in hub.requests if request.range]
    assert any(begin > transfer.PIECE_NBYTES for begin in begins), "no process went on where another had stopped"


def interrupted(hub: Hub, user: HubUser, after: int) -> str:
    """What a pull says that Ctrl-C ends when so many bytes were served."""
    hub.rate = 3e6
    process = user.start("pull", REPO)
    assert wait_until(lambda: weights_served(hub) > after, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=MINUTE)
    assert process.returncode == 130
    hub.rate = None
    return said


def test_ctrl_c_keeps_what_came_and_says_how_to_continue(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=large())
    said = interrupted(hub, user, 9_000_000)
    assert f"effllm pull {REPO} continues from here" in said and "Traceback" not in said
    before = weights_served(hub)
    again = user.run("pull", REPO)
    assert again.code == 0 and "downloaded already" in again.err
    assert weights_served(hub) - before <= SHARDS * SHARD_NBYTES - 5_000_000
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_a_file_whose_journal_is_damaged_begins_again_and_says_so(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=large())
    interrupted(hub, user, 4_000_000)
    journals = sorted((user.home / "hf" / "hub").rglob(f"*{JOURNAL}"), key=lambda path: path.stat().st_size)
    journals[-1].write_bytes(b"?" + journals[-1].read_bytes()[1:])
    again = user.run("pull", REPO)
    assert again.code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    assert again.err.count("starts over: of ") == 1 and "safetensors starts over" in again.err


@pytest.mark.slow
def test_two_pulls_of_one_model_share_the_work(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=large())
    hub.rate = 2e5
    first = user.start("pull", REPO)
    assert wait_until(lambda: weights_served(hub) > 500_000, first)
    second = user.start("pull", REPO)
    said = ""
    while "another program is downloading" not in said:
        line = second.stderr.readline()
        assert line, f"it ended without a word: {said}"
        said += line
    hub.rate = None
    others = [process.communicate(timeout=MINUTE)[1] for process in (first, second)]
    assert first.returncode == second.returncode == 0, others
    assert "another program" not in others[0]
    assert weights_served(hub) == SHARDS * SHARD_NBYTES and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_a_lock_of_the_hubs_own_library_is_respected(hub: Hub, user: HubUser) -> None:
    repo = hub.add(REPO, files=tiny())
    name = etag("model.safetensors", repo.files["model.safetensors"])
    lock = user.home / "hf" / "hub" / ".locks" / "models--org--name" / f"{name}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = user.start("pull", REPO)
        said = ""
        while "waiting for it" not in said:
            line = process.stderr.readline()
            assert line, "it ended without waiting"
            said += line
        assert not hub.requests_for("model.safetensors")
    assert process.wait(MINUTE) == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files
    process.communicate()


# -- progress ------------------------------------------------------------------------------------------------------------------------


def events(user: HubUser, attempts: int = 6) -> list[object]:
    client = Client(user.env, backoff=Backoff(attempts, first=0.01))
    target = pull_target(parse_reference(REPO, user.env), user.env)
    return list(pull_model(plan_pull(target, client, user.env), client, user.env))


def test_ollama_8484_progress_never_runs_backwards(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a file turns out to be wrong and comes again."""
    monkeypatch.setattr(transfer, "RANGE_NBYTES", 1 << 18)
    repo = hub.add(REPO, files=tiny(4_000_000))
    hub.rate, hub.cut_after, hub.cuts = 4e6, 100_000, 3
    hub.tags["model.safetensors"] = iter(["one"] * 6 + ["two"] * 100)
    told = events(user)
    done = [item.done for item in told if isinstance(item, Progress)]
    assert done == sorted(done) and len(set(done)) > 3 and {item.total for item in told if isinstance(item, Progress)} == {done[-1]}
    assert all(item.rate is not None and item.rate >= 0 for item in told if isinstance(item, Progress))
    assert any("changed on the server" in item.text for item in told if isinstance(item, Notice))
    assert isinstance(told[-1], Pulled) and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_a_hub_that_stays_down_is_abandoned_with_what_came_kept(hub: Hub, user: HubUser) -> None:
    from effllm import DownloadFailed

    repo = hub.add(REPO, files=tiny(4_000_000))
    hub.cut_after, hub.cuts = 1_500_000, 1

    def down(request: Request) -> Reply | None:
        return (502, {}, b"") if hub.served["model.safetensors"] >= 1_500_000 else None

    hub.disturb = down
    with pytest.raises(DownloadFailed, match="502"):
        events(user, attempts=3)
    hub.disturb = None
    events(user)
    assert hub.served["model.safetensors"] == len(repo.files["model.safetensors"])
    assert on_disk(user.snapshot(REPO, repo.commit)) == repo.files


def test_ollama_8280_the_rate_is_that_of_late_and_the_time_left_follows_from_it() -> None:
    """What an earlier run brought says nothing about this one's line."""
    from effllm.cli.number_format import duration
    from effllm.cli.screen import format_progress

    text = format_progress(Progress("downloading", 3 << 30, 4 << 30, "bytes", rate=float(8 << 20)), per_s=1.0)
    assert text.split("  ") == ["downloading", "3.00 GiB of 4.00 GiB", "75%", "8.00 MiB/s", "2:08 min left"]
    assert "left" not in format_progress(Progress("downloading", 3 << 30, 4 << 30, "bytes", rate=0.0), per_s=1.0)
    assert [duration(seconds) for seconds in (0.4, 59, 60, 3599, 12_000)] == ["0 s", "59 s", "1:00 min", "59:59 min", "3:20 h"]


# -- the pieces ------------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=30))
def test_stretches_are_sets_of_positions(pairs: list[tuple[int, int]]) -> None:
    stretches, model = ByteRanges(), set()
    for begin, end in pairs:
        new = set(range(begin, end)) - model
        assert stretches.add(begin, end) == len(new)
        model |= new
        assert stretches.count == len(model)
    for position in range(62):
        end = position
        while end in model:
            end += 1
        assert stretches.covered_from(position) == end
    assert {at for begin, end in stretches.missing(60) for at in range(begin, end)} == set(range(60)) - model


def test_a_journal_is_believed_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    data, journal, digest = tmp_path / "data", tmp_path / "journal", Digest("sha256", "0" * 64)
    part = PartialFile(data, journal, 100, digest)
    part.write(10, b"a" * 20)
    part.write(50, b"b" * 10)
    part.close()
    whole = journal.read_bytes()
    for torn, held in ((whole, 30), (whole[:-1], 20), (whole + b"70 9", 30), (whole + b"90 101\n", 30), (whole + b"x y\n60 70\n", 30),
                       (whole + b"60 70\n", 40), (b"", 0), (b"{}\n10 30\n", 0)):
        journal.write_bytes(torn)
        again = PartialFile(data, journal, 100, digest)
        assert again.received_nbytes == held, torn
        said = "data starts over: of 100 B that are here, which ones is unknown (a damaged journal, or another version)"
        assert again.restart_notice("data") == ("" if held else said), "nobody would know why it comes twice"
        again.write(0, b"c")
        again.close()
        noted = read_journal(data, journal, 100, digest)
        assert noted is not None and noted[0].count == held + 1
        data.write_bytes(bytes(100))
    journal.write_bytes(whole)
    assert read_journal(data, journal, 101, digest) is None and read_journal(data, journal, 100, Digest("sha256", "1" * 64)) is None
    os.truncate(data, 50)
    assert PartialFile(data, journal, 100, digest).received_nbytes == 0


def test_what_is_given_back_is_free_and_the_head_stays(tmp_path: Path) -> None:
    part = PartialFile(tmp_path / "data", tmp_path / "journal", 1 << 22, None)
    part.write(0, b"h" * 5000 + os.urandom((1 << 22) - 5000))
    os.sync()
    part.restart(keep=5000)
    part.close()
    status = (tmp_path / "data").stat()
    assert status.st_size == 1 << 22 and status.st_blocks * 512 <= 64 << 10
    again = PartialFile(tmp_path / "data", tmp_path / "journal", 1 << 22, None)
    assert again.received_nbytes == 5000 and (tmp_path / "data").read_bytes()[:5000] == b"h" * 5000


def test_retry_delays_grow_and_retry_after_takes_precedence() -> None:
    backoff = Backoff(first=1.0, longest=8.0)
    for failures, most in ((1, 1), (2, 2), (3, 4), (4, 8), (9, 8)):
        delays = [backoff.delay(failures) for _ in range(50)]
        assert most / 2 <= min(delays) and max(delays) <= most and len(set(delays)) > 1
    assert backoff.delay(1, 30.0) == 30.0
    assert retry_after("120", 0) == 120 and retry_after(None, 0) is None and retry_after("soon", 0) is None
    assert retry_after("\u00b2", 0) is None and retry_after("9" * 400, 0) > backoff.patience
    assert moment("Thu, 01 Jan 1970 00:01:00 GMT") == 60 and moment(None) is moment("soon") is None
    assert retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 10) == 50 and retry_after("Thu, 01 Jan 1970 00:00:00 GMT", 10) == 0


def test_addresses_and_proxies() -> None:
    url = Url.parse("https://hub.example:8443/a%20b?c=d#e")
    assert (url.scheme, url.host, url.port, url.target, url.authority) == ("https", "hub.example", 8443, "/a%20b?c=d", "hub.example:8443")
    assert Url.parse("http://[::1]/").authority == "[::1]"
    for bad in ("ftp://x/", "hub", "http:///a", "http://a b/", "http://a/\r\nX: y", "http://a:b/", "file:///etc/passwd"):
        with pytest.raises(ConnectionFailed):
            Url.parse(bad)
    env = {"HTTPS_PROXY": "http://u:p@proxy:3128", "NO_PROXY": "internal,.corp"}
    proxy = proxy_for(url, env)
    assert (proxy.host, proxy.port, proxy.authorization) == ("proxy", 3128, "Basic dTpw")
    for host in ("internal", "a.corp"):
        assert proxy_for(Url.parse(f"https://{host}/"), env) is None
    assert proxy_for(Url.parse("http://hub.example/"), env) is None
    assert proxy_for(url, {"all_proxy": "proxy:1", "no_proxy": "*"}) is None and proxy_for(url, {"all_proxy": "proxy:1"}).port == 1
