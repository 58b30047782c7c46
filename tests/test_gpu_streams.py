"""Families of which a layer's streams, its states or its routers go beside the one stream of others, with layers on a simulated GPU."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from effllm.kernels import reference_cca, reference_ngrams
from effllm.kernels.cca_shape import CcaShape
from effllm.kernels.conv_shape import ConvShape
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.ngram_shape import NgramShape, WithNgrams
from effllm.kernels.state_shape import NO_SLOT
from effllm.quant.state_weights import Cca, Ngrams
from effllm.quant.weight import Norm
from effllm.runtime.kv.states import controls

sys.path.insert(0, str(Path(__file__).parent))
from conversions import options, run
from family_models import CASES, CONTEXT, Case, assert_close, oracle, written
from gpu_runs import divergence, logits, opened, simulated
from test_device_memory import watched

LATER = [pytest.param(name, marks=pytest.mark.slow) for name in (
    "qwen4_exp, two tables, sigmoids, other layers, bfloat16", "zaya, windows, longer convolutions, bfloat16",
    "glm5_next, no bound, other layers, a choice that is shared, bfloat16")]
PROMPT = 480


def all_seen(case: Case) -> Case:
    """A model whose tokens see all of a context, as a card needs it."""
    chosen = {"qwen4_exp_text": "indexer_budget", "glm5_next_text": "index_topk"}.get(case.family)
    return replace(case, changes={**case.changes, **({chosen: CONTEXT} if chosen else {})})


@pytest.fixture(scope="module", params=["zaya", "glm5_next", "qwen4_exp_text", *LATER])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PreTrainedModel]]:
    folder = tmp_path_factory.mktemp("model")
    yield folder, written(all_seen(CASES[request.param]), folder)


def test_layers_on_the_card_answer_as_transformers_does(model: tuple[Path, PreTrainedModel]) -> None:
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
            planned = engine.placement.card.workspace_bytes
            assert 0 < seen.most <= planned, f"{seen.most / 2**20:.1f} MiB used, {planned / 2**20:.1f} MiB planned"
        finally:
            engine.close()


@pytest.mark.slow
def test_layers_of_four_bits_on_the_card_answer_as_on_the_cpu(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """With float32 activations on both sides; where two experts are nearly as good as each other rounding may choose."""
    run(model[0], tmp_path / "4bit", options("4bit"))
    wanted = logits(opened(tmp_path / "4bit", None, exact=True, kv="32bit")[0])
    engine, _ = opened(tmp_path / "4bit", simulated(1 << 30), gpu_layers=2, exact=True, kv="32bit")
    assert engine.placement.devices.count("cuda") == 2 and divergence(logits(engine), wanted) < 1e-4


class OnTorch:
    """A layer's states on the card, pass by pass from the beginning of a text."""

    def __init__(self, shape: CcaShape | WithNgrams) -> None:
        self.ops, self.told = TorchOps("cpu"), controls()
        self.states = self.ops.state_layer(shape, np.zeros(shape.nbytes, np.uint8), self.told)
        self.slot = NO_SLOT

    def begin(self, after: int = 0, hold: bool = True) -> None:
        target = 1 if self.slot == 0 else 0
        self.told[:] = self.slot, target, after, 3
        self.slot = target if hold else self.slot

    def put(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [self.ops.put(each, "f32").view(each.shape) for each in arrays]


@pytest.mark.parametrize("shape", [CcaShape(6, 2, 24, 2, 2), CcaShape(4, 1, 16, 3, 4), CcaShape(2, 2, 16, 1, 2)])
def test_queries_keys_and_values_on_torch_match_the_reference(shape: CcaShape) -> None:
    """Wherever a text is cut, behind what was kept on the way and behind a draft that was taken back."""
    rng, count, tokens = np.random.default_rng(2), shape.convolved, 40
    x = rng.standard_normal((tokens, shape.products[0]), np.float32)
    w = Cca(*(rng.standard_normal(size, np.float32) for size in ((shape.first, count), count, count * shape.second * shape.depth, count,
                                                                 shape.kv_heads)))
    by_head = w.by_head.reshape(count, shape.second, shape.depth)
    before = np.zeros((shape.taps - 1, shape.channels))
    expected = np.concatenate(reference_cca.mix(x, before, w.conv, w.bias, by_head, w.head_bias, w.temps, shape), 1)
    for cuts in ((40,), (1, 1, 2, 9, 27)):
        layer, at = OnTorch(shape), 0
        own, rows = Cca(*layer.put(w.conv, w.bias, w.by_head, w.head_bias, w.temps)), []

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
    layer.states.again(begun, 2, 4)
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
        own = Ngrams(None, None, *layer.put(taps), *(Norm("rms+1", each, None, 1e-6) for each in layer.put(*norms)))
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
    other.states.again(NO_SLOT, 2, 4)
    layer.states.write_slot(2, other.states.read_slot(2))
    layer.slot = 2
    layer.begin()
    passed(layer, 4, 40)
