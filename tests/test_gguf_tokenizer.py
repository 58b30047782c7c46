"""Tokenizers built from GGUF metadata: on published vocabularies the ids that their test set expects, and each broken list is named."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import FABLE, add_fable_tokenizer, write_model

from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.pre_tokenizers import SPLITTERS, pre_tokenizer, same_pattern
from effllm.runtime.gguf.store import read_header
from effllm.runtime.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER, backend, load_tokenizer, read_vocabulary
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer, TokenizerError

# Real vocabularies with texts and ids, where a checkout has them beside it.
FOLDERS = [parent / "shared" / "vocabs" for parent in Path(__file__).resolve().parents]
VOCABULARIES = sorted(path for folder in FOLDERS if folder.is_dir() for path in folder.glob("*.gguf"))
SEPARATOR = "\n__ggml_vocab_test__\n"


def cases(path: Path) -> list[tuple[str, list[int]]]:
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().split("\n")[: len(texts)]
    assert len(lines) == len(texts) > 40
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines)]


@pytest.mark.skipif(not VOCABULARIES, reason="no vocabularies beside this checkout")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_published_vocabularies_give_the_expected_ids(path: Path) -> None:
    made = backend(read_vocabulary(read_header(path)))
    wrong = [(text, ids, found) for text, ids in cases(path) if (found := made.encode(text, add_special_tokens=False).ids) != ids]
    assert not wrong


@pytest.mark.skipif(not VOCABULARIES, reason="no vocabularies beside this checkout")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_what_was_encoded_decodes(path: Path) -> None:
    made = backend(read_vocabulary(read_header(path)))
    for text, ids in cases(path):
        assert made.decode(ids, skip_special_tokens=False) == text


@pytest.mark.skipif(not VOCABULARIES, reason="no vocabularies beside this checkout")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_words_that_were_added_in_letters_of_bytes_are_shown(path: Path) -> None:
    """DeepSeek Coder's vocabulary has thirteen, and they are found in what a user writes."""
    tokenizer, text = load_tokenizer(path, 1 << 20), "fünf Öle à 3 Çü, søn þú ÿ÷À 日"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids) == text


def header(**keys: object) -> GgufHeader:
    return GgufHeader(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, {})


LLAMA = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁ab", "<go>"],
         "scores": np.array([0, 0, 0, 0, -1, -2, -3, -4, -5, 0], np.float32),
         "token_type": np.array([UNKNOWN, CONTROL, CONTROL, BYTE, *[NORMAL] * 5, USER]), "bos_token_id": 1, "eos_token_id": 2,
         "unknown_token_id": 0}


def test_scores_bytes_and_added_tokens() -> None:
    made = backend(read_vocabulary(header(**LLAMA)))
    assert made.encode("ab").ids == [8] and made.encode("A").ids == [4, 3]
    assert made.encode("ab<go>ab</s>").ids == [8, 9, 8, 2]
    assert made.decode([8, 9, 2]) == "ab<go>"  # a control token is not shown
    plain = backend(read_vocabulary(header(**LLAMA, add_space_prefix=False)))
    assert plain.encode("ab").ids == [7]


@pytest.mark.parametrize("said", [{"general.architecture": "phi3"}, {"general.name": "Phi-3 mini"}, {"general.name": "my-phi3"},
                                  {"general.architecture": "llama"}])
def test_marks_of_phi_3_swallow_the_white_space_after_them(said: dict[str, str]) -> None:
    made = backend(read_vocabulary(GgufHeader(Path("m.gguf"), header(**LLAMA).metadata | said, {})))
    phi = "llama" not in said.values()
    assert made.encode("<go>  ab").ids == ([9, 8] if phi else [9, 4, 4, 8])
    assert made.encode("<s> ab").ids == [1, 4, 8]


def test_the_unknown_token_is_one_where_it_is_written() -> None:
    assert backend(read_vocabulary(header(**LLAMA))).encode("ab<unk>ab").ids == [8, 0, 8]


@pytest.mark.parametrize(("kind", "ends"), [(NORMAL, [2]), (USER, [2]), (CONTROL, [2, 9])])
def test_a_tag_of_html_ends_no_answer_where_another_token_does(kind: int, ends: list[int]) -> None:
    """Gemma's vocabulary has </s> as a word."""
    tokens = [*LLAMA["tokens"][:2], "<eos>", *LLAMA["tokens"][3:9], "</s>"]
    read = read_vocabulary(header(**LLAMA | {"tokens": tokens, "token_type": np.array([*LLAMA["token_type"][:9], kind])}))
    assert sorted(Tokenizer(backend(read), read.special_tokens, False, 1, 10, [], None, Path("m.gguf")).stop_ids) == ends


def test_the_best_score_is_merged_first() -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc"], np.array([0, 0, 0, -2, -1], np.float32)
    made = backend(read_vocabulary(header(model="llama", tokens=tokens, scores=scores, add_space_prefix=False)))
    assert made.encode("abc").ids == [0, 4]


