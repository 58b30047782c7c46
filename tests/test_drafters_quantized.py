"""Trained drafters of quantized models: their matrices are quantized to as many bits while they are read, plans count and report that, and
they compute with the dequantized values."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CliRun
from drafter_models import Head, guessed_by, saved_head, with_assistant, with_head
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_drafters import IDS, SAMPLERS, held_to_be_alike, opened, planned, scores

from effllm import EffllmError
from effllm.kernels import warm
from effllm.offload.checkpoint import TensorStore
from effllm.quant.codes import dequantize
from effllm.quant.methods import rtn
from effllm.quant.pack import pack
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime.convert import ConvertOptions, convert
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.speculation import trained_draft_kinds
from effllm.runtime.speculation.assistant import AssistantDrafts
from effllm.runtime.stores.container import Container, StoredTensor
from effllm.runtime.stores.quantizing_store import QuantizingStore, format_like

FOUR = QuantSpec.parse("4bit")


def rounded(weight: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What the codes of a matrix stand for."""
    return torch.from_numpy(dequantize(rtn.quantize(weight.float().numpy(), spec), spec)).to(weight.dtype)


def low_bit(base: Path, bits: str) -> Path:
    """The model in base / "model" at these bits takes its place."""
    (base / "model").rename(base / "wide")
    list(convert(base / "wide", base / "model", ConvertOptions(Recipe(QuantSpec.parse(bits)), bits, threads=2)))
    return base


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    base = tmp_path_factory.mktemp("head")
    made = with_head(base)
    return low_bit(base, "8bit"), made


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[torch.nn.Module, torch.nn.Module]]:
    base = tmp_path_factory.mktemp("assistant")
    made = with_assistant(base, window=30)
    return low_bit(base, "8bit"), made


@pytest.fixture(scope="module", params=("head", "assistant"))
def engine(request: pytest.FixtureRequest, head: tuple[Path, Head], assistant: tuple[Path, object]) -> Iterator[Engine]:
    engine = opened({"head": head, "assistant": assistant}[request.param][0])
    yield engine
    engine.close()


@settings(max_examples=6)
@given(rows=st.integers(1, 70), depth=st.integers(1, 150), bits=st.sampled_from(("4bit", "6bit", "8bit")), kind=st.sampled_from(
    (torch.float32, torch.float16, torch.bfloat16)))
def test_codes_are_those_that_quantizing_makes(tmp_path_factory: pytest.TempPathFactory, rows: int, depth: int, bits: str,
                                               kind: torch.dtype) -> None:
    folder, spec = tmp_path_factory.mktemp("rounded"), QuantSpec.parse(bits)
    weight = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).to(kind)
    save_file({"norm": torch.ones(5), "weight": weight}, folder / "model.safetensors")
    inner = TensorStore.open(folder)
    with QuantizingStore(inner, [inner.tensors["weight"]], spec) as store:
        found = store.read(store.tensors["weight"])
        assert np.array_equal(found, pack(rtn.quantize(weight.float().numpy(), spec), spec))
        assert store.stored_nbytes(store.tensors["weight"]) == weight.nbytes and store.place(store.tensors["weight"]) is None
        assert np.array_equal(store.read(store.tensors["norm"]).view(np.float32), np.ones(5, np.float32))


def test_a_tensor_of_several_steps_is_whole(tmp_path: Path) -> None:
    weight = torch.randn(2000, 1024, generator=torch.Generator().manual_seed(1))
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    inner = TensorStore.open(tmp_path)
    with QuantizingStore(inner, [inner.tensors["weight"]], FOUR) as store:
        blob = np.zeros(store.tensors["weight"].nbytes, np.uint8)
        steps = list(store.reads(store.tensors["weight"], blob))
        for step, _ in reversed(steps):
            step()
    assert len(steps) > 3 and sum(nbytes for _, nbytes in steps) == len(blob)
    assert np.array_equal(blob, pack(rtn.quantize(weight.numpy(), FOUR), FOUR))


@pytest.mark.parametrize("specs, wanted", ((("bf16", "bf16", "8bit"), None), (("2bit", "bf16", "2bit"), "4bit"),
        (("5bit", "5bit", "8bit"), "5bit"), ((), None)))
def test_bits_are_those_of_most_weights(specs: tuple[str, ...], wanted: str | None) -> None:
    tensors = {str(i): StoredTensor(str(i), QuantSpec.parse(spec), (64, 64), 0) for i, spec in enumerate(specs)}
    found = format_like(Container("mixed", 4.0, tensors, {}, {}, {}, {}))
    assert found == (wanted and QuantSpec.parse(wanted)) and format_like(None) is None


@contextmanager
def beside_wide(base: Path, weights: list[torch.nn.Parameter], spec: QuantSpec) -> Iterator[Engine]:
    """The draft in codes beside its model as it was published, so that what they differ in is the draft's; `weights` are rounded alike."""
    kept = [each.data for each in weights]
    for each in weights:
        each.data = rounded(each.data, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_draft_kinds, "format_like", lambda container: spec)
        asked = EngineOptions(device="cpu", ctx=640, threads=2, kv="32bit", draft=str(base / "draft"))
        engine = list(open_engine(base / "wide", asked))[-1]
    try:
        yield engine
    finally:
        engine.close()
        for each, data in zip(weights, kept, strict=True):
            each.data = data


