"""Compressed keys (one for several tokens): kernels against their definition and transformers, and bits independent of chunking;
hyper-connections, and partial rotation at the end of heads."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from effllm.kernels import reference_compressed as meaning
from effllm.kernels import reference_hyper_connections, reference_indexer
from effllm.kernels.compressed_shape import CompressedShape
from effllm.kernels.cpu import compressed_attention
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.indexer_shape import IndexShape
from effllm.kernels.layout import F16, F32
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.compressed_attention_weights import Compressor, HyperConnection
from effllm.quant.kv import RawCodec
from effllm.quant.weight import Linear, Norm, Weight
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttentionAndState, AttnSpec, CacheShape
from effllm.runtime.rope import RopeTable

CTX, TEXT, HEADS, WIDTH, TURNED, WINDOW = 384, 300, 18, 32, 8, 40
TABLE = RopeTable((10_000.0 ** -(np.arange(TURNED // 2) / (TURNED // 2))).astype(np.float32), 1.0, TURNED)
FEW = CompressedShape(WIDTH, 4, True, TURNED, 16, WINDOW, (WIDTH,), (3,), 3 * 2 * (WIDTH + 16))
MANY = CompressedShape(WIDTH, 16, False, TURNED, 0, WINDOW, (WIDTH,), (), FEW.state_size)
SHAPES = {"four, chosen": (FEW, IndexShape(3, 16, TURNED, 20, tokens_per_key=4)), "sixteen": (MANY, None)}


def normal(seed: int, *size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


class Text:
    """Random queries, keys and products of a text and weights of a layer. Those of the index choose by whole numbers."""

    def __init__(self, name: str) -> None:
        self.shape, self.index = SHAPES[name]
        self.q, self.k = normal(1, TEXT, HEADS * WIDTH), normal(2, TEXT, WIDTH).astype(np.float16).astype(np.float32)
        self.products = [normal(3 + i, TEXT, width) for i, width in enumerate(self.shape.pooled_projection_widths)]
        self.sinks = normal(8, HEADS)
        bias, parts = normal(9, self.shape.tokens_per_key,
                             self.shape.rows_per_token * WIDTH), self.shape.rows_per_token * self.shape.index_dim
        norm = Norm("rms", 1 + 0.1 * normal(10, WIDTH), None, 1e-6)
        index = (normal(11, self.shape.tokens_per_key, parts), Norm("rms", np.ones(16, np.float32), None, 1e-6)) if parts else (None, None)
        self.w = Compressor((), bias, norm, *index)
        if self.index is not None:
            self.by, self.weights = normal(12, TEXT, 48), normal(13, TEXT, 3)

    def cache(self, pool: ThreadPool, stored: int = F32, sink: int = 64, only: str | None = None) -> KVCache:
        dims = Dims(8, HEADS, 1, WIDTH, 8, 8, chunk=512, ctx=CTX, logit_rows=1, recurrent=self.shape, indexer=self.index,
                    parallel_hybrid=True, output_group_width=8)
        spec = AttnSpec(HEADS, 1, WIDTH, WIDTH**-0.5, WINDOW, None, self.index, self.index is not None, False, self.shape)
        backends = [CpuOps(pool, dims, default_registry(only))]
        return build_cache(backends, [AttentionAndState(spec, self.shape)], RawCodec(stored), CacheShape(CTX, sink))

    def through(self, cache: KVCache, *cuts: int) -> np.ndarray:
        """What every token attends to, of a text in chunks of these lengths."""
        out = []
        for cut in cuts:
            for piece in cache.pieces(cut):
                span = slice(cache.n, cache.n + piece)
                cache.begin(piece)
                out.append(self.attended(cache, span))
                cache.commit()
        return np.concatenate(out)

    def attended(self, cache: KVCache, span: slice) -> np.ndarray:
        layer, own = cache.layer(0), np.ascontiguousarray
        layer.compress([own(product[span]) for product in self.products], self.w, TABLE)
        if self.index is not None:
            layer.choose(own(self.by[span]), None, own(self.weights[span]))
        k = own(self.k[span])
        return layer.attend(own(self.q[span]), k, k, self.sinks).copy()

    def keys(self, tokens: int, place: int = 0) -> np.ndarray:
        """What the references make of so many tokens: keys, or those of the index."""
        rows, weights = (product[:tokens] for product in self.products[2 * place : 2 * place + 2])
        bias, norm = ((self.w.bias, self.w.norm), (self.w.index_bias, self.w.index_norm))[place]
        width = rows.shape[1] // self.shape.rows_per_token
        made, *_ = meaning.compress(rows, weights, bias, 0, self.shape.tokens_per_key, np.zeros((self.shape.rows_per_token, 3, width)))
        places = np.arange(len(made)) * self.shape.tokens_per_key
        return meaning.finished(made, (norm.kind, norm.weight, None, norm.eps), *TABLE.cos_sin(places))

    def meant(self, tokens: int) -> np.ndarray:
        seen = None
        if self.index is not None:
            found = reference_indexer.scores(self.by[:tokens], self.keys(tokens, 1), self.weights[:tokens], 0, self.index)
            chosen = reference_indexer.choose(found, self.index)
            seen = reference_indexer.seen(chosen, tokens // self.index.tokens_per_key, 1, self.index)[:, 0]
            seen |= ((np.arange(tokens) + 1) // self.index.tokens_per_key <= self.index.top_k)[:, None]
        q = self.q[:tokens].reshape(tokens, HEADS, WIDTH)
        return meaning.attend(q, self.k[:tokens], self.keys(tokens), 0, np.arange(tokens), self.shape.tokens_per_key, WIDTH**-0.5, WINDOW,
                              self.sinks,
                              seen).reshape(tokens, -1)


def theirs(kind: type, **more: int) -> tuple[torch.nn.Module, DeepseekV4Config]:
    config = DeepseekV4Config(hidden_size=24, head_dim=WIDTH, q_lora_rank=12, index_n_heads=3, index_head_dim=16,
                              partial_rotary_factor=0.25,
                              compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}, num_hidden_layers=2,
                              rms_norm_eps=1e-6, **more)
    torch.manual_seed(2)
    module = kind(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module.eval(), config


@pytest.mark.parametrize(("kind", "rate", "parts"), [(DeepseekV4CSACompressor, 4, 2), (DeepseekV4HCACompressor, 16, 1)])
def test_keys_are_those_of_transformers(kind: type, rate: int, parts: int) -> None:
    module, _ = theirs(kind)
    x = torch.from_numpy(normal(4, 1, 99, 24))
    with torch.inference_mode():
        expected = module(x, torch.zeros(1, 99, 12), torch.arange(99)[None], None, 0)[0][0, 0].numpy()
        rows, weights = module.kv_proj(x)[0].numpy(), module.gate_proj(x)[0].numpy()
    made, *_ = meaning.compress(rows, weights, module.position_bias.detach().numpy(), 0, rate, np.zeros((parts, 3, WIDTH)))
    inv_freq = module.rotary_emb.compress_inv_freq.numpy()
    angles = (np.arange(len(made)) * rate)[:, None].astype(np.float32) * inv_freq
    found = meaning.finished(made, ("rms", module.kv_norm.weight.detach().numpy(), None, 1e-6), np.cos(angles), np.sin(angles))
    assert found.shape == expected.shape == (99 // rate, WIDTH) and np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("stored", "only"), [(F32, None), (F32, "reference"), (F16, None)])
def test_kernels_compute_their_meaning(pool: ThreadPool, name: str, stored: int, only: str | None) -> None:
    """Keys, and attention over them and the window, of a text in one chunk and in many."""
    text, close = Text(name), 2e-5 if stored == F32 else 3e-3
    for cuts in ([TEXT], [130, 1, 1, 8, 1, 3, 100, TEXT - 244]):
        cache = text.cache(pool, stored, only=only)
        found, keys = text.through(cache, *cuts), cache.token_selections[0].keys
        assert np.abs(keys.rows[: TEXT // text.shape.tokens_per_key] - text.keys(TEXT)).max() < close
        if text.index is not None:
            assert np.abs(cache.token_selections[0].index.keys(TEXT // 4) - text.keys(TEXT, 1)).max() < close
        if stored == F32:  # of rounded keys others may be chosen
            assert np.abs(found - text.meant(TEXT)).max() < 1e-4
    assert np.abs(text.meant(TEXT) - replaced(text, index=None).meant(TEXT)).max() > 0.05 or text.index is None


def replaced(text: Text, **fields: object) -> Text:
    other = object.__new__(Text)
    other.__dict__.update(text.__dict__ | fields)
    return other


@pytest.mark.parametrize("name", SHAPES)
def test_neither_threads_nor_pieces_change_a_bit(name: str) -> None:
    text, found = Text(name), []
    for threads, cuts, sink in ((1, [TEXT], 64), (3, [140, *[1] * 20, 5, 2, TEXT - 167], 64), (2, [TEXT], 0), (2, [TEXT], 128)):
        pool = ThreadPool(threads)
        cache = text.cache(pool, F16, sink)
        found.append((text.through(cache, *cuts), cache.token_selections[0].keys.rows[: TEXT // text.shape.tokens_per_key].copy(),
                      *cache.states.read(TEXT)))
        pool.close()
    for other in found[1:]:
        assert all(np.array_equal(one, each) for one, each in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_how_many_heads_are_a_job_changes_no_bit(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As many as there are, some, and one by one."""
    text, found = Text(name), []
    for most in (HEADS, 7, 1):
        monkeypatch.setattr(compressed_attention, "heads_per_job", lambda *sizes, most=most: most)
        found.append(text.through(text.cache(pool, F16), TEXT - 2, 1, 1))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 64))
