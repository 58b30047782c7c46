#!/usr/bin/env python3
"""A mixture of experts with half of its bytes in memory: tokens per second against the disk's limit, and hit rate against LRU and the
optimum.

Weights are random, with the layer shape of a named model; the number of layers is part of the published name. There is no recorded trace of
a real model, so routing is driven by synthetic states: the embedding rows are a random walk in hidden-state space, the sum of a constant
(experts popular with all tokens), a slowly moving part (a topic) and noise; tokens 0, 1, 2, ... are run in sequence through random routers.
The proportions are set to reproduce published locality: 38% of a token's experts are those of the token before (29.5% and 41% reported), an
LRU over an eighth of the experts hits 57% and over a quarter 81% (67% and 81% reported). llama.cpp gets the same routers, rows and tokens.

The bound is one over (disk + dense): `disk`, the seconds that the reads of the measured tokens take on their own, a layer's requested
together, on experts that no token has visited where there are enough of them (a virtual disk is faster for data it has read before), else
on the very same; `dense`, the seconds of a token whose experts are all in memory, times the share of its bytes that are not experts. A
second bound is one over (disk + such a whole token): experts in memory are multiplied too.

    python benchmarks/expert_paging.py --make qwen3-30b-a3b --layers 24 /data/qwen3-24 --gguf /data/qwen3-24.gguf
    python benchmarks/expert_paging.py /data/qwen3-24 --part 0.5 --gguf /data/qwen3-24.gguf --publish 24-layers
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from effllm.kernels.compile import cache_root
from effllm.offload.expert_cache import POLICIES, belady, replay
from effllm.offload.hardware import peak_rss
from effllm.offload.shards import Planned
from effllm.offload.size import format_size
from effllm.quant.methods import rtn
from effllm.quant.pack import put_rows, put_tables
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import from_f32
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.measuring.synthetic import SHAPES, SyntheticStore
from effllm.runtime.prepare import EngineOptions, prepare
from offload import child, evict
from predicted_speed import promise
from report import Figure, publish
from synthetic_folder import of_store, write_folder, write_marker

CONSTANT, SLOW, FAST, PERSISTENCE = 0.1, 0.6, 0.3, 0.97  # shares of the power of a row; what of the slow part stays from token to token
ROWS = 1024  # of the embedding that are a walk; the others are random
Q4_0 = 18  # bytes of a block of 32
WARM, MEASURED, AGAIN = 160, 80, 12
PEER_WARM_S, PEER_S = 35.0, 25.0
INTRO = ("Random weights, routing by random routers over a made walk of hidden states whose locality is that of published figures "
         "(`benchmarks/expert_paging.py` says how). Reads are direct.")


def walk(depth: int) -> np.ndarray:
    """Rows [ROWS, depth] of unit power."""
    rng = np.random.default_rng(11)
    constant, slow = rng.standard_normal(depth), rng.standard_normal(depth)
    rows = np.empty((ROWS, depth), np.float32)
    for row in rows:
        slow = PERSISTENCE * slow + (1 - PERSISTENCE**2) ** 0.5 * rng.standard_normal(depth)
        row[:] = CONSTANT**0.5 * constant + SLOW**0.5 * slow + FAST**0.5 * rng.standard_normal(depth)
    return rows


def router(layer: int, experts: int, depth: int) -> np.ndarray:
    return np.random.default_rng(100 + layer).standard_normal((experts, depth), np.float32) / np.float32(depth**0.5)


class Store(SyntheticStore):
    """Random weights, except for routers, the random walk, and norms of one."""

    def made(self, name: str) -> np.ndarray:
        """The bytes of a tensor."""
        info, stored = self.tensors[name], self.container.tensors[name]
        if name.endswith("mlp.gate.weight"):
            return from_f32(router(int(name.split(".")[2]), *stored.shape), "bf16").reshape(-1).view(np.uint8)
        if len(stored.shape) == 1:
            return from_f32(np.ones(stored.shape, np.float32), "bf16").view(np.uint8)
        blob = self.read(info)
        if name == "model.embed_tokens.weight":
            codes = rtn.quantize(walk(stored.shape[1]), stored.spec, None, None)
            put_rows(blob, stored.spec, stored.shape, 0, codes)
            if codes.levels is not None:
                put_tables(blob, stored.spec, stored.shape, codes.levels, codes.steps)
        return blob


def make(shape: str, layers: int, folder: Path) -> None:
    """A folder laid out as by `quantize --bits 4`: an expert is one record, aligned to 4096 bytes."""
    raw = {**SHAPES[shape], "num_hidden_layers": layers}
    store = Store(parse_config(raw), QuantSpec.parse("4bit"))
    groups: dict[str, list[Planned]] = {}
    for tensor in of_store(store):
        record = tensor.name.rpartition("_proj")[0].rpartition(".")[0] if ".experts." in tensor.name else tensor.name
        groups.setdefault(record, []).append(tensor)
    write_folder(folder, raw, list(groups.values()), store.made)
    write_marker(folder, store)


def make_gguf(folder: Path, path: Path) -> None:
    """The same shape for llama.cpp: matrices Q4_0 with random codes, the same routers and walk."""
    import gguf
    from gguf import GGMLQuantizationType as Kind

    raw = json.loads((folder / "config.json").read_text())
    depth, wide, experts = raw["hidden_size"], raw["moe_intermediate_size"], raw["num_experts"]
    heads, kv_heads, size = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(depth)
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_expert_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(float(raw["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(raw["rms_norm_eps"]))
    writer.add_expert_count(experts)
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    table, q, kv = (raw["vocab_size"], depth), heads * size, kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {"token_embd": table, "output_norm": (depth,), "output": table}
    for layer in range(raw["num_hidden_layers"]):
        tensors_of_layer = {"attn_norm": (depth,), "attn_q": (q, depth), "attn_k": (kv, depth), "attn_v": (kv, depth),
                            "attn_q_norm": (size,),
                            "attn_k_norm": (size,), "attn_output": (depth, q), "ffn_norm": (depth,),
                            "ffn_gate_inp": (experts, depth), "ffn_gate_exps": (experts, wide, depth),
                            "ffn_up_exps": (experts, wide, depth),
                            "ffn_down_exps": (experts, depth, wide)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in tensors_of_layer.items()}
    plain = {name for name, shape in shapes.items() if len(shape) == 1 or name.endswith("gate_inp")}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        kind = Kind.F32 if name in plain else Kind.F16 if name == "token_embd" else Kind.Q4_0
        nbytes = {Kind.F32: 4 * count, Kind.F16: 2 * count, Kind.Q4_0: count // 32 * Q4_0}[kind]
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    codes = np.random.default_rng(1).integers(0, 256, (1 << 16, Q4_0), np.uint8)
    codes[:, :2] = np.array([0.0017], np.float16).view(np.uint8)
    for name, shape in shapes.items():
        if name == "token_embd":
            rows = np.resize(walk(depth), shape)
            writer.write_tensor_data(rows.astype(np.float16))
        elif name in plain:
            values = np.ones(shape, np.float32) if len(shape) == 1 else router(int(name.split(".")[1]), *shape)
            writer.write_tensor_data(values)
        else:
            writer.write_tensor_data(np.resize(codes.reshape(-1), int(np.prod(shape)) // 32 * Q4_0))
    writer.close()


def opened(folder: Path, ram: int, threads: int | None) -> Engine:
    for item in open_engine(folder, EngineOptions(device="cpu", ram=str(ram), ctx=512, threads=threads)):
        if isinstance(item, Notice):
            print(item.text, file=sys.stderr, flush=True)
    return item


def timed(engine: Engine, ids: range | list[int]) -> Iterator[tuple[float, float]]:
    """(seconds, seconds spent waiting) of every token."""
    for token in ids:
        before, started = engine.model.pager.wait_s, time.perf_counter()
        engine.forward_logits([token])
        yield time.perf_counter() - started, engine.model.pager.wait_s - before


def promised(folder: Path, ram: int) -> float:
    """Tokens per second predicted by `plan`."""
    prepared = prepare(folder, EngineOptions(device="cpu", ram=str(ram), ctx=512))
    promised = promise(prepared)
    prepared.store.close()
    return promised.start.tokens_per_s


def alone(engine: Engine, misses: list[list[int]], trace: np.ndarray) -> float:
    """Seconds of the reads that some tokens made, with nothing computed meanwhile, a layer's requested together."""
    pager = engine.model.pager
    visited = {layer * pager.experts + int(expert) for token in trace for layer, row in enumerate(token) for expert in row}
    fresh = iter([key for key in np.random.default_rng(3).permutation(pager.layers * pager.experts).tolist() if key not in visited])
    if pager.layers * pager.experts - len(visited) >= sum(map(len, misses)):
        misses = [[next(fresh) for _ in keys] for keys in misses]
    started = time.perf_counter()
    for keys in misses:
        tickets = [pager._read(key, slot, True) for slot, key in enumerate(keys)]
        for ticket in tickets:
            pager._reader.wait(ticket)
    return time.perf_counter() - started