@pytest.mark.parametrize("bits", ("8bit", "4bit"))
def test_a_head_computes_what_its_codes_stand_for(head: tuple[Path, Head], bits: str) -> None:
    base, own = head
    weights = [each.weight for each in (*own.parts.values(), *own.layer.modules()) if isinstance(each, torch.nn.Linear)]
    with beside_wide(base, weights, QuantSpec.parse(bits)) as engine:
        for tokens in (20, 150):
            expected, (found, _) = own.scores(IDS[:tokens], 3)[0].numpy(), scores(engine, IDS[:tokens], 3)
            assert np.abs(found[0][0] - expected).max() < 0.04 * np.abs(expected).max(), "products round what they multiply to eight bits"


@pytest.mark.parametrize("bits", ("8bit", "4bit"))
def test_an_assistant_chooses_and_scores_by_its_codes(assistant: tuple[Path, tuple[torch.nn.Module, torch.nn.Module]], bits: str) -> None:
    base, (target, draft) = assistant
    weights = [each for name, each in draft.named_parameters() if each.ndim == 2 and "centroids" not in name]
    with beside_wide(base, weights, QuantSpec.parse(bits)) as engine:
        expected, (found, _) = guessed_by(target, draft, IDS[:150], 3, 30)[0].numpy(), scores(engine, IDS[:150], 3)
        logits, numbers = found[0]
        assert len(numbers) < len(expected) and expected.argmax() in numbers, "of groups that whole numbers choose"
        near = expected[numbers] > expected.min()  # in a group that both chose
        assert np.abs(logits - expected[numbers])[near].max() < 0.06 * np.abs(expected[numbers]).max() and near.mean() > 0.6


def test_memory_is_what_was_planned_and_less(engine: Engine) -> None:
    trained, own = engine.prepared.speculation.draft, engine.speculation._model
    assert trained.bits == engine.prepared.speculation.draft_bits == 8
    cache = own._cache
    kept = own._states.nbytes if isinstance(own, AssistantDrafts) else \
        sum(array.nbytes for array in cache.slots.memory) + cache.pool.nbytes + own._token_ids.nbytes
    assert trained.nbytes == own._weights._pager.nbytes + own._host.workspace.nbytes + kept
    stored = sum(map(trained.store.stored_nbytes, trained.infos))
    assert own._weights._pager.nbytes < stored, "the files have 32 bits"
    assert any(each.startswith("the draft model draft is rounded to 8 bits as it is read, like the model: ")
               for each in engine.prepared.notices)


def test_an_answer_is_what_it_is_without(engine: Engine) -> None:
    held_to_be_alike(engine, SAMPLERS["seeded"], 70)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ("4bit", "5bit", "6bit"))
@pytest.mark.parametrize("kind", ("head", "narrow", "assistant", "all of the vocabulary"))
def test_answers_at_other_bits(tmp_path: Path, kind: str, bits: str) -> None:
    if kind == "head" or kind == "narrow":
        with_head(tmp_path, hidden=48 if kind == "narrow" else 0)
    else:
        with_assistant(tmp_path, groups=20 if kind == "assistant" else 0)
    engine = opened(low_bit(tmp_path, bits), kv="4bit", kv_window=32)
    assert engine.prepared.speculation.draft_bits == int(bits[0])
    for name in SAMPLERS:
        held_to_be_alike(engine, SAMPLERS[name], 150)
    engine.close()


def test_beside_a_model_as_it_was_published_so_is_a_draft(tmp_path: Path) -> None:
    with_head(tmp_path)
    made = planned(tmp_path)
    assert made.speculation.draft_bits == 0 and not any("rounded" in each for each in made.notices)


def test_damaged_weights_are_named(head: tuple[Path, Head], tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(head[0] / "model")
    (tmp_path / "draft").mkdir()
    tensors = load_file(head[0] / "draft" / "model.safetensors")
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    (tmp_path / "draft" / "config.json").write_text((head[0] / "draft" / "config.json").read_text())
    with pytest.raises(EffllmError, match="draft: fc.weight: NaN or infinity among the weights"):
        opened(tmp_path)


def test_what_rounds_is_compiled_before_a_run(head: tuple[Path, Head]) -> None:
    asked = EngineOptions(draft=str(head[0] / "draft"))
    assert warm.ROUNDING in folder_kinds(head[0] / "model", asked)
    assert warm.ROUNDING not in folder_kinds(head[0] / "wide", asked)
    assert warm.ROUNDING not in folder_kinds(head[0] / "model", EngineOptions())


def test_the_plan_says_so(tmp_path: Path) -> None:
    saved_head(tmp_path / "fox-eagle3", 256, 4096, 512)
    asked = ("plan", "fable", "--no-probe", "--draft", str(tmp_path / "fox-eagle3"))
    wide, low = (CliRun(*asked, *more, "--json").json["speculation"] for more in ((), ("--bits", "4")))
    assert (wide["draft_bits"], low["draft_bits"]) == (None, 4) and low["draft_bytes"] < wide["draft_bytes"]
    ran = CliRun(*asked, "--bits", "4")
    assert "rounded to 4 bits like the model)" in ran.out