def test_workers_have_jobs_and_jobs_have_room(heads: int, tokens: int, workers: int) -> None:
    """No fewer heads than share a tile well, unless there are none."""
    most = compressed_attention.heads_per_job(heads, tokens, workers)
    fewest = min(heads, compressed_attention.MIN_HEADS_AT_ONCE)
    assert fewest <= most <= min(heads, compressed_attention.MAX_HEADS_AT_ONCE)
    assert most == fewest or tokens * -(-heads // most) >= workers
    assert compressed_attention.heads_per_job(64, 1, 2) == 32 and compressed_attention.heads_per_job(64, 128, 16) == 64


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("only", [None, "reference"])
def test_what_did_not_come_true_leaves_no_trace(pool: ThreadPool, name: str, only: str | None) -> None:
    """Drafts of which some are accepted, wherever keys close, and a rollback to the end of a prompt."""
    text, near = Text(name), 0 if only is None else 1e-5
    plain = text.cache(pool, only=only)
    expected = text.through(plain, 90, *[1] * 60)
    cache = text.cache(pool, only=only)
    text.through(cache, 90)
    for ran, held in ((7, 2), (8, 5), (6, 1), (8, 8), (3, 0), (7, 4), (8, 3), (5, 5)):
        cache.begin(ran)
        found = text.attended(cache, slice(cache.n, cache.n + ran))
        assert np.abs(found[:held] - expected[cache.n : cache.n + held]).max(initial=0) <= near
        cache.commit(held)
    at = cache.n
    assert np.abs(text.through(cache, *[1] * 10) - expected[at : at + 10]).max() <= near


def test_bytes_of_tokens_are_read_and_written_as_they_lie(pool: ThreadPool) -> None:
    """Of keys that pages share too."""
    for name in SHAPES:
        text = Text(name)
        cache, other = text.cache(pool, F16), text.cache(pool, F16)
        text.through(cache, 250)
        for kept, empty in zip(cache.indexes, other.indexes, strict=True):
            for begin, end in ((0, 24), (24, 152), (152, 250)):
                data = kept.read(begin, end)
                assert data.nbytes == (end - begin) * kept.token_nbytes
                empty.write(begin, data)
            whole = 250 // text.shape.tokens_per_key * text.shape.tokens_per_key
            assert np.array_equal(empty.read(0, whole), kept.read(0, whole)) and kept.read(0, whole).any()


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**31))
def test_streams_are_mixed_by_numbers_that_add_up(count: int, rounds: int, seed: int) -> None:
    say, scale, base = np.random.default_rng(seed).standard_normal((6, count * (2 + count))) * 3, np.ones(3), np.zeros(count * (2 + count))
    reads, writes, mixes = reference_hyper_connections.numbers(say, scale, base, count, 1e-6, rounds)
    assert ((reads > 0) & (reads <= 1 + 2e-6)).all() and ((writes > 0) & (writes < 2)).all() and (mixes > 0).all()
    assert (mixes.sum(1) < 1 + 1e-12).all()  # columns, by which was divided last, and by a little more
    few, more = (reference_hyper_connections.numbers(say, scale, base, count, 0.0, each)[2] for each in (rounds, rounds + 10))
    assert np.abs(few.sum(1) - 1).max() < 1e-12
    beside = [np.abs(each.sum(2) - 1).sum(1) for each in (few, more)]
    assert (beside[1] <= beside[0] + 1e-12).all(), "rows come nearer"


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("count", [2, 4])
def test_streams_are_mixed_as_transformers_does(pool: ThreadPool, count: int, only: str | None) -> None:
    width, tokens = 70, 11
    module, config = theirs(DeepseekV4HyperConnection, hc_mult=count)
    config.hidden_size = width
    made = [DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)]
    with torch.no_grad():
        for each in made:
            for parameter in each.parameters():
                parameter.normal_(0, 0.4)
    ops = CpuOps(pool, Dims(width, 2, 1, 32, 8, 8, chunk=16, ctx=64, logit_rows=1, residual_streams=count,
                            output_group_width=8), default_registry(only))
    x, branch = normal(6, tokens, count, width), normal(7, tokens, width)
    with torch.inference_mode():
        post, comb, collapsed = made[0](torch.from_numpy(x)[None])
        behind = post.unsqueeze(-1) * torch.from_numpy(branch)[None].unsqueeze(-2) + comb.transpose(-1, -2) @ torch.from_numpy(x)[None]
        left = made[1](torch.from_numpy(x)[None])
    hypers = [of(width, count, each, leaves) for each, leaves in zip(made, (False, True), strict=True)]
    flat = ops.workspace.take("x", tokens, count * width)
    flat[:] = x.reshape(tokens, -1)
    with ops.collecting():
        own = ops.read_streams(flat, hypers[0])
        ops.flush()
        assert np.abs(own - collapsed[0].numpy()).max() < 1e-5
        ops.write_streams(flat, branch, hypers[0])
        ops.flush()
        assert np.abs(flat.reshape(x.shape) - behind[0].numpy()).max() < 1e-5
        flat[:] = x.reshape(tokens, -1)
        found = ops.read_streams(flat, hypers[1])
        ops.flush()
        assert np.abs(found - left[0].numpy()).max() < 1e-5


