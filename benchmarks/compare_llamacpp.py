#!/usr/bin/env python3
"""Speed of low-bit weights against llama.cpp on the same random weights, both sides alternating in one run, next to this machine's
rooflines.

One set of random bf16 weights of a named shape is written once into --work and quantized by both. Each side runs in its own process. A
round runs every side in turns of a few tokens, with a measurement of the memory roofline (a load-only kernel over 1 GiB, same threads)
before each, because the memory of a shared machine changes speed within seconds; ratios are taken within a round, figures are medians over
rounds. Token embedding and LM head have one type on both sides: Q6_K and 6 bits, at 8 bits Q8_0 and 8.

    python benchmarks/compare_llamacpp.py [--bits 4 3 2 8] [--quick] [--no-results]
    python benchmarks/compare_llamacpp.py --bits 4 --quantize            # the time and memory of quantizing as well
    python benchmarks/compare_llamacpp.py --ours 4=DIR 2=DIR             # folders made otherwise (those of the quality figures, say)
    python benchmarks/compare_llamacpp.py --bits 4 --alone llama3-8b     # a larger shape against the read roof alone
    python benchmarks/compare_llamacpp.py --bits 4 --shape olmoe-1b-7b --layers 8    # a mixture of experts

Needs gguf and llama-cpp-python, and torch for an int8 product; wants the machine to itself for some ten minutes.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from platformdirs import user_cache_path

import roofline_compute
from benchmark_processes import (
    SHAPE,
    Child,
    Cost,
    file_nbytes,
    peer_file,
    quantize_effllm,
    quantize_peer,
    quantized_folder,
    random_folder,
    result_name,
)
from effllm.runtime.config import read_config
from effllm.runtime.measuring.synthetic import SHAPES
from reference_rates import PASSES as PASSES_OF_PRODUCTS
from reference_rates import Roof, Yardsticks
from report import Figure, parser_of, publish

PEERS = {"4": ("Q4_0", "Q4_K_M"), "3": ("Q3_K_M",), "2": ("Q2_K",), "8": ("Q8_0",)}
TOKENS, TOKENS_PER_TURN, PROMPT, COLUMNS, PASSES = 64, 16, 512, 8, 4
EFFLLM = "effllm"
PRODUCTS = {"fp32": "NumPy's fp32 product", "int_mm": "torch._int_mm"}
INTRO = ("Random weights, the same on both sides; 16-bit KV cache; batch 1; medians over rounds in which the sides alternate. "
         "Roof: a load-only kernel over 1 GiB with the same threads, in the same round. ")
OF_PRODUCTS = "Products of other libraries: 512×2048×5632, by turns with ours."
OF_MIXTURES = "Bytes of a token: of the experts that it visits, and of all else. llama.cpp's files are made of F16."


@dataclass(frozen=True)
class Schedule:
    """Numbers of rounds: of decode (and of columns), of prompts, and of quantizing."""

    decode: int = 10
    prefill: int = 5
    quantize: int = 3


QUICK = Schedule(3, 2, 1)


Round = dict[str, float]  # a side's name -> seconds; "roof" -> bytes a second


def decode_round(sides: Sequence[Child], roof: Roof, turn: int) -> Round:
    """Seconds for TOKENS tokens from an empty cache, in turns of a few; the order of the sides alternates."""
    sides = sides[:: 1 if turn % 2 else -1]
    for side in sides:
        side.request("clear")
    seconds, roofs = dict.fromkeys((side.name for side in sides), 0.0), []
    for _ in range(TOKENS // TOKENS_PER_TURN):
        for side in sides:
            roofs.append(roof())
            seconds[side.name] += side.request("forward", TOKENS_PER_TURN, 1)
    return {**seconds, "roof": sum(roofs) / len(roofs)}


def columns_round(sides: Sequence[Child], roof: Roof, turn: int) -> Round:
    """Seconds of a forward pass of COLUMNS tokens with all logits."""
    seconds, roofs = {}, []
    for side in sides[:: 1 if turn % 2 else -1]:
        side.request("clear")
        roofs.append(roof())
        seconds[side.name] = side.request("forward", PASSES, COLUMNS) / PASSES
    return {**seconds, "roof": sum(roofs) / len(roofs)}


def prefill_round(sides: Sequence[Child], roof: Roof, turn: int) -> Round:
    """Seconds of a prompt of PROMPT tokens."""
    return {side.name: side.request("prefill", PROMPT) for side in sides[:: 1 if turn % 2 else -1]}


def thread_count_text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def median_seconds(rounds: Sequence[Round], name: str) -> float:
    return median(times[name] for times in rounds)


def best_peer(rounds: Sequence[Round], peers: Sequence[str]) -> str:
    return min(peers, key=lambda name: median_seconds(rounds, name))


def speed(bits: str, ours: Path | str, folder: Path, schedule: Schedule, roof: Roof, threads: int,
          yardsticks: Yardsticks) -> Iterator[Figure]:
    """All figures of one bit width: ratios first, then what they are made of."""
    sides = [Child(name, "peer", peer_file(folder, name, threads), threads) for name in PEERS[bits]]
    sides.append(Child(EFFLLM, "own", ours, threads))
    our_side, peers = sides[-1], list(PEERS[bits])
    measured: dict[str, list[Round]] = {}
    for phase, one_round, count in (("decode", decode_round, schedule.decode), ("columns", columns_round, schedule.decode),
                                    ("prefill", prefill_round, schedule.prefill)):
        measured[phase] = [one_round(sides, roof, index) for index in range(count + 1)][1:]  # the first round warms up
    facts, name = our_side.request("facts"), f"{bits} bits"
    shares = list(product_shares(bits, our_side, facts, yardsticks, schedule)) if "operations" in facts else []
    peaks = {side.name: side.request("peak") for side in sides}
    for side in sides:
        side.close()
    for phase, work in (("decode", TOKENS), ("prefill", PROMPT)):
        rounds = measured[phase]
        best = best_peer(rounds, peers)
        conditions = f"{name}, {len(rounds)} rounds of {work} tokens, {thread_count_text(threads)}"
        yield Figure(f"{phase}_{bits}_ratio", f"{phase} against {best}", conditions, median(r[best] / r[EFFLLM] for r in rounds), "×")
        yield from (Figure(f"{phase}_{bits}_{peer.lower()}_tps", f"{phase}, {peer}", conditions, work / median_seconds(rounds, peer),
                           "tokens/s")
                    for peer in peers)
        yield Figure(f"{phase}_{bits}_tps", f"{phase}, {EFFLLM}", conditions, work / median_seconds(rounds, EFFLLM), "tokens/s")
    yield from roof_shares(bits, facts, measured, threads)
    yield from shares
    planned = f"baseline {facts['baseline'] / 1e6:.0f} MB, plan {facts['planned'] / 1e6:.0f} MB"
    yield Figure(f"memory_{bits}_plan", "peak memory, of the plan", f"{name}, {planned}", peaks[EFFLLM] / facts["planned"], "")
    yield from (Figure(f"memory_{bits}_{side.lower()}_mb", f"peak memory, {side}", name, peak / 1e6, "MB") for side, peak in peaks.items())


def product_shares(bits: str, ours: Child, facts: dict[str, float], yardsticks: Yardsticks, schedule: Schedule) -> Iterator[Figure]:
    """effllm against the faster library's product of the same size, by turns. Where the CPU has no VNNI torch multiplies int8 by a plain
    loop, and float32 is the faster one."""
    for key, description, order, operations, count, passes in (
            ("prefill", "whole prefill, operations of its matrices", ("prefill", PROMPT), PROMPT * facts["operations"],
             schedule.prefill, 1),
            ("ffn", "a layer's FFN products for 512 tokens", ("ffn",), facts["ffn_operations"], 2 * schedule.decode, PASSES_OF_PRODUCTS)):
        rounds = []
        for _ in range(count + 1):
            rates = {name: yardsticks.rate(name) for name in yardsticks.names}
            time.sleep(0.05)  # threads of those libraries spin for a while
            rounds.append(rates | {EFFLLM: operations / min(ours.request(*order) for _ in range(passes))})
        del rounds[0]
        best = max(yardsticks.names, key=lambda name: median_seconds(rounds, name))
        yield Figure(f"{key}_{bits}_product", f"{description}, against {PRODUCTS[best]}",
                     f"{bits} bits, {median_seconds(rounds, EFFLLM) / 1e9:.0f} and {median_seconds(rounds, best) / 1e9:.0f} GOP/s",
                     median(r[EFFLLM] / r[best] for r in rounds), "×")


def roof_shares(bits: str, facts: dict[str, float], measured: dict[str, list[Round]], threads: int) -> Iterator[Figure]:
    """effllm against the memory roofline: decode's share of it, and how many times longer than a single read a pass of COLUMNS tokens
    takes."""
    nbytes, rounds, columns = facts["bytes_per_pass"], measured["decode"], measured["columns"]
    roof_gbps = median(r["roof"] for r in rounds) / 1e9
    at_roof = f"{bits} bits, {nbytes / 1e9:.3f} GB a token, roof {roof_gbps:.1f} GB/s, {thread_count_text(threads)}"
    yield Figure(f"decode_{bits}_roof", "decode, share of the read roof", at_roof,
                 median(nbytes * TOKENS / r[EFFLLM] / r["roof"] for r in rounds), "")
    if "operations" in facts:  # several tokens of a mixture visit more experts than one
        yield Figure(f"columns_{bits}_roof", f"{COLUMNS} columns in a pass, times bytes / roof", at_roof,
                     median(r[EFFLLM] * r["roof"] / nbytes for r in columns), "×")
    peers = [name for name in columns[0] if name not in (EFFLLM, "roof")]
    if peers:
        best = best_peer(columns, peers)
        yield Figure(f"columns_{bits}_ratio", f"{COLUMNS} columns in a pass, against {best}", f"{bits} bits, {thread_count_text(threads)}",
                     median(r[best] / r[EFFLLM] for r in columns), "×")


def figures_of_shape(shape: str, bits: str, schedule: Schedule, roof: Roof, threads: int) -> Iterator[Figure]:
    """A shape's decode against the memory roofline, with random low-bit weights in memory."""
    ours = Child(EFFLLM, "own", f"synthetic:{shape}:{bits}", threads)
    measured = {"decode": [decode_round([ours], roof, index) for index in range(schedule.decode + 1)][1:],
                "columns": [columns_round([ours], roof, index) for index in range(schedule.decode + 1)][1:]}
    facts, peak = ours.request("facts"), ours.request("peak")
    ours.close()
    for figure in roof_shares(bits, facts, measured, threads):
        yield Figure(f"{shape}_{figure.key}", f"{shape}: {figure.what}", figure.conditions, figure.value, figure.unit)
    rate = TOKENS / median_seconds(measured["decode"], EFFLLM)
    yield Figure(f"{shape}_decode_{bits}_tps", f"{shape}: decode, {EFFLLM}", f"{bits} bits", rate, "tokens/s")
    yield Figure(f"{shape}_memory_{bits}_plan", f"{shape}: peak memory, of the plan", f"{bits} bits", peak / facts["planned"], "")


