"""Conversions for tests: models to convert, and a check of everything that a converted folder claims about itself."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from effllm.offload.checkpoint import TensorStore
from effllm.quant.codes import dequantize
from effllm.quant.pack import unpack
from effllm.quant.recipe import Recipe, parse_rule
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import from_f32, to_f32
from effllm.runtime.convert import Converted, ConvertOptions, convert
from effllm.runtime.events import Notice
from effllm.runtime.stores.container import Container, check_stored, read_container

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
# A model whose widths no group divides: K is 48 and 40, rows of 24 and 40 fill no block of 16.
ODD = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 50, "max_position_embeddings": 64, "tie_word_embeddings": False,
       "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32"}


def lines_of(journal: Path) -> int:
    """How much progress a running conversion has recorded; nothing if it has not begun, or has already renamed the folder."""
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def options(spec: str = "4bit", **more: object) -> ConvertOptions:
    rules = tuple(parse_rule(rule) for rule in more.pop("rules", ()))
    return ConvertOptions(Recipe(QuantSpec.parse(spec), rules), spec, **more)


def run(folder: Path, out: Path, given: ConvertOptions | None = None) -> tuple[Converted, list[str]]:
    """The result and the messages."""
    *said, made = convert(folder, out, given or options())
    assert isinstance(made, Converted)
    return made, [item.text for item in said if isinstance(item, Notice)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def odd_model(folder: Path, dtype: type = np.float32, change=lambda tensors: None) -> Path:
    """A tiny model with an untied head and random weights."""
    rng = np.random.default_rng(5)
    q, kv, hidden, ffn = 48, 24, 48, 40
    tensors = {"model.embed_tokens.weight": (50, hidden), "lm_head.weight": (50, hidden), "model.norm.weight": (hidden,)}
    for i in range(2):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
                    at + "self_attn.q_proj.weight": (q, hidden), at + "self_attn.k_proj.weight": (kv, hidden),
                    at + "self_attn.v_proj.weight": (kv, hidden), at + "self_attn.o_proj.weight": (hidden, q),
                    at + "mlp.gate_proj.weight": (ffn, hidden), at + "mlp.up_proj.weight": (ffn, hidden),
                    at + "mlp.down_proj.weight": (hidden, ffn)}
    values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in tensors.items()}
    change(values)
    folder.mkdir(exist_ok=True)
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(ODD))
    (folder / "LICENSE").write_text("do as you like")
    (folder / "notes.txt").write_text("not copied")
    return folder


def short_fable(folder: Path) -> Path:
    """The packaged model cut to its first two layers: it has a tokenizer, and text runs through it quickly."""
    folder.mkdir()
    for path in FABLE.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(json.loads((FABLE / "config.json").read_text()) | {"num_hidden_layers": 2}))
    return folder


def originals(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    schemes = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
    with TensorStore.open(folder) as store:
        for info in store.tensors.values():
            scheme = schemes[info.dtype]
            yield info.name, to_f32(store.read(info).view(np.float32 if scheme == "f32" else np.uint16), scheme).reshape(info.shape)


def check_whole(folder: Path, source: Path) -> Container:
    """Every checksum, every recorded error and every raw byte of a converted folder, recomputed from its files."""
    container = read_container(folder)
    before = dict(originals(source))
    with TensorStore.open(folder) as store:
        check_stored(container, store)
        for name, stored in container.tensors.items():
            raw = store.read(store.tensors[name])
            assert zlib.crc32(raw) == stored.crc32, name
            if stored.spec.is_raw:
                scheme = stored.spec.scheme
                assert raw.tobytes() == from_f32(before[name], scheme).tobytes(), name
                continue
            w = dequantize(unpack(raw, stored.spec, stored.shape), stored.spec)
            assert np.isfinite(w).all(), name
            error, squares = np.square(w - before[name], dtype=np.float64).sum(), np.square(before[name], dtype=np.float64).sum()
            if squares and error:
                assert abs(10 * np.log10(error / squares) - stored.error_db) < 0.01, name
                assert error < squares, name
    return container
