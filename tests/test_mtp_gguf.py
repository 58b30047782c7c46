"""The multi-token prediction layer in GGUF files: as llama.cpp's converter writes it, and as we export it."""

import ctypes
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import exported
from gguf_linear_attention import CASES, write
from gguf_samples import Reader
from hybrid_models import answer, opened
from mtp_models import mtp_logits, save_mtp_model, source
from safetensors.numpy import load_file, save_file

from effllm import UsageError
from effllm.kernels.reference import normalise
from effllm.runtime.prepare import EngineOptions, prepare

DENSE = "qwen3_5_text"
IDS = np.random.default_rng(5).integers(0, 300, 150).tolist()
PARTS = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
         "norm": "nextn.shared_head_norm", "layers.0.input_layernorm": "attn_norm",
         "layers.0.post_attention_layernorm": "post_attention_norm",
         **{f"layers.0.self_attn.{own}_proj": f"attn_{name}" for own, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))},
         **{f"layers.0.self_attn.{own}_norm": f"attn_{own}_norm" for own in "qk"},
         **{f"layers.0.mlp.{own}_proj": f"ffn_{own}" for own in ("gate", "up", "down")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp") / "model"
    save_mtp_model(CASES[DENSE], made)
    return made


def as_llamacpp_writes_it(folder: Path, at: Path, leave_out: str = "") -> Path:
    """A file with the layer behind the last, and the copies of tables that some files have, but for one tensor."""
    tensors = load_file(folder / "model.safetensors")
    plain = at / "plain"
    shutil.copytree(folder, plain)
    save_file({name: value for name, value in tensors.items() if not name.startswith("mtp.")}, plain / "model.safetensors")

    def behind(writer: gguf.GGUFWriter) -> None:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for own, part in PARTS.items():
            values = tensors[f"mtp.{own}.weight"]
            if part != leave_out:
                writer.add_tensor(f"blk.{layers}.{part}.weight", values + np.float32(1) if "norm" in own else values)
        for part in ("embed_tokens", "shared_head_head"):
            writer.add_tensor(f"blk.{layers}.nextn.{part}.weight", tensors["model.embed_tokens.weight"])

    write(plain, at / "m.gguf", change=behind)
    return at / "m.gguf"


def test_a_file_of_llamacpp_is_what_the_folder_is(folder: Path, tmp_path: Path) -> None:
    found = []
    for path in (folder, as_llamacpp_writes_it(folder, tmp_path)):
        engine = opened(path, ctx=256, spec="mtp")
        found.append(mtp_logits(engine, IDS))
        engine.close()
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[0]).max()


def test_a_file_that_lacks_some_of_it_runs_without(folder: Path, tmp_path: Path) -> None:
    path = as_llamacpp_writes_it(folder, tmp_path, "attn_k")
    made = prepare(path, EngineOptions(device="cpu", ctx=256))
    made.store.close()
    assert not made.speculation.mtp and not any("not used" in each for each in made.notices)
    with pytest.raises(UsageError, match="was left out of these weights"):
        prepare(path, EngineOptions(device="cpu", ctx=256, spec="mtp"))


