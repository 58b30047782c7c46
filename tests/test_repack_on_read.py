"""Experts repacked as they are read: the same bytes as a full load, no memory beyond what is planned, and corrupt data is named."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import test_imported
from family_models import CASES, Case
from gguf_samples import add_expert_keys, write_model
from imported_mixtures import GPTQ_SHAPE, imported_mixture
from saved_models import saved
from test_mxfp4 import packed_model

from effllm.kernels import warm
from effllm.offload import repack
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.direct_io import BLOCK, THREADS, Read
from effllm.offload.repack import Repack, RepackedPart, RepackJob, RepackStep, StagingBuffers, plan_staging, staging_buffer
from effllm.offload.safetensors_header import TensorInfo
from effllm.offload.streaming_pager import Part, Range, lay_out
from effllm.runtime.gguf import tensor_sources
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import open_store, open_weights
from effllm.runtime.stores import converting_store, gpt_oss_experts

KINDS = ("Q8_0", "Q5_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q5_1", "Q4_1", "NVFP4")
SMALL = Case("qwen3_moe", {"hidden_size": 256, "intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 32,
                           "moe_intermediate_size": 512, "num_hidden_layers": 1, "norm_topk_prob": True})


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What puts codes in order, as a run has it before it plans: compiling takes memory that is no arrival's."""
    warm.load_all((warm.FOREIGN,))


def experts(store: TensorStore, layer: int = 0) -> Iterator[list[TensorInfo]]:
    """The matrices of each expert of a layer."""
    number = 0
    while True:
        names = [name for name in store.tensors if f"layers.{layer}." in name and f".experts.{number}." in name and name.endswith("weight")]
        if not names:
            return
        yield [store.tensors[name] for name in names]
        number += 1


def read(store: TensorStore, piece: RepackStep) -> list[np.ndarray]:
    """What a piece is made of."""
    raws = [np.empty(own.nbytes + 1, np.uint8)[1:] for own in piece.ranges]  # on no border at all
    for own, raw in zip(piece.ranges, raws, strict=True):
        store.read_at(own.file, own.offset, memoryview(raw))
    return raws


def make(store: TensorStore, infos: Sequence[TensorInfo], begin: int = 0) -> list[np.ndarray]:
    """Tensors as they arrive in memory that holds `begin` everywhere, pieces in any order."""
    found = store.repack_plan(infos)
    assert found.nbytes == tuple(info.nbytes for info in infos)
    outs, pieces = [np.full(nbytes, begin, np.uint8) for nbytes in found.nbytes], list(found.pieces())
    assert max(staging_buffer(*(own.nbytes for own in piece.ranges)) for piece in pieces) == found.staging_nbytes
    assert sum(own.nbytes for piece in pieces for own in piece.ranges) == found.file_nbytes
    for place in np.random.default_rng(0).permutation(len(pieces)):
        pieces[place].put(read(store, pieces[place]), outs)
    return outs


def check(store: TensorStore) -> int:
    """Every expert arrives as a load reads it, whatever lay there before; returns the pieces of the last one."""
    for infos in experts(store):
        clean, stale = make(store, infos), make(store, infos, 0xA5)
        for info, own, over in zip(infos, clean, stale, strict=True):
            np.testing.assert_array_equal(own, store.read(info), err_msg=info.name)
            left = np.flatnonzero(own != over)  # what nobody reads: from the end of a section to the border of the next
            assert not left.size or (info.dtype == "U8" and left.size < 5 * 64 and not own[left].any()), info.name
            assert all(end % 64 == 63 or end + 1 in left for end in left)
    return len(list(store.repack_plan(infos).pieces()))