def of(width: int, count: int, module: torch.nn.Module, leaves: bool) -> HyperConnection:
    named = SimpleNamespace(**{name.removeprefix("hc_"): value.detach().numpy() for name, value in module.named_parameters()})
    norm = Norm("rms", np.ones(count * width, np.float32), None, 1e-6)
    return HyperConnection(count, norm, Linear(Weight.raw("f32", named.fn.shape, named.fn)), named.base, named.scale, 20, 1e-6, leaves)


@pytest.mark.parametrize("only", [None, "reference"])
def test_tails_turn_in_their_places_and_back(pool: ThreadPool, only: str | None) -> None:
    ops = CpuOps(pool, Dims(8, 3, 1, 20, 8, 8, chunk=16, ctx=64, logit_rows=1), default_registry(only))
    y, places = normal(5, 9, 60), np.arange(40, 49)
    cos, sin = TABLE.cos_sin(places)
    expected = meaning.turned_tails(y.reshape(9, 3, 20), cos, sin).reshape(9, -1)
    found = ops.rope_tails(y.copy(), 3, 20, places, TABLE)
    assert np.abs(found - expected).max() < 1e-6 and np.array_equal(found.reshape(9, 3, 20)[..., :12], y.reshape(9, 3, 20)[..., :12])
    assert np.abs(found - y).max() > 0.1 and np.abs(ops.rope_tails(found, 3, 20, places, TABLE, True) - y).max() < 1e-6


def test_what_is_counted_of_keys_is_what_they_take() -> None:
    assert FEW.token_nbytes(F16) * 4 == WIDTH * 2 and MANY.token_nbytes(F32) * 16 == WIDTH * 4
    assert MANY.keys_nbytes(33, F16) == 3 * WIDTH * 2 and MANY.keys(33) == 2
    own = IndexShape(3, 16, 8, 20, tokens_per_key=4)
    assert own.dense_tokens == 83 and own.nbytes(513, F16) == 2 * own.block_nbytes(F16)
    assert replace(own, tokens_per_key=1).dense_tokens == 20
    assert FEW.layer_state_floats == 3 * 2 * 48 and MANY.layer_state_floats == 96
