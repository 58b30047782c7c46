"""Products of latent attention: the definition against materialized keys and values, kernels and torch against the definition; expert
groups; attention over one wide head with many queries."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from effllm.kernels import reference_latent as reference
from effllm.kernels.cpu.attention import QUERY_TILE, WIDE_QUERY_VALUES, _tile_height, attend_prefill_state
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.inner_loops import DECODE_TILE_ROWS, TILE_ROWS
from effllm.kernels.cpu.ops import FEW_TOKENS, CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.latent_shape import LatentShape
from effllm.kernels.layout import F16
from effllm.kernels.reference_moe import Routing, ranks, route
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import RawCodec
from effllm.quant.weight import Expert, Linear, Norm, Weight, from_f32
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape

SHAPES = {"usual": (LatentShape(512, 128, 64, 128), 2), "odd": (LatentShape(74, 21, 6, 37, 40), 5),
          "of GLM": (LatentShape(512, 192, 64, 256), 3),
          "narrow": (LatentShape(3, 1, 2, 1), 1), "one more than strips": (LatentShape(129, 5, 2, 65), 2)}
TOKENS = (1, 2, FEW_TOKENS, FEW_TOKENS + 1, 12, 13, 50)


def drawn(shape: LatentShape, heads: int, stored: str) -> tuple[Weight, np.ndarray]:
    """A matrix in a stored type, and its values."""
    values = np.random.default_rng(heads).standard_normal((heads * shape.kv_b_rows, shape.rank)).astype(np.float32)
    weight = Weight.raw(stored, values.shape, from_f32(values, stored))
    return weight, weight.to_f32()


def ops_of(shape: LatentShape, heads: int, threads: int = 2, only: str | None = None) -> CpuOps:
    return CpuOps(ThreadPool(threads), Dims(16, heads, 1, shape.key, 16, 11, 64, 128, 1, mla=shape), default_registry(only))


def rows(tokens: int, width: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def test_the_meaning_is_that_of_keys_and_values_that_are_made() -> None:
    shape, heads = SHAPES["odd"]
    _, expand = drawn(shape, heads, "f32")
    own = expand.astype(np.float64).reshape(heads, shape.kv_b_rows, shape.rank)
    q, cached = rows(4, heads * shape.query), rows(7, shape.key, seed=5)
    latents = cached[:, shape.rope :]
    keys = np.concatenate([np.einsum("jr,hnr->jhn", latents, own[:, : shape.nope]),
                           np.broadcast_to(cached[:, None, : shape.rope], (7, heads, shape.rope))], axis=2)
    scores = np.einsum("thc,jhc->thj", q.reshape(4, heads, -1), keys)
    taken = reference.queries(q, heads, shape, expand).reshape(4, heads, -1)
    assert np.allclose(np.einsum("thc,jc->thj", taken, cached), scores)
    sums = np.einsum("thj,jc->thc", scores, cached).reshape(4, -1)
    values = np.einsum("thj,jr,hvr->thv", scores, latents, own[:, shape.nope :])
    assert np.allclose(reference.values(sums, heads, shape, expand).reshape(values.shape), values)


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_and_torch_do_what_the_reference_does(name: str, stored: str) -> None:
    shape, heads = SHAPES[name]
    weight, expand = drawn(shape, heads, stored)
    norm = Norm("rms", rows(1, shape.rank, seed=9)[0], None, 1e-6)
    for tokens in TOKENS:
        q, y, sums = rows(tokens, heads * shape.query), rows(tokens, shape.key), rows(tokens, heads * shape.key)
        expected = (reference.keys(y, shape, ("rms", norm.weight, None, 1e-6)), reference.queries(q, heads, shape, expand),
                    reference.values(sums, heads, shape, expand))
        for only in (None, "reference"):
            ops = ops_of(shape, heads, only=only)
            found = (ops.latent_keys(y, shape, norm), ops.latent_queries(q, heads, shape, weight),
                     ops.latent_values(sums, heads, shape, weight))
            for ours, meant in zip(found, expected, strict=True):
                assert np.abs(ours - meant).max() < 2e-6 * np.abs(meant).max() * shape.rank**0.5, (tokens, only)
            ops.close()
        card = TorchOps("cpu")
        held = SimpleNamespace(parts={"data": card.put(weight.parts["data"], stored)})
        there = [torch.from_numpy(x.copy()) for x in (y, q, sums)]
        own = Norm("rms", torch.from_numpy(norm.weight), None, 1e-6)
        found = (card.latent_keys(there[0], shape, own), card.latent_queries(there[1], heads, shape, held),
                 card.latent_values(there[2], heads, shape, held))
        for ours, meant in zip(found, expected, strict=True):
            assert np.abs(ours.numpy() - meant).max() < 2e-6 * np.abs(meant).max() * shape.rank**0.5, tokens


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["usual", "odd"])
def test_bits_depend_neither_on_threads_nor_on_the_tokens_beside(name: str, stored: str) -> None:
    shape, heads = SHAPES[name]
    weight, _ = drawn(shape, heads, stored)
    q, sums = rows(50, heads * shape.query), rows(50, heads * shape.key)
    found = []
    for threads in (1, 3):
        ops = ops_of(shape, heads, threads)
        whole = ops.latent_queries(q, heads, shape, weight).copy(), ops.latent_values(sums, heads, shape, weight).copy()
        for begin, end in ((0, 1), (3, 3 + FEW_TOKENS), (7, 7 + FEW_TOKENS + 1), (20, 49)):
            assert (ops.latent_queries(q[begin:end].copy(), heads, shape, weight) == whole[0][begin:end]).all()
            if end - begin > FEW_TOKENS:
                assert (ops.latent_values(sums[begin:end].copy(), heads, shape, weight) == whole[1][begin:end]).all()
        few = ops.latent_values(sums[:FEW_TOKENS].copy(), heads, shape, weight).copy()
        alone = np.concatenate([ops.latent_values(sums[t : t + 1].copy(), heads, shape, weight).copy() for t in range(FEW_TOKENS)])
        assert (few == alone).all()
        found.append((*whole, few))
        ops.close()
    assert all((one == other).all() for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("corrected", [False, True])
def test_experts_of_groups_that_are_not_kept_are_not_chosen(corrected: bool) -> None:
    """The kernel, torch and the reference, and the rule itself told once more in words of its own."""
    groups, size, kept, top, tokens, depth = 4, 3, 2, 4, 40, 24
    routing = Routing(top, corrected, sigmoid=corrected, routed_scale=2.5, num_groups=groups, top_groups=kept)
    correction = rows(1, groups * size, seed=1)[0] if corrected else None
    router = Linear(Weight.raw("f32", (groups * size, depth), rows(groups * size, depth, seed=2)))
    made = [Expert(*(Linear(Weight.raw("f32", shape, rows(*shape, seed=10 * e + i)))
                     for i, shape in enumerate(((8, depth), (8, depth), (depth, 8))))) for e in range(groups * size)]
    x, none = rows(tokens, depth), Norm("none")
    logits = x @ router.weight.to_f32().T
    by = ranks(logits, routing, correction)
    for t in range(tokens):
        plain = ranks(logits[t], Routing(top, False, sigmoid=corrected), correction).reshape(groups, size)
        of_group = [sum(sorted(own)[-2:]) if corrected else max(own) for own in plain.tolist()]
        best = sorted(range(groups), key=lambda group, found=of_group: -found[group])[:kept]
        assert {e // size for e in np.flatnonzero(np.isfinite(by[t]))} == set(best)
    chosen, shares = route(logits, routing, correction)
    assert (route(logits, Routing(top, corrected, corrected, 2.5), correction)[0] != chosen).any()
    expected = None
    for count in (1, FEW_TOKENS, tokens):
        ops = CpuOps(ThreadPool(2), Dims(depth, 1, 1, 32, 64, 11, tokens, 512, 1, groups * size, top, 8))
        seen = []
        stream = ops.workspace.take("x", count, depth)
        stream[:] = x[:count]
        ops.moe(stream, none, router, tuple(made), routing, "silu", seen.append, correction)
        visits = sorted(zip(seen[0].tokens.tolist(), np.repeat(np.arange(groups * size), np.diff(seen[0].offsets)).tolist()))
        assert visits == [(t, e) for t in range(count) for e in chosen[t].tolist()]
        expected = stream.copy()
        ops.close()
    card, put = TorchOps("cpu"), lambda each: Linear(SimpleNamespace(
        spec=each.weight.spec, shape=each.weight.shape, parts={"data": torch.from_numpy(each.weight.to_f32())}))
    there = torch.from_numpy(x.copy())
    card.moe(there, none, put(router), [Expert(*map(put, (each.gate, each.up, each.down))) for each in made], routing, "silu", None,
             None if correction is None else torch.from_numpy(correction))
    assert np.abs(there.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


def test_routers_choose_as_those_of_transformers() -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"hidden_size": 24, "n_routed_experts": 32, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
             "routed_scaling_factor": 2.5, "num_attention_heads": 4}
    x, weight, correction = torch.from_numpy(rows(60, 24)), torch.from_numpy(rows(32, 24, seed=4)), torch.from_numpy(rows(1, 32, seed=6)[0])
    for config, kind, own in ((DeepseekV2Config(**sizes, topk_method="group_limited_greedy"), DeepseekV2TopkRouter, None),
                              (DeepseekV3Config(**sizes), DeepseekV3TopkRouter, correction)):
        router = kind(config)
        with torch.no_grad():
            router.weight.copy_(weight)
            if own is not None:
                router.e_score_correction_bias.copy_(own)
            logits, shares, chosen = router(x)
        order = chosen.argsort(1)
        routing = Routing(6, own is not None, own is not None, 2.5, 8, 3)
        ours = route(logits.numpy().astype(np.float64), routing, None if own is None else own.numpy())
        assert (ours[0] == chosen.gather(1, order).numpy()).all()
        assert np.allclose(ours[1], shares.gather(1, order).numpy(), rtol=1e-5)


@pytest.mark.parametrize(("heads", "depth"), [(20, 576), (33, 130), (128, 40)])
def test_attention_of_one_wide_head_with_many_queries(heads: int, depth: int) -> None:
    """Prompts, whose tiles are lower then, and single tokens over several pages, against the reference; in few tokens the bits of one."""
    assert heads * depth > WIDE_QUERY_VALUES and _tile_height(heads, depth, 512) < QUERY_TILE
    draw, found = np.random.default_rng(2), {}
    keys, queries = draw.standard_normal((300, depth)).astype(np.float32), draw.standard_normal((300, heads * depth)).astype(np.float32)
    shape = CacheShape(320, sink=64, window=128, chunk=192)
    for only in (None, "reference"):
        ops = CpuOps(ThreadPool(2), Dims(8, heads, 1, depth, 8, 8, chunk=192, ctx=320, logit_rows=1), default_registry(only))
        cache = build_cache([ops], [AttnSpec(heads, 1, depth, depth**-0.5, None, None)], RawCodec(F16), shape)
        outs, at = [], 0
        for tokens in (192, 70, 1, 8, 29):
            cache.begin(tokens)
            part = slice(at, at + tokens)
            outs.append(cache.layer(0).attend(queries[part].copy(), keys[part].copy(), keys[part].copy()).copy())
            cache.commit()
            at += tokens
        found[only] = np.concatenate(outs)
        ops.close()
    assert np.abs(found[None] - found["reference"]).max() < 2e-5 * np.abs(found["reference"]).max()


def test_memory_between_turns_is_counted_by_the_tiles_that_there_are() -> None:
    dims = Dims(8, 20, 1, 576, 8, 8, chunk=100, ctx=320, logit_rows=1, spilled_kv=True)
    height = _tile_height(20, 576, 512)
    assert height == 9 and attend_prefill_state(100, dims) >= -(-100 // height) * height * 20 * (576 + 4)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("group", (1, 2, 3, 5, 8))
def test_memory_between_turns_holds_every_chunk_up_to_the_longest(group: int, packed: bool) -> None:
    """Whichever height the tiles of a shorter one have."""
    def floats(chunk: int, tokens: int) -> int:
        dims = Dims(8, 2 * group, 2, 64, 8, 8, chunk=chunk, ctx=1024, logit_rows=1, spilled_kv=True, packed_kv=packed)
        height = _tile_height(group, 0 if packed else 64, tokens)
        unit = TILE_ROWS * DECODE_TILE_ROWS if packed else TILE_ROWS
        rows = -(-height * group // unit) * unit
        assert attend_prefill_state(chunk, dims) >= 2 * -(-tokens // height) * rows * (2 * 64 + 6 if packed else 64 + 4)
        return attend_prefill_state(chunk, dims)

    for chunk in (64, 255, 256, 512):
        assert len({floats(chunk, tokens) for tokens in range(1, chunk + 1)}) == 1
