"""Folders written atomically: layout, headers, checksums of parts, the journal after a kill, full disks, locks, replacing."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from effllm import DoesNotFit, EffllmError, UsageError
from effllm.offload import checksum
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import JOURNAL, FolderWriter, is_journal, partial_folder
from effllm.offload.shards import INDEX, PAD, Planned, index_json, plan_files

MARKER = "done.json"
MINUTE = 60


def tensors(*sizes: int, prefix: str = "t") -> list[Planned]:
    return [Planned(f"{prefix}{i}", "U8", (size,), size) for i, size in enumerate(sizes)]


GROUPS = (tensors(100, 5000, 64, prefix="a"), tensors(1, 4096, prefix="b"), tensors(777, prefix="c"))


def content(name: str, nbytes: int) -> bytes:
    return random.Random(name).randbytes(nbytes)


def write_all(writer: FolderWriter, groups=GROUPS) -> None:
    for group in groups:
        for tensor in group:
            if tensor.name not in writer.finished:
                data = content(tensor.name, tensor.nbytes)
                half = tensor.nbytes // 2
                writer.write(tensor.name, half, data[half:])
                writer.write(tensor.name, 0, data[:half])
                writer.finish(tensor.name, {"crc32": zlib.crc32(data)})


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make(out: Path, fingerprint: str = "one", replace: bool = False, limit: int = 1 << 30) -> FolderWriter:
    files = plan_files(GROUPS, {"format": "test"}, limit)
    writer = FolderWriter(out, files, fingerprint, MARKER)
    write_all(writer)
    texts = {MARKER: "{}"} | ({INDEX: index_json(files)} if len(files) > 1 else {})
    writer.commit({}, texts, replace)
    return writer


def test_a_system_that_syncs_whole_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fdatasync, as on macOS: every tensor and its line in the journal are on the disk before the next one."""
    synced, fsync = [], os.fsync
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    files = plan_files(GROUPS, {"format": "test"}, 1 << 30)
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        before = len(synced)
        write_all(writer)
        assert len(synced) - before == 2 * sum(map(len, GROUPS))
        writer.commit({}, {MARKER: "{}"})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MARKER, "model.safetensors"]


# -- layout --------------------------------------------------------------------------------------------------------------------


def test_the_library_and_the_store_read_what_was_written(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as judge, TensorStore.open(tmp_path / "out") as store:
        for tensor in (tensor for group in GROUPS for tensor in group):
            expected = content(tensor.name, tensor.nbytes)
            assert judge.get_tensor(tensor.name).tobytes() == store.read(store.tensors[tensor.name]).tobytes() == expected
    assert not partial_folder(tmp_path / "out").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MARKER, "model.safetensors"]


def test_groups_begin_on_pages_and_tensors_on_lines(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with TensorStore.open(tmp_path / "out") as store:
        for group in GROUPS:
            assert store.tensors[group[0].name].offset % 4096 == 0
            assert all(store.tensors[tensor.name].offset % 64 == 0 for tensor in group)
            at = [store.tensors[tensor.name].offset for tensor in group]
            assert at == sorted(at), "in the order of the group"
        pads = [info for name, info in store.tensors.items() if name.startswith(PAD)]
        assert pads and all(not store.read(info).any() and info.dtype == "U8" for info in pads)


def test_shards_stay_below_their_limit_and_are_indexed(tmp_path: Path) -> None:
    limit = 10_000
    make(tmp_path / "out", limit=limit)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) >= 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all((tmp_path / "out" / name).stat().st_size <= limit for name in names)
    with TensorStore.open(tmp_path / "out") as store:
        for tensor in (tensor for group in GROUPS for tensor in group):
            assert store.read(store.tensors[tensor.name]).tobytes() == content(tensor.name, tensor.nbytes)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert set(index["weight_map"]) == {tensor.name for group in GROUPS for tensor in group}


def test_a_group_larger_than_a_shard_is_cut_between_tensors() -> None:
    files = plan_files([tensors(5000, 6000, 30_000, 100)], {}, limit=12_000)
    assert [sorted(name for name in file.places if not name.startswith(PAD)) for file in files] == [["t0"], ["t1"], ["t2"], ["t3"]]
    pads = [name for file in files for name in file.places if name.startswith(PAD)]
    assert len(set(pads)) == len(pads)


@pytest.mark.parametrize("seed", range(20))
def test_joined_checksums_are_those_of_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    whole = chance.randbytes(chance.randrange(20_000))
    cuts = sorted([0, len(whole), *(chance.randrange(len(whole) + 1) for _ in range(4))])
    parts = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    assert checksum.join([(zlib.crc32(part), len(part)) for part in parts]) == zlib.crc32(whole)


# -- kills and resumes -----------------------------------------------------------------------------------------------------------


