"""From a model's headers to a prediction: what is counted and recommended, what `plan`, `run` and `bench` report, and why one was off."""

import io
import json
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from streamed_models import larger_than_memory, streaming

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.number_format import rounded
from effllm.cli.plan_report import bar, lines
from effllm.kernels import warm
from effllm.kernels.cpu.bf16_pairs import HAS_PAIRS
from effllm.offload import hardware
from effllm.offload.direct_io import ReadStats
from effllm.offload.disk_probe import Disk, DiskRead
from effllm.offload.placement import Residency
from effllm.offload.predict import KindRate, PagedExpertCost, Prediction
from effllm.offload.size import format_size
from effllm.quant.spec import QuantSpec
from effllm.runtime.engine import open_engine
from effllm.runtime.last_layers import MIN_LAST_TOKENS
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning import forecast_outcome, machine_probe, roofs
from effllm.runtime.planning.forecast import UNMEASURED_EXACT, forecast, kind_of_weight, prepare_quantized, suggest, wanted, work
from effllm.runtime.planning.forecast_outcome import explain
from effllm.runtime.planning.roofs import DiskRoofs, MachineRoofs, Roofs
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.speculate import Counts
from effllm.runtime.tensors import check_tensors

FABLE = Path(__file__).resolve().parent.parent / "models/fable"
CPU = EngineOptions(device="cpu", threads=2)
EXACT = replace(CPU, exact=True)
KINDS = {"bf16": KindRate(16e9, 40e9), "codebook4:16": KindRate(8e9, 60e9), "symmetric6:32": KindRate(8e9, 60e9)}
MACHINE = MachineRoofs("A CPU", 2, "2026-01-01 12:00", 20e9, 20e9, 1e-4, 1e-5, KINDS, {"16bit": KindRate(10e9, 30e9)}, 0.0)
DISK = DiskRoofs(Disk("8:1 /dev/sda1", "ext4", True, (DiskRead(2 << 20, 4, 1e9),)), "2026-01-01 12:00", 11 << 20)
UNEXPLAINED = "for no reason that could be measured: effllm doctor --probe -t 2 measures this machine again"
KNOWN, NOTHING = Roofs(MACHINE, DISK), Roofs(None, None)


def fable(options: EngineOptions = CPU, spec: str | None = None) -> object:
    return prepare(FABLE, options) if spec is None else prepare_quantized(FABLE, spec, options)


def ran(*argv: str) -> tuple[int, str, str]:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    return main(argv, environment), environment.stdout.getvalue(), environment.stderr.getvalue()


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of which nothing is known."""
    monkeypatch.setattr(roofs, "cache_root", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which everything is known that is asked."""
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)


def test_every_weight_that_a_token_reads_is_counted() -> None:
    prepared = fable()
    counted = forecast(prepared, KNOWN).work
    assert counted.bytes_per_token == 11_540_992, "tied: the embedding is the head"
    matrices = sum(part.products for part in counted.parts)
    assert 5_760_000 < matrices <= 5_770_496 and [part.kind for part in counted.parts] == ["bf16", "bf16"]
    assert 6 * 2 * 2 * 64 * 2 <= counted.kv_bytes < 1.1 * 6 * 2 * 2 * 64 * 2, "keys and values of six layers, and headers of pages"
    assert counted.attention_width == 2 * 4 * 64 and counted.load == prepared.placement.weights_bytes


def test_a_prompt_is_spared_what_its_last_layers_make_of_all_but_the_last_tokens() -> None:
    config = (prepared := fable()).config
    (counted,) = {(part.last_tokens_share, whole.num_last_token_layers, whole.num_last_tokens)
                  for whole in [forecast(prepared, KNOWN).work] for part in whole.parts if not part.last_only}
    wide, ffn, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    behind, before = wide * wide + 3 * wide * ffn, wide * wide + 2 * wide * kv
    assert counted == (pytest.approx(behind / (behind + before) / config.num_hidden_layers), 1, MIN_LAST_TOKENS)


