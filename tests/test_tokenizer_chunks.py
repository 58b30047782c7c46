"""Long texts tokenized in chunks: the tokens of the whole text, in a fraction of the memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tiktoken import SNIPPETS, TEXTS
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from effllm.runtime.gguf.pre_tokenizers import SPLITTERS, pre_tokenizer
from effllm.runtime.tokens import chunked_encoding
from effllm.runtime.tokens.chunked_encoding import encode_in_chunks, exhaust, split_text

FABLE = Path(__file__).parents[1] / "models" / "fable"
KINDS = sorted(set(SPLITTERS.values()), key=lambda cutter: cutter.patterns)


def learnt(cutter: object) -> Backend:
    """Tokens that cross the borders of words, then cut by the patterns."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                        show_progress=False, min_frequency=1))
    if cutter is not None:
        made.pre_tokenizer = pre_tokenizer(cutter.patterns)
    return made


def long_ids(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    return exhaust(encode_in_chunks(backend, text, add_special_tokens))


@pytest.fixture(scope="module")
def backends() -> list[Backend]:
    spaced, odd = learnt(None), learnt(None)
    spaced.normalizer, odd.normalizer = normalizers.Prepend(" "), normalizers.Prepend("_")
    return [*map(learnt, KINDS), learnt(None), spaced, odd, Backend.from_file(str(FABLE / "tokenizer.json"))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK_CHARS", 24), ("CONTEXT_CHARS", 60), ("BATCH_CHUNKS", 2)):
        monkeypatch.setattr(chunked_encoding, name, value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.one_of(SNIPPETS, st.sampled_from(TEXTS)), min_size=2, max_size=6))
def test_the_tokens_are_those_of_the_whole(backends: list[Backend], short: None, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    for backend in backends:
        assert long_ids(backend, text, True) == backend.encode(text).ids


def test_special_tokens_stand_around_the_whole(short: None) -> None:
    backend = learnt(SPLITTERS["qwen2"])
    backend.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    text = TEXTS[2] * 5
    assert long_ids(backend, text, True) == backend.encode(text).ids and long_ids(backend, text, False) == backend.encode(text).ids[1:-1]


def test_a_text_is_cut_where_it_can_be(short: None) -> None:
    backend = learnt(SPLITTERS["gpt-2"])
    text = "the fox and the king went home\n" * 8
    cut = list(split_text(text, lambda part: backend.encode(part).ids))
    assert "".join(cut) == text and max(map(len, cut)) <= 48 and len(cut) > 8
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("n", "d")]
    tokens = [*sorted({*text.replace(" ", "▁")}), *("".join(pair) for pair in merges)]
    spaced = Backend(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaced_cut = list(split_text(text, lambda part: spaced.encode(part).ids))
    assert " ".join(spaced_cut) == text and len(spaced_cut) > 8 and long_ids(spaced, text, True) == spaced.encode(text).ids
    assert (done := list(encode_in_chunks(backend, text, True)))[-1] == len(text) and done == sorted(done) and len(done) > 4
    assert list(split_text("x" * 200, lambda part: backend.encode(part).ids)) == ["x" * 200]


PROGRAM = """
import resource, sys
from pathlib import Path
from effllm.runtime.config import read_config
from effllm.runtime.tokenizer import Tokenizer
folder = Path(sys.argv[1])
tokenizer, text = Tokenizer.load(folder, read_config(folder)), "The fox went home, and the king slept.\\n" * 120_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = len(tokenizer.encode(text))
print(count, len(text), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_long_text_takes_little_memory() -> None:
    ran = subprocess.run([sys.executable, "-P", "-c", PROGRAM, FABLE], capture_output=True, text=True, timeout=120, check=True)
    tokens, length, kib = map(int, ran.stdout.split())
    assert length > 4_000_000 and tokens > 1_000_000 and kib << 10 < 40 * length  # 150 at once; 36 of a token are its number in a list
