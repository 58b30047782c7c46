"""Mixtures in other tools' formats with experts on disk: the bits of experts in memory, the planned memory, and reports."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from family_models import FEW_EXPERTS, Case
from gguf_samples import add_expert_keys, add_fable_tokenizer, write_model
from imported_mixtures import imported_mixture
from saved_models import saved
from streamed_models import FABLE, differing, paging, random_folder
from test_mxfp4 import packed_model
from test_paged_models import logits, paged, resident
from test_paged_runs import answer
from test_streamed_runs import MIB, finish, peak, start

from effllm import DoesNotFit
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.size import format_size
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights.paged_experts import RECORD_NBYTES, expert_layout

QWEN = Case("qwen3_moe", {"hidden_size": 256, "intermediate_size": 256, **FEW_EXPERTS, "head_dim": 32, "moe_intermediate_size": 256,
                          "norm_topk_prob": True})
SLOTS = 20  # of 36: experts of two tokens take 18


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures") / "source"
    saved(QWEN, folder)
    return folder


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", *(pytest.param(kind, marks=pytest.mark.slow)
                                                          for kind in ("Q6_K", "Q4_0", "MXFP4", "Q5_1"))])
def test_a_file_gives_the_same_bits(source: Path, tmp_path: Path, kind: str) -> None:
    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(QWEN), expert_types={"_exps": kind})
    assert np.array_equal(paged(tmp_path / "m.gguf", SLOTS), resident(tmp_path / "m.gguf"))


def mixed(source: Path, path: Path) -> Path:
    """As llama.cpp mixes types, and more so: one matrix widened, one that lies as it is read, layers of one kind beside others."""
    write_model(source, path, "Q8_0", "qwen3moe", add_expert_keys(QWEN), per_file=20, expert_types={
        "blk.0.ffn_down_exps": "Q6_K", "blk.1.ffn_up_exps": "F16", "blk.1.ffn_down_exps": "Q5_1", "blk.2.ffn_gate_exps": "Q8_0",
        "_exps": "Q4_K"})
    return min(path.parent.glob("m-*.gguf"))


@pytest.mark.parametrize("more", ({}, {"threads": 2, "direct": False}, {"policy": "least-stale", "exact": True, "kv": "32bit"}),
                         ids=("direct", "buffered", "float32"))
def test_a_mix_of_types_in_several_files_gives_the_same_bits(source: Path, tmp_path: Path, more: dict) -> None:
    model = mixed(source, tmp_path / "m.gguf")
    whole = {key: value for key, value in more.items() if key not in ("direct", "policy")}
    assert np.array_equal(paged(model, SLOTS, **more), resident(model, **whole))


@pytest.mark.parametrize("name", ["gptq 4", "awq", "int4, zero points", "fp8 blocks", "nvfp4", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("gptq 4, act order", "nf4"))])
def test_other_tools_folders_give_the_same_bits(tmp_path: Path, name: str) -> None:
    imported_mixture(tmp_path / "m", name)
    assert np.array_equal(paged(tmp_path / "m", 9), resident(tmp_path / "m"))


def test_gpt_oss_as_published_gives_the_same_bits(tmp_path: Path) -> None:
    """With biases, which stay, and gates and ups that take turns in one tensor."""
    packed_model(tmp_path / "oss")
    assert np.array_equal(paged(tmp_path / "oss", 12), resident(tmp_path / "oss"))


def test_the_plan_counts_every_byte(source: Path, tmp_path: Path) -> None:
    model = mixed(source, tmp_path / "m.gguf")
    engine = paging(model, SLOTS, ctx=256)
    streams, pager = engine.prepared.streaming, engine.model.pager
    parts = streams.parts
    assert parts.staging.count and pager.nbytes + RECORD_NBYTES * len(parts.parts) == streams.held_nbytes
    assert pager.memory.nbytes == SLOTS * parts.demand.slot_nbytes
    before = pager.traffic.nbytes
    logits(engine, 20, 4)
    arrived = pager.stats.chunk_reads + pager.stats.uses - pager.stats.hits + pager.stats.prefetch_misses
    assert 0 < pager.traffic.nbytes - before <= (arrived + pager.stats.prefetched) * (parts.read_nbytes + 16 * 4096)
    said = " ".join(streams.notices)
    assert "repacked each time it is read" in said and format_size(parts.demand.slot_nbytes) in said
    engine.close()


def test_a_damaged_expert_is_named_when_it_is_needed(source: Path, tmp_path: Path) -> None:
    """As a whole load does, and no other expert suffers."""
    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(QWEN))
    prepared = prepare(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=256))
    tensors, own = check_tensors(prepared.config, prepared.store, prepared.container), prepared.config.moe
    parts = expert_layout(tensors, own.num_experts, own.experts_per_token, prepared.store)
    piece = parts.parts[0].repack_plan.pieces()[0]
    prepared.store.close()
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(piece.ranges[0].offset)
        file.write(b"\x00\x7e")  # the first scale is NaN
    engine = paging(tmp_path / "m.gguf", SLOTS, ctx=256)
    with pytest.raises(CheckpointError, match="'blk.0.ffn_gate_exps.weight' with a scale of NaN") as caught:
        logits(engine)
    assert caught.value.hint and "\n" not in caught.value.message
    engine.close()


def test_what_cannot_arrive_piece_by_piece_is_refused_with_the_next_step(
        source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.offload.checkpoint import TensorStore
    from effllm.runtime.gguf.store import GgufStore
    from effllm.runtime.planning import process_memory

    write_model(source, tmp_path / "m.gguf", "Q8_0", "qwen3moe", add_expert_keys(QWEN))
    monkeypatch.setattr(GgufStore, "repack_plan", TensorStore.repack_plan)
    monkeypatch.setattr(process_memory, "baseline", lambda kinds: 100 * MIB)  # that of a process in which tests have run moves by more
    whole = prepare(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=256))
    budget = (whole.placement.total_bytes - 4 * MIB) // MIB
    whole.store.close()
    with pytest.raises(DoesNotFit, match="converted on load") as caught:
        prepare(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=256, ram=f"{budget}Mi"))
    assert "effllm quantize" in caught.value.hint


# ---- whole runs


LARGE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 512,
         "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """63 million weights of experts with a tokenizer, in one file: 67 MB."""
    base = tmp_path_factory.mktemp("large")
    fable = json.loads((FABLE / "config.json").read_text())
    random_folder(base / "source", {**LARGE, "vocab_size": fable["vocab_size"]}, differing(np.random.default_rng(5)))

    def change(writer: object) -> None:
        add_expert_keys(Case("qwen3_moe", LARGE))(writer)
        add_fable_tokenizer(writer)

    write_model(base / "source", base / "m.gguf", "Q8_0", "qwen3moe", change)
    return base / "m.gguf"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")
@pytest.mark.parametrize("more", (2, pytest.param(12, marks=pytest.mark.slow)))
def test_a_run_keeps_to_its_budget_and_answers_the_same(large: Path, more: int) -> None:
    whole, _ = finish(start(*answer(large)))
    expected = json.loads(whole)
    out, err = finish(start(*answer(large, "--ram", "64M")), 4)
    assert json.loads(out)["code"] == 4 and "of 80 experts" in err
    budget = int(re.search(r"it takes --ram (\d+)Mi", err).group(1)) + more
    assert budget * MIB < expected["memory"]["planned_bytes"]
    out, err = finish(start(*answer(large, "--ram", f"{budget}Mi", "--stats")))
    found = json.loads(out)
    assert found["token_ids"] == expected["token_ids"] and found["text"] == expected["text"]
    assert peak(err) <= budget * MIB, f"{peak(err) / MIB:.0f} MiB of {budget} used"
    experts = found["placement"]["experts"]
    assert 20 <= experts["slots"] < experts["total"] == 80 and experts["needed"] == 39 * 5 * 2
    assert "repacked each time it is read" in err and found["io"]["disk_bytes_read"] > 0
    out, _ = finish(start("plan", large, "-c", 512, "--ram", f"{budget}Mi", "--device", "cpu", "--json", "--no-probe"))
    planned = json.loads(out)
    assert planned["total_bytes"] <= budget * MIB and abs(planned["experts"]["slots"] - experts["slots"]) < 8


def test_plans_of_files_that_are_not_here_page_too() -> None:
    """What another tool quantized is made as it arrives, and staging buffers for it are counted."""
    from effllm.quant.spec import QuantSpec
    from effllm.runtime.config import parse_config
    from effllm.runtime.families import expert_of
    from effllm.runtime.planning.expected_store import ExpectedStore

    config = parse_config({**LARGE, "vocab_size": 4096})
    spec = QuantSpec.parse("symmetric8:32")
    ready, made = (expert_layout(check_tensors(config, store, store.container), 16, 2, store) for store in (
        ExpectedStore(config, spec), ExpectedStore(config, formats=lambda role, rule: spec if expert_of(role) is not None else None)))
    assert not ready.staging.count and made.staging.count and len(made.parts) == 80
    assert abs(made.demand.slot_nbytes - ready.demand.slot_nbytes) <= 2 * 4096
