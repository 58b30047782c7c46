"""Packed KV pages on a torch device: the codec's numbers bit for bit, and attention against softmax over the decoded pages."""


import numpy as np
import pytest
import torch
from kv_samples import form_of, moments_basis

from effllm.kernels import reference
from effllm.kernels.cuda import attention, packed_pages
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.kv_layout import SUPPORTED_BITS, RecordLayout, unpack_tail
from effllm.kernels.layout import PAGE
from effllm.quant.kv import PackedCodec, codec
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_codec import decode, encode
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))


@pytest.fixture(params=["cpu", GPU])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param)


def unturned(heads: int, size: int, strength: np.ndarray | None = None) -> KVBasis:
    """A basis that leaves every value as it is: what is decoded is codes times scales."""
    eye = np.broadcast_to(np.eye(size, dtype=np.float32), (heads, size, size))
    return KVBasis(np.ones((heads, size), np.float32), eye, eye, strength_k=strength, strength_v=strength)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("size", [16, 80, 576, *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 256, 512))])
def test_records_open_to_the_numbers_of_the_codec(ops: TorchOps, bits: int, size: int) -> None:
    """Bit for bit, whatever widths the groups have and however large the values are."""
    rng = np.random.default_rng(size + bits)
    strength = np.exp2(rng.uniform(-6, 6, (3, size // 16)))
    basis = unturned(3, size, strength)
    k, v = rng.standard_normal((2, 3, PAGE, size)).astype(np.float32) * np.array([1e-3, 1, 1e3], np.float32)[:, None, None] + 2
    records = encode(k, v, bits, bits, basis)
    assert size < 64 or bits in (1, 10) or len(np.unique(basis.widths(bits, bits)[0])) > 1
    want = decode(records, size, basis)
    for head in range(3):
        one = ops.upload(records[head : head + 1])
        _, _, widths = unpack_tail(records[head].tobytes(), size // 16)
        for got, there in zip(packed_pages.open_records(one, RecordLayout(size, bits, bits), widths), want):
            np.testing.assert_array_equal(got[0].cpu().numpy(), there[head])


class Passes:
    """Random tokens through a cache of one layer, and what softmax over what it holds gives."""

    def __init__(self, ops: TorchOps, kv: str, heads: int, kv_heads: int, depth: int, tokens: int, basis: KVBasis | None = None,
                 bits: tuple[tuple[int, int], ...] | None = None, window: int | None = None, softcap: float | None = None,
                 ruin=None) -> None:
        form = form_of(kv)
        bits = bits or ((form.bits_k, form.bits_v),) * kv_heads
        codecs = None if basis is None else [PackedCodec(bits, basis)]
        spec = AttnSpec(heads, kv_heads, depth, depth**-0.5, window, softcap)
        self.ops, self.spec = ops, spec
        self.cache: KVCache = build_cache([ops], [spec], form, CacheShape(1024, sink=64, window=16, chunk=PAGE), codecs)
        rng = np.random.default_rng(tokens)
        self.q = (rng.standard_normal((tokens, heads * depth)) * 2).astype(np.float32)
        self.k, self.v = rng.standard_normal((2, tokens, kv_heads, depth)).astype(np.float32)
        if ruin is not None:
            ruin(self.k, self.v)

    def run(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Appends tokens; (answers, answers wanted)."""
        cache, spec = self.cache, self.spec
        ours, theirs = [], []
        for piece in cache.pieces(tokens):
            span = slice(cache.n, cache.n + piece)
            step, layer = cache.begin(piece), cache.layer(0)
            flat = [self.ops.from_host(x[span].reshape(piece, -1)) for x in (self.q, self.k, self.v)]
            ours.append(self.ops.to_host(layer.attend(*flat)))
            keys, values = (x[: cache.n + piece].astype(np.float16).astype(np.float32) for x in (self.k, self.v))
            for sealed, page, first, count in step.blocks:
                if sealed:
                    record = layer.pages.records[page].cpu().numpy()
                    k, v = cache.codecs[0].open(record, spec.kv_heads, spec.head_dim)
                    keys[first : first + count], values[first : first + count] = k.swapaxes(0, 1), v.swapaxes(0, 1)
            want = reference.attend(self.q[span].reshape(piece, spec.heads, -1), keys, values, step.position, np.arange(len(keys)),
                                    spec.scale, spec.window, spec.softcap)
            theirs.append(want.reshape(piece, -1))
            cache.commit()
        return np.concatenate(ours), np.concatenate(theirs)


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * float(np.abs(theirs).max()))


@pytest.mark.parametrize("kv", ["10bit", "8bit", "6bit", "5bit", "4bit", "3bit", "2bit", "k8v4"])
def test_attention_equals_softmax_over_the_decoded_pages(ops: TorchOps, kv: str) -> None:
    passes = Passes(ops, kv, 8, 2, 64, 420)
    for tokens in (400, *[1] * 10, 10):
        close(*passes.run(tokens))
    assert passes.cache.sealed == 2


@pytest.mark.parametrize("heads, kv_heads, depth", [(4, 4, 64), (4, 2, 80), (6, 2, 96), (8, 1, 128), (2, 1, 256), (3, 3, 16),
                                                    (2, 1, 512), (2, 1, 576)])
@pytest.mark.parametrize("window, softcap", [pytest.param(None, None, marks=pytest.mark.slow), (50, None), (200, 5.0)])
def test_shapes_windows_and_caps(ops: TorchOps, heads: int, kv_heads: int, depth: int, window: int | None, softcap: float | None) -> None:
    passes = Passes(ops, "4bit", heads, kv_heads, depth, 402, window=window, softcap=softcap)
    for tokens in (400, 1, 1):
        close(*passes.run(tokens))


def test_heads_with_bits_of_their_own_in_a_profiles_basis(ops: TorchOps) -> None:
    passes = Passes(ops, "4bit", 6, 3, 64, 402, moments_basis(3, 64), ((8, 2), (3, 6), (1, 5)))
    for tokens in (400, 1, 1):
        close(*passes.run(tokens))


def test_pages_whose_keys_were_not_turned(ops: TorchOps) -> None:
    """One head of one page has a lone pair: its queries are the ones that were scaled only."""

    def ruin(k: np.ndarray, v: np.ndarray) -> None:
        k[64 : 64 + PAGE, 1, [5, 37]] *= 50

    eye = unturned(2, 64)
    scale = np.tile(np.exp2(np.random.default_rng(1).integers(-2, 3, (2, 32))), 2).astype(np.float32)
    rotation = KVBasis.plain(2, 64).k_matrix
    basis = KVBasis(scale, rotation / scale[:, None], eye.v_matrix)
    passes = Passes(ops, "4bit", 4, 2, 64, 402, basis, ruin=ruin)
    close(*passes.run(400))
    flags = [[turned for turned, _ in passes.cache.layer(0).pages._tails[page]] for page in (0, 1)]
    assert flags == [[True, False], [True, True]]
    close(*passes.run(1))


def test_pages_are_opened_some_at_a_time(ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are opened together, the answer is the same but for the order of sums; nothing depends on what lies next to them."""
    outs = []
    for most, scores in ((64, 1 << 25), (1, 1 << 25), (2, 1)):
        monkeypatch.setattr(packed_pages, "MAX_UNPACKED_PAGES", most)
        monkeypatch.setattr(attention, "MAX_SCORES", scores)
        passes = Passes(ops, "4bit", 4, 2, 64, 900)
        passes.run(899)
        outs.append(passes.run(1))
    for ours, theirs in outs:
        close(ours, theirs)
    close(outs[0][0], outs[1][0])


def test_a_record_has_the_bytes_of_the_host(ops: TorchOps) -> None:
    """What lies on the device is what the codec made of the exact slot: pages move between tiers as they are."""
    passes = Passes(ops, "4bit", 4, 2, 64, 300)
    passes.run(300)
    layer, made = passes.cache.layer(0).pages, passes.cache.codecs[0]
    k, v = (x[64 : 64 + PAGE].astype(np.float16).astype(np.float32).swapaxes(0, 1) for x in (passes.k, passes.v))
    want = encode(k, v, 4, 4, made.basis, layer=0, first_token=64)
    np.testing.assert_array_equal(layer.records[0].cpu().numpy(), want.reshape(-1))


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_pages_that_are_put_back_give_the_same_bits(ops: TorchOps, kv: str) -> None:
    """What is computed from pages that came from outside is what was computed from the cache's own."""
    spec, shape = AttnSpec(4, 2, 64, 0.125), CacheShape(1024, sink=64, window=16, chunk=PAGE)
    first, second = (build_cache([ops], [spec], codec(kv), shape) for _ in range(2))
    rng = np.random.default_rng(0)

    def step(cache, data):
        cache.begin(len(data[0]))
        out = cache.layer(0).attend(*map(ops.from_host, data)).cpu().numpy().copy()
        cache.commit()
        return out

    def some(count):
        return [rng.standard_normal((count, width)).astype(np.float32) for width in (256, 128, 128)]

    for piece in list(first.pieces(420)):
        step(first, some(piece))
    second.adopt(first.n, first.sealed)
    for page in (*range(first.sealed), *(page for page, _ in first.exact_blocks())):
        second.write(page, first.read(page))
    assert first.sealed == 2 and [len(second.read(page)[0]) for page in (0, -1)] == [len(first.read(page)[0]) for page in (0, -1)]
    for count in (1, 20):
        data = some(count)
        np.testing.assert_array_equal(step(first, data), step(second, data))
