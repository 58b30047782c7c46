"""Kernels and parameters particular to Qwen 4: n-gram embeddings, gated hyper-connections, and averaged keys, against transformers' modules
and their definitions. Whole models are in `test_qwen4_exp.py`."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextGatedResidual,
    Qwen4ExpTextNGramEmbedding,
    Qwen4ExpTextPLELayer,
)

from effllm.kernels import reference_indexer
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.delta_shape import DeltaShape
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import F16, F32
from effllm.kernels.ngram_shape import NgramShape, WithNgrams
from effllm.kernels.reference_ngrams import ended
from effllm.kernels.state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.offload.memory import anonymous
from effllm.quant.compressed_attention_weights import GatedResidual
from effllm.quant.kv import RawCodec
from effllm.quant.recurrent_weights import NgramWeights as Weights
from effllm.quant.weight import Linear, Norm, Weight
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape
from effllm.runtime.kv.states import controls
from effllm.runtime.ngrams import NgramConfig, primes_from
from effllm.runtime.rope import RopeTable

COUNT, WIDTH, ROWS, TEXT, END = 3, 20, 24, 60, 7
SIZES = {"hidden_size": WIDTH, "hc_count": COUNT, "hc_lowrank": 9, "ple_layer_ids": [2, 3], "ple_embed_dim": ROWS, "heads_per_ngram": 3,
         "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "vocab_size": 300, "eos_token_id": END,
         "num_hidden_layers": 4, "ngram_size": 3}
SHAPE = NgramShape(COUNT, WIDTH, 4, 3, ROWS)
OWN = NgramConfig((1, 2), SHAPE, 3, 50, 8, 1234, END, 300, 4)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def of(module: torch.nn.Linear | torch.nn.Module) -> Linear:
    data = module.weight.detach().numpy()
    return Linear(Weight.raw("f32", data.shape, data))


def norm_of(module: torch.nn.Module) -> Norm:
    return Norm("rms+1", module.weight.detach().numpy(), None, 1e-6)


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.4)
    return module.eval()


def ops_of(pool: ThreadPool, only: str | None) -> CpuOps:
    dims = Dims(WIDTH, 4, 2, 16, 8, 8, chunk=128, ctx=512, logit_rows=1, residual_streams=COUNT, residual_gate_rank=9, ngrams=SHAPE,
                num_ngram_layers=1)
    return CpuOps(pool, dims, default_registry(only))


class Asked(torch.nn.Module):
    """Stands for a table, or for all that makes rows: keeps what it is asked for."""

    def __init__(self, rows: np.ndarray | None = None) -> None:
        super().__init__()
        self.weight, self.rows, self.numbers = torch.zeros(1), rows, None

    def forward(self, numbers: torch.Tensor, past: None = None) -> torch.Tensor:
        self.numbers = numbers
        return torch.zeros(*numbers.shape, 1) if self.rows is None else torch.from_numpy(self.rows)[None]


@cache
def numbering(place: int) -> torch.nn.Module:
    theirs = Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**SIZES), ROWS, place + 1, place)
    theirs.ngram_embedding = Asked()
    return theirs


# ---- numbers


@given(st.lists(st.sampled_from([END, 1, 2, 3, 250]), min_size=1, max_size=24), st.integers(0, 1))
def test_rows_are_numbered_as_transformers_does(ids: list[int], place: int) -> None:
    """Behind the ends of texts, and at the beginning."""
    theirs = numbering(place)
    theirs(torch.tensor([ids]), None)
    every = np.concatenate([np.full(2, END), np.array(ids, np.int64)])
    found = OWN.row_ids(place + 1, np.lib.stride_tricks.sliding_window_view(every, 3))
    assert np.array_equal(found, theirs.ngram_embedding.numbers[0].numpy())


def test_what_a_config_says_of_tables_is_what_transformers_makes_of_it() -> None:
    for place, layer in enumerate(OWN.layers):
        theirs = Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**SIZES), ROWS, layer, place)
        assert OWN.multipliers(layer) == tuple(theirs.layer_multipliers.tolist())
        assert OWN.table_sizes(layer) == tuple(theirs.head_vocab_sizes)
        assert (OWN.num_rows(layer), OWN.width) == tuple(theirs.ngram_embedding.weight.shape)
        assert sum(OWN.shard_rows(layer)) == OWN.num_rows(layer) and len(OWN.shard_rows(layer)) == 4
    assert primes_from(20_000_000, 2) == (20_000_003, 20_000_023) and primes_from(2, 3) == (2, 3, 5)


def test_words_before_the_end_of_a_text_count_as_its_end() -> None:
    words = np.array([[1, 2, 3], [1, END, 3], [END, 2, 3], [1, 2, END], [END, END, END]])
    assert ended(words, END).tolist() == [[1, 2, 3], [END, END, 3], [END, 2, 3], [1, 2, END], [END, END, END]]


# ---- kernels


@pytest.mark.parametrize("only", [None, "reference"])
def test_streams_after_gates_are_those_of_transformers(pool: ThreadPool, only: str | None) -> None:
    theirs, ops = drawn(Qwen4ExpTextGatedResidual(Qwen4ExpTextConfig(**SIZES))), ops_of(pool, only)
    residual = GatedResidual(COUNT, norm_of(theirs.hc_norm), of(theirs.input_mix_weight_down), of(theirs.input_mix_weight_up),
                        of(theirs.block_inject_weight))
    for tokens in (1, 5, 40):
        x, branch = normal(tokens, tokens, COUNT * WIDTH), normal(99, tokens, WIDTH)
        with torch.no_grad():
            read, _, shares = (each.numpy() for each in theirs(torch.from_numpy(x)))
        expected = x.reshape(tokens, COUNT, WIDTH) + shares[..., None] * branch[:, None]
        with ops.collecting():
            own = ops.read_streams(x, residual)
            ops.flush()
            assert np.abs(own - read).max() < 1e-5 * np.abs(read).max()
            ops.write_streams(x, branch, residual)
        assert np.abs(x.reshape(expected.shape) - expected).max() < 1e-5 * np.abs(expected).max()


def weights_of(theirs: torch.nn.Module) -> Weights:
    taps = np.ascontiguousarray(theirs.conv1d.weight.detach().numpy()[:, 0].T)
    return Weights(of(theirs.key_proj), of(theirs.value_proj), taps, *map(norm_of, (theirs.norm_query, theirs.norm_key, theirs.norm_conv)))


@pytest.mark.parametrize("only", [None, "reference"])
def test_what_n_grams_add_is_what_transformers_adds_however_a_text_is_cut(pool: ThreadPool, only: str | None) -> None:
    """Also from a state that was taken again behind some of a few tokens, and from one that was kept within a pass."""
    theirs, ops = drawn(Qwen4ExpTextPLELayer(Qwen4ExpTextConfig(**SIZES), 1, 0)), ops_of(pool, only)
    w, told, x, rows = weights_of(theirs), controls(), normal(1, TEXT, COUNT * WIDTH), normal(2, TEXT, ROWS)
    theirs.ple_embedding = Asked(rows)
    with torch.no_grad():
        expected = x + theirs(torch.from_numpy(x)[None], None, None)[0].numpy()
    ids = np.random.default_rng(5).integers(0, 300, TEXT)
    shape = WithNgrams(DeltaShape(1, 1, 4, 4, 2), SHAPE)
    states = ops.state_layer(shape, anonymous(shape.nbytes), told)
    with ops.collecting():  # all at once: of few tokens products have other last bits
        products = ops.ngram_products(rows, w)

    def run(begin: int, end: int, source: int, target: int, after: int = 0, kept: int = NO_SLOT) -> np.ndarray:
        told[[FROM, TO, AFTER, KEPT]] = source, target, after, kept
        out, own, words = x[begin:end].copy(), [each[begin:end].copy() for each in products], states.words(ids[begin:end], END)
        with ops.collecting():
            states.add_ngrams(out, own, w)
        before = np.concatenate([np.full(2, END), ids])[begin : end + 2]
        assert np.array_equal(words, np.lib.stride_tricks.sliding_window_view(before, 3))
        return out

    whole = run(0, TEXT, NO_SLOT, 0)
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()
    cut = np.concatenate([run(0, 31, NO_SLOT, 0, 20, 2), run(31, 32, 0, 1), run(32, 39, 1, 0)])
    assert np.array_equal(cut, whole[:39])
    assert np.array_equal(run(20, 40, 2, 3), whole[20:40])  # from what was kept within the pass
    run(32, 39, 1, 0)
    states.rebuild_slot(1, 0, 4)  # three of the seven are taken back
    assert np.array_equal(run(36, TEXT, 0, 1), whole[36:])
    states.write_slot(3, states.read_slot(1))
    assert np.array_equal(states.read_slot(3), states.read_slot(1))


# ---- keys that are means


INDEX = IndexShape(6, 16, 8, 5, tokens_per_key=4, pooled=True)
TABLE = RopeTable((10_000.0 ** (-np.arange(4) / 4)).astype(np.float32), 1.0, 8)
CLOSING = Norm("rms+1", normal(8, 16), None, 1e-6), TABLE


@pytest.mark.parametrize(("stored", "only"), [(F32, None), (F32, "reference"), (F16, None)])
def test_blocks_are_chosen_by_means_wherever_a_text_is_cut(pool: ThreadPool, stored: int, only: str | None) -> None:
    """And attended to with the tokens behind the last whole one, whose block has no key."""
    tokens, heads, depth = 200, 4, 16
    dims = Dims(8, heads, 2, depth, 8, 8, chunk=256, ctx=256, logit_rows=1, indexer=INDEX)
    spec = AttnSpec(heads, 2, depth, depth**-0.5, None, None, INDEX, True)
    by, keys = normal(11, tokens, 96), normal(12, tokens, 16)
    q, k, v = normal(13, tokens, heads * depth), normal(14, tokens, 2 * depth), normal(15, tokens, 2 * depth)

    def through(cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        held, out = build_cache([CpuOps(pool, dims, default_registry(only))], [spec], RawCodec(stored), CacheShape(256, chunk=256)), []
        for cut in cuts:
            for piece in held.pieces(cut):
                span = slice(held.n, held.n + piece)
                held.begin(piece)
                held.layer(0).choose(by[span].copy(), keys[span].copy(), None, CLOSING)
                out.append(held.layer(0).attend(q[span].copy(), k[span].copy(), v[span].copy()).copy())
                held.commit()
        return np.concatenate(out), held.token_selections[0].index.keys(tokens // 4).astype(np.float32)

    whole, made = through([tokens])
    stored_keys = keys if stored == F32 else keys.astype(np.float16).astype(np.float32)
    places = np.arange(tokens // 4) * 4
    meant = reference_indexer.means(stored_keys, ("rms+1", CLOSING[0].weight, None, 1e-6), 4, *TABLE.cos_sin(places))
    assert np.abs(made - meant).max() < (1e-5 if stored == F32 else 4e-3)
    for cuts in ([1] * 30 + [7, 100, 3, 60], [50, 150]):
        again, keys_again = through(cuts)
        assert np.array_equal(again, whole) and np.array_equal(keys_again, made)
    found = reference_indexer.scores(by, made, None, 0, INDEX)
    seen = reference_indexer.seen(reference_indexer.choose(found, INDEX), tokens, 2, INDEX)[:, 0]
    late = np.arange(tokens) >= INDEX.dense_tokens
    causal = np.arange(tokens) <= np.arange(tokens)[:, None]
    counts = (seen & causal)[late].sum(1)
    assert np.array_equal(counts, 20 + (np.arange(tokens)[late] + 1) % 4)
    scores = np.einsum("thd,nhd->thn", q.reshape(tokens, heads, depth), np.repeat(k.reshape(tokens, 2, depth), 2, 1)) * depth**-0.5
    scores = np.where(np.where(late[:, None], seen & causal, causal)[:, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("thn,nhd->thd", shares / shares.sum(-1, keepdims=True), np.repeat(v.reshape(tokens, 2, depth), 2, 1))
    assert np.abs(whole - expected.reshape(whole.shape)).max() < (1e-4 if stored == F32 else 2e-2)