def test_an_unfinished_folder_continues_and_ends_the_same(tmp_path: Path) -> None:
    make(tmp_path / "straight")
    files = plan_files(GROUPS, {"format": "test"})
    for stop in range(6):
        out = tmp_path / f"out{stop}"
        writer = FolderWriter(out, files, "one", MARKER)
        for tensor in [tensor for group in GROUPS for tensor in group][:stop]:
            data = content(tensor.name, tensor.nbytes)
            writer.write(tensor.name, 0, data)
            writer.finish(tensor.name, {"crc32": zlib.crc32(data)})
        writer.write("c0", 0, b"half a tensor that the journal does not know")
        writer.close()
        assert not out.exists()
        again = FolderWriter(out, files, "one", MARKER)
        assert again.resumed == (stop > 0) and len(again.finished) == stop and not again.discarded
        write_all(again)
        assert again.finished["a1"] == {"crc32": zlib.crc32(content("a1", 5000))}
        again.commit({}, {MARKER: "{}"})
        assert folder_bytes(out) == folder_bytes(tmp_path / "straight")


def test_every_cut_of_the_journal_is_survived(tmp_path: Path) -> None:
    """A line that the kill left unfinished counts as not written, wherever it was cut."""
    make(tmp_path / "straight")
    files = plan_files(GROUPS, {"format": "test"})
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        write_all(writer)
    journal = partial_folder(tmp_path / "out") / "journal"
    whole = journal.read_bytes()
    for cut in range(0, len(whole), 7):
        journal.write_bytes(whole[:cut])
        with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
            assert len(writer.finished) == max(0, whole[:cut].count(b"\n") - 1)
            write_all(writer)
        assert journal.read_bytes() == whole
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        writer.commit({}, {MARKER: "{}"})
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "straight")


@pytest.mark.parametrize("seed", range(40))
def test_a_journal_that_was_damaged_costs_time_and_no_byte(tmp_path: Path, seed: int) -> None:
    """Its entries were believed: one that had lost its checksum ended every run with a traceback, an altered one went into the result."""
    make(tmp_path / "straight")
    files, chance = plan_files(GROUPS, {"format": "test"}), random.Random(seed)
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        write_all(writer)
        entries = dict(writer.finished)
    journal = partial_folder(tmp_path / "out") / "journal"
    head, *lines = journal.read_bytes().splitlines(keepends=True)
    harmed = bytearray(b"".join(lines))
    at = chance.randrange(len(harmed))
    harmed[at : at + chance.choice((0, 1, 512))] = chance.choice((b"", b"0", b'"', bytes(16), chance.randbytes(3), b"[" * 100_000))
    journal.write_bytes(head + harmed)
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert all(entries[name] == entry for name, entry in writer.finished.items())
        assert {*writer.finished} >= {*[*entries][: bytes(harmed[:at]).count(b"\n")]}, "what lies before the damage is kept"
        write_all(writer)
        assert writer.finished == entries
        writer.commit({}, {MARKER: "{}"})
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "straight")


@pytest.mark.parametrize("line", ['[["c0"], {}]', '[{}, {}]', '["c0", 5]', '["c0"]', '["c0", {}, 1]', '["c0", {'])
def test_lines_that_no_writer_wrote_count_as_nothing(tmp_path: Path, line: str) -> None:
    files = plan_files(GROUPS, {"format": "test"})
    FolderWriter(tmp_path / "out", files, "one", MARKER).close()
    with (partial_folder(tmp_path / "out") / "journal").open("a", encoding="utf-8") as journal:
        journal.write(line + "\n")
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert not writer.finished and not writer.discarded


def test_tensors_of_a_version_without_checksums_are_written_again_and_told(tmp_path: Path) -> None:
    make(tmp_path / "straight")
    files = plan_files(GROUPS, {"format": "test"})
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        write_all(writer)
    journal = partial_folder(tmp_path / "out") / "journal"
    head, *lines = journal.read_text().splitlines()
    journal.write_text("".join(f"{line}\n" for line in (head, *(json.dumps(json.loads(line)[:2]) for line in lines))))
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert writer.discarded and not writer.finished
        write_all(writer)
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert len(writer.finished) == len(lines) and not writer.discarded
        writer.commit({}, {MARKER: "{}"})
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "straight")


def test_another_kind_of_result_starts_afresh(tmp_path: Path) -> None:
    files = plan_files(GROUPS, {"format": "test"})
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        write_all(writer)
    with FolderWriter(tmp_path / "out", files, "two", MARKER) as writer:
        assert writer.discarded and not writer.resumed
        with TensorStore.open(writer.partial) as store:
            assert not store.read(store.tensors["a1"]).any(), "bytes of the other result are left"


def test_a_weight_file_that_is_gone_or_cut_starts_afresh(tmp_path: Path) -> None:
    files = plan_files(GROUPS, {"format": "test"})
    for harm in (lambda path: path.unlink(), lambda path: os.truncate(path, 100)):
        with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
            write_all(writer)
        harm(partial_folder(tmp_path / "out") / "model.safetensors")
        with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
            assert writer.discarded and not writer.finished


def test_two_writers_do_not_share_a_folder(tmp_path: Path) -> None:
    files = plan_files(GROUPS, {"format": "test"})
    with FolderWriter(tmp_path / "out", files, "one", MARKER):
        with pytest.raises(UsageError, match="another effllm is writing"):
            FolderWriter(tmp_path / "out", files, "one", MARKER)
    FolderWriter(tmp_path / "out", files, "one", MARKER).close()


