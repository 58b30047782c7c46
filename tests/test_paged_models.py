"""Experts on disk give the bits of experts in memory: families, formats, policies, prompts and answers, whatever the slots."""

from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES
from saved_models import saved
from streamed_models import paging
from test_moe_models import mixture_model

from effllm.offload.expert_cache import POLICIES
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights.paged_experts import LayerExperts


def logits(engine: Engine, prompt: int = 150, answer: int = 30) -> np.ndarray:
    """Of every position of a prompt in chunks (one of few tokens), then token by token, then few at once, then token by token."""
    ids = np.random.default_rng(7).integers(0, engine.config.vocab_size, prompt + answer + 8).tolist()
    engine.reset()
    rows = [found.copy() for _, found in engine.score(ids[:prompt])]
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
    rows.append(engine.forward_logits(ids[prompt + answer : -2]).copy())
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(len(ids) - 2, len(ids))]
    return np.concatenate(rows)


def resident(folder: Path, **asked: object) -> np.ndarray:
    engine = list(open_engine(folder, EngineOptions(device="cpu", ctx=256, **asked)))[-1]
    assert engine.model.pager.resident
    found = logits(engine)
    engine.close()
    return found


def paged(folder: Path, slots: int, **asked: object) -> np.ndarray:
    engine = paging(folder, slots, ctx=256, **asked)
    found = logits(engine)
    tally = engine.model.pager.stats
    assert 0 < tally.hits < tally.uses and tally.chunk_reads > 0
    engine.close()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture of two layers with six experts each, of which a token visits two; its first layer is dense."""
    base = tmp_path_factory.mktemp("mixture")
    found = {"bf16": mixture_model(base / "bf16")}
    for spec in ("4bit", "8bit", "affine3:64", "ternary"):
        run(found["bf16"], base / spec.replace(":", "-"), options(spec))
        found[spec] = base / spec.replace(":", "-")
    run(found["bf16"], base / "mixed", options("4bit", rules=[r"experts\.[01]\.=8bit", r"experts\.2\.up=bf16"]))
    return {**found, "mixed": base / "mixed"}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    return {spec: resident(folder) for spec, folder in folders.items()}


@pytest.mark.parametrize("spec", ("bf16", "4bit", "affine3:64", "mixed", *(
    pytest.param(each, marks=pytest.mark.slow) for each in ("8bit", "ternary"))))
def test_every_format_gives_the_same_bits(spec: str, folders, expected) -> None:
    assert np.array_equal(paged(folders[spec], 8), expected[spec])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", (8, pytest.param(9, marks=pytest.mark.slow), 11))
def test_no_policy_changes_a_bit(policy: str, slots: int, folders, expected) -> None:
    assert np.array_equal(paged(folders["4bit"], slots, policy=policy), expected["4bit"])


@pytest.mark.parametrize("spec", ("bf16", "4bit"))
@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("direct", (True, False), ids=("direct", "buffered"))
def test_neither_threads_nor_the_way_of_reading_change_a_bit(spec: str, threads: int, direct: bool, folders, expected) -> None:
    assert np.array_equal(paged(folders[spec], 8, threads=threads, direct=direct), expected[spec])


def test_pages_of_the_cache_may_lie_on_the_disk_too(folders, tmp_path: Path) -> None:
    asked = {"ctx": 512, "kv": "4bit", "kv_sink": 0, "kv_window": 0}
    whole = list(open_engine(folders["4bit"], EngineOptions(device="cpu", **asked)))[-1]
    disk = paging(folders["4bit"], 8, kv_pages=1, spill_dir=str(tmp_path), **asked)
    assert np.array_equal(logits(disk, 440), logits(whole, 440))
    assert disk.cache.sealed == 3 and disk.cache.pool.traffic.nbytes > 0 and disk.model.pager.stats.hits > 0
    for engine in (whole, disk):
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ("bf16", "4bit"))
def test_products_in_float32_give_the_same_bits(spec: str, folders) -> None:
    """Where no kernel prepares products of a few tokens beforehand."""
    assert np.array_equal(paged(folders[spec], 8, exact=True, kv="32bit"), resident(folders[spec], exact=True, kv="32bit"))


FAMILIES = {"mixtral": 12, "mixtral, window, bfloat16": 12, "qwen3_moe": 20, "qwen3_moe, some layers dense": 8, "qwen3_moe, bfloat16": 20,
            "olmoe": 24, "olmoe, one expert, float16": 6, "qwen2_moe": 20, "qwen2_moe, some layers dense, bfloat16": 13, "glm4_moe": 13,
            "granitemoe": 20, "ernie4_5_moe": 14, "qwen3_5_moe_text": 26, "qwen3_next": 26, "mellum": 13, "llama4_text": 9, "afmoe": 20,
            "bailing_hybrid": 32, "flint": 24, "kolibri1": 40, "laguna": 13, "mimo_v2_flash": 13, "step3p7": 26, "axk1": 13,
            "longcat_flash": 13, "qwen4_exp_text": 13, "lara_mini": 32, "beam": 20,
            "phimoe": 14, "granitemoe_swa": 20, "bailing_moe_v2": 13, "hy_v3": 13, "cohere2_moe": 14, "flex_olmo": 16,
            "llama4_text, two of a token, dense layers, bfloat16": 8, "dots1": 13, "lfm2_moe": 20,
            "granitemoehybrid, experts, bfloat16": 12, "granitemoeshared": 16, "hunyuan_v1_moe": 20,
            "jamba": 9, "kimi_linear": 26, "minimax": 14, "dbrx": 12, "nemotron_h, experts": 16,
            "nemotron_h, groups of experts, bfloat16": 16}


OFTEN = {"mixtral, window, bfloat16", "qwen2_moe", "olmoe, one expert, float16", "qwen3_moe, some layers dense", "glm4_moe", "qwen3_next",
         "bailing_hybrid", "flint", "kolibri1", "llama4_text", "phimoe", "flex_olmo", "cohere2_moe", "jamba", "kimi_linear", "dbrx",
         "nemotron_h, experts", "granitemoehybrid, experts, bfloat16", "minimax",
         "longcat_flash"}  # routed, stored or surrounded in ways of their own


def test_those_that_are_often_asked_are_families() -> None:
    assert OFTEN <= FAMILIES.keys()


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_every_family_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    saved(CASES[name], tmp_path / "model")
    assert np.array_equal(paged(tmp_path / "model", FAMILIES[name]), resident(tmp_path / "model"))


@pytest.mark.parametrize("name, slots", (("mixtral", 12), ("olmoe", 24), ("gpt_oss", 12), ("gpt_oss, bfloat16", 24),
                                         ("qwen2_moe", 20), ("glm4_moe", 13), ("nemotron_h, experts", 16), ("llama4_text", 9)))
def test_quantized_families_give_the_same_bits(name: str, slots: int, tmp_path: Path) -> None:
    """gpt-oss with its biases and clamped gates: taken apart by the conversion, it pages."""
    saved(CASES[name], tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("4bit"))
    if slots < 24:
        assert np.array_equal(paged(tmp_path / "out", slots), resident(tmp_path / "out"))
    else:  # all four of five experts of a token: every slot of three layers
        engine = paging(tmp_path / "out", 14, ctx=256)
        assert np.array_equal(logits(engine), resident(tmp_path / "out"))
        engine.close()


def test_everything_in_slots_reads_every_expert_once(folders, expected) -> None:
    engine = paging(folders["4bit"], 12, ctx=256)
    assert np.array_equal(logits(engine), expected["4bit"])
    first = engine.model.pager.traffic.nbytes
    assert np.array_equal(logits(engine), expected["4bit"])
    rows = engine.model.pager.traffic.nbytes - first
    assert len(engine.model.pager.pool) == 12 and rows < first / 2, "only rows of the embedding are read again"
    engine.close()


def test_an_expert_is_one_read_and_a_chunk_reads_none_twice(folders) -> None:
    """In a folder that effllm wrote. The embedding of this model is its head too, so nothing else is read."""
    engine = paging(folders["4bit"], 8, ctx=256)
    pager = engine.model.pager
    before = pager.traffic.reads
    ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, 120).tolist()
    for _ in engine.score(ids, pages=8):
        continue
    assert pager.traffic.reads - before == pager.stats.chunk_reads <= 12
    for at in range(20):
        engine.forward_logits([at])
    tally = pager.stats
    read = pager.traffic.reads - before - tally.chunk_reads
    assert tally.uses == 20 * 2 * 2 and 0 <= read - (tally.uses - tally.hits) <= tally.prefetched + tally.prefetch_misses
    engine.close()


def test_what_was_shown_of_a_layers_visits_is_what_happened(folders) -> None:
    engine = paging(folders["4bit"], 8, ctx=256)
    seen: list[tuple[int, list[int]]] = []

    def tap(name: str, layer: int, value: object) -> None:
        if name == "visits":
            seen.append((layer, np.flatnonzero(np.diff(value.offsets)).tolist()))

    for token in range(6):
        engine.model.forward(np.array([token]), engine.cache, tap)
    trace = engine.model.pager.trace()
    assert trace.shape == (6, 2, 2)
    assert [(layer, numbers) for layer, numbers in seen] == [(1 + i % 2, row) for i, row in enumerate(trace.reshape(-1, 2).tolist())]
    engine.close()


def test_records_follow_their_expert_from_slot_to_slot(folders) -> None:
    engine = paging(folders["4bit"], 8, ctx=256)
    logits(engine, 20, 10)
    for (raw, made), key in ((engine.model._wrapped[key], key) for key in (1, 2)):
        pages = made.experts
        assert isinstance(pages, LayerExperts) and raw is not None and len(pages) == 6
        table = engine.backends["cpu"].mixtures.tables[id(pages)]
        for expert in range(6):
            slot = table.slot_address[expert] // pages.slot_nbytes
            own = pages.expert(expert, slot)
            assert table.gated[expert, 1] == own.gate.weight.address and table.down[expert, 1] == own.down.weight.address, key
    engine.close()