@pytest.mark.parametrize(("shape", "layers"), [(machine_probe.WIDE, 2), (machine_probe.THIN, machine_probe.THIN_LAYERS)])
def test_a_rate_of_prompts_is_of_the_products_that_a_prediction_counts(shape: dict[str, object], layers: int) -> None:
    prepared = machine_probe.prepared_shape(shape, layers, CPU)
    counted = work(prepared, check_tensors(prepared.config, prepared.store))
    (part,) = [part for part in counted.parts if not part.last_only]
    made = part.products * (machine_probe.PROMPT - part.last_tokens_share * (machine_probe.PROMPT - counted.num_last_tokens))
    norms = 2 * layers * shape["hidden_size"]
    assert made - machine_probe.PROMPT * norms <= machine_probe.prompt_products(shape, layers) <= made
    least = machine_probe.PROMPT * (layers - 1) / layers * part.products * 0.99
    assert machine_probe.prompt_products(shape, layers) > least, "most of it for all tokens"


def test_a_mixture_counts_the_experts_that_a_token_visits() -> None:
    prepared = prepare_synthetic("olmoe-1b-7b", replace(CPU, ctx=256, ram="64G"))
    tensors = check_tensors(prepared.config, prepared.store)
    experts = sum(tensor.nbytes for roles in tensors.values() for role, tensor in roles.items() if role.startswith("experts."))
    every = sum(tensor.nbytes for roles in tensors.values() for tensor in roles.values())
    counted = work(prepared, tensors)
    assert counted.is_moe
    assert counted.bytes_per_token == pytest.approx(every - tensors["outer"]["embed"].nbytes - experts * 56 / 64, abs=8)


def test_the_prediction_is_the_arithmetic_of_the_rates() -> None:
    assert [forecast(fable(replace(CPU, ctx=ctx)), KNOWN).prompt_tokens for ctx in (1, 256, 2048)] == [1, 255, 512]
    found = forecast(fable(), KNOWN, prompt_tokens=100)
    assert found.start.seconds == pytest.approx(11_540_992 / 16e9 + 1e-4 + 6e-5)
    assert found.full.seconds == pytest.approx(found.start.seconds + 2047 * 6 * 512 / 10e9)
    assert found.prompt.seconds > found.start.seconds and found.load_s == pytest.approx(0.011540992) and not found.reason


def test_what_is_not_known_is_reported() -> None:
    assert forecast(fable(), NOTHING).start is None and "effllm doctor" in forecast(fable(), NOTHING).reason
    assert suggest(fable(), NOTHING) is None
    on_gpu = replace(fable(), placement=replace(fable().placement, devices=("cpu", "cuda", "cuda", "cuda", "cuda", "cuda")))
    assert "GPU" in forecast(on_gpu, KNOWN).reason
    streams = replace(fable(), placement=replace(fable().placement, residency=Residency((), (0,), 0, 9_000_000, 1000)))
    assert "disk" in forecast(streams, Roofs(MACHINE, None)).reason
    assert forecast(streams, KNOWN).start.limit == "disk" and forecast(streams, KNOWN).start.seconds == pytest.approx(0.009)
    padded = fable().placement.weights_bytes + 500_000
    streams = replace(fable(), placement=replace(fable().placement, residency=Residency((), (0,), 0, padded, 1000)))
    assert forecast(streams, KNOWN).load_s == 0, "what streams is counted with its alignment"
    assert ", all of them from the disk" in dict(lines("fable", streams, KNOWN, forecast(streams, KNOWN), None))["per token"]
    streams = replace(fable(), placement=replace(fable().placement, residency=Residency((), (0,), 0, 9_000_000, 1000)))
    assert ", 8.58 MiB of them from" in dict(lines("fable", streams, KNOWN, forecast(streams, KNOWN), None))["per token"]