def measure(folder: Path, ram: int, tokens: int, threads: int | None) -> dict[str, float]:
    """One process: warm-up, `tokens` measured, the same reads on their own, one token repeated."""
    evict(sorted(folder.glob("*.safetensors")))
    engine = opened(folder, ram, threads)
    pager, config = engine.model.pager, engine.config
    for _ in timed(engine, range(WARM)):
        continue
    before, tally = [], pager.stats
    before = [tally.uses, tally.hits, tally.ready, tally.prefetched, tally.prefetch_hits, tally.prefetch_misses, pager.disk_nbytes]
    misses: list[list[int]] = []
    visit = pager.visit

    def seen(layer: int, needed: list[int], counts: object = None) -> object:
        base = layer * pager.experts
        misses.append([key for key in range(base, base + pager.experts) if key - base in needed
                       and (key not in pager.pool or key in pager._prefetched or key in pager._tickets)])
        return visit(layer, needed, counts)

    pager.visit = seen
    timings = list(timed(engine, range(WARM, WARM + tokens)))
    del pager.visit
    uses, hits, ready, guessed, useful, wasted, read = (now - then for now, then in zip(
        (tally.uses, tally.hits, tally.ready, tally.prefetched, tally.prefetch_hits, tally.prefetch_misses, pager.disk_nbytes), before))
    trace = pager.trace()[:WARM + tokens]
    still = []
    for _ in range(AGAIN):  # the same token: its experts are there, and what is waited for is its row of the embedding
        missed = tally.uses - tally.hits
        ((last_seconds, waited),) = timed(engine, [WARM + tokens])
        still += [last_seconds - waited] if tally.uses - tally.hits == missed else []
    slots, experts, layers = pager.memory.nbytes // pager.slot_nbytes, pager.experts, pager.layers
    rates = {name: replay(trace, experts, slots, name, WARM) for name in POLICIES}
    best = belady(trace, experts, slots, WARM)
    demanded = sum(map(len, misses))
    disk = alone(engine, misses, trace) / tokens
    routed = layers * config.moe.experts_per_token * pager.slot_nbytes
    dense = median(still) * (1 - routed / engine.model.bytes_per_pass)
    seconds = sum(seconds_of_token for seconds_of_token, _ in timings) / tokens
    predicted = engine.prepared.streaming.choice.hit_rate
    result = {"seconds": seconds, "median_s": median(seconds_of_token for seconds_of_token, _ in timings),
              "waited_s": sum(waited for _, waited in timings) / tokens,
              "disk_s": disk, "dense_s": dense, "resident_s": median(still), "hit_rate": hits / uses, "ready": ready / uses,
              "expected_hit_rate": predicted, "belady": best, "slots": slots, "experts": experts * layers,
              "read_gb": read / tokens / 1e9, "demanded": demanded / tokens,
              "disk_gbps": demanded * pager.slot_nbytes / tokens / disk / 1e9 if disk else 0.0, "guessed": guessed, "useful": useful,
              "wasted": wasted, "peak_gb": peak_rss() / 1e9, "ram_gb": ram / 1e9, "model_gb": engine.model.nbytes / 1e9,
              "policy": POLICIES.index(engine.prepared.streaming.choice.policy), **{f"replay_{name}": rate for name, rate in rates.items()}}
    engine.close()
    return result


