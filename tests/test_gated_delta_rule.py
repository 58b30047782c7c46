"""Linear attention by a gated delta rule: the reference against transformers. Kernels are in `test_state_kernels.py`."""


import numpy as np
import pytest
import torch
from state_kinds import DELTAS, EPS, KDAS, assert_close, expected, inputs, weights
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from effllm.kernels import reference_delta
from effllm.kernels.delta_shape import DeltaShape
from effllm.kernels.kda_shape import KdaShape


@pytest.mark.parametrize("shape", DELTAS.values(), ids=DELTAS)
def test_the_reference_is_what_transformers_computes(shape: DeltaShape) -> None:
    w, (qkv, z, b, a) = weights(shape), inputs(shape, 40)
    t = lambda x: torch.from_numpy(np.ascontiguousarray(x)).double()  # noqa: E731
    mixed = oracle.causal_conv1d_fn(t(qkv.T)[None], t(w.conv.T), activation="silu")[0].T
    np.testing.assert_allclose(reference_delta.convolve(qkv, np.zeros((shape.taps - 1, shape.channels)), w.conv), mixed, atol=1e-12)
    q, k, v = (side.unflatten(1, (heads, -1))[None] for side, heads in zip(
        mixed.split((shape.keys, shape.keys, shape.values), 1), (shape.key_heads, shape.key_heads, shape.value_heads)))
    if shape.tiled:  # there heads of values that read one of keys lie side by side
        q, k = (side.repeat(1, 1, shape.value_heads // shape.key_heads, 1) for side in (q, k))
    g = -t(w.decay) * torch.nn.functional.softplus(t(a) + t(w.dt_bias))
    out, last = oracle.torch_recurrent_gated_delta_rule(q, k, v, g[None], shape.beta_scale * t(b).sigmoid()[None], output_final_state=True,
                                                        use_qk_l2norm_in_kernel=True)
    norm = oracle.Qwen3_5RMSNormGated(shape.value_dim, EPS)
    norm.weight.data = t(w.norm.weight)
    found, state = expected(shape, (qkv, z, b, a))
    assert_close(found, norm(out[0].flatten(0, 1), t(z).reshape(-1, shape.value_dim)).detach().numpy().reshape(len(z), -1), 1e-5)
    assert_close(state, last[0].transpose(1, 2).numpy().reshape(-1), 1e-5)  # which goes through float32


@pytest.mark.parametrize("shape", KDAS.values(), ids=KDAS)
def test_the_reference_by_channel_is_what_transformers_computes(shape: KdaShape) -> None:
    w, given = weights(shape), inputs(shape, 40)
    qkv, of_z, of_a, b = (torch.from_numpy(np.ascontiguousarray(x)).double() for x in given)
    made = lambda x, each: x if each is None else x @ torch.from_numpy(each.weight.parts["data"]).double().T  # noqa: E731
    mixed = kimi.causal_conv1d_fn(qkv.T[None], torch.from_numpy(w.conv.T).double(), activation="silu")[0].T
    q, k, v = (side.unflatten(1, (shape.key_heads, -1))[None] for side in mixed.chunk(3, dim=1))
    steps = (made(of_a, w.decay_up) + torch.from_numpy(w.dt_bias)).unflatten(1, (shape.key_heads, -1))
    rates = torch.from_numpy(w.decay).double()[:, None]
    g = -rates * torch.nn.functional.softplus(steps) if shape.decay_bound is None else shape.decay_bound * torch.sigmoid(rates * steps)
    out, last = kimi.recurrent_kimi_delta_attention(q, k, v, g[None], b.sigmoid()[None], None, True, use_qk_l2norm_in_kernel=True)
    norm = kimi.KimiLinearRMSNormGated(shape.value_dim, EPS)
    norm.weight.data = torch.from_numpy(w.norm.weight)
    gated = norm(out[0], made(of_z, w.gate_up).unflatten(1, (shape.value_heads, -1)))
    found, state = expected(shape, given)
    assert_close(found, gated.detach().numpy().reshape(len(found), -1), 1e-5)
    assert_close(state, last[0].transpose(1, 2).numpy().reshape(-1), 1e-5)  # which goes through float32
