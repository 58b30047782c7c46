"""A variant of fable that never ends: generation to be interrupted must not have finished when the keys arrive, and on a busy machine they
arrive seconds later, which are thousands of tokens for so small a model."""

import json
from pathlib import Path

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
NAMES = {"<|end|>": "<|past|>", "<|endoftext|>": "<|begin|>"}  # by the ones a text would end, whatever the config says
NEVER = "ÿ"  # the byte 0xFF, which is in no text


def endless(folder: Path) -> Path:
    """Its folder, created here; weights and settings are fable's."""
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