WRITTEN = ("qwen3_5_text", "qwen3_5_moe_text", "glm4_moe")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_exported_file_has_it(tmp_path: Path, name: str) -> None:
    """And so has one that is made of that."""
    path = source(name, tmp_path / "source")
    made = exported(path, tmp_path / "m.gguf")
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    header = Reader(made)
    arch = header.fields["general.architecture"].contents()
    assert header.fields[f"{arch}.block_count"].contents() == layers + 1 and header.fields[f"{arch}.nextn_predict_layers"].contents() == 1
    assert {tensor.name.removeprefix(f"blk.{layers}.") for tensor in header.tensors if ".nextn." in tensor.name} == {
        f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    found = []
    for each in (path, made, exported(made, tmp_path / "again.gguf")):
        engine = opened(each, ctx=256, spec="mtp")
        found.append(mtp_logits(engine, IDS))
        engine.close()
    assert max(np.abs(found[0] - other).max() for other in found[1:]) < 1e-3 * np.abs(found[0]).max()


@pytest.mark.parametrize("name", ("deepseek_v3", "glm4_moe_lite"))
def test_files_that_llamacpp_would_not_take_are_written_without(tmp_path: Path, name: str) -> None:
    made = exported(source(name, tmp_path / "source"), tmp_path / "m.gguf")
    assert not any(".nextn." in tensor.name for tensor in Reader(made).tensors)


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_llamacpp_takes_an_exported_file(tmp_path: Path, name: str) -> None:
    """It writes what is written here where it passes over the block, and where it runs it says the same of it."""
    peer = pytest.importorskip("llama_cpp")
    path = exported(source(name, tmp_path / "source"), tmp_path / "m.gguf")
    engine, ids = opened(path, ctx=256, spec="mtp", kv="32bit"), IDS[:40]
    theirs = peer.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0)
    try:
        wanted = [token for token, _ in zip(theirs.generate(ids[:12], temp=0.0, top_k=1, repeat_penalty=1.0), range(12))]
        for _ in engine.prefill(ids[:12]):
            continue
        assert answer(engine, 12) == wanted
        own = mtp_logits(engine, ids)
        with engine.model.outer() as outer:
            x, norm = engine.backends["cpu"].workspace.take("x", 1, engine.config.hidden_size), outer.mtp.norm
            state = normalise(x, norm.kind, norm.weight, norm.bias, norm.eps)[0]
    finally:
        engine.close()
        theirs.close()
    scores, states = by_llamacpp(peer.llama_cpp, path, ids, engine.config.vocab_size, engine.config.hidden_size)
    assert np.abs(scores - own).max() < 1e-2 * np.abs(own).max(), "it rounds activations to 16 bits"
    assert np.abs(states - state).max() < 1e-2 * np.abs(state).max(), "what it feeds back for a further guess"


def by_llamacpp(lib: object, path: Path, ids: list[int], vocabulary: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What its own graph of the block makes of a text: scores behind the last token, and the state that goes into it again. The functions
    that hand states over are not part of its C interface in this version, so they are asked for by the compiler's names."""
    names = ("_Z26llama_set_embeddings_nextnP13llama_contextbb", "_Z26llama_get_embeddings_nextnP13llama_context")
    try:
        shows, states = (lib._lib[name] for name in names)
    except AttributeError:
        pytest.skip("this version of llama.cpp hands no states over")
    shows.argtypes, shows.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
    states.argtypes, states.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
    model_asked, asked = lib.llama_model_default_params(), lib.llama_context_default_params()
    model_asked.load_mtp, asked.n_threads, asked.type_k, asked.type_v, asked.flash_attn_type = True, 1, 0, 0, 0
    model = lib.llama_model_load_from_file(str(path).encode(), model_asked)
    found, context = [], None
    for kind in (0, 1):  # the model, then its block
        asked.ctx_type, asked.ctx_other = kind, context
        context, tokens = lib.llama_init_from_model(model, asked), ids[kind:]
        shows(context, True, False)
        batch, held = lib.llama_batch_init(len(tokens), kind * width, 1), (ctypes.c_int32 * len(tokens))(*tokens)
        batch.n_tokens, batch.token = len(tokens), ctypes.cast(held, type(batch.token))
        if kind:
            np.ctypeslib.as_array(batch.embd, (len(tokens), width))[:] = found[0][:-1]
        for i in range(len(tokens)):
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, 1, 0, 1
        assert lib.llama_decode(context, batch) == 0
        found.append(np.ctypeslib.as_array(states(context), (len(tokens), width)).copy())
    return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, len(ids) - 2), (vocabulary,)).copy(), found[1][-1]