def test_a_strangers_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    stranger = partial_folder(tmp_path / "out")
    stranger.mkdir()
    (stranger / "diary.txt").write_text("private")
    with pytest.raises(UsageError, match="in the way"):
        make(tmp_path / "out")
    assert (stranger / "diary.txt").read_text() == "private"


# -- the end -------------------------------------------------------------------------------------------------------------------


def test_copies_and_texts_are_there_and_the_marker_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "LICENSE"
    source.write_bytes(b"x" * 9_000_000)
    order: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda one, two: (order.append(Path(two).name), real(one, two)))
    with FolderWriter(tmp_path / "out", plan_files(GROUPS, {}), "one", MARKER) as writer:
        write_all(writer)
        writer.commit({"LICENSE": source}, {MARKER: "{}", "zzz.json": "[]"})
    assert (tmp_path / "out" / "LICENSE").read_bytes() == source.read_bytes()
    assert order == ["zzz.json", MARKER]


def test_replacing_swaps_and_removes_the_old(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out" / MARKER).write_text("old")
    make(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / MARKER).read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_without_replace_a_folder_that_appeared_meanwhile_stays(tmp_path: Path) -> None:
    files = plan_files(GROUPS, {})
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        write_all(writer)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("kept")
        with pytest.raises(EffllmError):
            writer.commit({}, {MARKER: "{}"})
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    (tmp_path / "out").rename(tmp_path / "theirs")
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert writer.resumed and len(writer.finished) == sum(map(len, GROUPS)), "nothing is made twice"
        writer.commit({}, {MARKER: "{}"})
    assert (tmp_path / "out" / MARKER).exists() and not (tmp_path / "out" / JOURNAL).exists()


def test_a_journal_that_a_kill_left_under_the_final_name_is_known_for_one(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", plan_files(GROUPS, {}), "one", MARKER) as writer:
        write_all(writer)
        shutil.copy(partial_folder(tmp_path / "out") / JOURNAL, tmp_path / JOURNAL)
        writer.commit({}, {MARKER: "{}"})
    assert is_journal(tmp_path / JOURNAL)
    (tmp_path / JOURNAL).write_text("Monday: rain.\n")
    assert not is_journal(tmp_path / JOURNAL), "a person's"


# -- full disks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_bytes_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    files = plan_files(GROUPS, {"format": "test"})
    room, real = 3000, os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(code, os.strerror(code))
        count = real(fd, data[:room], offset)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer, pytest.raises(DoesNotFit) as caught:
        write_all(writer)
    assert "full" in caught.value.message and "iB more" in caught.value.message and "same command" in caught.value.hint
    assert not (tmp_path / "out").exists()
    room = 1 << 30
    with FolderWriter(tmp_path / "out", files, "one", MARKER) as writer:
        assert writer.resumed and "a0" in writer.finished and "a1" not in writer.finished
        write_all(writer)
        writer.commit({}, {MARKER: "{}"})
    monkeypatch.undo()
    make(tmp_path / "straight")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "straight")


def test_room_that_is_missing_beside_the_weights_is_told_too(tmp_path: Path) -> None:
    """It was 0 B where the weights were written already."""
    (tmp_path / "tokenizer.json").write_bytes(bytes(100_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FolderWriter(tmp_path / "out", plan_files(GROUPS, {"format": "test"}), "one", MARKER) as writer:
        write_all(writer)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            with pytest.raises(DoesNotFit, match="out needs .* KiB more"):
                writer.commit({"tokenizer.json": tmp_path / "tokenizer.json"}, {MARKER: "{}"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.commit({"tokenizer.json": tmp_path / "tokenizer.json"}, {MARKER: "{}"})
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bytes(100_000)


def test_a_limit_on_file_sizes_is_an_error_of_one_line(tmp_path: Path) -> None:
    code = ("import resource, sys\nfrom pathlib import Path\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
            "from effllm import DoesNotFit\nfrom effllm.offload.shards import Planned, plan_files\n"
            "from effllm.offload.folder_writer import FolderWriter\n"
            "files = plan_files([[Planned('w', 'U8', (1 << 20,), 1 << 20)]], {})\n"
            "try:\n    FolderWriter(Path(sys.argv[1]), files, 'one', 'm')\n"
            "except DoesNotFit as error:\n    print(error.message)\n")
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=MINUTE, check=True)
    assert "does not allow a file of that size" in ran.stdout and "1.00 MiB more" in ran.stdout
    assert not (tmp_path / "out").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 8192


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EffllmError, match="out.partial"):
        FolderWriter(tmp_path / "absent" / "out", plan_files(GROUPS, {}), "one", MARKER)


def test_writes_from_arrays_and_at_any_offset(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", plan_files(GROUPS, {}), "one", MARKER) as writer:
        writer.write("b1", 1000, memoryview(np.arange(10, dtype=np.uint32)))
        with TensorStore.open(writer.partial) as store:
            found = store.read(store.tensors["b1"])
    assert found[1000:1040].view(np.uint32).tolist() == list(range(10)) and not found[:1000].any() and not found[1040:].any()
