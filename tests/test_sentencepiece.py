"""SentencePiece's tokenizer.model: what is read, against the copy of the vocabulary in a GGUF file, and by hand."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from config_samples import LLAMA

from effllm import EffllmError
from effllm.runtime.config import parse_config
from effllm.runtime.gguf.tokenizer import Vocabulary, backend
from effllm.runtime.tokenizer import Tokenizer, TokenizerError

CONFIG = parse_config(LLAMA)
WORDS = ["▁", "a", "b", "c", "d", "▁a", "ab", "▁ab", "cd", "abcd", "▁abcd", "▁▁"]
PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
          *((word, -float(i), 1) for i, word in enumerate(WORDS)), ("[UNUSED_1]", -50.0, 5), ("<tool>", 0.0, 4)]
PLAIN = {4: 0}  # blanks stay


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: object) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(fields: dict[int, object]) -> bytes:
    return b"".join(field(number, value) for number, value in fields.items())


def written(folder: Path, normalizer: dict[int, object] = PLAIN, trainer: dict[int, object] | None = None, pieces: list = PIECES,
            **settings: object) -> Path:
    data = b"".join(field(1, message({1: text.encode(), 2: score} | ({} if kind == 1 else {3: kind}))) for text, score, kind in pieces)
    data += field(2, message({3: 2, 43: -1} if trainer is None else trainer)) + field(3, message(normalizer)) + field(4, b"other")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    names = {number: token for token, number in tokenizer.vocabulary().items()}
    return [names[number] for number in tokenizer.encode(text, add_special_tokens=False)]


def test_pieces_are_joined_by_their_scores(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path), CONFIG)
    assert tokens(tokenizer, "abcd") == ["▁abcd"] and tokens(tokenizer, "cab") == ["▁", "c", "ab"]
    assert tokens(tokenizer, "a  ab") == ["▁a", "▁", "▁ab"], "of two pairs the one with the better score is joined first"
    assert tokens(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens(tokenizer, "a<tool>b") == ["▁a", "<tool>", "▁", "b"], "a piece of its own is not cut, and begins another text"
    assert tokenizer.vocab_size == len(PIECES)
    for text in ("abcd", "a  ab", "é b", "cab\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_it_is_what_a_gguf_file_makes_of_the_same_lists(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path), CONFIG)
    texts, scores, kinds = zip(*PIECES, strict=True)
    ids = {"unknown": 0, "bos": 1, "eos": 2}
    other = backend(Vocabulary(tmp_path, "llama", "", list(texts), np.array(kinds), np.array(scores), [], ids, True, True, None))
    for text in ("abcd cab", " a  ab", "dé<tool>abab", ""):
        assert tokenizer.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False).ids
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("a")[0] == 1 and tokenizer.stop_ids == {2, *CONFIG.eos_token_ids}


def test_blanks_are_as_the_model_says(tmp_path: Path) -> None:
    bare = Tokenizer.load(written(tmp_path / "bare", {3: 0, 4: 0}), CONFIG)
    assert tokens(bare, "ab") == ["ab"] and tokens(bare, " ab") == ["▁ab"]
    fewer = Tokenizer.load(written(tmp_path / "fewer", {}), CONFIG)  # both are so where nothing is said
    assert tokens(fewer, "  a   ab ") == ["▁a", "▁ab"]


def test_tokens_are_added_in_the_place_of_pieces_and_after_them(tmp_path: Path) -> None:
    unused, end = len(PIECES) - 2, len(PIECES) + 1
    folder = written(tmp_path, added_tokens_decoder={str(unused): {"content": "<|im_end|>", "special": True},
                                                     str(end): {"content": "<more>", "special": False}})
    tokenizer = Tokenizer.load(folder, CONFIG)
    assert tokenizer.encode("a<|im_end|><more>", add_special_tokens=False) == [tokenizer.vocabulary()["▁a"], unused, end]
    assert "[UNUSED_1]" not in tokenizer.vocabulary() and unused in tokenizer.stop_ids
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": unused}))
    assert Tokenizer.load(folder, CONFIG).encode("<|im_end|>", add_special_tokens=False) == [unused]


def test_a_tokenizer_json_goes_before_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        Tokenizer.load(folder, CONFIG)


@pytest.mark.parametrize(("change", "said"), [
    (lambda data: data[:-3], "SentencePiece|ends within"), (lambda data: b"", "no pieces"), (lambda data: b"\x0f" + data, "SentencePiece"),
    (lambda data: b"\xff" * 12, "SentencePiece"), (lambda data: field(1, message({1: b"\xff\xfe", 2: 1.0})) + data, "lacks a text"),
    (lambda data: data + field(2, message({3: 1})), "not a BPE model"), (lambda data: field(1, b"\x0a\x7fa") + data, "ends within"),
    (lambda data: b"\x09" + data[-4:], "ends within")])
def test_what_is_no_such_file_is_said_in_one_line(tmp_path: Path, change: object, said: str) -> None:
    path = written(tmp_path) / "tokenizer.model"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(EffllmError, match=said) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "\n" not in caught.value.message and "tokenizer.model" in caught.value.message and caught.value.hint


@pytest.mark.parametrize("entry", [{"99999999": {"content": "<far>", "special": True}}, {"-1": {"content": "x"}}])
def test_a_number_that_no_vocabulary_has(tmp_path: Path, entry: dict[str, object]) -> None:
    folder = written(tmp_path, added_tokens_decoder=entry)
    if "-1" in entry:
        assert Tokenizer.load(folder, CONFIG).vocab_size == len(PIECES)
        return
    with pytest.raises(TokenizerError, match="an added token has an id out of range"):
        Tokenizer.load(folder, CONFIG)
