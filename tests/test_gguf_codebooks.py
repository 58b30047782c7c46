"""GGUF block formats with codebooks: llama.cpp's values, and the message where a format's grids are not included here."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import fable_gguf

from effllm.offload.checkpoint import CheckpointError
from effllm.offload.gguf_header import BLOCKS
from effllm.quant.imports import gguf_codebooks, mxfp4
from effllm.quant.imports.gguf import DECODERS, dequantize
from effllm.runtime.gguf.store import open_gguf_store


def test_products_with_every_level_and_scale_stay_below_24_bits() -> None:
    """A tile's two groups, activations at their largest."""
    scales = {"IQ4_XS": 32, "Q3_K": 32, "TQ1_0": 1, "TQ2_0": 1, "IQ1_S": 15, "IQ1_M": 15}
    for kind, own in gguf_codebooks.KINDS.items():
        assert 32 * 127 * int(np.abs(own.levels.astype(int)).max()) * scales.get(kind, 31) < 1 << 24, kind
        assert len(own.levels) == 1 << own.bits, kind


def test_a_grid_that_is_not_here_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fable.gguf"
    fable_gguf(path, "IQ2_XS")
    gguf_codebooks.grid_of.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="of type IQ2_XS, whose grid of codes is in the package gguf") as refused:
        open_gguf_store(path, low_bit=True)
    assert refused.value.hint == "python -m pip install gguf"


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DECODERS])
def test_blocks_mean_what_ggml_says(kind: str) -> None:
    """Bit for bit, on any bytes but scales that are no numbers."""
    peer = pytest.importorskip("llama_cpp")
    ggml = ctypes.CDLL(str(Path(peer.__file__).parent / "lib" / "libggml-base.so"))
    values, nbytes = BLOCKS[kind]
    raw = np.random.default_rng(5).integers(0, 256, (500, nbytes), np.uint8)
    if kind == "MXFP4":
        raw[:, 0] %= mxfp4.NOT_A_NUMBER
    found = np.empty((len(raw), values), np.float32)
    name = f"dequantize_row_{kind.lower().replace('_k', '_K')}"
    getattr(ggml, name)(raw.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(found.size))
    ours = dequantize(raw, kind, values)
    finite = np.isfinite(found).all(axis=1)
    assert finite.sum() > 300 and np.array_equal(np.isfinite(ours).all(axis=1), finite)
    np.testing.assert_array_equal(ours[finite], found[finite])
