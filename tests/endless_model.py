"""fable as it writes on and on: an answer that is to be stopped while it is written must not have ended by itself when the keys come, and
on a busy machine they come seconds later, which are thousands of tokens of so small a model."""

import json
from pathlib import Path

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
NAMES = {"<|end|>": "<|past|>", "<|endoftext|>": "<|begin|>"}  # by the ones a text would end, whatever the config says
NEVER = "ÿ"  # the byte 0xFF, which is in no text


def endless(folder: Path) -> Path:
    """Its folder, made here; weights and settings are those of fable."""
    folder.mkdir()
    for path in FABLE.iterdir():
        if path.suffix != ".json":
            (folder / path.name).symlink_to(path)
            continue
        text = path.read_text(encoding="utf-8")
        for name, other in NAMES.items():
            text = text.replace(name, other)
        (folder / path.name).write_text(text, encoding="utf-8")
    _change(folder / "tokenizer_config.json", eos_token=NEVER)
    end = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"][NEVER]
    for name in ("config.json", "generation_config.json"):
        _change(folder / name, eos_token_id=end)
    return folder


def _change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
