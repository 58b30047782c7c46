"""Measured limits of the machine: one real probe, stored and found again, and files that cannot be trusted."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from effllm.kernels import warm
from effllm.kernels.layout import PAGE
from effllm.offload import hardware
from effllm.offload.hardware import CpuTime
from effllm.offload.predict import KindRate
from effllm.runtime.events import Notice, Progress
from effllm.runtime.planning import machine_probe as child
from effllm.runtime.planning import roofs
from effllm.runtime.planning.roofs import Roofs, RoofsWanted

FABLE = Path(__file__).resolve().parent.parent / "models/fable"
MACHINE = {"cpu": "A CPU", "threads": 2, "date": "2026-01-01 12:00", "memory": 20e9, "memory_usual": 18e9, "token_s": 1e-4, "layer_s": 1e-5,
           "choice_s": 4e-5, "kinds": {"bf16": {"decode": 15e9, "prefill": 40e9}},
           "attention": {"16bit": {"decode": 10e9, "prefill": 20e9}}}
DISK = {"device": "8:1 /dev/sda1", "file_system": "ext4", "direct": True, "reads": [{"nbytes": 2 << 20, "depth": 4, "rate": 1e9}],
        "date": "2026-01-01 12:00", "file_bytes": 99}
OVERHEAD = {"figure": "overhead", "token_s": 1e-4, "layer_s": 1e-5, "choice_s": 5e-5}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(roofs, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache" / roofs.FILE


def write(kept: Path, wanted: RoofsWanted, machine: object = MACHINE, disk: object = DISK, **more: object) -> None:
    kept.parent.mkdir(exist_ok=True)
    content = {"format": roofs.FORMAT, "version": roofs.VERSION, "machines": {roofs._machine_key(wanted.threads): machine},
               "disks": {roofs._disk_key(wanted.file): disk} if wanted.file else {}} | more
    kept.write_text(json.dumps(content))


WANTED = RoofsWanted(2, ("bf16",), ("16bit",), FABLE / "model.safetensors")


def test_what_was_kept_is_found(kept: Path) -> None:
    write(kept, WANTED)
    known = roofs.known(WANTED)
    assert known.machine.kinds == {"bf16": KindRate(15e9, 40e9)} and known.disk.disk.stream_rate == 1e9
    assert known.rates.reread_rate(1) == 1e9, "nothing was read twice"
    write(kept, WANTED, disk={**DISK, "again": 3e9, "stretch": 100})
    assert [roofs.known(WANTED).rates.reread_rate(nbytes) for nbytes in (100, 101)] == [3e9, 1e9]
    assert known.rates.disk == 1e9 and known.rates.memory_variation == pytest.approx(0.1) and known.rates.memory == 20e9
    assert roofs.missing(WANTED, known) is None
    assert roofs.known(replace(WANTED, threads=3)).machine is None, "another number of threads is another machine"


def test_only_what_is_missing_is_asked_for(kept: Path) -> None:
    write(kept, WANTED)
    wider = replace(WANTED, kinds=("bf16", "codebook4:16"), kv=("16bit", "32bit"))
    assert roofs.missing(wider, roofs.known(wider)) == RoofsWanted(2, ("codebook4:16",), ("32bit",), None)
    nothing = Roofs(None, None)
    assert roofs.missing(WANTED, nothing) == WANTED and roofs.missing(RoofsWanted(2), nothing) == RoofsWanted(2)
    assert nothing.rates is None


def test_all_that_is_known_is_measured_again_where_that_is_asked_for(kept: Path) -> None:
    """`doctor --probe` left formats as they were that it does not ask for by itself."""
    write(kept, WANTED)
    asked = RoofsWanted(2, ("codebook4:16",), ("16bit", "4bit"), WANTED.file)
    wanted = RoofsWanted(2, ("codebook4:16", "bf16"), ("16bit", "4bit"), WANTED.file, base=True)
    assert roofs.everything(asked, roofs.known(asked)) == wanted
    assert roofs.everything(asked, Roofs(None, None)) == asked


def test_a_file_that_does_not_tell_what_lies_between_passes_is_measured_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for nothing, and shown as measured; what the file knows of weights and of the cache stays."""
    write(kept, WANTED, machine={name: value for name, value in MACHINE.items() if name != "choice_s"})
    known, asked = roofs.known(WANTED), []
    assert known.machine.choice_s is None and known.rates.choice_s == 0 and known.machine.kinds
    lacking = roofs.missing(WANTED, known)
    assert lacking == RoofsWanted(2)
    figures = [OVERHEAD, {"figure": "memory", "best": 21e9, "median": 19e9, "alone": 12e9}]
    monkeypatch.setattr(child, "measure", lambda *wanted: asked.append(wanted) or iter(figures))
    monkeypatch.setattr(warm, "is_cold", lambda kinds: False)
    *_, found = roofs.probe(lacking, known)
    assert asked == [(2, (), (), True)] and found == roofs.known(WANTED) and roofs.missing(WANTED, found) is None
    assert found.rates.choice_s == 5e-5 and found.machine.kinds == known.machine.kinds
    assert (found.machine.memory, found.machine.memory_alone) == (21e9, 12e9)