@pytest.fixture(params=(False, True), ids=("at once", "in pieces"))
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As small as pieces and steps can be."""
    if request.param:
        monkeypatch.setattr(converting_store, "STEP_VALUES", 1)
        monkeypatch.setattr(tensor_sources, "READ_NBYTES", 1)
        monkeypatch.setattr(gpt_oss_experts, "READ_NBYTES", 1)
    return request.param


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures") / "source"
    saved(SMALL, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_arrive_as_a_load_reads_them(source: Path, tmp_path: Path, kind: str, cut: bool) -> None:
    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(SMALL), expert_types={"_exps": kind})
    for low_bit in (True, False):
        with open_store(tmp_path / "m.gguf", low_bit=low_bit) as store:
            assert check(store) == ((512 + 512 + 256) // 16 if cut else 3)


@pytest.fixture(scope="module", params=test_imported.CASES)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with matrices of such a case, 192 x 256 and 256 x 192."""
    folder = tmp_path_factory.mktemp("imported") / "m"
    imported_mixture(folder, request.param, {**GPTQ_SHAPE, "num_experts": 3, "num_hidden_layers": 1})
    return folder


def test_parts_of_other_tools_arrive_as_a_load_reads_them(imported: Path, cut: bool) -> None:
    for low_bit in (True, False):
        with open_store(imported, low_bit=low_bit) as store:
            assert check(store) == 3, "a piece for each matrix, whose parts are read together"


def test_gate_and_up_that_lie_in_one_are_read_once(tmp_path: Path, cut: bool) -> None:
    packed_model(tmp_path / "oss")
    for low_bit in (True, False):
        with open_store(tmp_path / "oss", low_bit=low_bit) as store:
            assert check(store) == (192 // 32 + 64 // 16 if cut else 2)
    saved(CASES["gpt_oss, bfloat16"], tmp_path / "wide")
    with open_store(tmp_path / "wide") as store:
        assert check(store) == 2


def compiled_before(path: Path) -> bool:
    """Is what puts codes in order a part of what a run compiles, and of the program that a plan weighs?"""
    with open_weights(path)[0] as store:
        weighed = store.repacks_on_read
    assert (warm.FOREIGN in folder_kinds(path, EngineOptions())) == weighed
    return weighed


def test_a_run_that_puts_codes_in_order_compiles_what_does(source: Path, tmp_path: Path) -> None:
    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(SMALL), expert_types={"_exps": "Q4_K"})
    write_model(source, tmp_path / "raw.gguf", "F16", "qwen3moe", add_expert_keys(SMALL))
    packed_model(tmp_path / "oss")
    needed = {path: compiled_before(path) for path in (source, tmp_path / "m.gguf", tmp_path / "raw.gguf", tmp_path / "oss")}
    assert list(needed.values()) == [False, True, False, True], needed
    draft = EngineOptions(draft=str(tmp_path / "m.gguf"))
    assert warm.FOREIGN in folder_kinds(source, draft) and warm.LOW_BIT in folder_kinds(source, draft)


def test_a_run_of_another_tools_folder_compiles_what_puts_it_in_order(imported: Path) -> None:
    assert compiled_before(imported)


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_of_a_file_takes_no_more_than_is_counted(source: Path, tmp_path: Path, kind: str) -> None:
    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(SMALL), expert_types={"_exps": kind})
    with open_store(tmp_path / "m.gguf", low_bit=True) as store:
        assert 0.05 < most(store) <= 1


@pytest.mark.parametrize("values", (1 << 13, 1 << 17))
def test_a_weight_of_other_tools_takes_no_more_than_is_counted(imported: Path, monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    monkeypatch.setattr(converting_store, "STEP_VALUES", values)
    for low_bit in (True, False):
        with open_store(imported, low_bit=low_bit) as store:
            assert 0.05 < most(store) <= 1


def test_published_codes_take_no_more_than_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting_store, "STEP_VALUES", 1 << 12)
    packed_model(tmp_path / "oss")
    for low_bit in (True, False):
        with open_store(tmp_path / "oss", low_bit=low_bit) as store:
            assert most(store) <= 1


def most(store: TensorStore) -> float:
    """The most memory that any matrix of an expert took on its way, as a share of what is counted for it."""
    infos = next(experts(store))
    found = store.repack_plan(infos)
    outs, shares = [np.zeros(nbytes, np.uint8) for nbytes in found.nbytes], []
    for piece in found.pieces():
        raws = read(store, piece)
        tracemalloc.start()
        try:
            piece.put(raws, outs)
            shares.append(tracemalloc.get_traced_memory()[1] / found.scratch_nbytes)
        finally:
            tracemalloc.stop()
    return max(shares)


