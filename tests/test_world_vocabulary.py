"""RWKV's World vocabulary: the longest matching token from the start, in folders and in GGUF files, and invalid files."""

import json
from pathlib import Path

import numpy as np
import pytest
from family_models import Case, written
from hypothesis import given, settings
from hypothesis import strategies as st
from rwkv7_files import file_of
from rwkv_vocabulary import END, SETTINGS, TOKENS, WORDS, greedy, lines, write_vocabulary
from tokenizers import Tokenizer as Library

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.gguf.folder_files import folder_texts
from effllm.runtime.hub import WORLD
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tokens.rwkv_vocabulary import MAX_REGEX_DEPTH, WORLD_TEMPLATE, rwkv_tokenizer, unescape_bytes
from effllm.runtime.tokens.token_bytes import token_bytes_of

# Texts of the vocabulary's words and of their beginnings, and of anything.
TEXTS = st.lists(st.sampled_from([*WORDS, *(word[:-1] for word in WORDS)]) | st.text(max_size=4), max_size=30).map("".join)
BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("world") / "source"
    written(Case("rwkv7", {"num_hidden_layers": 1, "head_dim": 64}), made)
    write_vocabulary(made)
    (made / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, read_config(folder))


@pytest.fixture(scope="module")
def exported(folder: Path) -> Tokenizer:
    path = folder.parent / "exported.gguf"
    list(export_gguf(folder, path, "F16", "a name"))
    return Tokenizer.load(path, read_config(path))


@pytest.fixture(scope="module")
def of_file(folder: Path) -> Tokenizer:
    path = file_of(folder, folder.parent / "m.gguf", vocabulary=True)
    return Tokenizer.load(path, read_config(path))


@given(TEXTS)
def test_a_text_is_cut_into_the_longest_tokens_that_fit(tokenizer: Tokenizer, of_file: Tokenizer, text: str) -> None:
    expected = greedy(text.encode())
    assert tokenizer.encode(text) == of_file.encode(text) == expected
    assert tokenizer.decode(expected) == of_file.decode(expected) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, expected)) + stream.flush() == text


@given(st.binary(max_size=40) | st.lists(st.sampled_from([*TOKENS]), max_size=12).map(b"".join))
def test_any_bytes_come_back(tokenizer: Tokenizer, some: bytes) -> None:
    numbers = greedy(some)
    assert b"".join(map(token_bytes_of(tokenizer), numbers)) == some
    assert tokenizer.decode(numbers) == some.decode("utf-8", "replace")


@given(st.sets(st.text("ab-]", min_size=2, max_size=2 * MAX_REGEX_DEPTH + 3) | st.integers(2, 3 * MAX_REGEX_DEPTH).map("a".__mul__),
               max_size=40),
       st.lists(st.text("ab-]c", max_size=60), min_size=1, max_size=4))
def test_any_vocabulary_finds_its_longest_words(words: set[str], texts: list[str]) -> None:
    """Also where words lie in one another more deeply than groups of an expression do."""
    tokens = {token: number for number, token in enumerate([*BYTES, *sorted(word.encode() for word in words)], 1)}
    made = rwkv_tokenizer(tokens, {0: END})
    for text in texts:
        at, expected, whole = 0, [], text.encode()
        while at < len(whole):
            length = next(length for length in range(len(whole) - at, 0, -1) if whole[at : at + length] in tokens)
            expected.append(tokens[whole[at : at + length]])
            at += length
        assert made.encode(text).ids == expected


def test_it_is_a_tokenizer_json_like_any_other(tokenizer: Tokenizer) -> None:
    again = Library.from_str(tokenizer.to_json())
    text = "User: then thereof 中文😀\n\n"
    assert again.encode(text).ids == tokenizer.encode(text)


def test_an_end_of_text_is_a_token_and_none_is_put_before_a_text(tokenizer: Tokenizer, of_file: Tokenizer) -> None:
    for own, end in ((tokenizer, END), (of_file, "<s>")):
        assert own.encode("ab") == [TOKENS[b"ab"]] and own.encode(f"ab{end}")[-1] == 0
        assert own.stop_ids == {0, TOKENS[b"\n\n"]} and own.bos_id == 0
        assert own.decode([TOKENS[b"ab"], 0]) == "ab" and own.vocab_size == len(TOKENS) + 1


def test_a_chat_is_asked_as_the_folder_says_or_llama_cpp_does(tokenizer: Tokenizer, of_file: Tokenizer) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi "}, {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "the"}]
    asked = "System: Be brief.\n\nUser: hi\n\nAssistant: ab\n\nUser: the\n\nAssistant:"
    assert of_file.render_chat(said, add_generation_prompt=True) == asked
    assert tokenizer.render_chat(said, add_generation_prompt=True) == asked.replace("hi", " hi ")