def test_what_lies_between_passes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, made = [], partial(SimpleNamespace, forward_logits=len, close=lambda: None)
    monkeypatch.setattr(child, "_engine", lambda shape, layers, *more: made(layers=layers))
    monkeypatch.setattr(child, "_token_s", lambda engine, tokens: 1e-3 + 1e-4 * engine.layers)
    monkeypatch.setattr(child, "_choice_s", lambda engine: measured.append(engine) or 3e-5)
    assert child._overhead(1) == {"figure": "overhead", "token_s": pytest.approx(1e-3), "layer_s": pytest.approx(1e-4), "choice_s": 3e-5}
    assert len(measured) == 1


@pytest.mark.parametrize("broken", (None, [], {}, {**MACHINE, "memory": 0.0}, {**MACHINE, "kinds": {"bf16": {"decode": 1}}},
                                    {**MACHINE, "memory": "fast"}, {**MACHINE, "unknown": 1}, {**MACHINE, "token_s": -1.0}))
def test_an_entry_that_is_not_whole_is_not_believed(kept: Path, broken: object) -> None:
    write(kept, WANTED, machine=broken, disk=broken)
    assert roofs.known(WANTED) == Roofs(None, None)


@pytest.mark.parametrize("broken", ("fast", 3, [1], {"kinds": 5}, {**MACHINE, "kinds": 7, "memory": "x"}, {"attention": {}}))
def test_a_probe_replaces_an_entry_that_is_not_whole(kept: Path, monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    """What was measured was added to it: every plan ended with a traceback until the file was removed by hand."""
    figures = [{"figure": "memory", "best": 20e9, "median": 18e9, "alone": 12e9}, OVERHEAD,
               {"figure": "kind", "kind": "bf16", "decode": 15e9, "prefill": 40e9},
               {"figure": "attention", "kv": "16bit", "decode": 10e9, "prefill": 20e9}]
    monkeypatch.setattr(child, "measure", lambda *wanted: iter(figures))
    monkeypatch.setattr(warm, "is_cold", lambda kinds: False)
    wanted = replace(WANTED, file=None)
    write(kept, wanted, machine=broken)
    *_, found = roofs.probe(wanted, roofs.known(wanted))
    assert roofs.known(wanted).machine.kinds == found.machine.kinds == {"bf16": KindRate(15e9, 40e9)}


def test_a_disk_whose_table_has_gaps_is_probed_again(kept: Path) -> None:
    """`doctor` shows every size at every depth."""
    reads = [{"nbytes": size, "depth": depth, "rate": 1e9} for size in (16384, 2 << 20) for depth in (1, 4)]
    write(kept, WANTED, disk={**DISK, "reads": reads})
    assert roofs.known(WANTED).disk is not None
    write(kept, WANTED, disk={**DISK, "reads": reads[1:]})
    assert roofs.known(WANTED).disk is None


@pytest.mark.parametrize("text", ("", "[1]", "{", "null", '{"format": "other"}', "[" * 100_000,
                                  json.dumps({"format": roofs.FORMAT, "version": 99, "machines": {}, "disks": {}}),
                                  json.dumps({"format": roofs.FORMAT, "version": roofs.VERSION, "machines": [], "disks": 3})))
def test_a_damaged_file_knows_nothing(kept: Path, text: str) -> None:
    kept.parent.mkdir()
    kept.write_text(text)
    assert roofs.known(WANTED) == Roofs(None, None)


@pytest.mark.slow
def test_a_real_probe_is_kept(kept: Path) -> None:
    """Everything once, on one thread: figures are those of a machine, and the next look finds them."""
    for _ in warm.warm((warm.RAW,)) if warm.is_cold((warm.RAW,)) else ():
        continue
    wanted = RoofsWanted(1, ("bf16",), ("16bit",), FABLE / "model.safetensors")
    *progress, found = roofs.probe(wanted, roofs.known(wanted))
    assert all(isinstance(item, Progress) and item.total == 5 for item in progress) and progress[-1].done == 5
    assert roofs.known(wanted) == found and roofs.missing(wanted, found) is None
    here = found.machine
    bf16 = here.kinds["bf16"]
    assert min(bf16.decode, bf16.prefill, bf16.narrow) > 0 and 0 < here.memory_usual <= here.memory
    assert here.memory_alone > here.memory_usual / 4, "it is one thread that was measured"
    assert min(here.token_s, here.layer_s) >= 0 and here.threads == 1 and here.cpu
    assert min(here.attention["16bit"].decode, here.attention["16bit"].prefill, here.attention["16bit"].deep) > 0
    assert found.disk.file_bytes == (FABLE / "model.safetensors").stat().st_size and found.rates.disk > 0
    assert {file.name for file in kept.parent.iterdir()} == {roofs.FILE}, "nothing unfinished is left"


@pytest.mark.parametrize("kv", ("16bit", "4bit"))
def test_a_deep_context_is_made_of_copies_of_a_page(kv: str) -> None:
    engine = child._engine(child.ATTENTIVE, 1, 1, 24 * PAGE, kv=kv)
    try:
        child._fill_context(engine, 16)
        cache, held = engine.cache, 64 + 16 * PAGE + 128 + 64
        assert (cache.n, cache.sealed, len(engine.tokens), cache.is_packed) == (held, 16, held, kv == "4bit")
        assert all(np.array_equal(cache.read(0)[0], cache.read(page)[0]) for page in range(16)) and cache.read(0)[0].any()
        for token in range(child.MAX_RUNS * child.DEEP_CONTEXT_TOKENS):
            assert np.isfinite(engine.forward_logits([token])).all()
        assert cache.sealed == 16, "no measured token is one that packs a page"
    finally:
        engine.close()


def test_a_probe_whose_child_fails_keeps_what_was_known(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kept, WANTED)
    monkeypatch.setattr(child, "measure", lambda *given: iter(()))
    *_, found = roofs.probe(RoofsWanted(2, ("codebook4:16",)), roofs.known(WANTED))
    assert list(found.machine.kinds) == ["bf16"] and found.disk is not None
    assert json.loads(kept.read_text())["machines"][roofs._machine_key(2)] == MACHINE


def test_a_format_that_nobody_knows_is_left_out_with_its_reason(kept: Path) -> None:
    *items, found = roofs.probe(RoofsWanted(1, ("nonsense",)), Roofs(roofs._machine(MACHINE), None))
    said = [item.text for item in items if isinstance(item, Notice)]
    assert len(said) == 1 and said[0].startswith("not measured, and so not predicted: nonsense (") and "nonsense" in said[0].split("(")[1]
    assert [item.done for item in items if isinstance(item, Progress)][-1] == 1


def test_a_child_that_breaks_off_is_reported(kept: Path) -> None:
    figures = list(child.measure(0, ("bf16",), (), base=False))  # no pool has no workers
    assert figures[-1]["figure"] == "failed" and figures[-1]["what"] == "the rest" and "Error" in figures[-1]["why"], figures


def test_a_folder_that_cannot_be_written_costs_the_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(roofs, "cache_root", lambda: tmp_path / "file" / "cache")
    monkeypatch.setattr(child, "measure", lambda *given: iter((
        {"figure": "memory", "best": 2e9, "median": 1e9, "alone": 1e9}, OVERHEAD)))
    *_, found = roofs.probe(RoofsWanted(2), Roofs(None, None))
    assert found.machine.memory_variation == 0.5 and roofs.known(RoofsWanted(2)).machine is None


@pytest.mark.parametrize("kv", ("16bit", "8bit", "4bit"))
def test_a_prompts_second_and_third_pass_differ_by_what_a_chunk_holds(kv: str) -> None:
    """What the probe of attention counts on: both take PROMPT tokens."""
    engine = child._engine(child.ATTENTIVE, 1, 1, 3 * child.PROMPT + 16, kv=kv)
    try:
        held = [engine.cache.n for _ in engine.prefill(child._ids(3 * child.PROMPT))]
        assert held[0] < child.PROMPT and np.diff(held[:3]).tolist() == [child.PROMPT] * 2
    finally:
        engine.close()


def test_what_was_measured_beside_others_is_measured_again_when_they_leave(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan beside a build made every later prediction of that machine four times too low."""
    write(kept, WANTED)
    slow = [{"figure": "kind", "kind": "codebook4:16", "decode": 2e9, "prefill": 3e9, "others": 0.6},
            {"figure": "attention", "kv": "4bit", "decode": 1e9, "prefill": 1e9, "others": 0.1},
            {"figure": "memory", "best": 9e9, "median": 8e9, "alone": 7e9, "others": 0.4}]
    monkeypatch.setattr(child, "measure", lambda *given: iter(slow))
    monkeypatch.setattr(warm, "is_cold", lambda kinds: False)
    asked = replace(WANTED, kinds=("codebook4:16",), kv=("4bit",))
    *_, found = roofs.probe(asked, roofs.known(asked))
    assert found.machine.disturbed == {"kind codebook4:16": 0.6, "memory": 0.4} and roofs.known(asked) == found
    assert found.machine.disturbed_of(replace(asked, kinds=("bf16",))) == {"memory": 0.4}

    monkeypatch.setattr(roofs, "is_quiet", lambda: False)
    assert roofs.missing(asked, found) is None, "what others take now they would take again"
    monkeypatch.setattr(roofs, "is_quiet", lambda: True)
    lacking = roofs.missing(asked, found)
    assert lacking == RoofsWanted(2, ("codebook4:16",), base=True)
    given, quick = [], [{**slow[0], "decode": 9e9, "others": 0.01}, OVERHEAD, {**slow[2], "best": 30e9, "others": 0.0}]
    monkeypatch.setattr(child, "measure", lambda *wish: given.append(wish) or iter(quick))
    *_, found = roofs.probe(lacking, found)
    assert given == [(2, ("codebook4:16",), (), True)] and found == roofs.known(asked)
    assert (found.machine.disturbed, found.machine.memory, found.machine.kinds["codebook4:16"].decode) == ({}, 30e9, 9e9)
    monkeypatch.setattr(roofs, "is_quiet", lambda: pytest.fail("nobody looks at the cores without a reason"))
    assert roofs.missing(asked, found) is None


def test_a_figure_tells_who_else_had_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((CpuTime(10.0, 4.0, 1.0), CpuTime(20.0, 5.0, 4.0, 2.0), CpuTime(20.0, 5.0, 4.0, 2.0), CpuTime(20.0, 5.0, 4.0, 2.0)))
    monkeypatch.setattr(hardware, "cpu_time", lambda: next(looks))
    assert child._with_cpu_use(lambda: {"figure": "overhead"}) == {"figure": "overhead", "others": 0.6}, "4 of 10 s, 2 for the host"
    assert child._with_cpu_use(lambda: {"figure": "overhead"})["others"] == 0.0


@pytest.mark.slow
def test_a_busy_machine_is_no_quiet_one() -> None:
    """As many loops as there are cores want them."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(hardware.cpu_threads())]
    try:
        time.sleep(1)
        assert not roofs.is_quiet()
        figures = list(child.measure(1, (), ("16bit",), base=False))
        assert [figure["figure"] for figure in figures] == ["attention"] and figures[0]["others"] > roofs.MAX_OTHERS_SHARE
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