# ---- parts and staging buffers


def some(tmp_path: Path) -> tuple[Path, bytes]:
    content = np.random.default_rng(3).integers(0, 256, 9 * BLOCK, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file", content


def filled(path: Path) -> Callable[[Read], int]:
    def fill(read: Read) -> int:
        assert read.offset % BLOCK == 0 and len(read.out) % BLOCK == 0
        found = path.read_bytes()[read.offset : read.offset + len(read.out)]
        read.out[: len(found)] = found
        return len(found)
    return fill


def test_a_part_holds_what_lies_ready_beside_what_is_made(tmp_path: Path) -> None:
    """In the order of its tensors, each on its border, none over another."""
    path, content = some(tmp_path)

    def put(raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        outs[0][:], outs[1][:] = raws[0][::-1], raws[1]

    ranges = Range(path, 5000, 100), Range(path, 20_000, 333)
    own = Repack((100, 333), 433, staging_buffer(100, 333), 0, lambda: [RepackStep(ranges, put)])
    part = RepackedPart((Range(path, 777, 1000),), own, (0, 2))
    assert part.sizes == (100, 1000, 333) and part.nbytes % BLOCK == 0 and part.read_nbytes == 433 + lay_out(part.ranges)[1]
    memory, start = np.zeros(3 * part.nbytes, np.uint8), part.nbytes
    extents, places = part.laid_out(start)
    assert places[0] % 64 == places[2] % 64 == 0 and max(places[0] + 100, places[2] + 333) <= start + part.nbytes
    spans = sorted(zip(places, part.sizes, strict=True))
    assert all(place + size <= after for (place, size), (after, _) in zip(spans, spans[1:])) and spans[0][0] >= start
    (job,) = part.repack_jobs(memory, places, StagingBuffers(plan_staging([part])))
    assert job.run(filled(path)) >= 433 and len(extents) == 1 and places[1] == extents[0].at + 777
    assert memory[places[0] :][:100].tobytes() == content[5000:5100][::-1] and memory[places[2] :][:333].tobytes() == content[20_000:20_333]
    assert Part(part.ranges).repack_jobs(memory, places, None) == []


def test_desks_are_as_many_as_their_memory_allows() -> None:
    def part(staging: int, scratch: int) -> RepackedPart:
        return RepackedPart((), Repack((64,), 64, staging, scratch, list), (0,))

    assert plan_staging([Part((Range(Path("x"), 0, 1),))]).nbytes == 0 and StagingBuffers(plan_staging([])).nbytes == 0
    small = plan_staging([part(BLOCK, 100), part(5000, 50)])
    assert (small.count, small.staging_nbytes, small.scratch_nbytes) == (THREADS, 2 * BLOCK, 100)
    assert small.nbytes == THREADS * (2 * BLOCK + 100) == StagingBuffers(small).nbytes
    for staging in (repack.STAGING_NBYTES // 3, 2 * repack.STAGING_NBYTES):
        plan = plan_staging([part(staging, 1 << 20)])
        assert plan.count == max(1, repack.STAGING_NBYTES // (plan.staging_nbytes + (1 << 20))) < THREADS


@pytest.mark.parametrize("error", (ValueError("no weight"), MemoryError("no room"), IndexError("beyond the end"),
                                   CheckpointError("named already", "hint")))
def test_what_goes_wrong_on_a_desk_is_one_line_and_frees_it(tmp_path: Path, error: Exception) -> None:
    path, _ = some(tmp_path)

    def put(raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        raise error

    staging = StagingBuffers(repack.StagingPlan(1, 2 * BLOCK))
    for _ in range(3):
        with pytest.raises(CheckpointError) as caught:
            RepackJob(RepackStep((Range(path, 10, 20),), put), (), staging).run(filled(path))
        assert str(error) in caught.value.message and caught.value.hint