def test_exact_products_that_nobody_measured_are_not_predicted(known: None) -> None:
    """Memory's rate stood in for them, 30 times what they reach."""
    prepared = fable(EXACT, "4bit")
    found = forecast(prepared, KNOWN)
    assert (found.start, found.prompt, found.reason) == (None, None, UNMEASURED_EXACT) and suggest(prepared, KNOWN) is None
    kinds = {kind: KindRate(1e9, 1e10) for kind in wanted(prepared).kinds}
    measured = replace(KNOWN, machine=replace(MACHINE, kinds=kinds))
    assert all(kind.endswith(" exact") for kind in kinds) and not forecast(prepared, measured).reason
    assert forecast(prepared, measured).start.seconds > found.work.bytes_per_token / 1e9
    assert forecast(fable(EXACT), KNOWN).start.seconds == forecast(fable(), KNOWN).start.seconds, "of raw weights it changes only prompts"
    assert (forecast(fable(EXACT), KNOWN).prompt is None) == HAS_PAIRS and forecast(fable(), KNOWN).prompt is not None


def test_kinds_are_named_by_how_they_are_multiplied() -> None:
    float32 = "bf16 exact" if HAS_PAIRS else "bf16"  # elsewhere bf16 is multiplied like them
    assert [kind_of_weight(QuantSpec.raw(raw)) for raw in ("f32", "f16", "bf16")] == [float32, float32, "bf16"]
    assert {kind_of_weight(QuantSpec.raw("bf16"), *flags) for flags in ((True,), (False, True))} == {float32}
    assert kind_of_weight(QuantSpec.parse("4bit+1%")) == "codebook4:16" and kind_of_weight(QuantSpec.parse("8bit"), True).endswith(" exact")
    asked = wanted(fable())
    assert asked.kinds == ("bf16", "codebook4:16", "symmetric6:32") and asked.file == FABLE / "model.safetensors"
    assert wanted(fable(spec="4bit")).kinds == ("symmetric6:32", "codebook4:16") and wanted(fable(spec="4bit")).file is not None


# -- what is shown -----------------------------------------------------------------------------------------------------------------


def test_the_bar_shows_every_part_and_no_more_than_its_width() -> None:
    assert bar((("a", 50), ("b", 25)), 100, 8) == "aaaabb··"
    assert bar((("a", 1), ("b", 0), ("c", 1)), 10**9, 8) == "ac······"
    assert bar((("a", 100), ("b", 100)), 100, 8) == "aaaaaaaa" and bar((("a", 1),), 0, 4) == "····"


def test_plan_predicts_and_advises(known: None) -> None:
    code, out, _ = ran("plan", "fable", "--device", "cpu", "-t", "2", "-p", "100", "--json")
    plan = json.loads(out)
    assert code == 0
    start = plan["prediction"]["start"]
    assert start["tokens_per_s"] == pytest.approx(forecast(fable(), KNOWN).start.tokens_per_s) and start["limit"] == "memory"
    assert plan["prediction"]["prompt_tokens"] == 100 and plan["prediction"]["prompt"]["tokens_per_s"] > start["tokens_per_s"]
    assert plan["suggestion"]["flag"] == "--bits 4" and plan["tiers"]["memory"]["weights_bytes"] == plan["weights_bytes"]
    assert plan["per_token"]["disk_bytes"] == 0 and plan["machine"]["date"] == "2026-01-01 12:00" and plan["disk"]["bytes_per_s"] == 1e9
    text = ran("plan", "fable", "--device", "cpu", "-t", "2")[1]
    for said in ("█", "tokens/s (± 45%)", "the memory limits it", "--bits 4: ", "for a prompt of 512 tokens", "memory 20.0 GB/s"):
        assert said in text, said


def test_plan_at_other_bits(known: None) -> None:
    whole, small, named = (json.loads(ran("plan", *words, "--device", "cpu", "--json")[1]) for words in (
        ("fable",), ("fable", "--bits", "4"), ("fable:4bit",)))
    assert small["weights_bytes"] < whole["weights_bytes"] / 3 and small["weights_bytes"] == named["weights_bytes"]
    code, _, said = ran("plan", "fable", "--bits", "7")
    assert code == 2 and "--bits is 8, 6, 5, 4, 3 or 2, not 7" in said
    assert ran("plan", "fable", "-p", "0")[0] == 2


