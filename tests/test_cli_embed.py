"""`effllm embed`: vectors on the command line, as lines, a document or an array, and texts near a query; held against transformers."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.config import read_config
from effllm.runtime.text import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from embedders import ENDS, FABLE, embedder, expected

TEXTS = ("The fox wanted to be king.", "A king.", "The sea was calm.")


class Ran:
    """What a call of `main` wrote and returned."""

    def __init__(self, *argv: object) -> None:
        environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        self.code = main([str(word) for word in argv], environment)
        self.out, self.err = environment.stdout.getvalue(), environment.stderr.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedder(tmp_path_factory.mktemp("model") / "vectors")


@pytest.fixture(scope="module")
def theirs() -> np.ndarray:
    """What transformers makes of the texts, each with the token at its end."""
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    return np.stack([expected(FABLE, tokenizer.encode(text + ENDS)) for text in TEXTS])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text(f"{TEXTS[1]}\n\n  {TEXTS[2]}\r\n", encoding="utf-8")
    return path


def embed(folder: Path, *argv: object) -> Ran:
    return Ran("embed", folder, *argv, "-c", 128, "-t", 1, "--kv", "32bit")


def test_texts_and_lines_of_a_file_make_json_lines(folder: Path, lines: Path, theirs: np.ndarray) -> None:
    ran = embed(folder, TEXTS[0], "-f", lines)
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert np.allclose([row["embedding"] for row in rows], theirs, atol=1e-5)
    again = embed(folder, *TEXTS, "--json")
    document = json.loads(again.out)
    assert document["embeddings"] == [row["embedding"] for row in rows] and document["dimensions"] == theirs.shape[1]
    assert document["tokens"] == sum(len(Tokenizer.load(FABLE, read_config(FABLE)).encode(text)) + 1 for text in TEXTS)


def test_an_array_holds_the_vectors_cut_as_asked(folder: Path, tmp_path: Path, theirs: np.ndarray) -> None:
    out = tmp_path / "vectors.npy"
    ran = embed(folder, *TEXTS, "--dimensions", 32, "-o", out)
    assert ran.code == 0 and not ran.out and "3 vectors of 32 numbers" in ran.err
    cut = theirs[:, :32] / np.linalg.norm(theirs[:, :32], axis=1, keepdims=True)
    made = np.load(out)
    assert made.dtype == np.float32 and np.allclose(made, cut, atol=1e-5)
    refused = embed(folder, *TEXTS, "-o", out)
    assert refused.code == 2 and f"{out} exists" in refused.err and np.array_equal(np.load(out), made)


def test_texts_are_ranked_by_their_cosine_with_a_query(folder: Path, lines: Path, theirs: np.ndarray) -> None:
    ran = embed(folder, "-f", lines, "--rank", TEXTS[0], "--json")
    ranked = json.loads(ran.out)["ranked"]
    wanted = theirs[1:] @ theirs[0]
    assert [each["index"] for each in ranked] == list(np.argsort(-wanted))
    assert np.allclose([each["score"] for each in ranked], np.sort(wanted)[::-1], atol=1e-5)
    shown = embed(folder, "-f", lines, "--rank", TEXTS[0], "--top", 1)
    assert shown.out.split(maxsplit=1) == [f"{max(wanted):.3f}", ranked[0]["text"] + "\n"]


@pytest.mark.parametrize(("argv", "said", "code"), (
    ((), "there is no text", 2), ((" ",), "a text is empty", 2), (("a", "--top", 3), "--top is about --rank", 2),
    (("a", "--rank", " "), "the query is empty", 2), (("a", "--rank", "b", "--top", 0), "--top is 1 or more", 2),
    (("a", "-o", "v.txt"), "is not named .npy", 2), (("a", "-o", "v.npy", "--json"), "-o writes vectors", 2),
    (("a", "-o", "/nowhere/v.npy"), "cannot be written", 2), (("a", "--dimensions", 100_000), "--dimensions is 1 to", 2),
    (("a", "-f", "no such file"), "No such file", 2), (("word " * 300,), "the context holds 128", 5)))
def test_what_is_wrong_is_one_line_with_a_next_step(folder: Path, argv: tuple[object, ...], said: str, code: int) -> None:
    ran = embed(folder, *argv)
    assert ran.code == code and said in ran.err and "\nhint: " in ran.err and ("--json" in argv or not ran.out), ran.err


def test_a_long_text_is_cut_if_that_is_asked_for(folder: Path) -> None:
    ran = embed(folder, "word " * 300, "--truncate", "--json")
    assert ran.code == 0 and json.loads(ran.out)["tokens"] == 128 and "is cut" in ran.err


def test_a_model_of_another_kind_is_told_before_its_weights_are_read() -> None:
    ran = Ran("embed", FABLE, "a")
    assert ran.code == 2 and "not made for embeddings" in ran.err
