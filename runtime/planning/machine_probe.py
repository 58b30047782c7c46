"""Machine benchmark: how fast our kernels run here, measured in a few seconds in a child process, as the input of predictions.

The child process has the memory for it, which is free again when a plan is made. It prints one JSON line per figure, as each is known:

    memory      bytes per second of a load-only kernel (the roof): the best and the median pass, before and after all else; one thread's
    overhead    seconds of a one-token pass that no weight explains, per token and per layer
    attention   products per second of attention, per cache precision: for one token over a short context and beyond it, from memory, and
                for a prompt
    kind        for weights of one format: bytes per second for one token, from memory and from a cache, products per second for a prompt,
                in wide layers and in narrow ones
    failed      in place of one that could not be measured: `what`, and `why`

All but the first are taken from the engine itself, on random weights of small shapes, so they include everything that a run does. Each
figure has `others`, the share of CPU time that other programs and the hypervisor had while it was taken. Run as `python -m
effllm.runtime.planning.machine_probe '{"threads": 2, "base": true, "kinds": ["bf16"], "kv": ["16bit"]}'`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import PAGE
from ...offload import hardware
from ...offload.predict import CACHED_NBYTES, MEMORY_NBYTES, SHORT_CONTEXT
from ..last_layers import LAST_TOKEN_ROLES, MIN_LAST_TOKENS

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepare import EngineOptions, Prepared

ROOF_NBYTES, MEMORY_PASSES, MORE_PASSES = 256 << 20, 7, 5
PROMPT = 512  # a prompt chunk, as in a run
TOKENS = 24
CHOICES = 128  # tokens of an answer whose sampling is timed
MIN_RUNS, MAX_RUNS, RUN_TOLERANCE = 2, 4, 0.03  # runs that differ by no more than this share agree
MAX_RUNS_S = 1.0  # per figure: on a machine that is never idle, more runs would take long without agreeing better
DEPTH, DEEP_CONTEXT_TOKENS = SHORT_CONTEXT, 10
FEW_LAYERS, MANY_LAYERS, ATTENTION_LAYERS = 2, 12, 3
_SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "torch_dtype": "bfloat16", "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": True}
SMALL = {**_SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
ATTENTIVE = {**_SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
             "max_position_embeddings": 1 << 20}
NARROW = {**_SHAPE, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
WIDE = {**_SHAPE, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64}
THIN = {**_SHAPE, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
THIN_LAYERS = 5
RAW = "bf16"
Figure = dict[str, object]


def measure(threads: int, kinds: Sequence[str], kv: Sequence[str], base: bool = True) -> Iterator[Figure]:
    """The figures listed above, measured in a child process and yielded as they arrive."""
    request = json.dumps({"threads": threads, "kinds": list(kinds), "kv": list(kv), "base": base})
    with tempfile.TemporaryFile("w+", errors="replace") as errors, subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, request], stdout=subprocess.PIPE, stderr=errors, text=True) as child:
        for line in child.stdout:
            yield json.loads(line)
        if child.wait():
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"it ended with {child.returncode}"]
            yield {"figure": "failed", "what": "the rest", "why": last[0]}


def count(kinds: Sequence[str], kv: Sequence[str], base: bool = True) -> int:
    """Lines that `measure` yields, unless its child fails."""
    return 2 * base + len(kinds) + len(kv)


def memory_passes(threads: int) -> list[float]:
    """Bytes per second of each pass of the load-only kernel over ROOF_NBYTES, in this process."""
    from ...kernels.cpu.memory_bandwidth import read_bandwidth
    from ...kernels.threads import ThreadPool
    from ...offload.memory import anonymous

    pool = ThreadPool(threads)
    try:
        memory = anonymous(ROOF_NBYTES)
        memory.view(np.uint64)[:] = 0x0101010101010101  # untouched memory maps to a single shared zero page
        return [read_bandwidth(pool, memory, passes=1) for _ in range(MEMORY_PASSES)]
    finally:
        pool.close()


def prepared_shape(shape: Mapping[str, object], layers: int, options: EngineOptions, spec: str | None = None) -> Prepared:
    """Random weights of a shape, ready to be opened."""
    from ...quant.spec import QuantSpec
    from ..config import parse_config
    from ..measuring.synthetic import SyntheticStore
    from ..prepare import prepare_with

    config = parse_config({**shape, "num_hidden_layers": layers})
    store = SyntheticStore(config, None if spec is None else QuantSpec.parse(spec))
    return prepare_with(None, config, store, options, store.container)


def _engine(shape: Mapping[str, object], layers: int, threads: int, ctx: int, spec: str | None = None, kv: str = "16bit",
            exact: bool = False) -> Engine:
    """An engine over random weights."""
    from ..engine import open_prepared
    from ..prepare import EngineOptions
    from .needed_kernels import kinds_of

    options = EngineOptions(device="cpu", threads=threads, ctx=ctx, kv=kv, exact=exact)
    prepared = prepared_shape(shape, layers, options, spec)
    *_, engine = open_prepared(lambda: prepared, kinds_of(prepared.config, prepared.store, prepared.container, options))
    return engine


def _ids(tokens: int) -> list[int]:
    return np.random.default_rng(0).integers(0, _SHAPE["vocab_size"], tokens).tolist()


def _best_of_runs(run: Callable[[], Sequence[float]]) -> list[float]:
    """The minimum of each time that `run` returns, over some runs: disturbances only lengthen it. On an idle machine two runs agree, and
    more would add nothing."""
    runs, seconds = [], []
    while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and sum(seconds) < MAX_RUNS_S and not _agree([sum(times) for times in runs])):
        started = time.perf_counter()
        runs.append(run())
        seconds.append(time.perf_counter() - started)
    return [min(times) for times in zip(*runs)]


def _agree(totals: Sequence[float]) -> bool:
    """Whether the two fastest runs took about equally long."""
    best, second = sorted(totals)[:2]
    return second - best <= RUN_TOLERANCE * best


def _prompt_s(engine: Engine, tokens: int) -> list[float]:
    """Seconds for each pass over a prompt."""
    return _best_of_runs(lambda: _prompt_run_s(engine, tokens))


def _prompt_run_s(engine: Engine, tokens: int) -> list[float]:
    """Seconds for each pass over a prompt, of one run."""
    ids = _ids(tokens)
    engine.reset()
    stamps = [time.perf_counter()]
    for _ in engine.prefill(ids):  # which yields between passes
        stamps.append(time.perf_counter())
    stamps.append(time.perf_counter())
    return [after - before for before, after in zip(stamps, stamps[1:])]


def _token_s(engine: Engine, tokens: int = TOKENS) -> float:
    """Seconds for one token after the current context: the first quartile over passes. Other programs only ever lengthen a pass, and their
    disturbance often outlasts a run of passes."""
    return _best_of_runs(lambda: [_token_run_s(engine, tokens)])[0]


def _token_run_s(engine: Engine, tokens: int) -> float:
    """Seconds for one token, of one run."""
    times = []
    for token in _ids(tokens):
        started = time.perf_counter()
        engine.forward_logits([token])
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[(len(times) - 2) // 4]


def _choice_s(engine: Engine) -> float:
    """Seconds between a pass's logits and the next pass: sampling a token, and looking up drafts. A large vocabulary takes little
    longer."""
    from ..sampler import Sampler, SamplerSettings

    def run() -> list[float]:
        engine.reset()
        for _ in engine.prefill(_ids(4)):
            continue
        before = engine.decode_s - engine.passes_s
        for _ in engine.generate(Sampler(SamplerSettings(seed=0), engine.config.vocab_size), CHOICES, frozenset()):
            continue
        return [(engine.decode_s - engine.passes_s - before) / CHOICES]

    return _best_of_runs(run)[0]


def _overhead(threads: int) -> Figure:
    seconds, choice = {}, 0.0
    for layers in (FEW_LAYERS, MANY_LAYERS):
        engine = _engine(SMALL, layers, threads, 1024)
        engine.forward_logits(_ids(4))
        seconds[layers] = _token_s(engine, 3 * TOKENS)
        if layers == MANY_LAYERS:
            choice = _choice_s(engine)
        engine.close()
    layer = max(0.0, (seconds[MANY_LAYERS] - seconds[FEW_LAYERS]) / (MANY_LAYERS - FEW_LAYERS))
    return {"figure": "overhead", "token_s": max(0.0, seconds[FEW_LAYERS] - FEW_LAYERS * layer), "layer_s": layer, "choice_s": choice}


def _attention(threads: int, kv: str) -> Figure:
    """A token at depth 1024 against one at the start; the third pass over a prompt against the second, which sees as many exact tokens of a
    packed cache; and a token after more pages than any cache holds against one at depth 1024. The short ones alternate, so that a
    disturbance affects all of them."""
    layer = 2 * ATTENTIVE["num_attention_heads"] * ATTENTIVE["head_dim"]
    width = layer * ATTENTION_LAYERS
    engine = _engine(ATTENTIVE, ATTENTION_LAYERS, threads, max(DEPTH, 3 * PROMPT) + 2 * TOKENS, kv=kv)

    def run() -> list[float]:
        engine.reset()
        engine.forward_logits(_ids(4))
        shallow = _token_run_s(engine, TOKENS)
        _prompt_run_s(engine, DEPTH)
        near = _token_run_s(engine, TOKENS)
        return [*_prompt_run_s(engine, 3 * PROMPT)[1:3], shallow, near]

    try:
        second, third, shallow, near = _best_of_runs(run)
        page_nbytes = engine.cache.sealed_nbytes
    finally:
        engine.close()
    pages = max(2 * DEPTH // PAGE, -(-MEMORY_NBYTES // page_nbytes))
    engine = _engine(ATTENTIVE, ATTENTION_LAYERS, threads, PAGE * (pages + 8), kv=kv)
    try:
        _fill_context(engine, pages)
        context = engine.cache.n
        deep = _token_s(engine, DEEP_CONTEXT_TOKENS)
    finally:
        engine.close()
    # The difference of the passes: every query of the third sees another chunk's keys, but few queries reach the last layer.
    seen = layer * PROMPT * ((ATTENTION_LAYERS - 1) * PROMPT + MIN_LAST_TOKENS)
    return {"figure": "attention", "kv": kv, "decode": width * (DEPTH - TOKENS) / max(near - shallow, 1e-6),
            "prefill": seen / max(third - second, 0.02 * (second + third)), "deep": width * (context - DEPTH) / max(deep - near, 1e-6)}


def _fill_context(engine: Engine, pages: int) -> None:
    """Fill an engine's cache with `pages` copies of a page, and what is exact after them: values do not affect speed, and prefilling so
    long a prompt would take minutes."""
    for _ in engine.prefill(_ids(PROMPT)):
        continue
    cache = engine.cache
    page = cache.read(0)
    num_tokens = cache.shape.sinks + PAGE * pages + cache.shape.window + PAGE // 2
    cache.adopt(num_tokens, pages)
    for index in range(pages):
        cache.write(index, page)
    engine.set_tokens([0] * num_tokens)


def _kind(threads: int, kind: str, overhead: Figure) -> Figure:
    from ...quant.spec import QuantSpec

    name, _, exact = kind.partition(" ")
    spec = QuantSpec.parse(name)

    def open_engine(shape: Mapping[str, object], layers: int) -> Engine:
        engine = _engine(shape, layers, threads, PROMPT + MAX_RUNS * TOKENS, None if spec.is_raw else name, exact=bool(exact))
        engine.forward_logits(_ids(4))
        return engine

    rates = {}
    for rate, shape, nbytes in (("cached", NARROW, CACHED_NBYTES), ("decode", WIDE, MEMORY_NBYTES)):
        layer = sum(spec.nbytes(matrix) for matrix in _matrices(shape).values())
        layers = max(1, round(nbytes / layer))
        engine = open_engine(shape, layers)
        try:
            rates[rate] = layers * layer / max(_token_s(engine) - overhead["token_s"] - layers * overhead["layer_s"], 1e-6)
        finally:
            engine.close()
    # A prompt is bound by arithmetic: one whole layer tells as much as the many that a low-bit format fits in as many bytes.
    # Narrow ones have a single head, so that their attention is as small a part as that of the wide one.
    for rate, shape, layers in (("prefill", WIDE, 2), ("narrow", THIN, THIN_LAYERS)):
        engine = open_engine(shape, layers)
        try:
            seconds = sum(_prompt_s(engine, PROMPT)) - overhead["token_s"] - layers * overhead["layer_s"]
            rates[rate] = prompt_products(shape, layers) / max(seconds, 1e-6)
        finally:
            engine.close()
    return {"figure": "kind", "kind": kind, **rates}


def prompt_products(shape: Mapping[str, object], layers: int) -> int:
    """Products of a prompt of PROMPT tokens with the matrices of `layers` layers, the last of which continues with a few tokens only."""
    products = {role: rows * depth for role, (rows, depth) in _matrices(shape).items()}
    last_token_products = sum(products[role] for role in products if role in LAST_TOKEN_ROLES)
    return PROMPT * layers * sum(products.values()) - (PROMPT - MIN_LAST_TOKENS) * last_token_products


def _matrices(shape: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """[N, K] of a layer's matrices by role."""
    hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    return {"q": (queries, hidden), "o": (hidden, queries), "k": (keys, hidden), "v": (keys, hidden), "gate": (ffn, hidden),
            "up": (ffn, hidden), "down": (hidden, ffn)}


