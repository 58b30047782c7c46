"""Operations of vision and audio towers, against float64: activations, norms, attention in blocks, and weights kept as stored."""

import math
import threading

import numpy as np
import pytest
import torch

from effllm.kernels import blas
from effllm.runtime.images import EncodingJob, tower_ops
from effllm.runtime.images.tower_ops import ACTIVATIONS, Matrix, Norm, WorkerPool, attend, matmul, patches_of, to_float32

RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def crew():
    with WorkerPool(2, EncodingJob()) as crew:
        yield crew


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_curves(name):
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -1e4, 1e4]]).astype(np.float32)
    wide = torch.from_numpy(x.astype(np.float64))
    wanted = {"gelu": torch.nn.functional.gelu, "quick_gelu": lambda each: each * torch.sigmoid(1.702 * each), "relu": torch.relu,
              "silu": torch.nn.functional.silu}.get(name, lambda each: torch.nn.functional.gelu(each, approximate="tanh"))(wide).numpy()
    found = ACTIVATIONS[name](x.copy())
    assert found.dtype == np.float32 and np.abs(found - wanted).max() / 1e4 < 1e-7
    small = np.abs(x) < 12
    assert np.abs(found - wanted)[small].max() < 2e-6


@pytest.mark.parametrize("centered", [True, False])
def test_norms(centered):
    x, weight, bias = normal(5, 33) + 3, normal(33), normal(33)
    wide = x.astype(np.float64) - (x.astype(np.float64).mean(-1, keepdims=True) if centered else 0)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    assert np.abs(Norm(weight, bias, 1e-5, centered)(x) - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("spans", [[(0, 300)], [(0, 7), (7, 290), (290, 300)], [(begin, begin + 10) for begin in range(0, 300, 10)]])
def test_attention_both_ways_within_spans(spans, crew, monkeypatch):
    monkeypatch.setattr(tower_ops, "QUERIES", 64)
    queries, keys, values = (normal(3, 300, 8) for _ in range(3))
    out = np.empty((300, 24), np.float32)
    attend(queries, keys, values, out, spans, crew)
    for begin, end in spans:
        scores = queries[:, begin:end].astype(np.float64) @ keys[:, begin:end].swapaxes(1, 2) / math.sqrt(8)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = (shares / shares.sum(-1, keepdims=True) @ values[:, begin:end]).swapaxes(0, 1).reshape(end - begin, 24)
        assert np.abs(out[begin:end] - wanted).max() < 1e-6


def test_no_matrix_of_all_by_all_is_made(crew, monkeypatch):
    """Of 4,096 patches one head's would be 64 MiB."""
    largest = []
    exp = np.exp
    monkeypatch.setattr(tower_ops.np, "exp", lambda x, **more: largest.append(x.nbytes) or exp(x, **more))
    queries, keys, values = (normal(2, 4096, 4) for _ in range(3))
    attend(queries, keys, values, np.empty((4096, 8), np.float32), [(0, 4096)], crew)
    assert len(largest) == 2 * 4096 // tower_ops.QUERIES and max(largest) <= 4 * 4096 * tower_ops.QUERIES


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_weights_are_kept_as_stored(stored, crew):
    wide = torch.from_numpy(normal(9, 20)).to(getattr(torch, stored))
    kept = wide.view(torch.uint16).numpy() if stored == "bfloat16" else wide.numpy()
    assert np.array_equal(to_float32(kept), wide.float().numpy())
    x, bias = normal(1000, 20), normal(9)
    wanted = x.astype(np.float64) @ wide.double().numpy().T + bias
    assert np.abs(matmul(x, Matrix(kept, bias), crew) - wanted).max() < 1e-5


def test_rows_are_shared_out_evenly_and_a_failure_is_raised(crew):
    seen, lock = [], threading.Lock()

    def note(rows):
        with lock:
            seen.append((rows.start, rows.stop))

    for count in (1, 2, 3, 383, 729, 5000):
        seen.clear()
        crew.each(note, count)
        borders = sorted(seen)
        assert borders[0][0] == 0 and borders[-1][1] == count
        assert all(one[1] == other[0] for one, other in zip(borders, borders[1:], strict=False))
        assert max(end - begin for begin, end in seen) <= max(1, 1.6 * tower_ops.ROWS)
    assert len(seen) % 2 == 0
    with pytest.raises(ZeroDivisionError):
        crew.each(lambda rows: 1 // 0, 10)


def test_two_at_once_leave_blas_as_it_was():
    """Towers of two requests: the second would take the first one's single thread for what there was before."""
    get, put = blas._functions()
    saved, entered, inside, never = get(), [], threading.Event(), threading.Event()

    def look(seconds):
        with WorkerPool(2, EncodingJob()):
            entered.append(get())
            inside.set()
            never.wait(seconds)

    put(2)
    try:
        first, second = (threading.Thread(target=look, args=(seconds,)) for seconds in (0.1, 0.3))
        first.start()
        assert inside.wait(10)
        second.start()
        for each in (first, second):
            each.join(10)
        assert entered == [1, 1] and get() == 2
    finally:
        put(saved)


def test_patches_lie_as_a_convolution_reads_them():
    picture, weights = normal(13, 18, 3), normal(4, 3, 5, 5)
    wanted = torch.nn.functional.conv2d(torch.from_numpy(picture.transpose(2, 0, 1)[None]), torch.from_numpy(weights), stride=5)
    found = patches_of(picture, 5) @ weights.reshape(4, -1).T
    assert np.abs(found - wanted[0].flatten(1).T.numpy()).max() < 1e-4
