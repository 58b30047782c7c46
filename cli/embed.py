"""`effllm embed`: vectors of texts by a model that was made for it, and texts in the order of how near they are to a query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError, not_written
from .flags import add_command, flag
from .loading import at_bits, find_any, follow, last, loaded
from .options import OUTPUT, EngineFlags, Json, Model, WeightFlags
from .prompt import is_fed, read_file, read_stream, typed_text
from .screen import Screen

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.answers.replies import Replies

TEXT = "text"
EXAMPLES = """examples

  effllm embed Qwen/Qwen3-Embedding-0.6B "The fox is king." "The sea was calm."
  effllm embed Qwen/Qwen3-Embedding-0.6B -f lines.txt > vectors.jsonl
  effllm embed Qwen/Qwen3-Embedding-0.6B -f lines.txt -o vectors.npy
  effllm embed Qwen/Qwen3-Embedding-0.6B -f lines.txt --rank "Who is king?" --top 5
"""
ELSEWHERE = "give another place with -o"
NEXT = 'effllm embed MODEL "a text", or -f FILE with a text in each line'

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT ...", show_default=False, help="texts to make vectors of")]
Lines = Annotated[str | None, flag(TEXT, "-f --file", "FILE", "a text in each line, empty ones left out; - is standard input", "embed")]
Query = Annotated[str | None, flag(TEXT, "--rank", "QUERY", "the texts in the order of how near they are to this one, with the cosine")]
Top = Annotated[int | None, flag(TEXT, "--top", "N", "of --rank the N nearest (all)")]
Truncate = Annotated[bool, flag(TEXT, "--truncate", "", "cut what is longer than the context (an error)")]
Dimensions = Annotated[int | None, flag(OUTPUT, "--dimensions", "N", "the first N numbers of a vector, for models trained to be cut (all)")]
Out = Annotated[Path | None, flag(OUTPUT, "-o --out", "FILE.npy", "write a NumPy array, float32 with a row for each text")]


def register(app: typer.Typer) -> None:
    add_command(app, "embed", "talk to a model", embed, EXAMPLES)


def embed(context: typer.Context, model: Model, text: Texts = None, file: Lines = None, rank: Query = None, top: Top = None,
          truncate: Truncate = False, dimensions: Dimensions = None, *, engine: EngineFlags, weights: WeightFlags,
          out: Out = None, json: Json = False) -> None:
    """A vector of each text, of length 1: JSON lines of index and embedding; or the texts nearest to a query."""
    from ..runtime.answers.embedding import in_numbers, pooling_of, shortened
    from ..runtime.answers.replies import Replies

    screen = Screen(context.obj)
    screen.environment.demand_stdout()
    judge(rank, top, out, json)
    texts = texts_of(text, file, screen)
    found, options = find_any(model, screen), engine.options()
    pooling_of(found.folder)  # one that was not made for it is told before anything is read
    if out is not None:
        demand_place(out)
    with at_bits(found, weights, screen, options) as ref, loaded(ref, options, screen) as at_hand:
        width = at_hand.engine.config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= width:
            raise UsageError(f"--dimensions is 1 to {width}, not {dimensions}", "leave it away for all of them")
        replies = Replies(at_hand.engine, at_hand.tokenizer)
        vectors, tokens = made(replies, texts if rank is None else [typed_text(rank, "--rank"), *texts], truncate, screen)
    vectors = shortened(vectors, dimensions)
    if rank is not None:
        tell_nearest(texts, vectors, top, json, screen)
    elif out is not None:
        write_array(out, vectors)
        screen.note(f"{out}: {len(vectors)} vectors of {len(vectors[0])} numbers, of {tokens} tokens")
    elif json:
        screen.json({"model": model, "dimensions": len(vectors[0]), "tokens": tokens, "embeddings": list(map(in_numbers, vectors))})
    else:
        write_lines(vectors, screen)


def judge(rank: str | None, top: int | None, out: Path | None, json: bool) -> None:
    """Raises UsageError for flags that do not go together."""
    if rank is None and top is not None:
        raise UsageError("--top is about --rank", '--rank "a query"')
    if rank is not None and not rank.strip():
        raise UsageError("the query is empty", '--rank "a query"')
    if top is not None and top < 1:
        raise UsageError(f"--top is 1 or more, not {top}", "--top 5")
    if out is not None and (rank is not None or json):
        raise UsageError(f"-o writes vectors, and {'--rank' if rank is not None else '--json'} something else", "one of them")
    if out is not None and out.suffix != ".npy":
        raise UsageError(f"-o {out} is not named .npy, which is what is written", f"-o {out.with_suffix('.npy')}; JSON lines go to stdout")


def texts_of(given: Sequence[str] | None, file: str | None, screen: Screen) -> list[str]:
    """Those that were typed, then the lines of a file, or of standard input where nothing else was given. Raises UsageError for none."""
    texts = [typed_text(each, "a text") for each in given or ()]
    if any(not each.strip() for each in texts):
        raise UsageError("a text is empty", NEXT)
    if file == "-" or file is None and not texts and is_fed(screen.environment.stdin):
        lines = read_stream(screen.environment.stdin)
    else:
        lines = "" if file is None else read_file(Path(file))
    texts += [line for line in map(str.strip, lines.split("\n")) if line]
    if not texts:
        raise UsageError("there is no text to make a vector of", NEXT)
    return texts


def made(replies: Replies, texts: Sequence[str], truncate: bool, screen: Screen) -> tuple[Sequence[np.ndarray], int]:
    """The vectors, and how many tokens the texts have."""
    from ..runtime.events import Embedded

    embedded = last(follow(replies.embed(texts, truncate), screen, Embedded))
    return embedded.vectors, embedded.tokens


def tell_nearest(texts: Sequence[str], vectors: Sequence[np.ndarray], top: int | None, json: bool, screen: Screen) -> None:
    """`vectors`: of the query, then of the texts. Equal ones stay in their order."""
    scores = [float(vectors[0] @ each) for each in vectors[1:]]
    order = sorted(range(len(texts)), key=lambda at: -scores[at])[:top]
    if json:
        screen.json({"ranked": [{"index": at, "score": round(scores[at], 6), "text": texts[at]} for at in order]})
    else:
        screen.table(("", ""), [(f"{scores[at]:.3f}", texts[at]) for at in order], right=(0,))


def write_lines(vectors: Sequence[np.ndarray], screen: Screen) -> None:
    """A JSON object in each line."""
    from json import dumps

    from ..runtime.answers.embedding import in_numbers

    for at, each in enumerate(vectors):
        screen.environment.write(dumps({"index": at, "embedding": in_numbers(each)}) + "\n")


def demand_place(out: Path) -> None:
    """Before the work: raises UsageError where a file of that name is, or none can be made."""
    from ..runtime.files.whole_file import try_whole

    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists", "give another name with -o, or remove it")
    try:
        try_whole(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", ELSEWHERE) from error


def write_array(out: Path, vectors: Sequence[np.ndarray]) -> None:
    """Whole or not at all."""
    import numpy as np

    from ..runtime.files.whole_file import whole

    try:
        with whole(out) as file:
            np.save(file, np.stack(vectors))
    except OSError as error:
        raise not_written(error, f"cannot write {out}", ELSEWHERE, f"make room there, or {ELSEWHERE}") from error