def test_the_begin_token() -> None:
    def adds(**keys: object) -> bool:
        return read_vocabulary(header(**keys)).add_bos

    merged = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    assert adds(**LLAMA) and not adds(**LLAMA, add_bos_token=False)
    assert adds(**merged, pre="llama-bpe") and not adds(**merged, pre="qwen2") and adds(**merged, pre="qwen2", add_bos_token=True)


@pytest.mark.parametrize(("changes", "named"), [
    ({"model": None}, "holds no tokenizer"), ({"model": "plamo2"}, "'plamo2'"), ({"model": 3}, "of kind 3"), ({"tokens": 5}, "tokens 5"),
    ({"tokens": []}, "tokens [0 values]"), ({"scores": None}, "tokenizer.ggml.scores"), ({"scores": np.zeros(3)}, "scores [3 values]"),
    ({"token_type": np.zeros(4, int)}, "token_type [4 values]"), ({"eos_token_id": "x"}, "eos_token_id 'x'"),
    ({"eos_token_id": -1}, "eos_token_id -1"), ({"model": "gpt2"}, "merges"), ({"model": "gpt2", "merges": ["a b"], "pre": "new"}, "'new'"),
])
def test_broken_lists_are_named(changes: dict[str, object], named: str) -> None:
    keys = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(TokenizerError) as caught:
        read_vocabulary(header(**keys))
    assert named in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", sorted(SPLITTERS))
def test_every_cutter_keeps_the_text(name: str) -> None:
    """Patterns compile, and the fragments joined are the text again."""
    text = "Hello  World's 12345 naïve 中文かな\n\n\tdef f(x): return x/2 \r\n !?... ÄÖ"
    cut = pre_tokenizer(SPLITTERS[name].patterns).pre_tokenize_str(text)
    assert "".join(text[begin:end] for _, (begin, end) in cut) == text and len(cut) > (5 if name == "superbpe" else 10)


def test_deepseek_v3_cuts_marks_from_what_follows_them() -> None:
    """Three digits at most, marks with the letters behind them, Han and kana together; spelt with line ends as they are, the same."""
    text = "Hello World's 12345 words\n\n(tabs)! x=foo_bar ひらカナ漢字 naïve"
    cutter = SPLITTERS["deepseek-v3"]
    cut = [text[begin:end] for _, (begin, end) in pre_tokenizer(cutter.patterns).pre_tokenize_str(text)]
    assert cut == ["Hello", " World", "'s", " ", "123", "45", " words", "\n\n", "(tabs", ")!", " x", "=foo", "_bar", " ", "ひらカナ漢字",
                   " naïve"]
    spelt = cutter.patterns[-1].replace(r"\r", "\r").replace(r"\n", "\n")
    assert spelt != cutter.patterns[-1] and same_pattern(spelt) == same_pattern(cutter.patterns[-1])


def test_a_template_for_tools(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        writer.add_string("tokenizer.chat_template.tool_use", "tools")

    write_model(FABLE, tmp_path / "m.gguf", "F32", change=change)
    *_, engine = open_engine(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=512, threads=1))
    tokenizer = Tokenizer.load(tmp_path / "m.gguf", engine.config)
    engine.close()
    said = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(said, tools=[{"type": "function"}]) == "tools" and "Hi" in tokenizer.render_chat(said)


@pytest.mark.parametrize("kind", [CONTROL, USER, NORMAL])
def test_lmstudio_1143_an_answer_ends_at_the_mark_of_its_template(tmp_path: Path, kind: int) -> None:
    """A file whose eos_token_id is that of another token, with a template that ends turns by <|im_end|>, whatever type it says this
    token has: the answer is what the model says before the mark, not thousands of tokens behind it."""
    def change(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        stated = writer.kv_data[0]
        stated["tokenizer.ggml.tokens"].value[4], stated["tokenizer.ggml.token_type"].value[4] = "<|im_end|>", kind
        stated["tokenizer.ggml.eos_token_id"].value = 3
        template = stated["tokenizer.chat_template"]
        assert "<|end|>" in template.value
        template.value = template.value.replace("<|end|>", "<|im_end|>")

    write_model(FABLE, tmp_path / "m.gguf", "F32", change=change)
    said = []
    for model in (FABLE, tmp_path / "m.gguf"):
        *_, engine = open_engine(model, EngineOptions(device="cpu", ctx=512, threads=1, kv="32bit"))
        settings = SamplerSettings(temperature=0.0, repetition_penalty=1.2)
        session = Session(engine, Tokenizer.load(model, engine.config), settings, max_tokens=300)
        said.append(list(session.ask("Repeat after me: the fox ran into the wood."))[-1].stats)
        engine.close()
    folder, file = said
    assert folder.finish_reason == file.finish_reason == "stop" and len(file.token_ids) < 300
    assert file.token_ids == folder.token_ids and file.text == folder.text and "im_end" not in file.text
