"""The infill sampler: tokens chosen by hand, and against llama.cpp's."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import FABLE, fable_gguf

from effllm.runtime.config import read_config
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.sampling.infill_sampler import InfillSampler
from effllm.runtime.tokenizer import Tokenizer

TOP = {"top_k": 40, "top_p": 0.99}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FABLE, read_config(FABLE))


def logits(size: int, **chances: float) -> np.ndarray:
    """With these chances of tokens (`t5`), the rest shared by the others."""
    values = np.full(size, 1e-9)
    for name, chance in chances.items():
        values[int(name[1:])] = chance
    return np.log(values).astype(np.float32)


def sure(tokenizer: Tokenizer, **settings: float) -> InfillSampler:
    return InfillSampler(tokenizer, tokenizer.stop_ids, SamplerSettings(**{**TOP, **settings}))


def numbers(tokenizer: Tokenizer, *texts: str) -> list[int]:
    found = [tokenizer.encode(text, False) for text in texts]
    assert all(len(each) == 1 for each in found)
    return [each[0] for each in found]


def test_the_likeliest_is_taken_if_it_has_a_fifth(tokenizer: Tokenizer) -> None:
    fox, king, wolf, end = *numbers(tokenizer, " fox", " king", " wolf"), min(tokenizer.stop_ids)
    size = tokenizer.vocab_size

    def chosen(**chances: float) -> int:
        return sure(tokenizer).select(logits(size, **chances))

    assert chosen(**{f"t{fox}": 0.7, f"t{king}": 0.3}) == fox
    assert chosen(**{f"t{fox}": 0.25, f"t{king}": 0.45, f"t{wolf}": 0.3}) == king
    spread = {f"t{token}": 0.05 for token in range(200, 219)}  # letters and the like, of which none begins another
    assert chosen(**{f"t{fox}": 0.9, f"t{end}": 0.1}) == fox
    assert chosen(**{f"t{fox}": 0.85, f"t{end}": 0.15, **dict.fromkeys(spread, 1e-3)}) in tokenizer.stop_ids, "an end that is likely enough"


def test_tokens_that_begin_alike_are_one(tokenizer: Tokenizer) -> None:
    fo, fox, k, w = numbers(tokenizer, " fo", " fox", " k", " w")
    others = [token for token in range(100) if tokenizer.decode([token], False).isupper()][:20]
    chances = {f"t{fox}": 0.15, f"t{fo}": 0.14, f"t{k}": 0.18, f"t{w}": 0.18, **{f"t{token}": 0.35 / 20 for token in others}}
    assert len(others) == 20
    assert sure(tokenizer).select(logits(tokenizer.vocab_size, **chances)) == fox, "together they have more than the others"


def test_where_nothing_is_sure_it_ends(tokenizer: Tokenizer) -> None:
    values = np.zeros(tokenizer.vocab_size, np.float32)
    chooses = InfillSampler(tokenizer, tokenizer.stop_ids, SamplerSettings(top_k=7, top_p=1.0))
    far = np.random.default_rng(1).permutation(tokenizer.vocab_size)[:7]
    values[far] = 1.0
    assert chooses.select(values) in tokenizer.stop_ids
    left = values.copy()
    chooses.mask_logits(left)
    assert np.isfinite(left).sum() == 1 and int(left.argmax()) in tokenizer.stop_ids
    chosen = InfillSampler(tokenizer, (), SamplerSettings(**TOP)).select(values)
    assert chosen in range(tokenizer.vocab_size), "without an end there is none"


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_keeps_what_is_chosen(tokenizer: Tokenizer, tmp_path: Path) -> None:
    peer, path = pytest.importorskip("llama_cpp"), tmp_path / "m.gguf"
    fable_gguf(path)
    params = peer.llama_model_default_params()
    params.vocab_only = True
    model = peer.llama_model_load_from_file(str(path).encode(), params)
    vocab, rng = peer.llama_model_get_vocab(model), np.random.default_rng(3)
    first, second = peer.llama_sampler_init_top_k(40), peer.llama_sampler_init_top_p(ctypes.c_float(0.9), 1)
    samplers = [first, second, peer.llama_sampler_init_infill(vocab)]
    ends = frozenset(token for token in range(tokenizer.vocab_size) if peer.llama_vocab_is_eog(vocab, token))
    chooses, ended, alone = InfillSampler(tokenizer, ends, SamplerSettings(top_k=40, top_p=0.9)), 0, 0
    for scale in np.repeat([1.0, 2.0, 3.0, 4.0, 6.0], 80):
        values = (rng.standard_normal(tokenizer.vocab_size) * scale).astype(np.float32)
        values[[*ends]] += np.float32(rng.choice([0, 2, 3]) * scale)
        rows = (peer.llama_token_data * len(values))(*((token, float(value), 0.0) for token, value in enumerate(values)))
        array = peer.llama_token_data_array(ctypes.cast(rows, peer.llama_token_data_p), len(values), -1, False)
        for sampler in samplers:
            peer.llama_sampler_apply(sampler, ctypes.byref(array))
        theirs = {array.data[number].id: array.data[number].p for number in range(array.size)}
        token = chooses.select(values)
        assert token in theirs or token in ends and theirs.keys() <= ends
        ended, alone = ended + (token in ends), alone + (len(theirs) == 1)
    assert 50 < ended < 350 and alone > 100, "of all kinds there are some"
    peer.llama_model_free(model)