def quantizing(folder: Path, work: Path, schedule: Schedule, threads: int, extra: Sequence[str]) -> Iterator[Figure]:
    """`rtn` to 4 bits against llama-quantize to Q4_K_M: time and memory of the whole process, alternating."""
    costs: dict[str, list[Cost]] = {EFFLLM: [], "Q4_K_M": []}
    for _ in range(schedule.quantize):
        target = work / "quantized.gguf"
        costs["Q4_K_M"].append(quantize_peer(folder, target, "Q4_K_M", threads))
        target.unlink()
        target = work / "quantized"
        costs[EFFLLM].append(quantize_effllm(folder, target, "4", ("--method", "rtn", "--threads", str(threads), *extra)))
        shutil.rmtree(target)
    times = {side: median(cost.seconds for cost in cost_list) for side, cost_list in costs.items()}
    conditions = f"{folder.name.removeprefix('random-')}, bf16 to 4 bits, {thread_count_text(threads)}, median of {schedule.quantize}"
    yield Figure("quantize_ratio", "quantizing, time over llama-quantize's", conditions, times[EFFLLM] / times["Q4_K_M"], "×")
    for side, cost_list in costs.items():
        yield Figure(f"quantize_{side.lower()}_s", f"quantizing, {side}", conditions, times[side], "s")
        yield Figure(f"quantize_{side.lower()}_peak_mb", f"quantizing, {side}, peak memory", conditions,
                     max(cost.peak_nbytes for cost in cost_list) / 1e6, "MB")
        yield Figure(f"quantize_{side.lower()}_anonymous_mb", f"quantizing, {side}, peak without mapped files", conditions,
                     max(cost.anonymous_nbytes for cost in cost_list) / 1e6, "MB")


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--bits", nargs="*", default=list(PEERS), choices=list(PEERS), help="widths to compare (default: all)")
    parser.add_argument("--shape", default=SHAPE, choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape (default: all)")
    parser.add_argument("--ours", nargs="+", default=[], metavar="BITS=DIR", help="effllm's folders, instead of random weights quantized")
    parser.add_argument("--quantize", action="store_true", help="measure quantizing as well")
    parser.add_argument("--quantize-args", type=str.split, default=[], metavar="'ARG ...'", help="further arguments of `effllm quantize`")
    parser.add_argument("--alone", nargs="*", default=[], metavar="SHAPE", help="shapes to hold against the read roof at 4 bits")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--work", type=Path, default=user_cache_path("effllm") / "benchmarks")
    parser.add_argument("--results", metavar="NAME", help="keep them under this name (compare-llamacpp, with a shape that was given)")
    arguments = parser.parse_args()
    folders_given = dict(item.split("=", 1) for item in arguments.ours)
    schedule, threads = QUICK if arguments.quick else Schedule(), arguments.threads
    folder = random_folder(arguments.shape, arguments.work, arguments.layers)
    roof = Roof(threads)
    yardsticks = Yardsticks(roofline_compute.GEMM, threads)
    figures: list[Figure] = []
    for bits in arguments.bits:
        ours = folders_given.get(bits) or quantized_folder(folder, bits, threads, arguments.quantize_args)
        figures += speed(bits, ours, folder, schedule, roof, threads, yardsticks)
        figures.append(Figure(f"file_{bits}_mb", f"file, {EFFLLM}", f"{bits} bits", file_nbytes(Path(ours)) / 1e6, "MB"))
        figures += [Figure(f"file_{name.lower()}_mb", f"file, {name}", "", file_nbytes(peer_file(folder, name, threads)) / 1e6, "MB")
                    for name in PEERS[bits]]
    for shape in arguments.alone:
        figures += figures_of_shape(shape, "4", schedule, roof, threads)
    if arguments.quantize:
        figures += quantizing(folder, arguments.work, schedule, threads, arguments.quantize_args)
    yardsticks.close()
    figures += [Figure("roof_gbps", "memory read", f"{thread_count_text(threads)}, 1 GiB, at the end", roof() / 1e9, "GB/s")]
    roof.close()
    shape_name = folder.name.removeprefix("random-")
    intro = f"Shape: {shape_name}. {INTRO}{OF_PRODUCTS if read_config(folder).moe is None else OF_MIXTURES}"
    publish(arguments.results or result_name("compare-llamacpp", shape_name), "Low-bit weights against llama.cpp", intro, figures,
            keep=not arguments.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
