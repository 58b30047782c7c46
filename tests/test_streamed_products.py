"""Products with the parts of matrices that have arrived are one job, and their input is packed once: with the bits of whole matrices."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from streamed_models import streaming

import effllm
from effllm.kernels.compile import Kernel
from effllm.kernels.cpu import gemm, gemm_amx, linear, linear_amx, linear_bf16, packed
from effllm.kernels.cpu.jobs import Jobs
from effllm.kernels.cpu.low_bit import FINE_COLUMNS, MAX_MATRICES
from effllm.offload.read_ahead import ReadAhead
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights import stream_layout

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
IDS = np.random.default_rng(3).integers(0, 2000, 70).tolist()
WAYS = ("bf16", "4bit", "8bit", "bf16, exact", "4bit, exact")
PACKING = (linear.pack_columns, linear_amx.pack_columns, linear_bf16.pack_columns, gemm.pack_tokens, gemm_amx.pack_tokens)
PRODUCTS = (linear.many_columns, linear_amx.multiply, linear_bf16.multiply, gemm.multiply, gemm.multiply_exact, gemm_amx.multiply)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each kernel was run or noted."""
    counts, before = Counter(), Jobs.run

    def counted(self: Jobs, kernel: Kernel, *rest: object) -> None:
        counts[kernel] += 1
        before(self, kernel, *rest)

    monkeypatch.setattr(Jobs, "run", counted)
    return counts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"bf16": FABLE}
    for spec in ("4bit", "8bit"):
        made[spec] = tmp_path_factory.mktemp("quantized") / spec
        run(FABLE, made[spec], options(spec))
    return made


def asked(way: str) -> tuple[str, dict[str, bool]]:
    spec, _, exact = way.partition(", ")
    return spec, {"exact": bool(exact)}


def resident(folder: Path, **more: object) -> Engine:
    return list(open_engine(folder, EngineOptions(device="cpu", ctx=128, **more)))[-1]


def prompt(engine: Engine) -> list[np.ndarray]:
    """Logits of a prompt for the kernels of many columns, twice as many as the head takes at once."""
    engine.reset()
    return [found.copy() for _, found in engine.score(IDS[: 2 * LOGIT_ROWS])]


def logits(engine: Engine) -> np.ndarray:
    """Of a prompt, then of a few tokens, which other kernels take."""
    found = np.concatenate([*prompt(engine), engine.forward_logits(IDS[2 * LOGIT_ROWS :]).copy()])
    engine.close()
    return found


def wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a part is asked for, all that were asked of the disk have come."""
    before = ReadAhead.join

    def join(self: ReadAhead, place: int) -> bool:
        for turn in self:
            self.wait(turn.ticket)
        return before(self, place)

    monkeypatch.setattr(ReadAhead, "join", join)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("keep", "has_come"), [(0, True), (3, False), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((0, False), (1, True), (1, False), (3, True)))])
def test_jobs_of_any_number_of_parts_give_the_same_bits(way: str, keep: int, has_come: bool, folders: dict[str, Path],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    spec, more = asked(way)
    if has_come:
        wait_for_all(monkeypatch)
    else:
        monkeypatch.setattr(ReadAhead, "join", lambda self, place: False)
    assert np.array_equal(logits(streaming(folders[spec], keep, 300 << 10, ctx=128, **more)), logits(resident(folders[spec], **more)))


@pytest.mark.parametrize("way", WAYS)
def test_an_input_is_packed_as_often_as_for_whole_matrices(way: str, folders: dict[str, Path], noted: Counter) -> None:
    spec, more = asked(way)
    logits(resident(folders[spec], **more))
    whole = {kernel: noted[kernel] for kernel in PACKING}
    noted.clear()
    logits(streaming(folders[spec], 2, ctx=128, **more))
    assert {kernel: noted[kernel] for kernel in PACKING} == whole and sum(whole.values()) > 0


@pytest.mark.parametrize("way", WAYS)
def test_parts_that_stay_are_few_jobs(way: str, folders: dict[str, Path], noted: Counter) -> None:
    """As many as hold the matrices of a stage, at most so many each; parts that come one by one are a job each."""
    spec, more = asked(way)
    prompt(engine := streaming(folders[spec], 1, ctx=128, **more))
    engine.close()
    together = sum(noted[kernel] for kernel in PRODUCTS)
    slices, outer = engine.model.streamed.parts.slices, engine.model.tensors["outer"]
    stages = [[tensors[role].name for role in stage if role in tensors] for key, tensors in engine.model.tensors.items() if key != "outer"
              for stage in stream_layout.STAGES if stage[0] in tensors]
    stages.append([outer.get("head", outer["embed"]).name])
    matrices = [sum(len(slices[name]) for name in stage) for stage in stages]
    *jobs, of_head = (-(-count // MAX_MATRICES) for count in matrices)
    assert max(matrices) > MAX_MATRICES
    if fine := noted[packed.packed_columns]:  # a head of integers, by kernels of few columns
        apart = sum(tensors["v"].spec != tensors["q"].spec for key, tensors in engine.model.tensors.items() if key != "outer")
        assert fine == 2 * of_head * LOGIT_ROWS // FINE_COLUMNS and together == sum(jobs) + apart
    else:
        assert together == sum(jobs) + 2 * of_head
    noted.clear()
    prompt(engine := streaming(folders[spec], 0, ctx=128, **more))
    engine.close()
    assert together < sum(noted[kernel] for kernel in PRODUCTS)
