"""Pre-tokenization of byte-level vocabularies in GGUF files: llama.cpp's tokens for the same file."""

import ctypes
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from effllm.runtime.gguf.pre_tokenizers import SPLITTERS
from effllm.runtime.gguf.store import read_header
from effllm.runtime.gguf.tokenizer import backend, read_vocabulary

PLAIN = ["Hello World's 12345 words,  two spaces\n\n\tand (tabs)! HELLO'S WE'LL don't",
         "naïve Äpfel 中文かなカナ漢字 한국어 テスト… ‘q’ “x”—y",
         "x=y+1; // C++\r\nif (a_b != c->d) {\n    return x[10] * 1234567890;\n}\n\n\n", "Привет, мир! Это тест 2024 года. ЗДРАВСТВУЙ",
         "a  b   c    d     e      f        g\t\thi", "1 12 123 1234 12345 123456 1234567 12345678 123456789 3.14159 1,000,000",
         "\n \n  \n\t\n", "http://example.com/path/to?x=1&y=2 user@mail.org /usr/bin/env\n//x/\n", "'s 't 're 've 'm 'll 'd 'S 'T ' s's",
         "「日本語」（テスト）、。！？：；《书》【x】", "ㄅㄆㄇ ㄱㄴㄷ ︰︱﹏", "<sentinel:12> IMGIMGABZ <b>x</b>",
         "ok…。，、।۔،next (paren) |bar|",
         "Türkçe'nin İstanbul'da ğüşıöç"]
MARKS = ["हिन्दी में लिखा हुआ पाठ ।", "ไทย ภาษา สวัสดี", "e\u0301te\u0301 A\u030angstro\u0308m"]
CASED = ["camelCase PascalCase HTTPServer iPhone IOError getHTTPResponse"]
DIGITS = ["مرحبا بالعالم ١٢٣٤٥ هذا، اختبار", "१२३४ ๑๒๓๔"]
# What llama.cpp cuts otherwise than the models' own tokenizers: it takes marks for no letters, in some patterns all letters for those of
# either case, and only ten characters for digits.
APART = dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), MARKS) | {"kimi-k2": MARKS + CASED}
APART |= dict.fromkeys(("tiny_aya", "cohere2moe"), CASED + DIGITS) | {"youtu": CASED, "superbpe": DIGITS}


@cache
def learnt() -> tuple[list[str], list[str]]:
    """Tokens that cross the borders of words, so that a wrong cut changes the tokens, and their merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([*PLAIN, *MARKS, *CASED, *DIGITS], trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, show_progress=False, min_frequency=1))
    model = json.loads(made.to_str())["model"]
    pairs = (each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"])
    return sorted(model["vocab"], key=model["vocab"].get), [f"{left} {right}" for left, right in pairs]


def write(path: Path, name: str) -> Path:
    """A file of a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count, writer.add_head_count,
                writer.add_feed_forward_length):
        add(8)
    writer.add_layer_norm_rms_eps(1e-5)
    texts, merges = learnt()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(texts))
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def peer() -> Iterator[object]:
    module = pytest.importorskip("llama_cpp")
    silent = module.llama_log_callback(lambda *_: None)
    module.llama_log_set(silent, ctypes.c_void_p(0))
    yield module
    module.llama_log_set(module._logger.llama_log_callback, ctypes.c_void_p(0))  # `silent` ends here, and would be called by other tests


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPLITTERS))
def test_llama_cpp_cuts_the_same_words(tmp_path: Path, peer: object, name: str) -> None:
    path = write(tmp_path / "m.gguf", name)
    read = read_vocabulary(read_header(path))
    made, params = backend(read), peer.llama_model_default_params()
    params.vocab_only = True
    model = peer.llama_model_load_from_file(str(path).encode(), params)
    assert model, "llama.cpp knows no such name"
    try:
        vocab = peer.llama_model_get_vocab(model)
        assert peer.llama_vocab_get_add_bos(vocab) == read.add_bos
        apart = []
        for text in [*PLAIN, *MARKS, *CASED, *DIGITS]:
            data, room = text.encode(), 4 * len(text) + 8
            ids = (peer.llama_token * room)()
            theirs = list(ids[:peer.llama_tokenize(vocab, data, len(data), ids, room, False, False)])
            ours = made.encode(text, add_special_tokens=False).ids
            assert made.decode(ours) == text
            if ours != theirs:
                apart.append(text)
    finally:
        peer.llama_model_free(model)
    assert set(apart) <= set(APART.get(name, ())) and bool(apart) == (name in APART)
