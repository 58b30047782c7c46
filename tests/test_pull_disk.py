"""Disks during a download: one that fills up midway, one that is read-only. File systems of a few megabytes where mounting is allowed;
elsewhere the call that writes fails as it would."""

import builtins
import errno
import io
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import Hub, Reply, Request
from hub_user import FABLE, MINUTE, HubUser, on_disk, sharded, tiny

from effllm.offload.size import parse_size

REPO = "org/name"
WEIGHTS = 6_000_000
FULL = re.compile(r"the disk of (\S+) is full: ([\d.]+ \w+) are still missing, ([\d.]+ \w+) are free\n"
                  r"hint: make room for ([\d.]+ \w+), then ")


def mounted(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    if not mounted("-t", "tmpfs", "-o", f"size={size}", "none", str(place)):
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextmanager
def read_only(folder: Path, way: str) -> Iterator[Path]:
    """`folder` on a mount that refuses every write, also root's; where nothing can be mounted, below calls that refuse as it would."""
    if way == "calls":
        with pytest.MonkeyPatch.context() as patched:
            refuse_writes(patched, folder)
            yield folder
        return
    if not mounted("--bind", str(folder), str(folder)):
        pytest.skip("mounting a file system is not allowed here")
    try:
        if not mounted("-o", "remount,ro,bind", str(folder)):
            pytest.skip("mounting read-only is not allowed here")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def refuse_writes(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Whatever makes, changes or removes a name below `folder`, or opens one for writing, fails as on a mount for reading."""
    def below(name: object) -> bool:
        return isinstance(name, (str, bytes, os.PathLike)) and Path(os.fsdecode(name)).absolute().is_relative_to(folder)

    def guarded(module: object, call: str, writes: Callable[..., bool]) -> None:
        real = getattr(module, call)

        def replacement(*words: object, **more: object) -> object:
            if any(map(below, words[:2])) and writes(*words, **more):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(words[0]))
            return real(*words, **more)

        patched.setattr(module, call, replacement)

    for call in ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "symlink", "link", "truncate", "utime", "chmod"):
        guarded(os, call, lambda *words, **more: True)
    guarded(os, "open", lambda name, flags, *words, **more: bool(flags & WRITING))
    for module in (builtins, io):
        guarded(module, "open", lambda name, mode="r", *words, **more: any(letter in mode for letter in "wax+"))


def fills(disk: Path, leave: int, word: str) -> Callable[[Request], Reply | None]:
    """Somebody else takes the room but for `leave` bytes, when a file with `word` in its name is first asked for."""
    filled = threading.Event()

    def disturb(request: Request) -> Reply | None:
        if word in request.path and "signed" in request.path and not filled.is_set():
            filled.set()
            free = shutil.disk_usage(disk).free
            (disk / "somebody-elses").write_bytes(bytes(max(0, free - leave)))
        return None

    return disturb


@pytest.mark.parametrize("leave", [0, 1_500_000, *(pytest.param(each, marks=pytest.mark.slow) for each in (4096, 4_000_000))])
def test_ollama_6727_a_disk_that_fills_midway_says_how_much_is_missing_and_the_pull_resumes(
        hub: Hub, user: HubUser, tmp_path: Path, leave: int) -> None:
    repo = hub.add(REPO, files=tiny(WEIGHTS))
    with small_disk(tmp_path / "disk", "16m") as disk:
        cache = {"HF_HUB_CACHE": str(disk / "hub")}
        hub.disturb = fills(disk, leave, "model.safetensors")
        process = user.start("pull", REPO, **cache)
        _, said = process.communicate(timeout=MINUTE)
        assert process.returncode == 4 and "Traceback" not in said, said
        found = FULL.search(said)
        assert found and said.count("is full") == 1 and str(disk) in found[1], said
        missing, free, room = (parse_size(text.replace(" ", "")) for text in found.groups()[1:])
        blobs = disk / "hub" / "models--org--name" / "blobs"
        here = sum(path.stat().st_blocks * 512 for path in blobs.glob("*.effllm.incomplete"))
        assert WEIGHTS - here - (1 << 20) <= missing <= WEIGHTS and abs(missing - free - room) < 1 << 17
        assert not list((disk / "hub").glob("models--*/snapshots/*/model.safetensors"))
        (disk / "somebody-elses").unlink()
        hub.disturb, before = None, hub.served["model.safetensors"]
        again = user.run("pull", REPO, **cache)
        assert again.code == 0, again.err
        assert on_disk(disk / "hub" / "models--org--name" / "snapshots" / repo.commit) == repo.files
        assert hub.served["model.safetensors"] - before <= missing + (1 << 17), "what had come was loaded again"


def test_a_disk_that_fills_while_quantizing_as_it_comes(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    repo = hub.add(REPO, files=sharded(FABLE))
    with small_disk(tmp_path / "disk", "40m") as disk:
        data = {"XDG_DATA_HOME": str(disk)}
        hub.disturb = fills(disk, 1_000_000, "00002-of")
        process = user.start("pull", REPO, "--bits", "4", **data)
        _, said = process.communicate(timeout=MINUTE)
        assert process.returncode == 4 and "is full" in said and "Traceback" not in said, said
        assert re.search(r"[\d.]+ [KM]iB (are still missing|more)", said) and "same command" in said, said
        (disk / "somebody-elses").unlink()
        hub.disturb = None
        assert user.run("pull", REPO, "--bits", "4", **data).code == 0
        assert user.run("verify", f"{REPO}:4bit", **data).code == 0 and repo.commit


@pytest.mark.parametrize("room", [0, 1, 70_000, 1_000_000, 1_900_000])
def test_wherever_a_disk_fills_nothing_unwritten_counts_as_here(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch,
                                                                room: int) -> None:
    """Also where nothing can be mounted: the write itself fails, or takes only a part first."""
    repo = hub.add(REPO, files=tiny())
    left, real = [room], os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: left[0]]
        left[0] -= len(part)
        return real(fd, part, offset)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        said = user.run("pull", REPO).refused(4)
    assert FULL.search(said), said
    assert user.run("pull", REPO).code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


@pytest.mark.parametrize("room", [0, 70_000, 1_500_000])
def test_wherever_a_disk_fills_while_quantizing_as_it_comes(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The same of a pull that keeps only the small weights: what it had made is kept, and the next one finishes."""
    hub.add(REPO, files=sharded(FABLE))
    left, real = [room], os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return real(fd, data, offset)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        said = user.run("pull", REPO, "--bits", "4").refused(4)
    assert "is full" in said, said
    assert user.run("pull", REPO, "--bits", "4").code == 0 and user.run("verify", f"{REPO}:4bit").code == 0


def test_a_file_larger_than_the_file_system_takes(hub: Hub, user: HubUser) -> None:
    """As FAT ends at 4 GB: said in one line, in a process of its own whose files may have a megabyte."""
    hub.add(REPO, files=tiny())
    code = ("import resource, sys\nfrom effllm.cli.app import main\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))\nsys.exit(main(sys.argv[1:]))\n")
    process = user.start_python("-c", code, "pull", REPO)
    _, said = process.communicate(timeout=MINUTE)
    lines = said.splitlines()
    assert process.returncode == 4 and lines[-2].startswith("effllm: a file that large may not be written"), said
    assert lines[-1].startswith("hint: set HF_HUB_CACHE to") and "is full" not in said and "Traceback" not in said, said
    assert user.run("pull", REPO).code == 0


def test_a_quota_that_is_used_up_is_no_full_disk(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, files=tiny())

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        said = user.run("pull", REPO).refused(4)
    assert "the quota is used up" in said and "HF_HUB_CACHE" in said and "make room" not in said


def test_a_file_system_without_room_for_a_single_name(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """No journal, no folder, no length: each of these calls can be the first that fails."""
    repo = hub.add(REPO, files=tiny())
    for call in ("mkdir", "ftruncate", "symlink", "replace"):
        def fail(*words: object, **more: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as full:
            full.setattr(os, call, fail)
            assert "is full" in user.run("pull", REPO).refused(4), call
    assert user.run("pull", REPO).code == 0 and on_disk(user.snapshot(REPO, repo.commit)) == repo.files


@pytest.mark.parametrize("way", ["mount", "calls"])
def test_a_cache_on_a_read_only_mount(hub: Hub, user: HubUser, way: str) -> None:
    """What is in it runs; nothing is fetched into it, and the line names the variable that gives another place."""
    repo = hub.add(REPO, FABLE)
    assert user.run("pull", REPO).code == 0
    cache = user.home / "hf" / "hub"
    hub.add("org/other", files=tiny())
    with read_only(cache, way):
        ran = user.run("run", REPO, "Once", "--raw", "-n", "2", "--temp", "0")
        assert ran.code == 0 and ran.out.strip(), ran.err
        assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable", REPO]
        assert user.run("pull", REPO).code == 0, "everything is here"
        hub.forget()
        said = user.run("pull", "org/other").refused(1)
        assert "read-only file system" in said and "HF_HUB_CACHE" in said and str(cache) in said
        assert not hub.requests_for("model.safetensors")
        removed = user.run("rm", REPO, "-y")
        assert removed.code == 1 and "Traceback" not in removed.err and "ead-only" in removed.err
    assert user.run("verify", REPO).code == 0 and repo.commit


@pytest.mark.parametrize("way", ["mount", "calls"])
def test_a_home_on_a_read_only_mount(hub: Hub, user: HubUser, way: str) -> None:
    """Nowhere to keep kernels, settings or models: a run works and says what it costs, what must be kept says where."""
    hub.add(REPO, files=sharded(FABLE))
    variables = {"XDG_DATA_HOME": str(user.home / "ro" / "data"), "XDG_CONFIG_HOME": str(user.home / "ro" / "config"),
                 "HF_HOME": str(user.home / "ro" / "hf")}
    (user.home / "ro").mkdir()
    with read_only(user.home / "ro", way):
        assert user.run("run", "fable", "Hi", "-n", "2", "--bits", "4", **variables).code == 0
        for words, named in ((("pull", REPO), "HF_HUB_CACHE"), (("pull", REPO, "--bits", "4"), "XDG_DATA_HOME"),
                             (("alias", "work", "fable"), "models.yaml")):
            said = user.run(*words, **variables).refused(1)
            assert "ead-only file system" in said and named in said, said


def test_pulls_of_one_model_into_one_full_disk_do_not_harm_each_other(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    """Two at once, on a disk that fills: both say so, and the next one finishes."""
    repo = hub.add(REPO, files=tiny(WEIGHTS))
    with small_disk(tmp_path / "disk", "16m") as disk:
        cache = {"HF_HUB_CACHE": str(disk / "hub")}
        hub.disturb = fills(disk, 1_000_000, "model.safetensors")
        both = [user.start("pull", REPO, **cache) for _ in range(2)]
        said = [process.communicate(timeout=MINUTE)[1] for process in both]
        assert [process.returncode for process in both] == [4, 4], said
        (disk / "somebody-elses").unlink()
        hub.disturb = None
        assert user.run("pull", REPO, **cache).code == 0
        assert on_disk(disk / "hub" / "models--org--name" / "snapshots" / repo.commit) == repo.files
