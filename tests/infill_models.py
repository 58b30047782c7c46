"""Fill-in-the-middle models for tests: random weights of the packaged model's shape, with a larger vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path

from streamed_models import FABLE, random_folder

from effllm.runtime.gguf.tokenizer import tokenizer_files

OF_QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
OF_CODESTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
ROWS = 4160  # those of the packaged model, and more


def filling_model(folder: Path, names: Sequence[str] = OF_QWEN) -> Path:
    """With tokens of these names added to the packaged model's."""
    made = random_folder(folder, {**json.loads((FABLE / "config.json").read_text()), "vocab_size": ROWS})
    tokenizer = json.loads((FABLE / "tokenizer.json").read_text())
    first, like = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": first + number, "content": name} for number, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def model_of(folder: Path, vocabulary: Path, rows: int) -> Path:
    """With the tokenizer of a GGUF file."""
    made = random_folder(folder, {**json.loads((FABLE / "config.json").read_text()), "vocab_size": rows})
    for name, text in tokenizer_files(vocabulary).items():
        (folder / name).write_text(text)
    return made
