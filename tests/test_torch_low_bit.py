"""Low-bit weights in the torch backend: dequantized to the codec's numbers bit for bit, multiplied in float32, whole models included."""


import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from low_bit_samples import FORMATS, WITH_OUTLIERS, low_bit, random_codes, seed_of

from effllm.kernels.cuda import low_bit as opening
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"))


@pytest.fixture(params=["cpu", GPU])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param)


def placed(ops: TorchOps, weight: Weight) -> Weight:
    return Weight(weight.spec, weight.shape, {"data": ops.put(weight.parts["data"], weight.spec.scheme)})


@given(text=st.sampled_from(FORMATS + WITH_OUTLIERS), rows=st.integers(1, 70), depth=st.integers(1, 300), data=st.data())
def test_any_weight_opens_to_what_it_means(text: str, rows: int, depth: int, data: st.DataObject) -> None:
    """Bit for bit, from any row block to any other."""
    spec = QuantSpec.parse(text)
    weight = low_bit(random_codes(np.random.default_rng(seed_of(text) + rows * depth), spec, (rows, depth), every_scale=True), spec)
    form = opening.Format(spec.bits, spec.group, spec.scheme, weight.shape, spec.sections(weight.shape))
    first = data.draw(st.integers(0, (rows - 1) // 16))
    end = data.draw(st.integers(first + 1, -(-rows // 16)))
    found = opening.dequantize(torch.from_numpy(weight.parts["data"].copy()), form, first, end).numpy()
    np.testing.assert_array_equal(found.view(np.int32), weight.to_f32()[16 * first : 16 * end].view(np.int32))


@pytest.mark.parametrize("text", [*FORMATS, *WITH_OUTLIERS])
def test_products_are_those_of_the_values(ops: TorchOps, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 activations on both sides, tiles that do not divide the rows, and a bias."""
    rng, spec = np.random.default_rng(seed_of(text)), QuantSpec.parse(text)
    weight, bias = low_bit(random_codes(rng, spec, (83, 300)), spec), rng.standard_normal(83, np.float32)
    linear = Linear(placed(ops, weight), ops.put(bias, "f32"))
    for opened in (1, 16 * 320, 1 << 22):
        monkeypatch.setattr(opening, "MAX_DEQUANTIZED", opened)
        for tokens in (1, 9):
            x = rng.standard_normal((tokens, 300), np.float32)
            got = ops.to_host(ops.norm_linear(ops.from_host(x), Norm("none"), [linear])[0])
            want = x.astype(np.float64) @ weight.to_f32().astype(np.float64).T + bias
            assert np.abs(got - want).max() <= 2e-6 * max(1.0, np.abs(want).max())


def test_codes_stay_codes(ops: TorchOps) -> None:
    """What lies on the device is the blob, not what it is opened to."""
    spec = QuantSpec.parse("4bit")
    weight = low_bit(random_codes(np.random.default_rng(1), spec, (64, 256)), spec)
    there = placed(ops, weight).parts["data"]
    assert there.dtype == torch.uint8 and there.nbytes == spec.nbytes((64, 256)) < 64 * 256
    np.testing.assert_array_equal(there.cpu().numpy(), weight.parts["data"])