def test_plan_tells_what_of_the_cache_a_token_reads_from_the_disk(known: None) -> None:
    asked = ("plan", "fable", "--device", "cpu", "--kv-ram", "6Mi")
    code, out, err = ran(*asked, "--json")
    plan = json.loads(out)
    away, whole = (plan["per_token"][name] for name in ("kv_disk_bytes_at_full_context", "kv_bytes_at_full_context"))
    assert code == 0 and 0 < away < whole and away <= plan["tiers"]["disk"]["kv_bytes"]
    assert "read for every token" in err
    assert f"of cache, {format_size(away)} of it from the disk" in ran(*asked)[1]
    code, out, err = ran(*asked, "--kv-read", "sparse")
    assert code == 0 and "of cache, few of the pages on the disk" in out
    assert "are on disk, of which a token reads few pages" in err and "read for every token" not in err
    assert "after 0 s of loading" not in ran("plan", "fable", "--device", "cpu", "--ram", refused_for("1M"))[1]


def refused_for(ram: str) -> str:
    """The least memory that a refusal names for the packaged model."""
    return ran("plan", "fable", "--device", "cpu", "--ram", ram)[2].split("--ram ")[1].split(",")[0]


def test_without_a_probe_nothing_is_measured_and_that_is_reported(nobody: Path) -> None:
    code, out, _ = ran("plan", "fable", "--device", "cpu", "--no-probe", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["prediction"]["start"] is None and "not measured" in plan["prediction"]["unknown"]
    assert plan["suggestion"] is None and plan["machine"] is None and not list(nobody.iterdir())
    assert "effllm doctor" in ran("plan", "fable", "--device", "cpu", "--no-probe")[1]


def test_run_and_bench_only_look(nobody: Path) -> None:
    code, out, said = ran("run", "fable", "--raw", "Once", "-n", "3", "--device", "cpu", "--json", "--stats")
    placement = json.loads(out)["placement"]
    assert code == 0 and placement["layers"] == {"cpu": 6} and placement["pinned_bytes"] == 11_540_992
    assert placement["predicted_tps"] is None and placement["measured_tps"] > 0 and "effllm doctor" in placement["reason"]
    assert "no prediction: this machine was not measured yet (run effllm doctor once)\n" in said
    code, rows, said = ran("bench", "fable", "-p", "8", "-n", "2", "-r", "1", "--device", "cpu", "-t", "1", "-o", "json")
    assert [row["predicted_ts"] for row in json.loads(rows)] == [None, None] and not list(nobody.iterdir())
    assert said.count("no prediction: this machine was not measured with 1 thread yet (run effllm doctor -t 1 once)\n") == 1


def test_run_holds_the_prediction_against_what_came(known: None) -> None:
    code, out, said = ran("run", "fable", "--raw", "Once", "-n", "40", "--ignore-eos", "--device", "cpu", "-t", "2", "--json", "--stats",
                          "--spec", "off")
    placement = json.loads(out)["placement"]
    assert code == 0 and placement["predicted_tps"] == pytest.approx(forecast(fable(), KNOWN).start.tokens_per_s, rel=0.02)
    ratio, most = placement["measured_tps"] / placement["predicted_tps"], 1 + placement["error"]
    off = abs(ratio - 1) > forecast_outcome.MISS_SHARE and not 1 / most <= ratio <= most
    assert (placement["miss"] is not None) == off and f"predicted {rounded(placement['predicted_tps'])} tokens/s" in said
    rows = json.loads(ran("bench", "fable", "-p", "1,8,63,64", "-n", "2", "-r", "1", "--device", "cpu", "-o", "json")[1])
    told = {row["n_prompt"] or "answer": row["predicted_ts"] for row in rows}
    assert told[8] is told[63] is None, "the rates are those of a whole chunk, and a few tokens are three times as slow"
    assert all(told[tokens] > 0 for tokens in (1, 64, "answer"))
    assert list(rows[0])[:9] == ["build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
                                 "model_size", "model_n_params"]
    assert rows[0]["test_time"].endswith("Z") and rows[0]["n_batch"] >= 8 and rows[0]["n_gpu_layers"] == 0


# -- why it came otherwise ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> object:
    for _ in warm.warm((warm.RAW,)) if warm.is_cold((warm.RAW,)) else ():
        continue
    *_, engine = open_engine(FABLE, CPU)
    yield engine
    engine.close()


def test_what_drafts_gained_is_a_part_of_what_was_to_be_expected(known: None, engine: object) -> None:
    expected = [forecast_outcome.outcome(engine, 10, 0, 40, 0.1, 1.0, 1.0, drafted).predicted_tps
                for drafted in (None, Counts(20, 25, 19, 26.0), Counts(20, 25, 0, 40.0))]
    assert expected[1] == pytest.approx(expected[0] * 39 / 26) and expected[2] == expected[0], "a loss is not foreseen"


def test_a_reason_is_looked_for(engine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    assert explain(engine, MACHINE, 0.5, 3, 1.0, 1.0) == "3 tokens are too few to tell"
    assert explain(engine, MACHINE, 0.5, 1, 1.0, 1.0) == "one token is too few to tell"
    assert UNEXPLAINED in explain(engine, MACHINE, 0.5, 100, 1.0, 1.0)
    assert explain(engine, MACHINE, 0.5, 100, 0.04, 0.04) == "0.04 s are too short to tell why, a longer answer tells more"
    assert explain(engine, MACHINE, 0.5, 3, 1.0, 1.0, "the disk") == "the disk"
    assert explain(engine, MACHINE, 0.5, 100, 1.0, 1.0, "the disk") == "the disk"
    assert "drafting took 60% of the time, where 0% were foreseen" in explain(engine, MACHINE, 0.5, 100, 1.0, 0.4)
    foreseen = replace(MACHINE, choice_s=0.005)
    assert UNEXPLAINED in explain(engine, foreseen, 0.5, 100, 1.0, 0.4), "half of the time was expected to go there"
    unknown = replace(MACHINE, choice_s=None)
    assert UNEXPLAINED in explain(engine, unknown, 0.5, 100, 1.0, 0.4), "nobody foresaw anything"
    assert explain(engine, MACHINE, 0.5, 100, 1.0, 0.4, "the disk").startswith("the disk; sampling")
    assert UNEXPLAINED in explain(engine, MACHINE, 0.5, 100, 1.0, 0.8), "a fifth of the time does not double it"
    monkeypatch.setattr(forecast_outcome, "memory_now", lambda engine: 5e9)
    assert "5.0 GB/s now and at 20.0" in explain(engine, MACHINE, 0.5, 100, 1.0, 1.0)
    assert UNEXPLAINED in explain(engine, MACHINE, 2.0, 100, 1.0, 1.0)
    monkeypatch.setattr(forecast_outcome, "memory_now", lambda engine: 40e9)
    assert "others used it then" in explain(engine, MACHINE, 2.0, 100, 1.0, 1.0)
    monkeypatch.setattr(forecast_outcome, "memory_now", lambda engine, threads=2: {1: 10e9, 2: 11.5e9}[threads])
    apart = replace(MACHINE, memory_alone=10e9)
    assert "so threads share a memory channel, or cores with other programs" in explain(engine, apart, 0.5, 100, 1.0, 1.0)
    assert "one thread alone reads at 10.0" in explain(engine, apart, 0.5, 100, 1.0, 1.0)
    monkeypatch.setattr(forecast_outcome, "memory_now", lambda engine, threads=2: {1: 6e9, 2: 11.5e9}[threads])
    assert "other programs use it" in explain(engine, apart, 0.5, 100, 1.0, 1.0), "one thread is slower, too"
    alike = replace(MACHINE, memory_alone=17e9)
    assert "other programs use it" in explain(engine, alike, 0.5, 100, 1.0, 1.0), "one thread had all of it then"
    monkeypatch.setattr(forecast_outcome, "memory_now", lambda engine: 40e9)
    assert "the threads shared a core or a memory channel then" in explain(engine, alike, 2.0, 100, 1.0, 1.0)
    assert "others used it then" in explain(engine, apart, 2.0, 100, 1.0, 1.0)
    beside = replace(MACHINE, disturbed={"memory": 0.2, "kind codebook4:16": 0.62, "kind affine2:64": 0.9})
    assert "other programs had 62% of the cores' time when this machine was measured" in explain(engine, beside, 2.0, 100, 1.0, 1.0)
    others = replace(beside, disturbed={"kind affine2:64": 0.9})
    assert "cores" not in explain(engine, others, 2.0, 100, 1.0, 1.0), "those weights are not this model's"
    busy = hardware.CpuTime(all=2.0, idle=0.1, own=1.1, stolen=0.1)
    assert explain(engine, MACHINE, 0.5, 100, 1.0, 1.0, cpu_use=busy) == "other programs had 35% of the cores' time meanwhile"
    host = explain(engine, MACHINE, 0.5, 100, 1.0, 1.0, "the disk", replace(busy, own=1.2, stolen=0.5))
    assert host == "the disk; this virtual machine's host, for others, had 25% of the cores' time meanwhile"
    for else_ in (replace(busy, idle=0.6), replace(busy, own=1.7), replace(busy, own=1.8, idle=0.0, stolen=0.0)):
        assert "cores' time" not in explain(engine, MACHINE, 0.4, 100, 1.0, 1.0, cpu_use=else_)
    assert "cores' time" not in explain(engine, MACHINE, 2.0, 100, 1.0, 1.0, cpu_use=busy)
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 1.0, 1.0))
    monkeypatch.setattr(forecast_outcome.hardware, "cpu_threads", lambda: 4)
    assert explain(engine, MACHINE, 0.5, 100, 1.0, 1.0) == "9 programs want the 4 cores of this machine"
    assert explain(engine, MACHINE, 0.05, 100, 1.0, 1.0).startswith(UNEXPLAINED), "they take no nineteen twentieths of the time"
    monkeypatch.setattr(forecast_outcome.hardware, "cpu_threads", lambda: 16)
    assert "9 programs" not in explain(engine, MACHINE, 0.5, 100, 1.0, 1.0), "there are more cores than the two of this run"


