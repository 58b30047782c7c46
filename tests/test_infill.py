"""Fill-in-the-middle: a vocabulary's tokens for it, the prompts built from them, and how much of the text fits."""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from command_line import CliRun
from gguf_samples import FABLE, add_fable_tokenizer, write_model
from infill_models import OF_CODESTRAL, OF_QWEN, ROWS, filling_model

from effllm import ContextOverflow
from effllm.offload.gguf_header import GgufHeader
from effllm.runtime.config import read_config
from effllm.runtime.gguf.store import read_header
from effllm.runtime.gguf.tokenizer import backend, load_tokenizer, read_vocabulary
from effllm.runtime.gguf.tokenizer_export import tokenizer_metadata
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.tokens.infill import CURRENT_FILE, MIN_CONTEXT_TOKENS, PROJECT, SNIPPET, InfillContext, find_fim_tokens, infill_prompt
from effllm.runtime.tokens.plain_text import PlainText
from effllm.runtime.tokens.stream_filters import IndentStop

VOCABS = [folder for parent in Path(__file__).resolve().parents if (folder := parent / "shared" / "vocabs").is_dir()]
needs_vocabularies = pytest.mark.skipif(not VOCABS, reason="no vocabularies beside this checkout")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
FAMILIES = {  # names in the order in which a prompt has them, then those that end what is written
    "Qwen": (OF_QWEN[:3], OF_QWEN[3:]), "CodeGemma": (OF_QWEN[:3], ("<|file_separator|>",)),
    "StarCoder 2": (STARCODER[:3], ("<fim_pad>", "<repo_name>", "<file_sep>")),
    "Granite Code": (STARCODER[:3], ("<fim_pad>", "<reponame>", "<filename>")),
    "Mellum": ((STARCODER[1], STARCODER[0], STARCODER[2]), ("<fim_pad>", "<filename>", "<reponame>")),
    "DeepSeek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("<|EOT|>",)),
    "CodeLlama": (("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),
    "Seed Coder": (("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), ()),
    "Codestral": (("[SUFFIX]", "[PREFIX]"), ()), "GLM": (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), ())}
BESIDE = {"Mellum": ("<system>", "</assistant>"), "Codestral": ("[MIDDLE]",)}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def asked(names: dict[str, int], gap: InfillContext, room: int = 1 << 20, answer: int = 16, may_cut: bool = True, bos: int | None = None):
    return infill_prompt(find_fim_tokens(names, {}), gap, letters, letters, bos, room, answer, may_cut)


def numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names, 100_000)}


QWEN = numbered(*OF_QWEN)


def spelled(ids: list[int], names: dict[str, int] = QWEN) -> str:
    texts = {number: name for name, number in names.items()}
    return "".join(texts.get(token) or chr(token) for token in ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_order(family: str) -> None:
    order, ends = FAMILIES[family]
    names = numbered("<|im_start|>", *BESIDE.get(family, ()), *ends, *order)
    first, second, *middle = order
    texts = ("before", "behind") if "uf" not in first.lower() else ("behind", "before")
    assert spelled(asked(names, InfillContext("before", "behind")).ids, names) == first + texts[0] + second + texts[1] + "".join(middle)
    assert find_fim_tokens(names, {}).ends == {names[name] for name in (*order, *ends)}


def test_a_vocabulary_without_all_of_them_has_none() -> None:
    assert find_fim_tokens(numbered("<|endoftext|>", *OF_QWEN[:2], "<fim_middle>"), {}) is None
    assert find_fim_tokens(numbered(), {"prefix_token": "", "suffix_token": "", "middle_token": ""}) is None
    assert find_fim_tokens(numbered(*OF_CODESTRAL), {}).middle is None


def test_files_may_state_tokens_of_any_name() -> None:
    names = numbered("<before>", "<after>", "<here>", "<nothing>", *OF_QWEN)
    stated = {"prefix_token": "<before>", "suffix_token": "<after>", "middle_token": "<here>", "fim_pad_token": "<nothing>"}
    marks = find_fim_tokens(names, stated)
    assert (marks.prefix, marks.suffix, marks.middle) == (names["<before>"], names["<after>"], names["<here>"])
    assert names["<nothing>"] in marks.ends and not marks.suffix_first
    assert find_fim_tokens(names, {**stated, "middle_token": "<gone>"}).prefix == names["<|fim_prefix|>"]


def test_what_is_begun_belongs_to_the_prefix_and_text_begins_once() -> None:
    prompt = asked(QWEN, InfillContext("a\n", "\nb", "  c"), bos=7)
    assert spelled(prompt.ids[1:]) == "<|fim_prefix|>a\n  c<|fim_suffix|>\nb<|fim_middle|>" and prompt.ids[0] == 7
    assert prompt.cacheable == 1 and not prompt.is_truncated
    assert spelled(asked(QWEN, InfillContext("", "")).ids) == "<|fim_prefix|><|fim_suffix|><|fim_middle|>"


@pytest.mark.parametrize(("names", "said"), [
    (OF_QWEN, f"<|repo_name|>{PROJECT}\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 1\n<|file_sep|>{CURRENT_FILE}\n"),
    ((*STARCODER, "<repo_name>", "<file_sep>"), f"<repo_name>{PROJECT}<file_sep>x = 1\n<file_sep>y = 1\n<file_sep>"),
    ((*STARCODER, "<reponame>", "<filename>"),
     f"<reponame>{PROJECT}\n<filename>a.py\nx = 1\n<filename>b.py\ny = 1\n<filename>{CURRENT_FILE}\n"),
    (OF_QWEN[:3], f"{SNIPPET}x = 1\n{SNIPPET}y = 1\n")])
def test_other_files_come_first(names: tuple[str, ...], said: str) -> None:
    known = numbered(*names)
    gap = InfillContext("before", "behind", files=(("a.py", "x = 1\n"), ("b.py", "y = 1\n")))
    prompt = asked(known, gap)
    assert spelled(prompt.ids, known) == f"{said}{names[0]}before{names[1]}behind{names[2]}"
    assert prompt.cacheable == prompt.ids.index(known[names[0]])
    assert spelled(asked(known, InfillContext("before", "behind")).ids, known).startswith(names[0])


@pytest.mark.parametrize("before", [100, 3_000, 30_000])
@pytest.mark.parametrize("behind", [100, 3_000, 30_000])
@pytest.mark.parametrize("files", [0, 3, 40])
def test_what_is_nearest_has_room(before: int, behind: int, files: int) -> None:
    gap = InfillContext("".join(chr(200 + each % 700) for each in range(before)), "".join(chr(1000 + each % 700) for each in range(behind)),
                        "!!",
              tuple((f"{number}.py", f"{number}" * 300) for number in range(files)))
    prompt, room, answer = asked(QWEN, gap, room=8192, answer=128), 8192, 128
    assert len(prompt.ids) + answer <= room
    said = spelled(prompt.ids)
    own = said[said.index("<|fim_prefix|>") + len("<|fim_prefix|>") :]
    prefix, suffix = own.removesuffix("<|fim_middle|>").split("!!<|fim_suffix|>")
    assert gap.prefix.endswith(prefix) and gap.suffix.startswith(suffix)
    whole = (len(prefix), len(suffix)) == (before, behind) and said.count("<|file_sep|>") == files + bool(files)
    assert prompt.is_truncated != whole
    if (len(prefix), len(suffix)) != (before, behind):
        assert len(prompt.ids) + answer > room * 0.85, "what room there is is used"
        assert len(suffix) == behind or len(suffix) * 3 >= len(prefix) or len(prefix) == before
    if files == 40:
        assert "<|file_sep|>39.py\n" in said and "<|file_sep|>0.py\n" not in said and prompt.cacheable <= room - MIN_CONTEXT_TOKENS


def test_a_key_pressed_moves_neither_files_nor_the_cut() -> None:
    """What was read of them is held then."""
    files = tuple((f"{number}.py", f"{number}" * 300) for number in range(40))
    prompts = [asked(QWEN, InfillContext("p" * 5_000 + "q" * number, "s" * 9_000, files=files), room=8192, answer=most).ids
               for number, most in ((0, 128), (1, 128), (2, 128), (3, 0))]
    same = [next((at for at, (one, other) in enumerate(zip(prompts[0], each)) if one != other), len(each)) for each in prompts]
    assert len({tuple(each[: each.index(QWEN["<|fim_prefix|>"])]) for each in prompts}) == 1, "files, also in a request that only warms"
    assert min(same[:3]) >= prompts[0].index(ord("q") if ord("q") in prompts[0] else QWEN["<|fim_suffix|>"])
    texts = [spelled(each).split("<|fim_prefix|>")[1].split("<|fim_suffix|>")[0].rstrip("q") for each in prompts[:3]]
    assert len(set(texts)) == 1


def test_what_may_not_be_cut_is_refused() -> None:
    with pytest.raises(ContextOverflow, match="the prompt has 2003 tokens and the context holds 1024"):
        asked(QWEN, InfillContext("p" * 1000, "s" * 1000), room=1024, may_cut=False)
    assert len(asked(QWEN, InfillContext("p" * 1000, "s" * 10), room=1024, may_cut=False).ids) == 1013
    with pytest.raises(ContextOverflow, match="the begun completion has 2000 tokens"):
        asked(QWEN, InfillContext("p", "s", "b" * 2000), room=1024)


# ---- texts as such


@needs_vocabularies
def test_the_tokens_of_codellamas_authors() -> None:
    """What the tokenizer of their repository makes of its first example of infilling."""
    plain = PlainText(load_tokenizer(VOCABS[0] / "llama-spm.gguf", 32_016))
    assert plain.encode_start('def remove_non_ascii(s: str) -> str:\n    """ ') == [
        822, 3349, 29918, 5464, 29918, 294, 18869, 29898, 29879, 29901, 851, 29897, 1599, 851, 29901, 13, 1678, 9995, 29871]
    assert plain.encode_continuation("\n    return result\n") == [13, 1678, 736, 1121, 13]


@needs_vocabularies
@pytest.mark.parametrize("name", ["llama-spm", "deepseek-coder", "gpt-2"])
def test_marks_in_a_text_are_letters(name: str) -> None:
    tokenizer = load_tokenizer(VOCABS[0] / f"{name}.gguf", 1 << 20)
    marks = find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens)
    assert (marks is not None) == (name == "deepseek-coder")
    plain, written = PlainText(tokenizer, marks.ends if marks else ()), [*tokenizer.special_tokens.values(), "<｜fim▁hole｜>", "<|EOT|>"]
    smile = tokenizer.encode("\u263a", False)
    known = {tokenizer.added[text] for text in written if text in tokenizer.added}
    for text in ("a", " ", "", "\n\n", *written, f"x{written[0]}{written[-1]} y\n", "".join(written), f"é{written[0][1:]}"):
        for ids in (plain.encode_start(text), plain.encode_continuation(text)):
            assert known.isdisjoint(ids), text
            said = tokenizer.decode([*smile, *ids], False).removeprefix("\u263a")
            assert said.strip() == (text.replace("\u2581", " ") if name == "llama-spm" else text).strip()
    assert plain.encode_continuation("def f(x):") == tokenizer.encode("\u263adef f(x):", False)[len(smile) :]


def test_a_gguf_file_states_its_tokens(tmp_path: Path) -> None:
    ids = {"fim_pre": 11, "fim_suf": 12, "fim_mid": 13, "fim_pad": 14, "fim_rep": 15, "fim_sep": 16}

    def change(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        for name, number in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)

    write_model(FABLE, tmp_path / "m.gguf", change=change)
    tokenizer = load_tokenizer(tmp_path / "m.gguf", 4096)
    marks = find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens)
    assert (marks.prefix, marks.suffix, marks.middle, marks.repository, marks.file) == (11, 12, 13, 15, 16)
    assert {11, 12, 13, 14, 15, 16} <= marks.ends
    before = {f"tokenizer.ggml.fim_{part}_token_id": name for part, name in (("pre", "prefix"), ("suf", "suffix"), ("mid", "middle"))}
    older = GgufHeader(tmp_path / "m.gguf", {f"tokenizer.ggml.{before[key]}_token_id" if key in before else key: value
                                             for key, value in read_header(tmp_path / "m.gguf").metadata.items()}, {})
    assert read_vocabulary(older).special_tokens == tokenizer.special_tokens and backend(read_vocabulary(older)).get_vocab_size()


