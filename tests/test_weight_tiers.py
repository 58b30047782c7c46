"""The tier of each tensor's bytes in a plan: one tier each, and all tiers together hold every tensor of the file."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_models import bundled
from conversions import options, run
from family_models import Case
from saved_models import saved
from streamed_models import FABLE, larger_than_memory, random_model, streams

from effllm import DoesNotFit
from effllm.cli.plan_report import report
from effllm.offload.checkpoint import TensorStore
from effllm.offload.expert_cache import PolicyChoice
from effllm.offload.shards import PAD
from effllm.runtime.engine import EngineOptions, prepare
from effllm.runtime.planning.forecast import forecast
from effllm.runtime.planning.roofs import Roofs
from effllm.runtime.prepare import Prepared
from effllm.runtime.sparse.neuron_bundles import NeuronWindows, bundle_places
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights.paged_experts import PagedExperts, expert_layout
from effllm.runtime.weights.weight_tiers import WeightTiers, weight_tiers

ASKED = EngineOptions(device="cpu", ctx=256)


def of_file(folder: Path) -> int:
    """Bytes of the tensors of a folder, from its headers."""
    with TensorStore.open(folder) as store:
        return sum(info.nbytes for name, info in store.tensors.items() if not name.startswith(PAD))


def total(tiers: WeightTiers) -> int:
    return tiers.memory + tiers.disk + tiers.gpu


def streaming(folder: Path, keep: int) -> tuple[Prepared, WeightTiers]:
    prepared = prepare(folder, ASKED)
    made = replace(prepared, streaming=streams(folder, ASKED, keep))
    return made, weight_tiers(made)


def test_with_everything_in_memory_that_is_all() -> None:
    assert weight_tiers(prepare(FABLE, ASKED)) == WeightTiers(always=of_file(FABLE))


@pytest.mark.parametrize("spec", [None, "4bit", "3bit", "8bit"])
def test_what_streams_and_what_stays_add_up(tmp_path: Path, spec: str | None) -> None:
    folder = FABLE
    if spec is not None:
        run(FABLE, tmp_path / "made", options(spec))
        folder = tmp_path / "made"
    for keep in (0, 1, 3):
        made, tiers = streaming(folder, keep)
        kept = made.streaming.residency
        assert total(tiers) == of_file(folder) and tiers.on_demand == 0, "its embedding is the head too, which streams"
        assert (tiers.streamed == 0) == (not kept.streamed) and (tiers.pinned == 0) == (not kept.pinned)
        assert 0 < tiers.always < 0.1 * total(tiers) and tiers.memory == tiers.always + tiers.pinned
        assert tiers.streamed <= kept.streamed_nbytes and tiers.pinned <= kept.pinned_nbytes, "a plan counts whole blocks of the disk"


def test_rows_of_an_embedding_are_on_the_disk(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", tie_word_embeddings=False)
    _, tiers = streaming(folder, 2)
    embed = prepare(folder, ASKED).store.tensors["model.embed_tokens.weight"].nbytes
    assert total(tiers) == of_file(folder) and tiers.on_demand == embed and tiers.disk == tiers.streamed + embed


@pytest.mark.parametrize("slots", [2, 5])
def test_experts_are_in_slots_or_on_the_disk(tmp_path: Path, slots: int) -> None:
    saved(Case("mixtral", {"tie_word_embeddings": False}), tmp_path)
    prepared = prepare(tmp_path, ASKED)
    own, tensors = prepared.config.moe, check_tensors(prepared.config, prepared.store, prepared.container)
    parts = expert_layout(tensors, own.num_experts, own.experts_per_token, prepared.store)
    tiers = weight_tiers(replace(prepared, streaming=PagedExperts(parts, slots, PolicyChoice("lru", 0.5))))
    expert = sum(own.nbytes for own in parts.parts[0].ranges)
    rows = 0 if not parts.tables else tensors["outer"]["embed"].nbytes
    assert total(tiers) == of_file(tmp_path) and tiers.pinned == slots * expert
    assert tiers.on_demand == (len(parts.parts) - slots) * expert + rows


def test_neurons_are_in_the_window_or_on_the_disk(tmp_path: Path) -> None:
    saved(Case("llama", {"hidden_act": "relu", "hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_key_value_heads": 2},
                 dtype="bfloat16"), tmp_path / "model")
    bundled(tmp_path / "model", tmp_path / "bundled")
    made, _ = streaming(tmp_path / "bundled", 1)
    found = bundle_places(check_tensors(made.config, made.store, made.container), made.store)
    for slots in (4, 10**6):
        windows = NeuronWindows(found, tuple(min(slots, place.units) for place in found))
        tiers = weight_tiers(replace(made, streaming=replace(made.streaming, windows=windows)))
        rows = check_tensors(made.config, made.store, made.container)["outer"]["embed"].nbytes
        assert total(tiers) == of_file(tmp_path / "bundled") and (tiers.on_demand > rows) == (slots == 4) and tiers.on_demand >= rows


def test_a_plan_reports_tiers_that_add_up_to_the_file(tmp_path: Path) -> None:
    folder = larger_than_memory(tmp_path / "model")
    with pytest.raises(DoesNotFit) as refused:
        prepare(folder, replace(ASKED, ram="100M"))
    least = int(re.search(r"--ram (\d+)Mi", refused.value.hint).group(1))
    prepared = prepare(folder, replace(ASKED, ram=f"{least + 60}Mi"))
    placed, told = prepared.placement, report("model", prepared, Roofs(None, None), forecast(prepared, Roofs(None, None)), None)
    tiers = json.loads(json.dumps(told))["tiers"]
    assert placed.streamed_bytes > 0 and sum(each["tensor_bytes"] for each in tiers.values()) == of_file(folder)
    memory = tiers["memory"]
    assert memory["weights_bytes"] == placed.pinned_bytes == placed.always_bytes + placed.residency.pinned_nbytes
    assert 0 < memory["always_bytes"] <= placed.always_bytes and memory["tensor_bytes"] <= memory["weights_bytes"]
    exact = memory["weights_bytes"] + memory["ring_bytes"]
    rest = memory["kv_bytes"] + memory["other_bytes"]
    assert told["total_bytes"] == exact - (-rest * 105 // 100), "weights and ring are exact, the rest has slack"