def test_what_the_disk_explains_of_a_miss() -> None:
    """1 GB of weights and 100 MB of the cache for a token, foreseen at 2 GB/s; an answer of ten passes that waited for the disk."""
    prepared = fable()
    every = work(prepared, check_tensors(prepared.config, prepared.store, prepared.container))
    asked = replace(every, streamed=10**9, windows=(None,), kv_bytes=10**5, resident_kv_tokens=0)
    foreseen = Prediction(0.55, 0.55, 0.1, 0.2, "disk", 0.3)

    def said(ratio: float, reads: ReadStats, seconds: float = 10.0, **changes: object) -> str:
        return forecast_outcome.explain_disk(replace(asked, **changes), 1000, foreseen, "2026-01-01 12:00", ratio, 10, seconds, reads)

    slow = said(0.5, ReadStats(nbytes=11 * 10**9, wait_s=8.0, busy_s=10.0))
    assert slow == "the disk gave 1.1 GB/s, and 2 for such reads when it was probed (2026-01-01 12:00)"
    assert "gave 4.4 GB/s" in said(2.0, ReadStats(nbytes=11 * 10**9, busy_s=2.5), 2.5)
    assert said(0.5, ReadStats(nbytes=11 * 10**9, wait_s=1.0, busy_s=10.0)) == "", "the processor kept it waiting"
    assert said(0.5, ReadStats(nbytes=11 * 10**9, wait_s=5.0, busy_s=5.5)) == "", "it gave what was expected"
    assert said(0.5, ReadStats()) == ""
    more = said(0.5, ReadStats(nbytes=22 * 10**9, wait_s=8.0, busy_s=11.0), 11.0)
    assert more == "a token read 2.05 GiB from the disk, 1.02 GiB were expected"
    guessed = said(0.2, ReadStats(nbytes=22 * 10**9, wait_s=8.0, busy_s=22.0), 22.0, is_sparsity_assumed=True)
    assert "expected: which neurons are active was a guess, effllm calibrate-sparsity measures it; the disk gave 1 GB/s" in guessed
    assert "a token read 524.52 MiB" in said(1.9, ReadStats(nbytes=55 * 10**8, busy_s=2.75), 2.75), "experts that were in memory"