def test_what_a_folder_states_is_in_the_file_that_is_made_of_it(tmp_path: Path) -> None:
    folder, names = filling_model(tmp_path / "coder", ("<before>", "<after>", "<here>")), ("prefix", "suffix", "middle")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    stated = {f"{name}_token": text for name, text in zip(names, ("<before>", "<after>", "<here>"))}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | stated))
    tokenizer = Tokenizer.load(folder, read_config(folder))
    written = tokenizer_metadata(folder, tokenizer, ROWS)
    assert [written[f"tokenizer.ggml.fim_{part}_token_id"] for part in ("pre", "suf", "mid")] == [4096, 4097, 4098]
    again = read_vocabulary(GgufHeader(folder, written, {})).special_tokens
    assert find_fim_tokens(tokenizer.vocabulary(), again) == find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens) is not None


def test_show_says_whether_a_model_has_them(tmp_path: Path) -> None:
    for model, said in ((str(filling_model(tmp_path / "coder")), "supported (<|fim_prefix|>)"), ("fable", "")):
        table = CliRun("show", model)
        assert table.code == 0 and ("infill " in table.out) == bool(said) and said in table.out
        assert json.loads(CliRun("show", model, "--json").out)["infill"] == bool(said)


# ---- where it ends


@pytest.mark.parametrize(("text", "kept"), [
    ("a\n    b\n\n    c\nd\n", "a\n    b\n\n    c\n"), ("a\n  b", "a\n"), ("x\n\n  ", None), ("x\n    y\n   z", "x\n    y\n"),
    ("return 1\n", None), ("  a\nb", "  a\n"), ("\n    a\nq", "\n    a\n"), ("\n\n\t\t\t\tq\n}", "\n\n\t\t\t\tq\n"), ("", None)])