def peer(path: Path) -> dict[str, float]:
    """llama.cpp over a memory-mapped file, token by token; the caller has limited this process's memory."""
    from llamacpp_run import Peer

    evict([path])
    llama = Peer(path, 512, len(os.sched_getaffinity(0)), mapped=True)
    token, started = 0, time.perf_counter()
    while token < WARM and time.perf_counter() - started < PEER_WARM_S:
        llama.forward([token], "last")
        token += 1
    first, started = token, time.perf_counter()
    while token < first + MEASURED and time.perf_counter() - started < PEER_S:
        llama.forward([token], "last")
        token += 1
    return {"seconds": (time.perf_counter() - started) / (token - first), "tokens": token - first, "warm": first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", metavar="SHAPE", help="write random weights of a mixture's shape into the folder, and stop")
    parser.add_argument("--layers", type=int, default=24, help="of what --make writes")
    parser.add_argument("--part", type=float, default=0.5, help="of the model's bytes that may be used, by everything")
    parser.add_argument("--tokens", type=int, default=MEASURED)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gguf", type=Path, help="the peer's file; --make writes it")
    parser.add_argument("--publish", metavar="NAME", help="keep the result under this name")
    parser.add_argument("--alone", choices=("own", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--ram", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.layers, options.folder)
        if options.gguf:
            make_gguf(options.folder, options.gguf)
        return 0
    if options.alone:
        print(json.dumps(peer(options.gguf) if options.alone == "peer"
                         else measure(options.folder, options.ram, options.tokens, options.threads)))
        return 0
    ram = round(options.part * sum(path.stat().st_size for path in options.folder.glob("*.safetensors")))
    with tempfile.TemporaryDirectory() as cache:  # a person's traces are not this benchmark's
        (Path(cache) / "effllm").mkdir()
        (Path(cache) / "effllm" / "kernels").symlink_to(cache_root() / "kernels")
        os.environ["XDG_CACHE_HOME"] = cache
        arguments = [str(options.folder), "--alone", "own", "--ram", str(ram),
                     *(["--threads", str(options.threads)] if options.threads else [])]
        limit = ram if options.gguf else None
        child([*arguments, "--tokens", "8"], limit, __file__)  # shows the model's routing
        expected = promised(options.folder, ram)
        ours = child([*arguments, "--tokens", str(options.tokens)], limit, __file__)
    print(json.dumps(ours), file=sys.stderr, flush=True)
    under = f"{options.folder.name}, {ours['model_gb']:.1f} GB in {ours['ram_gb']:.2f} GB"
    bound = 1 / (ours["disk_s"] + ours["dense_s"])
    figures = [
        Figure("tokens_per_s", "decode", under, 1 / ours["seconds"], "tokens/s"),
        Figure("bound", "1 / (disk + dense)", f"{1000 * ours['disk_s']:.0f} + {1000 * ours['dense_s']:.0f} ms", bound, "tokens/s"),
        Figure("share", "decode over 1 / (disk + dense)", under, 1 / ours["seconds"] / bound, ""),
        Figure("share_of_all", "decode over 1 / (disk + a token in memory)", under,
               (ours["disk_s"] + ours["resident_s"]) / ours["seconds"], ""),
        Figure("predicted_tokens_per_s", "predicted before the run", under, expected, "tokens/s"),
        Figure("resident_s", "a token whose experts are all in memory", under, 1000 * ours["resident_s"], "ms"),
        Figure("hit_rate", "hit rate", f"{ours['slots']:.0f} of {ours['experts']:.0f} experts in memory, {POLICIES[int(ours['policy'])]}",
               ours["hit_rate"], ""),
        Figure("ready", "there when they were needed", "with those that had come on a guess", ours["ready"], ""),
        *(Figure(f"replay_{name}", f"hit rate of {name}", "replayed on the same trace", ours[f"replay_{name}"], "") for name in POLICIES),
        Figure("belady", "hit rate of the optimum", "knowing the future of the same trace", ours["belady"], ""),
        Figure("expected_hit_rate", "hit rate expected", "before the run, from the tokens of another", ours["expected_hit_rate"], ""),
        Figure("disk_gbps", "disk", "such reads alone", ours["disk_gbps"], "GB/s"),
        Figure("read_mb", "read per token", f"{ours['demanded']:.1f} experts asked for", 1000 * ours["read_gb"], "MB"),
        Figure("guessed", "experts read ahead, per token", f"{ours['useful']:.0f} used, {ours['wasted']:.0f} driven out unused",
               ours["guessed"] / options.tokens, ""),
        Figure("peak_gb", "most memory held", f"budget {format_size(ram)}", ours["peak_gb"], "GB"),
    ]
    if options.gguf:
        theirs = child([str(options.folder), "--alone", "peer", "--gguf", str(options.gguf)], ram, __file__)
        where = f"memory cgroup of {format_size(ram)}, {theirs['tokens']:.0f} tokens after {theirs['warm']:.0f}"
        figures += [Figure("peer_tokens_per_s", "llama.cpp, mapped file", where, 1 / theirs["seconds"], "tokens/s"),
                    Figure("against_peer", "decode over llama.cpp", under, theirs["seconds"] / ours["seconds"], "x")]
    publish(f"experts-{options.publish}" if options.publish else "experts", "Experts from the disk", INTRO, figures,
            keep=bool(options.publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
