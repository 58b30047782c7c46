"""`effllm embed MODEL [TEXT ...]`: embeddings of texts, or texts ranked by similarity to a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError, not_written, typed
from .eval import read_text, source_name
from .flags import add_command, flag
from .loading import final_result, find_model_variant, open_model, quantized_on_load
from .options import OUTPUT, TEXT, EngineFlags, Json, Model, WeightFlags
from .prompt import check_encoding, is_piped
from .screen import Screen

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.catalog import ModelRef
    from ..runtime.generation.served_encoder import ServedEncoder
    from ..runtime.generation.served_model import ServedModel

# Parameters of this command that do not affect how a model runs.
EMBED_PARAMETERS = frozenset(("model", "texts", "file", "prompt_name", "rank", "dimensions", "out"))
ARRAY_SUFFIX, OTHER_PATH_HINT = ".npy", "choose another path with -o"
EXAMPLES = """examples

  effllm embed Qwen/Qwen3-Embedding-0.6B "The fox is king." "The sea was calm." --rank "Who rules?"
  effllm embed ./my-embedder -f sentences.txt -o vectors.npy
  sort -u names.txt | effllm embed ./my-embedder --dimensions 256 > vectors.jsonl

Without -o and --rank, each text gets a line of JSON: {"index": 0, "embedding": [...]}.
"""

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT ...", help="texts to embed", show_default=False)]
File = Annotated[str | None, flag(TEXT, "-f --file", "FILE", "read texts from a file, one a line; - is standard input")]
PromptName = Annotated[str | None, flag(TEXT, "--prompt-name", "NAME",
                                        "which of the model's prompts to prepend to each text (its default one; with --rank, query "
                                        "and document)")]
Rank = Annotated[str | None, flag(OUTPUT, "--rank", "QUERY", "sort the texts by similarity to this one, closest first")]
Dimensions = Annotated[int | None, flag(OUTPUT, "--dimensions", "N",
                                        "keep the first N dimensions of each vector, normalized again (all)")]
Out = Annotated[str | None, flag(OUTPUT, "-o --out", "FILE.npy",
                                 "write the vectors as a NumPy array: float32, one row per text")]


def register(app: typer.Typer) -> None:
    add_command(app, "embed", "run a model", embed, EXAMPLES)


def embed(context: typer.Context, model: Model, texts: Texts = None, file: File = None, prompt_name: PromptName = None,
          rank: Rank = None, dimensions: Dimensions = None, out: Out = None, *, engine: EngineFlags, weights: WeightFlags,
          json: Json = False) -> None:
    """Compute embeddings of texts, or rank texts by similarity to a query."""
    from ..runtime.events import Embedded
    from ..runtime.generation.embedding import shortest_floats, truncate_dimensions

    screen = Screen(context.obj)
    if out is None:
        screen.environment.require_stdout()
    elif rank is not None:
        raise UsageError("--rank prints texts and -o writes vectors", "give one of them")
    elif not out.endswith(ARRAY_SUFFIX):
        raise UsageError(f"-o {out} is not a NumPy file", f"-o {typed(out + ARRAY_SUFFIX)}; without -o, JSON lines go to standard output")
    else:
        check_writable(Path(out))
    lines = read_texts(model, texts, file, screen)
    question = None if rank is None else check_encoding(rank, "--rank")
    if question is not None and not question.strip():
        raise UsageError("--rank needs a question", 'effllm embed MODEL -f FILE --rank "your question"')
    with open_embedder(context, find_model_variant(model, screen), engine, weights, screen) as embedder:
        if dimensions is not None and not 1 <= dimensions <= embedder.vector_width:
            raise UsageError(f"--dimensions {dimensions} is not 1 to {embedder.vector_width}", "leave it out for all")
        names = embedder.embedding_prompts
        query_prompt, text_prompt = (prompt_name, prompt_name) if question is None else (names.query, prompt_name or names.document)
        embedded = final_result(embedder.embed(lines, prompt_name=text_prompt), screen, Embedded)
        vectors, tokens = truncate_dimensions(embedded.vectors, dimensions), embedded.tokens
        if question is not None:
            nearest = final_result(embedder.embed([question], prompt_name=query_prompt), screen, Embedded)
            print_ranking(question, lines, vectors, truncate_dimensions(nearest.vectors, dimensions)[0], screen, json)
            return
    if out is not None:
        write_array(Path(out), vectors)
        screen.note(f"{out}: {len(vectors)} vectors of {len(vectors[0])} dimensions, from {tokens} tokens")
        if json:
            screen.json({"file": out, "vectors": len(vectors), "dimensions": len(vectors[0]), "tokens": tokens})
        return
    rows = [{"index": index, "embedding": shortest_floats(each)} for index, each in enumerate(vectors)]
    if json:
        screen.json({"embeddings": rows, "dimensions": len(vectors[0]), "tokens": tokens})
        return
    from json import dumps

    for row in rows:
        screen.line(dumps(row))


@contextmanager
def open_embedder(context: typer.Context, requested: ModelRef, engine: EngineFlags, weights: WeightFlags,
            screen: Screen) -> Iterator[ServedModel | ServedEncoder]:
    """A context that yields the loaded model, which computes embeddings."""
    from ..runtime.encoders import is_encoder

    if is_encoder(requested.folder):
        from ..runtime.generation.served_encoder import ServedEncoder
        from .serve_encoder import check_encoder_flags, open_encoder_with_progress

        check_encoder_flags(context, requested, EMBED_PARAMETERS)
        yield ServedEncoder(open_encoder_with_progress(requested, engine, screen))
        return
    from ..runtime.generation.embedding import read_pooling_mode
    from ..runtime.generation.served_model import ServedModel

    read_pooling_mode(requested.folder)  # raises for a model without pooling, before its weights are read
    options = engine.options()
    with quantized_on_load(requested, weights, screen, options) as ref, open_model(ref, options, screen) as opened:
        yield ServedModel(opened.engine, opened.tokenizer)


def read_texts(model: str, texts: Sequence[str] | None, file: str | None, screen: Screen) -> list[str]:
    """The texts to embed. Raises UsageError if there are none, and for an empty one."""
    stdin = screen.environment.stdin
    if texts and file is not None:
        raise UsageError("texts were given both as arguments and with -f FILE", "give one of them")
    if file is None and texts:
        if (empty := next((number for number, each in enumerate(texts, 1) if not each.strip()), None)) is not None:
            raise UsageError(f"text {empty} is empty", "leave it out")
        return [check_encoding(each, "a text") for each in texts]
    if file is None and not is_piped(stdin):
        raise UsageError("there are no texts", f'effllm embed {typed(model)} "a text", or -f FILE with one a line')
    source = file or "-"
    lines = [line.removesuffix("\r") for line in read_text(source, screen, "-f").split("\n")]  # other line separators may be part of a text
    while lines and not lines[-1].strip():
        lines.pop()
    if (empty := next((number for number, each in enumerate(lines, 1) if not each.strip()), None)) is not None:
        raise UsageError(f"line {empty} of {source_name(source)} is empty", "each line gives one vector: remove the empty line")
    return lines


def print_ranking(question: str, lines: Sequence[str], vectors: Sequence[np.ndarray], query_vector: np.ndarray, screen: Screen,
                  json: bool) -> None:
    """Print the texts by similarity, nearest first; ties keep their order."""
    scores = [float(each @ query_vector) for each in vectors]
    order = sorted(range(len(lines)), key=lambda index: -scores[index])
    if json:
        screen.json({"query": question, "results": [{"index": index, "score": scores[index], "text": lines[index]} for index in order]})
    else:
        screen.table(("score", "text"), [(f"{scores[index]:.4f}", lines[index]) for index in order], right=(0,))


def check_writable(path: Path) -> None:
    """Raises EffllmError if the file cannot be created, before the work whose result it will hold."""
    from ..runtime.files.atomic_write import check_writable

    try:
        check_writable(path)
    except OSError as error:
        raise not_written(error, f"{path} cannot be written", OTHER_PATH_HINT, f"make room there, or {OTHER_PATH_HINT}") from error


def write_array(path: Path, vectors: Sequence[np.ndarray]) -> None:
    """Write the vectors as one array, atomically. Raises EffllmError."""
    import numpy as np

    from ..runtime.files.atomic_write import atomic_file

    array, form = np.stack(vectors), np.lib.format
    try:
        with atomic_file(path) as file:  # not np.save, which hides why a file could not be written
            form.write_array_header_1_0(file, form.header_data_from_array_1_0(array))
            file.write(memoryview(array).cast("B"))
    except OSError as error:
        raise not_written(error, f"{path} cannot be written", OTHER_PATH_HINT, f"make room there, or {OTHER_PATH_HINT}") from error
