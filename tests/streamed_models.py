"""Models opened with parts of their weights on the disk, whatever the machine's memory holds."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import effllm
from effllm.offload.placement import Residency
from effllm.offload.shards import Planned, plan_files
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.model import check_tensors
from effllm.runtime.parts import cut
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.streamed import Streams
from effllm.runtime.synthetic import SyntheticStore

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def streams(folder: Path, options: EngineOptions, keep: int = 0, ring: int | None = None, direct: bool = True) -> Streams:
    """Every `keep`-th part pinned (0: none), the rest in a ring for two parts, or of `ring` bytes."""
    prepared = prepare(folder, options)
    parts = cut(check_tensors(prepared.config, prepared.store, prepared.container), prepared.store)
    prepared.store.close()
    pinned = tuple(i for i in range(len(parts.parts)) if keep and i % keep == 0)
    streamed = tuple(i for i in range(len(parts.parts)) if i not in pinned)
    room = max(2 * max(parts.sizes), ring or 0)
    return Streams(parts, Residency(pinned, streamed, sum(parts.sizes[i] for i in pinned), sum(parts.sizes[i] for i in streamed), room),
                   direct=direct)


def streaming(folder: Path, keep: int = 0, ring: int | None = None, direct: bool = True, **options: object) -> Engine:
    """An engine that streams."""
    asked = EngineOptions(device="cpu", **options)
    made = streams(folder, asked, keep, ring, direct)
    engine = Engine(replace(prepare(folder, asked), streams=made))
    for _ in engine.model.load():
        continue
    return engine


def larger_than_memory(folder: Path, layers: int = 8) -> Path:
    """A model of a quarter of a gigabyte with random weights and the packaged model's tokenizer, in bf16."""
    shape = {**json.loads((FABLE / "config.json").read_text()), "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers,
             "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
    folder.mkdir()
    for path in FABLE.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(shape))
    store = SyntheticStore(parse_config(shape))
    (plan,) = plan_files([[Planned(info.name, info.dtype, info.shape, info.nbytes)] for info in store.tensors.values()], {})
    with (folder / plan.name).open("wb") as out:
        out.write(plan.head)
        for name, place in plan.places.items():
            if name in store.tensors:
                out.seek(place)
                out.write(store.read(store.tensors[name]).data)
    return folder