def test_an_answer_that_was_stopped_before_any_of_its_prompt_was_read(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    experts = PagedExpertCost(6, 8, 2, 1 << 20, 0.5, 0.5)
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)
    paged = replace(work(engine.prepared, engine.model.tensors), streamed=1 << 20, paged=experts)
    monkeypatch.setattr(forecast_outcome.forecast, "work", lambda *_: paged)
    stopped = forecast_outcome.outcome(engine, 0, 0, 0, 0.5, 0.0, 0.0)
    assert stopped.predicted_tps and stopped.predicted_prompt_s is stopped.measured_prompt_s is stopped.measured_tps is None


def test_a_run_whose_disk_is_slower_than_it_was_says_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model streams; the disk is said to have given a hundred times what it gives."""
    fast = replace(DISK, disk=replace(DISK.disk, reads=(DiskRead(2 << 20, 4, 1e12),)))
    monkeypatch.setattr(roofs, "known", lambda asked: Roofs(replace(MACHINE, memory=1e13, memory_usual=1e13), fast))
    with closing(streaming(larger_than_memory(tmp_path / "large"), ctx=256)) as engine:
        before = engine.disk_traffic
        for _ in engine.prefill([1, 2, 3]):
            continue
        at, started = engine.disk_traffic, time.perf_counter()
        made = len(list(engine.generate(Sampler(SamplerSettings(temperature=0), 4096), 4, frozenset())))
        reads = engine.disk_traffic.since(at)
        assert reads.nbytes > 3 * 200 * 2**20 and 0 < reads.busy_s <= time.perf_counter() - started + 0.1
        assert engine.disk_traffic.since(before).nbytes > reads.nbytes
        engine.prepared = replace(engine.prepared, placement=replace(engine.placement, residency=engine.prepared.streaming.residency))
        found = forecast_outcome.outcome(engine, 3, 0, made, 1.0, time.perf_counter() - started, 0.0, None, reads)
    assert "the disk gave" in found.miss and "when it was probed" in found.miss, found


def test_the_memory_is_read_through_the_weights(engine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forecast_outcome.memory_now(engine) is None, "11 MB may lie in a cache"
    monkeypatch.setattr(forecast_outcome, "MIN_NBYTES", 1 << 20)
    assert forecast_outcome.memory_now(engine) > 1e8


def test_the_outcome_of_an_answer(engine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)
    monkeypatch.setattr(forecast_outcome, "explain", lambda *given: "reasons")
    predicted = forecast(engine.prepared, KNOWN).start.tokens_per_s
    near = forecast_outcome.outcome(engine, 1, 0, 101, 0.01, 100 / predicted, 0.0)
    assert near.miss == "" and near.measured_tps == pytest.approx(predicted) and near.predicted_prompt_s > 0
    unsteady = Roofs(replace(MACHINE, memory_usual=9e9), DISK)  # a stated error of 70%
    monkeypatch.setattr(roofs, "known", lambda asked: unsteady)
    within = forecast_outcome.outcome(engine, 1, 0, 101, 0.01, 150 / predicted, 0.0)
    assert within.miss == "" and within.error > 0.5 and within.measured_tps == pytest.approx(predicted / 1.5), "a third less is within it"
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)
    far = forecast_outcome.outcome(engine, 1, 0, 101, 0.01, 200 / predicted, 0.0)
    assert far.miss == "reasons" and far.to_json()["miss"] == "reasons"
    held = forecast_outcome.outcome(engine, 50, 49, 1, 0.01, 0.0, 0.0)
    assert held.measured_tps is None and held.measured_prompt_s is None and held.predicted_prompt_s is None