def test_a_line_that_is_indented_less_ends_it(text: str, kept: str | None) -> None:
    for size in range(1, len(text) + 1):
        indented, said = IndentStop(4), ""
        for at in range(0, len(text), size):
            said += indented.push(text[at : at + size])
        assert (said + indented.flush(), indented.hit) == (text if kept is None else kept, kept is not None), size
    free = IndentStop(0)
    assert free.push(text) + free.flush() == text and not free.hit


def test_blanks_come_through_in_any_pieces() -> None:
    choose = random.Random(1)
    for _ in range(300):
        text = "".join(choose.choice(" \n\ta") for _ in range(20))
        indented, said = IndentStop(2), ""
        for letter in text:
            said += indented.push(letter)
        said += indented.flush()
        assert text.startswith(said) and (said == text or indented.hit)


# ---- llama.cpp's own


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen", "StarCoder 2", "Granite Code", "DeepSeek", "CodeLlama", "GLM"])
def test_llama_cpp_finds_the_same_tokens(tmp_path: Path, family: str) -> None:
    peer = pytest.importorskip("llama_cpp")
    order, ends = FAMILIES[family]
    names = [*order, *ends]

    def change(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        key = "tokenizer.ggml.tokens"
        own = next(each for each in writer.kv_data if key in each)
        own[key].value = own[key].value[:-len(names)] + names
        kinds = next(each for each in writer.kv_data if "tokenizer.ggml.token_type" in each)["tokenizer.ggml.token_type"]
        kinds.value = kinds.value[:-len(names)] + [3] * len(names)

    path = tmp_path / "m.gguf"
    write_model(FABLE, path, change=change)
    tokenizer = Tokenizer.load(path, type("Config", (), {"vocab_size": 4096}))
    marks = find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens)
    params = peer.llama_model_default_params()
    params.vocab_only = True
    model = peer.llama_model_load_from_file(str(path).encode(), params)
    vocab = peer.llama_model_get_vocab(model)
    try:
        theirs = [getattr(peer, f"llama_vocab_fim_{part}")(vocab) for part in ("pre", "suf", "mid")]
        assert theirs == [marks.prefix, marks.suffix, marks.middle]
        for ours, part in ((marks.repository, "rep"), (marks.file, "sep")):
            found = getattr(peer, f"llama_vocab_fim_{part}")(vocab)
            assert found in (-1, ours), "it knows fewer of these"
        over = {token for token in range(4096) if peer.llama_vocab_is_eog(vocab, token)}
        assert over - tokenizer.stop_ids <= marks.ends
    finally:
        peer.llama_model_free(model)


@needs_vocabularies
@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_makes_the_same_tokens_of_texts_that_hold_marks() -> None:
    peer, path = pytest.importorskip("llama_cpp"), VOCABS[0] / "deepseek-coder.gguf"
    params = peer.llama_model_default_params()
    params.vocab_only = True
    model = peer.llama_model_load_from_file(str(path).encode(), params)
    tokenizer = load_tokenizer(path, 1 << 20)
    marks = find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens)
    plain, room = PlainText(tokenizer, marks.ends), np.empty(256, np.int32)
    try:
        for text in ("def f(x):\n    return x\n", "a b  c", "  x", "x = '' # é\n"):
            made = peer.llama_tokenize(peer.llama_model_get_vocab(model), text.encode(), len(text.encode()),
                                       room.ctypes.data_as(peer.llama_token_p), len(room), False, False)
            assert plain.encode_continuation(text) == room[:made].tolist()
    finally:
        peer.llama_model_free(model)