def test_a_folder_that_is_made_of_a_file_cuts_and_ends_as_it_does(folder: Path, of_file: Tokenizer, tmp_path: Path) -> None:
    for name, said in folder_texts(folder.parent / "m.gguf").items():
        (tmp_path / name).write_text(said, encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    again = Tokenizer.load(tmp_path, read_config(tmp_path))
    assert again.encode("User: 中文 the\n\n") == of_file.encode("User: 中文 the\n\n")
    assert again.stop_ids == of_file.stop_ids and again.template.source == WORLD_TEMPLATE


@settings(max_examples=20)
@given(st.text(max_size=40) | st.lists(st.sampled_from(WORDS), max_size=20).map("".join))
def test_an_exported_file_cuts_and_ends_as_its_folder_does(tokenizer: Tokenizer, exported: Tokenizer, text: str) -> None:
    assert exported.encode(text) == greedy(text.encode()) and exported.decode(exported.encode(text)) == text
    assert exported.stop_ids == tokenizer.stop_ids and exported.bos_id == 0 and exported.vocab_size == tokenizer.vocab_size
    assert exported.template.source == tokenizer.template.source


@pytest.mark.parametrize(("written", "meant"), [
    ("ab", b"ab"), (r"\n\t\r", b"\n\t\r"), (r"\x00\xff", b"\x00\xff"), (r"\\n", b"\\n"), (r"\'\"", b"'\""), ("é", "é".encode()),
    ("\\", b"\\")])
def test_tokens_of_a_file_are_written_as_python_does(written: str, meant: bytes) -> None:
    assert unescape_bytes(written) == meant


LAST = len(TOKENS)


@pytest.mark.parametrize(("change", "said"), [
    (lambda text: text.replace("1 ", "x ", 1), "line 1 is not an id"),
    (lambda text: text + f"{LAST + 1} 'zz' 3\n", f"line {LAST + 1} is not"),
    (lambda text: text + f"{LAST + 1} __import__('os') 2\n", f"line {LAST + 1} is not"),
    (lambda text: text + f"{LAST + 1} '\\xzz' 3\n", f"line {LAST + 1} is not"),
    (lambda text: text + f"{LAST + 1} '' 0\n", f"line {LAST + 1} is not"),
    (lambda text: text + f"{LAST + 1} 'ab' 2\n", f"line {LAST + 1} repeats an id or a text"),
    (lambda text: text + f"{LAST} 'zz' 2\n", f"line {LAST + 1} repeats an id or a text"),
    (lambda text: text + f"{LAST + 1} '{'z' * 300}' 300\n", "exceed the size limits"),
    (lambda text: text + "9000000 'zz' 2\n", "exceed the size limits"),
    (lambda text: "".join(text.splitlines(True)[1:]), "lacks tokens for some of the 256 bytes"),
    (lambda text: "", "lacks tokens for some of the 256 bytes"),
    (lambda text: text + f"{LAST + 1} {END!r} {len(END)}\n", "is a duplicate")])
def test_a_file_that_is_no_vocabulary_is_named(folder: Path, tmp_path: Path, change, said: str) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / WORLD).write_text(change(lines()), encoding="utf-8")
    with pytest.raises(EffllmError) as caught:
        Tokenizer.load(tmp_path, read_config(tmp_path))
    assert said in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_a_model_is_run_held_to_a_form_and_asked_again(folder: Path, tmp_path: Path, user) -> None:
    said = user.run("run", folder, "User: the", "-n", "4", "--temp", "0")
    assert said.code == 0, said.err
    held = user.run("run", folder, "the", "-n", "12", "--grammar", 'root ::= "abcdef" | "thereof"')
    assert held.code == 0 and held.out.strip() in ("abcdef", "thereof"), held
    made = user.run("quantize", folder, "-o", tmp_path / "4bit", "--bits", "8")
    assert made.code == 0 and (tmp_path / "4bit" / WORLD).exists()
    assert user.run("run", tmp_path / "4bit", "User: the", "-n", "4", "--temp", "0").code == 0


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("file", ["m.gguf", "exported.gguf"])
def test_llama_cpp_cuts_the_same(folder: Path, of_file: Tokenizer, exported: Tokenizer, file: str) -> None:
    peer = pytest.importorskip("llama_cpp")
    theirs, random = peer.Llama(str(folder.parent / file), vocab_only=True, verbose=False), np.random.default_rng(1)
    for _ in range(200):
        text = "".join(random.choice([*WORDS, "x", " ", "z\n"], 20))
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == of_file.encode(text)
    theirs.close()


@pytest.mark.peer
@pytest.mark.slow
def test_the_published_vocabulary_cuts_as_its_own_program_does() -> None:
    peer = pytest.importorskip("rwkv.rwkv_tokenizer")
    path = Path(peer.__file__).parent / WORLD
    from effllm.runtime.tokens.rwkv_vocabulary import read_rwkv

    theirs, ours = peer.TRIE_TOKENIZER(str(path)), read_rwkv(path, {"eos_token": "\n\n"})
    assert ours.ends == (261,)
    random = np.random.default_rng(2)
    some = [" the", "hello", "中文", "😀", "\n\n", "\r\n", "https://", "def ", "    ", "<b>", "====", "naïve", "Ünï", "한국어", "'s"]
    for _ in range(500):
        text = "".join(random.choice(some) if random.random() < 0.7 else chr(random.integers(1, 0x3000)) for _ in range(60))
        assert ours.backend.encode(text).ids == theirs.encode(text) and ours.backend.decode(theirs.encode(text)) == text