def _memory(threads: int, passes: Sequence[float], fastest: float) -> Figure:
    """The memory's rate, from passes already made and more. Weights cannot be read faster than memory allows: if some were, other programs
    used memory while it was measured, and it is measured again a few times."""
    passes, runs_left = [*passes, *memory_passes(threads)], MORE_PASSES
    while runs_left and max(passes) < fastest:
        passes, runs_left = [*passes, *memory_passes(threads)], runs_left - 1
    return {"figure": "memory", "best": max(passes), "median": median(passes), "alone": median(memory_passes(1))}


def _with_cpu_use(take: Callable[[], Figure]) -> Figure:
    """A figure, with the share of CPU time that others had meanwhile."""
    before = hardware.cpu_time()
    figure = take()
    return {**figure, "others": round(hardware.cpu_time().since(before).others_share, 3)}


def main(argument: str) -> None:
    from ... import EffllmError

    request = json.loads(argument)
    threads = request["threads"]

    def write(figure: Figure) -> None:
        sys.stdout.write(f"{json.dumps(figure)}\n")
        sys.stdout.flush()

    passes, fastest = memory_passes(threads) if request["base"] else [], 0.0
    overhead = _with_cpu_use(lambda: _overhead(threads))
    if request["base"]:
        write(overhead)
    for name, measure_item in (("kv", lambda kv: _attention(threads, kv)), ("kinds", lambda kind: _kind(threads, kind, overhead))):
        for item in request[name]:
            try:
                figure = _with_cpu_use(lambda measure_item=measure_item, item=item: measure_item(item))
                write(figure)
                fastest = max(fastest, figure["decode"] if name == "kinds" else 0.0)
            except (EffllmError, MemoryError) as error:  # unknown here, but the rest is not
                write({"figure": "failed", "what": item, "why": str(error) or "not enough memory"})
    if request["base"]:  # at both ends: on a shared machine the roof moves within seconds, and by how much is part of the result
        write(_with_cpu_use(lambda: _memory(threads, passes, fastest)))


if __name__ == "__main__":
    main(sys.argv[1])
