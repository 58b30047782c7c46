"""Families with hyper-connections, recurrent states or unusual routers, with layers on a simulated GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bit_exactness import assert_restored_text_continues
from conversions import options, run
from family_models import CASES, CONTEXT, Case, assert_close, oracle, written
from gpu_runs import divergence, logits, opened, simulated
from hybrid_models import IDS, read_afresh
from more_family_cases import DEEPSEEK_4
from test_device_memory import watched
from transformers import PreTrainedModel

from effllm.kernels import reference_cca, reference_compressed, reference_indexer, reference_ngrams
from effllm.kernels.cca_shape import CcaShape
from effllm.kernels.compressed_shape import CompressedShape
from effllm.kernels.conv_shape import ConvShape
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import F16, F32
from effllm.kernels.ngram_shape import NgramShape, WithNgrams
from effllm.kernels.state_shape import NO_SLOT
from effllm.quant.compressed_attention_weights import Compressor
from effllm.quant.recurrent_weights import Cca, NgramWeights
from effllm.quant.weight import Norm
from effllm.runtime.kv.states import controls
from effllm.runtime.rope import RopeTable
from effllm.runtime.sessions.session_store import SessionStore

LATER = [pytest.param(name, marks=pytest.mark.slow) for name in (
    "qwen4_exp, two tables, sigmoids, other layers, bfloat16", "zaya, windows, longer convolutions, bfloat16",
    "glm5_next, no bound, other layers, a choice that is shared, bfloat16",
    "hy_v4, three streams, other layers, groups, tied, bfloat16", "deepseek_v4, two streams, stretched, other layers, bfloat16")]
PROMPT = 480


def all_seen(case: Case) -> Case:
    """A model with full attention over the whole context, as a GPU needs it."""
    chosen = {"qwen4_exp_text": "indexer_budget", "glm5_next_text": "index_topk", "hy_v4": "index_topk"}.get(case.family)
    return replace(case, changes={**case.changes, **({chosen: CONTEXT} if chosen else {})})


@pytest.fixture(scope="module", params=["zaya", "glm5_next", "qwen4_exp_text", "hy_v4", "deepseek_v4", *LATER])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PreTrainedModel]]:
    folder = tmp_path_factory.mktemp("model")
    yield folder, written(all_seen(CASES[request.param]), folder)


def test_layers_on_the_gpu_answer_as_transformers_does(model: tuple[Path, PreTrainedModel]) -> None:
    """Some of them or all, in chunks of a prompt and in single tokens; working memory stays below the plan."""
    folder, theirs = model
    ids = np.random.default_rng(3).integers(0, 290, PROMPT + 8).tolist()
    expected = oracle(theirs, ids)[PROMPT:]
    for layers in (2, theirs.config.get_text_config().num_hidden_layers):
        engine, _ = opened(folder, simulated(1 << 30), gpu_layers=layers, kv="32bit")
        try:
            assert engine.placement.devices.count("cuda") == layers
            with watched() as seen:
                list(engine.prefill(ids[:PROMPT]))
                rows = np.stack([engine.forward_logits([token])[0].copy() for token in ids[PROMPT:]])
            assert_close(rows, expected, lambda: oracle(theirs, ids)[PROMPT:])
            planned = engine.placement.gpu.workspace_bytes
            assert 0 < seen.most <= planned, f"{seen.most / 2**20:.1f} MiB used, {planned / 2**20:.1f} MiB planned"
        finally:
            engine.close()


@pytest.mark.slow
def test_layers_of_four_bits_on_the_gpu_answer_as_on_the_cpu(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """With float32 activations on both sides; where two experts are nearly as good as each other rounding may choose."""
    run(model[0], tmp_path / "4bit", options("4bit"))
    wanted = logits(opened(tmp_path / "4bit", None, exact=True, kv="32bit")[0])
    engine, _ = opened(tmp_path / "4bit", simulated(1 << 30), gpu_layers=2, exact=True, kv="32bit")
    assert engine.placement.devices.count("cuda") == 2 and divergence(logits(engine), wanted) < 1e-4


class OnTorch:
    """A layer's states on the GPU, pass by pass from the start of a text."""

    def __init__(self, shape: CcaShape | CompressedShape | WithNgrams) -> None:
        self.ops, self.pass_slots = TorchOps("cpu"), controls()
        self.states = self.ops.state_layer(shape, np.zeros(shape.nbytes, np.uint8), self.pass_slots)
        self.slot = NO_SLOT

    def begin(self, after: int = 0, hold: bool = True) -> None:
        target = 1 if self.slot == 0 else 0
        self.pass_slots[:] = self.slot, target, after, 3
        self.slot = target if hold else self.slot

    def put(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [self.ops.put(each, "f32").view(each.shape) for each in arrays]


@pytest.mark.parametrize("shape", [CcaShape(6, 2, 24, 2, 2), CcaShape(4, 1, 16, 3, 4), CcaShape(2, 2, 16, 1, 2)])
def test_queries_keys_and_values_on_torch_match_the_reference(shape: CcaShape) -> None:
    """Wherever a text is cut, behind what was kept on the way and behind a draft that was taken back."""
    rng, count, tokens = np.random.default_rng(2), shape.qk_channels, 40
    x = rng.standard_normal((tokens, shape.projection_widths[0]), np.float32)
    w = Cca(*(rng.standard_normal(size, np.float32) for size in ((shape.first, count), count, count * shape.second * shape.depth, count,
                                                                 shape.kv_heads)))
    by_head = w.head_conv.reshape(count, shape.second, shape.depth)
    before = np.zeros((shape.taps - 1, shape.channels))
    expected = np.concatenate(reference_cca.mix(x, before, w.conv, w.conv_bias, by_head, w.head_conv_bias, w.key_temperatures, shape), 1)
    for cuts in ((40,), (1, 1, 2, 9, 27)):
        layer, at = OnTorch(shape), 0
        own, rows = Cca(*layer.put(w.conv, w.conv_bias, w.head_conv, w.head_conv_bias, w.key_temperatures)), []

        def run(begin: int, end: int, layer: OnTorch = layer, own: Cca = own) -> np.ndarray:
            return torch.cat(layer.states.convolved(torch.from_numpy(x[begin:end]), own), 1).numpy()

        for many in cuts:
            layer.begin(after=many // 2)
            rows.append(run(at, at + many))
            at += many
        assert np.allclose(np.concatenate(rows), expected, atol=2e-5)
    layer.slot = 3  # behind 13 tokens and half of 27 more
    layer.begin()
    assert np.allclose(run(26, 40), expected[26:], atol=2e-5)
    begun = layer.slot = NO_SLOT
    layer.begin(hold=False)
    run(0, 6)
    layer.states.rebuild_slot(begun, 2, 4)
    layer.slot = 2
    layer.begin()
    assert np.allclose(run(4, 40), expected[4:], atol=2e-5)


def test_n_grams_on_torch_match_the_reference() -> None:
    """As above, and the words before a token are those that were told, in a pass that was kept, taken back or brought from elsewhere."""
    shape, rng, tokens, end = NgramShape(2, 24, 3, 3, 16), np.random.default_rng(5), 40, 9
    both = WithNgrams(ConvShape(8, 3), shape)
    x, keys = rng.standard_normal((2, tokens, shape.channels), np.float32)
    values, ids = rng.standard_normal((tokens, shape.width), np.float32), rng.integers(0, 300, tokens)
    taps, norms = rng.standard_normal((shape.kernel, shape.channels), np.float32), rng.standard_normal((3, shape.channels), np.float32)
    streams = x.reshape(tokens, shape.count, -1)
    made, inputs = reference_ngrams.gated(streams, keys.reshape(streams.shape), values, norms, 1e-6)
    inputs = inputs.reshape(tokens, -1)
    expected = x + made.reshape(x.shape) + reference_ngrams.convolve(inputs, np.zeros((shape.taps - 1, shape.channels)), taps, shape.size)
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate([[end] * 2, ids]), shape.size)

    def passed(layer: OnTorch, begin: int, end_: int) -> None:
        own = NgramWeights(None, None, *layer.put(taps), *(Norm("rms+1", each, None, 1e-6) for each in layer.put(*norms)))
        assert np.array_equal(layer.states.words(ids[begin:end_], end), windows[begin:end_])
        given = (torch.from_numpy(each[begin:end_].copy()) for each in (x, keys, values))
        found = layer.states.add_ngrams(next(given), list(given), own)
        assert np.allclose(found.numpy(), expected[begin:end_], atol=1e-5)

    for cuts in ((40,), (1, 1, 2, 9, 27)):
        layer, at = OnTorch(both), 0
        for many in cuts:
            layer.begin(after=many // 2)
            passed(layer, at, at + many)
            at += many
    layer.slot = 3
    layer.begin()
    passed(layer, 26, 40)
    other = OnTorch(both)
    other.begin(hold=False)
    passed(other, 0, 6)
    other.states.rebuild_slot(NO_SLOT, 2, 4)
    layer.states.write_slot(2, other.states.read_slot(2))
    layer.slot = 2
    layer.begin()
    passed(layer, 4, 40)


TURNED = RopeTable((10_000.0 ** -(np.arange(4) / 4)).astype(np.float32), 1.0, 8)
OF_FOUR = CompressedShape(32, 4, True, 8, 16, 40, (32,), (3,), 3 * 2 * (32 + 16))


@pytest.mark.parametrize("shape", [OF_FOUR, CompressedShape(32, 16, False, 8, 0, 40, (32,), (), OF_FOUR.state_size)],
                         ids=["four", "sixteen"])
def test_keys_of_several_tokens_on_torch_match_the_reference(shape: CompressedShape) -> None:
    """Wherever a text is cut, behind what was kept on the way and behind a draft that was taken back; keys of the index too."""
    rng, tokens, index = np.random.default_rng(4), 70, IndexShape(3, 16, 8, 20, tokens_per_key=4)
    products = [rng.standard_normal((tokens, width), np.float32) for width in shape.pooled_projection_widths]
    biases = [rng.standard_normal((shape.tokens_per_key, shape.rows_per_token * width), np.float32) for width in (
        shape.width, shape.index_dim) if width]
    norms = [1 + rng.standard_normal(width, np.float32) / 8 for width in (shape.width, shape.index_dim)]

    def meant(place: int) -> np.ndarray:
        width = (shape.width, shape.index_dim)[place]
        made, *_ = reference_compressed.compress(*products[2 * place : 2 * place + 2], biases[place], 0, shape.tokens_per_key,
                                                 np.zeros((shape.rows_per_token, 3, width)))
        turns = TURNED.cos_sin(np.arange(len(made)) * shape.tokens_per_key)
        return reference_compressed.finished(made, ("rms", norms[place], None, 1e-6), *turns)

    def passed(layer: OnTorch, keys: tuple, begin: int, end: int) -> None:
        own = Compressor((), layer.put(biases[0])[0], Norm("rms", *layer.put(norms[0]), None, 1e-6),
                         *((layer.put(biases[1])[0], Norm("rms", *layer.put(norms[1]), None, 1e-6)) if shape.index_dim else (None, None)))
        layer.states.compress([torch.from_numpy(each[begin:end].copy()) for each in products], own, begin, TURNED, *keys)

    def opened_keys(layer: OnTorch) -> tuple:
        keys = layer.ops.compressed_keys(shape, np.zeros(shape.keys_nbytes(128, F32), np.uint8), F32)
        return keys, layer.ops.index_layer(index, np.zeros(index.nbytes(128, F32), np.uint8), F32) if shape.index_dim else None

    def check(keys: tuple) -> None:
        for place, own in enumerate(keys):
            if own is not None:
                expected = meant(place)
                assert np.allclose(own.rows[: len(expected)].numpy(), expected, atol=2e-5)

    for cuts in ((70,), (1, 1, 2, 9, 30, 27)):
        layer, at = OnTorch(shape), 0
        keys = opened_keys(layer)
        for many in cuts:
            layer.begin(after=many // 2)
            passed(layer, keys, at, at + many)
            at += many
        check(keys)
    for each in keys:  # what a session keeps of them, and takes
        if each is not None:
            data = each.read(5, 70)
            each.memory.zero_()
            each.write(5, data)
            assert np.array_equal(each.read(5, 70), data)
    layer.slot = 3  # behind 43 tokens and half of 27 more
    keys = opened_keys(layer)
    layer.begin()
    passed(layer, keys, 56, 70)
    first = -(-56 // shape.tokens_per_key)
    assert np.allclose(keys[0].rows[first : 70 // shape.tokens_per_key].numpy(), meant(0)[first:], atol=2e-5)
    other = OnTorch(shape)
    keys = opened_keys(other)
    other.begin(hold=False)
    passed(other, keys, 0, 6)
    other.states.rebuild_slot(NO_SLOT, 2, 3)
    other.slot = 2
    other.begin()
    passed(other, keys, 3, 70)
    check(keys)


def test_a_choice_on_torch_is_the_references() -> None:
    """By whole numbers, of which many are equal, in pieces as small as memory may ask for."""
    shape, rng, tokens, begin = IndexShape(3, 16, 8, 5, tokens_per_key=4), np.random.default_rng(7), 90, 13
    keys, q = rng.integers(-2, 3, ((begin + tokens) // 4, 16)).astype(np.float32), rng.integers(-2, 3, (tokens, 48)).astype(np.float32)
    weights = rng.integers(-2, 3, (tokens, 3)).astype(np.float32)
    index = TorchOps("cpu").index_layer(shape, np.zeros(shape.nbytes(128, F16), np.uint8), F16)
    index.rows[: len(keys)] = torch.from_numpy(keys).half()
    found = index.choose(torch.from_numpy(q), torch.from_numpy(weights), begin)
    chosen = reference_indexer.choose(reference_indexer.scores(q, keys, weights, begin, shape), shape)
    closed = np.arange(len(keys)) < ((begin + np.arange(tokens) + 1) // 4)[:, None]
    assert np.array_equal(found.numpy(), reference_indexer.seen(chosen, len(keys), 1, shape)[:, 0] & closed)
    assert index.choose(torch.from_numpy(q[:10]), torch.from_numpy(weights[:10]), 13) is None and shape.dense_tokens == 23


def test_layers_that_choose_among_keys_of_several_tokens_answer_as_on_the_cpu(tmp_path: Path) -> None:
    """Far beyond what all tokens see, some layers here and some there; when what was read is taken back, and from a session."""
    written(Case("deepseek_v4", {**DEEPSEEK_4, "initializer_range": 0.08, "index_topk": 10}), tmp_path)
    ids = np.random.default_rng(3).integers(0, 290, 330).tolist()
    found = []
    for layers in (0, 2, 4):
        engine, _ = opened(tmp_path, simulated(1 << 30) if layers else None, gpu_layers=layers, exact=True, kv="32bit")
        try:
            assert engine.config.indexer.shape.dense_tokens == 43 and engine.placement.devices.count("cuda") == layers
            list(engine.prefill(ids))
            rows = [engine.forward_logits([token])[0].copy() for token in (3, 4)]
            engine.reset()
            list(engine.prefill(ids[:300]))
            found.append([*rows, engine.forward_logits([5])[0].copy()])
            if layers == 2:
                read_afresh(engine, IDS[:200])
                assert_restored_text_continues(engine, SessionStore(tmp_path / "sessions"), 207)
        finally:
            engine.close()
    for each in found[1:]:
        assert divergence(np.stack(each), np.stack(found[0])) < 1e-8
