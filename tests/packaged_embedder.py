"""An embedding model for tests: the packaged model with the files that sentence-transformers writes next to such models."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

import effllm

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
ENDS = "<|end|>"
LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MODULES = [{"type": f"sentence_transformers.models.{kind}", "path": path}
           for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]


def embedder(folder: Path, pooling: object = LAST, modules: object = MODULES) -> Path:
    """The packaged model turned into an embedding model: every text ends with a special token, as with Qwen 3 Embedding."""
    (folder / "1_Pooling").mkdir(parents=True)
    for path in FABLE.iterdir():
        if path.name != "tokenizer.json":
            (folder / path.name).symlink_to(path)
    tokenizer = json.loads((FABLE / "tokenizer.json").read_text())
    number = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == ENDS)
    text, end = ({"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": ENDS, "type_id": 0}})
    special = {ENDS: {"id": ENDS, "ids": [number], "tokens": [ENDS]}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": [text, end], "pair": [text, end], "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def expected(folder: Path, ids: list[int], way: str = "last") -> np.ndarray:
    """The embedding computed by transformers from token ids, in float64."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    made = (states[-1] if way == "last" else states.mean(0)).numpy()
    return made / np.linalg.norm(made)
