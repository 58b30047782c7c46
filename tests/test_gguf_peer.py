"""Files of every type that llama.cpp writes and effllm reads: the same greedy text in both."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import FABLE, Reader, add_scales, fable_gguf

from effllm.quant.imports.gguf import DECODERS
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.tokenizer import Tokenizer

# What llama.cpp calls a file, the number that asks for it, and the types of blocks in it.
FILES = {"ALL_F32": (0, {"F32"}), "MOSTLY_F16": (1, {"F16"}), "MOSTLY_BF16": (32, {"BF16"}), "MOSTLY_Q8_0": (7, {"Q8_0"}),
         "MOSTLY_Q4_0": (2, {"Q4_0"}), "MOSTLY_Q4_1": (3, {"Q4_1"}), "MOSTLY_Q5_0": (8, {"Q5_0"}), "MOSTLY_Q5_1": (9, {"Q5_1"}),
         "MOSTLY_Q2_K": (10, {"Q2_K", "Q3_K"}), "MOSTLY_Q3_K_M": (12, {"Q3_K", "Q4_K", "Q5_K"}), "MOSTLY_Q4_K_M": (15, {"Q4_K", "Q6_K"}),
         "MOSTLY_Q6_K": (18, {"Q6_K"}), "MOSTLY_IQ4_NL": (25, {"IQ4_NL"}),
         "MOSTLY_IQ4_XS": (30, {"IQ4_XS"}), "MOSTLY_IQ3_S": (26, {"IQ3_S"}), "MOSTLY_IQ3_XXS": (23, {"IQ3_XXS", "IQ2_S", "IQ3_S"}),
         "MOSTLY_IQ2_M": (29, {"IQ2_S", "IQ3_S"}), "MOSTLY_IQ2_XS": (20, {"IQ2_XS", "Q2_K"}), "MOSTLY_IQ2_XXS": (19, {"IQ2_XXS", "Q2_K"}),
         "MOSTLY_IQ1_S": (24, {"IQ1_S", "IQ2_XXS", "Q2_K"}), "MOSTLY_IQ1_M": (31, {"IQ1_M", "IQ2_XXS"}), "MOSTLY_TQ1_0": (36, {"TQ1_0"}),
         "MOSTLY_TQ2_0": (37, {"TQ2_0"})}
NOT_MADE = {"MXFP4", "NVFP4"}  # by llama.cpp's quantizer out of a dense model
TEXT, TOKENS = "Once upon a time there was a king", 32
LIKELY = 0.04  # of the largest logit: llama.cpp rounds activations to 8 bits before it multiplies blocks


def test_every_type_that_is_read_is_among_them() -> None:
    assert set().union(*(kinds for _, kinds in FILES.values())) | NOT_MADE == {*DECODERS, "F32", "F16", "BF16"}


def alike(peer: object, source: Path) -> tuple[object, list[np.ndarray]]:
    """All columns of all matrices as equally important, and what has to stay while that is read."""
    shapes = {tensor.name: int(tensor.shape[0]) for tensor in Reader(source).tensors if len(tensor.shape) == 2}
    kind, kept = peer.llama_model_imatrix_data, [np.ones(width, np.float32) for width in shapes.values()]
    entries = (kind * (len(kept) + 1))()  # the last one, all zeros, ends the list
    for entry, name, values in zip(entries, shapes, kept):
        entry.name, entry.size, entry.data = name.encode(), values.size, values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return ctypes.cast(entries, ctypes.POINTER(kind)), kept


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_llama_cpp_writes_the_same_text_from_the_same_file(tmp_path: Path, name: str) -> None:
    """Where an answer parts, two tokens were about as likely."""
    peer = pytest.importorskip("llama_cpp")
    number, kinds = FILES[name]
    assert getattr(peer, f"LLAMA_FTYPE_{name}") == number
    source, path = tmp_path / "source.gguf", tmp_path / "m.gguf"
    fable_gguf(source, "F16")
    params = peer.llama_model_quantize_default_params()
    params.ftype, params.nthread = number, 2
    if kinds & {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ2_XXS"}:  # which are refused without importances
        params.imatrix, kept = alike(peer, source)
        assert kept
    assert peer.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    assert kinds <= {tensor.tensor_type.name for tensor in Reader(path).tensors}
    same_text(peer, path)


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_writes_the_same_text_from_nvfp4_under_scales_of_tensors(tmp_path: Path) -> None:
    peer = pytest.importorskip("llama_cpp")
    fable_gguf(tmp_path / "m.gguf", "NVFP4", change=add_scales)
    same_text(peer, tmp_path / "m.gguf")


def same_text(peer: object, path: Path) -> None:
    """Where an answer parts, two tokens were about as likely."""
    ids = Tokenizer.load(FABLE, read_config(FABLE)).encode(TEXT)
    model = peer.Llama(str(path), n_ctx=128, n_threads=2, verbose=False, type_k=0, type_v=0)
    try:
        theirs = [token for token, _ in zip(model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), range(TOKENS))]
    finally:
        model.close()
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=128, exact=True))
    assert isinstance(engine, Engine)
    try:
        list(engine.prefill(ids))
        sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
        ours = [step.token for step in engine.generate(sampler, TOKENS, frozenset())]
        if ours != theirs:
            at = next(i for i, (one, two) in enumerate(zip(ours, theirs)) if one != two)
            engine.reset()
            scores = engine.forward_logits(ids + ours[:at])[-1]
            assert scores[ours[at]] - scores[theirs[at]] < LIKELY * abs(scores).max(), at
    finally:
        engine.close()
