"""`effllm embed`: the vectors that transformers computes, texts from every source, the model's prompts, and what is refused."""

import io
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from packaged_embedder import FABLE, embedder, expected

from effllm import DiskFull
from effllm.cli.app import main
from effllm.cli.embed import write_array
from effllm.cli.environment import Environment
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.generation.embedding_prompts import read_embedding_prompts
from effllm.runtime.tokenizer import Tokenizer

PROMPTS = "config_sentence_transformers.json"
TEXTS = ["The fox was made king of all beasts.", "The sea was calm."]
NAMED = {"prompts": {"query": "Question: ", "document": "Text: "}, "default_prompt_name": None}


class Ran:
    """What a call of `main` wrote and returned."""

    def __init__(self, *argv: object, given: str = "") -> None:
        environment = Environment(io.StringIO(given), io.StringIO(), io.StringIO(), os.environ)
        self.code = main(["embed", *map(str, argv)], environment)
        self.out, self.err = environment.stdout.getvalue(), environment.stderr.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = embedder(tmp_path_factory.mktemp("models") / "embedder")
    (folder / PROMPTS).write_text(json.dumps(NAMED))
    return folder


def theirs(model: Path, text: str) -> np.ndarray:
    return expected(model, Tokenizer.load(model, read_config(model)).encode(text))


def test_a_line_or_a_document_or_an_array(model: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in Ran(model, *TEXTS, "-c", 256).out.splitlines()]
    assert [each["index"] for each in lines] == [0, 1]
    for text, own in zip(TEXTS, lines, strict=True):
        assert np.array(own["embedding"]) @ theirs(model, text) > 0.99999
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n\n")
    ran = Ran(model, "-f", texts, "-o", tmp_path / "made.npy", "-c", 256, "--dimensions", 8)
    made = np.load(tmp_path / "made.npy")
    assert ran.code == 0 and ran.out == "" and made.dtype == np.float32 and made.shape == (2, 8)
    assert np.abs(np.linalg.norm(made, axis=1) - 1).max() < 1e-6
    whole = json.loads(Ran(model, "-f", "-", "--json", "-c", 256, "--dimensions", 8, given="\n".join(TEXTS)).out)
    assert np.array_equal(np.array([each["embedding"] for each in whole["embeddings"]], np.float32), made) and whole["tokens"] > 8


def test_a_disk_that_fills_is_told_as_one(tmp_path: Path) -> None:
    """A file size limit, which is reported as a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(DiskFull):
            write_array(tmp_path / "made.npy", [np.zeros(256, np.float32)] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]


def test_a_line_ends_where_a_file_says_so_and_nowhere_else(model: Path, tmp_path: Path) -> None:
    """Not at what else ends lines in a text, or vectors would be those of other lines from there on."""
    texts = tmp_path / "texts.txt"
    texts.write_bytes("a\u2028b\x0bc\x85d\r\ne\x1cf\n".encode())
    made = Ran(model, "-f", texts, "--json", "-c", 256)
    assert made.code == 0 and len(json.loads(made.out)["embeddings"]) == 2


def test_ranked_after_the_prompts_of_both_sides(model: Path) -> None:
    ran = Ran(model, *reversed(TEXTS), "--rank", "Who is king?", "--json", "-c", 256, "--exact")
    results = json.loads(ran.out)["results"]
    for each in results:
        wanted = theirs(model, "Question: Who is king?") @ theirs(model, "Text: " + each["text"])
        assert abs(each["score"] - wanted) < 1e-4 and each["text"] == TEXTS[1 - each["index"]]
    assert len(results) == 2 and results[0]["score"] >= results[1]["score"]
    table = Ran(model, *reversed(TEXTS), "--rank", "Who is king?", "-c", 256).out.splitlines()
    assert [line.split(None, 1)[1] for line in table[1:]] == [each["text"] for each in results]


def test_a_prompt_by_its_name(model: Path) -> None:
    own = json.loads(Ran(model, TEXTS[0], "--prompt-name", "query", "-c", 256).out)["embedding"]
    assert np.array(own) @ theirs(model, "Question: " + TEXTS[0]) > 0.99999 > np.array(own) @ theirs(model, TEXTS[0])


def test_prompts_that_files_state(tmp_path: Path) -> None:
    prompts = read_embedding_prompts(FABLE)
    assert prompts.prefix(None) == "" and prompts.query is prompts.document is None
    folder = embedder(tmp_path / "a", {"pooling_mode_mean_tokens": True, "include_prompt": False})
    (folder / PROMPTS).write_text(json.dumps({"prompts": {"passage": "p: ", "none": ""}, "default_prompt_name": "passage"}))
    prompts = read_embedding_prompts(folder)
    assert (prompts.query, prompts.document, prompts.prefix("none")) == ("passage", "passage", "")
    with pytest.raises(Exception, match="excluded from pooling"):
        prompts.prefix(None)
    for wrong in ([], {"prompts": 7}, {"prompts": {"a": 7}}, {"prompts": {"a": "x"}, "default_prompt_name": "b"},
                  {"prompts": {}, "default_prompt_name": []}):
        (folder / PROMPTS).write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="prompts are texts by name"):
            read_embedding_prompts(folder)


@pytest.mark.parametrize(("words", "given", "said", "code"), [
    (("x", "--rank", "y", "-o", "z.npy"), "", "--rank prints texts", 2), (("x", "-o", "z.bin"), "", "is not a NumPy file", 2),
    (("x", "-o", "/nowhere/z.npy"), "", "cannot be written", 1), (("x", "-f", "-"), "y", "both as arguments and with -f", 2),
    (("x", " "), "", "text 2 is empty", 2), (("-f", "-"), "a\n\nb", "line 2 of standard input is empty", 2),
    ((), "", "there are no texts", 2),
    (("x", "--rank", " "), "", "--rank needs a question", 2), (("x", "--dimensions", "257", "-c", "256"), "", "is not 1 to 256", 2),
    (("x", "--prompt-name", "doc", "-c", "256"), "", "no prompt 'doc'", 2), (("x " * 400, "-c", "256"), "", "the context holds 256", 5)])
def test_what_is_refused(model: Path, words: tuple[str, ...], given: str, said: str, code: int) -> None:
    ran = Ran(model, *words, given=given)
    assert (ran.code, ran.out) == (code, "") and said in ran.err and "hint: " in ran.err and "Traceback" not in ran.err
