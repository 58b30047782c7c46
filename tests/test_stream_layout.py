"""How a model is split for streaming: every byte of every matrix in exactly one part, in order of use, the rest in memory; and the chunks
of a prefill."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import effllm
from effllm import DoesNotFit
from effllm.kernels.layout import PAGE
from effllm.offload.hardware import rss
from effllm.offload.placement import Budget, Placement, Residency
from effllm.offload.streaming_pager import FETCH_NBYTES
from effllm.quant.spec import QuantSpec
from effllm.runtime.config import parse_config
from effllm.runtime.measuring.synthetic import SHAPES
from effllm.runtime.prefill_chunks import FEW, PASS_MULTIPLES, join_chunks, widest_prefill
from effllm.runtime.prepare import EngineOptions, prepare_with
from effllm.runtime.pull.plan import ExpectedStore
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights import stream_layout

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SPECS = (None, "codebook4:16", "affine4:64", "symmetric8:32", "offset4:64", "super4:32", "block8:32")


def cut_of(shape: str | dict, spec: str | None = None) -> tuple[stream_layout.StreamLayout, dict, ExpectedStore]:
    """A named shape as if its files were here."""
    config = parse_config(SHAPES[shape] if isinstance(shape, str) else shape)
    store = ExpectedStore(config, None if spec is None else QuantSpec.parse(spec))
    tensors = check_tensors(config, store, store.container)
    return stream_layout.plan_layout(tensors, store), tensors, store


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", ("llama3.2-1b", "llama3-8b"))
def test_every_byte_is_in_one_place(shape: str, spec: str | None) -> None:
    """Streamed matrices byte by byte, but for the padding between their sections; the table alone is nowhere as a whole."""
    made, tensors, store = cut_of(shape, spec)
    lie = {info.name: info.nbytes for infos in made.always.values() for info in infos}
    for roles in tensors.values():
        for tensor in roles.values():
            own = made.slices.get(tensor.name)
            if own is None:
                assert tensor.name in lie or tensor.name in made.tables
                continue
            assert [(before.end, after.first) for before, after in zip(own, own[1:])] == [(cut.first,) * 2 for cut in own[1:]]
            assert own[0].first == 0 and own[-1].end == tensor.shape[0]
            ranges = sorted((found.offset, found.nbytes) for cut in own for found in (
                made.parts[cut.part].ranges[i] for i in cut.ranges.values()))
            assert all(begin + nbytes <= after for (begin, nbytes), (after, _) in zip(ranges, ranges[1:]))
            rest = tensor.nbytes - sum(nbytes for _, nbytes in ranges) - lie.get(stream_layout.fixed_name(tensor.name), 0)
            assert 0 <= rest < 64 * 3
    assert made.tables == {"model.embed_tokens.weight"}
    assert made.always_nbytes >= FETCH_NBYTES + sum(lie.values())
    streamed = sum(made.sizes)
    unread = 0 if shape == "llama3.2-1b" else tensors["outer"]["embed"].nbytes
    assert abs(streamed + sum(lie.values()) - (store.nbytes - unread)) < 0.01 * store.nbytes


@pytest.mark.parametrize("spec", SPECS)
def test_parts_are_of_one_size_whatever_the_layer(spec: str | None) -> None:
    made, tensors, _ = cut_of("llama3-8b", spec)
    assert max(made.sizes) < stream_layout.PART_NBYTES + (256 << 10) and 2 * max(made.sizes) < 64 << 20
    order = [tensor.name for key in range(32) for role in ("q", "k", "v", "o", "gate", "up", "down") for tensor in [tensors[key][role]]]
    seen = sorted((cut.part, name) for name, own in made.slices.items() for cut in own)
    first = {}
    for part, name in seen:
        first.setdefault(name, part)
    assert [first[name] for name in order] == sorted(first[name] for name in order), "parts come in the order of use"
    assert first["lm_head.weight"] == max(first.values())
    for key in range(32):
        gate, up = (made.slices[tensors[key][role].name] for role in ("gate", "up"))
        assert [(cut.part, cut.first, cut.end) for cut in gate] == [(cut.part, cut.first, cut.end) for cut in up]


def test_what_cannot_be_read_as_it_lies_stays() -> None:
    plain, tensors, _ = cut_of("llama3.2-1b", "codebook4:16")
    with_outliers = {key: {role: replace(tensor, spec=replace(tensor.spec, outliers=0.01)) if len(tensor.shape) == 2 else tensor
                           for role, tensor in roles.items()} for key, roles in tensors.items()}
    store = ExpectedStore(parse_config(SHAPES["llama3.2-1b"]), QuantSpec.parse("codebook4:16"))
    assert plain.parts and not stream_layout.plan_layout(with_outliers, store).parts
    store.place = lambda info: None
    converted = stream_layout.plan_layout(tensors, store)
    assert not converted.parts and not converted.tables and converted.kept_for == stream_layout.CONVERTED_REASON
    mixture, *_ = cut_of("olmoe-1b-7b")
    assert mixture.kept_for == stream_layout.EXPERTS_REASON and not any("experts" in name for name in mixture.slices)
    assert any("q_proj" in name for name in mixture.slices) and not plain.kept_for


def test_the_number_of_parts_is_bounded() -> None:
    """A config may claim any size, and a plan is made of it before anything is downloaded."""
    large = {**SHAPES["llama3-8b"], "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    made, *_ = cut_of(large)
    assert max(made.sizes) > 1.5 * stream_layout.PART_NBYTES and 2 * max(made.sizes) < 64 << 20 and len(made.parts) < 16_000
    absurd = {**large, "hidden_size": 65_536, "intermediate_size": 1 << 18, "num_attention_heads": 512, "num_hidden_layers": 200}
    made, _, store = cut_of(absurd)
    assert not made.parts and not made.tables and made.always_nbytes > store.nbytes


def test_a_model_that_cannot_be_streamed_says_why() -> None:
    apart = lambda info: None if ".experts.3.up" in info.name else info.offset  # noqa: E731
    for shape, said, place in (("olmoe-1b-7b", stream_layout.EXPERTS_REASON, apart),
                               ("llama3.2-1b", stream_layout.CONVERTED_REASON, lambda info: None)):
        config = parse_config(SHAPES[shape])
        store = ExpectedStore(config)
        store.place = place
        with pytest.raises(DoesNotFit, match=said) as caught:
            prepare_with(FABLE, config, store, EngineOptions(device="cpu", ram=str(rss() + (1200 << 20)), ctx=512))
        assert caught.value.exit_code == 4 and (said == stream_layout.EXPERTS_REASON or "effllm quantize" in caught.value.hint)


@given(chunks=st.lists(st.integers(1, 512), max_size=20), most=st.integers(512, 4096))
def test_chunks_go_together_and_few_tokens_alone(chunks: list[int], most: int) -> None:
    passes = list(join_chunks(chunks, most))
    assert sum(passes) == sum(chunks) and all(0 < length <= most for length in passes)
    few = Counter(length for length in chunks if length <= FEW)
    assert Counter(length for length in passes if length <= FEW) == few
    ends = {sum(chunks[:i]) for i in range(len(chunks) + 1)}
    assert {sum(passes[:i]) for i in range(len(passes) + 1)} <= ends, "passes end where chunks do"
    large = [length for length in passes if length > FEW]
    assert len(large) <= len([length for length in chunks if length > FEW])


def placement(ctx: int, streamed: int) -> Placement:
    return Placement(("cpu",), ctx, 0, 0, 0, 0, 0, Budget(0), residency=Residency((), (0,) if streamed else (), 0, streamed, 0))


def test_a_pass_is_as_wide_as_costs_little() -> None:
    def plans(costs: dict[int, int], ctx: int = 4096):
        return lambda tokens: placement(ctx, 1000 + costs.get(tokens, 10_000))

    assert widest_prefill(plans({512: 0, 1024: 50, 2048: 100, 4096: 101}), 512)[0] == 2048
    assert widest_prefill(plans({512: 0}), 512)[0] == 512
    assert widest_prefill(plans({512: 0, 1024: 0, 2048: 0, 4096: 0}, ctx=1024 + PAGE), 512)[0] == 1024
    assert widest_prefill(lambda tokens: placement(4096, 0), 512)[0] == 512, "what is in memory keeps its chunks"

    def refuses(tokens: int) -> Placement:
        if tokens > 1024:
            raise DoesNotFit("too wide", "")
        return placement(4096, 1000)

    assert widest_prefill(refuses, 512) == (1024, placement(4096, 1000)) and PASS_MULTIPLES == (8, 4, 2)
