"""KV pages that come back from disk altered: detected, named, and recomputed."""

import os

import numpy as np
import pytest
from test_kv_tiers import PREADV, Feed, cache_of, same

from effllm.offload.checksum import word_sums
from effllm.offload.page_pool import DiskTier
from effllm.offload.page_stream import PagesLost


def summed(row: bytes) -> int:
    """As `word_sums` says it."""
    whole = len(row) // 8 * 8
    total = sum(row[whole:])
    for place, begin in enumerate(range(0, whole, 4096), 1):
        words = sum(int.from_bytes(row[at : at + 8], "little") for at in range(begin, min(begin + 4096, whole), 8))
        total += words * (place * 0x9E3779B97F4A7C15 % 2**64 | 1)
    return total % 2**64


@pytest.mark.parametrize("nbytes", (8, 99, 4096, 4103, 12_288, 12_300))
def test_a_sum_tells_every_bit_and_every_block_of_a_page(nbytes: int) -> None:
    pages = np.random.default_rng(nbytes).integers(0, 256, (3, nbytes), np.uint8)
    assert word_sums(pages).tolist() == [summed(row.tobytes()) for row in pages]
    for one in range(0, nbytes - 4095, 4096):
        for other in range(0, one, 4096):
            altered = pages.copy()
            altered[1, one : one + 4096], altered[1, other : other + 4096] = pages[1, other : other + 4096], pages[1, one : one + 4096]
            assert (word_sums(altered) != word_sums(pages)).tolist() == [False, True, False], "blocks that changed places"
    for at in range(nbytes):
        altered = pages.copy()
        altered[1, at] ^= 1 << at % 8
        assert (word_sums(altered) != word_sums(pages)).tolist() == [False, True, False]


def alter(disk: Feed, page: int, layer: int = 1) -> None:
    """A bit of a page is another in the file, as of a disk that fails or of somebody who writes to it."""
    stream = disk.cache.pool.stream
    place = stream._layer_offsets[layer] + page * stream.page_nbytes[layer] + 300
    (byte,) = os.pread(stream.spill.descriptor, 1, place)
    os.pwrite(stream.spill.descriptor, bytes([byte ^ 16]), place)
    os.fsync(stream.spill.descriptor)


@pytest.mark.parametrize("slots", (0, 6))
@pytest.mark.parametrize("kv", ("4bit", "16bit"))
def test_a_byte_of_the_file_that_changed_is_found_and_named(pool, tmp_path, kv, slots):
    """What comes of such a page would be an answer like any other."""
    memory, disk = Feed(cache_of(pool, None, kv)), Feed(cache_of(pool, DiskTier(tmp_path, 1, slots=slots), kv))
    disk.run(900)
    alter(disk, 3)
    with pytest.raises(PagesLost, match="the KV cache's file was altered: the checksum of page 3 of layer 1 differs") as caught:
        for _ in range(20):  # what was read ahead is there
            disk.run(1)
    assert "--spill-dir" in caught.value.hint
    with pytest.raises(PagesLost, match="page 3 of layer 1"):
        disk.run(1)
    disk.cache.truncate(300)  # what is read anew is written anew
    disk.run(1200 - disk.cache.n)
    memory.run(900)
    memory.cache.truncate(300)
    memory.run(1200 - memory.cache.n)
    assert slots or np.array_equal(memory.out[:, 300:1200], disk.out[:, 300:1200])
    disk.cache.close()


def test_a_read_that_brought_other_bytes_once_is_made_again(pool, tmp_path, monkeypatch):
    wrong = []

    def preadv(fd: int, buffers: list, offset: int) -> int:
        count = PREADV(fd, buffers, offset)
        if len(wrong) < 1:
            buffers[0][5000] ^= 1
            wrong.append(offset)
        return count

    memory, disk = Feed(cache_of(pool, None)), Feed(cache_of(pool, DiskTier(tmp_path, 0)))
    monkeypatch.setattr(os, "preadv", preadv)
    for feed in (memory, disk):
        feed.run(1000)
    assert wrong and same(memory, disk)
    disk.cache.close()
