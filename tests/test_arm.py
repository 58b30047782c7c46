"""Kernels for 64-bit ARM, cross-compiled by LLVM on any machine: the decode loops' instructions, and how the processor is reported.

That they are right is shown with emulated instructions (`test_instruction_sets.py`, `test_kv_attention.py`, `test_kv_estimate.py`); here
it is that LLVM finds the real ones. On an ARM machine every other test runs them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from effllm.kernels import target as of_target
from effllm.kernels.target import add_arm_features, arm_features

TRIPLE = "aarch64-unknown-linux-gnu"
# Set -> features that kernels are told, a processor that has no more, what multiplies, and how often for a tile of 512 weights.
SETS = {"neondot": ("neon,dotprod", "neoverse-n1", "sdot", 32), "neon": ("neon", "cortex-a72", r"smull2?|mul\tv\d+\.8h", 64)}
# Way, bits: instructions for 64 weights at most, with dot products and without (where nothing but LLVM's own finds is: 140 to 453).
MOST = {("codebook", 4): (24, 42), ("codebook", 3): (41, 62), ("codebook", 2): (26, 43), ("plain", 4): (20, 37), ("plain", 8): (21, 38),
        ("blocks", 4): (19, 35), ("super", 4): (26, 44), ("signed", 6): (40, 57), ("exponents", 4): (24, 41),
        ("table", 4): (25, 42), ("table", 3): (43, 60), ("nibble", 2): (30, 46), ("minima", 4): (24, 42), ("small", 4): (30, 50)}


def assembly(loop: object, count: int, processor: str) -> str:
    """An intrinsic of `count` integers for a processor, alone in a function."""
    from numba.core import types

    class Context:
        def get_dummy_value(self) -> None:
            return None

    _, codegen = loop.body(None, *[types.int64] * count)
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count), "loop")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    codegen(Context(), builder, None, list(function.args))
    builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=processor, opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def loop_of(found: str) -> list[str]:
    """The instructions of the innermost loop, between a label and the jump back to it."""
    lines = found.split("\n")
    labels = {line.rstrip(":"): place for place, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    back = [(labels[jump[1]], place) for place, line in enumerate(lines)
            if (jump := re.search(r"\tb\.\w+\t(\.L\w+)$", line)) and labels.get(jump[1], place) < place]
    begin, end = min(back, key=lambda each: each[1] - each[0])
    return [line.strip() for line in lines[begin + 1 : end + 1] if re.match(r"\t[a-z]", line)]


def all_loops(name: str) -> dict[str, list[str]]:
    """In a process of its own, before kernels are imported: the loops of all formats of a set, and that of a prompt's tiles."""
    features, processor, *_ = SETS[name]
    from effllm.kernels import compile as compiling

    compiling.cpu_features = lambda: frozenset(features.split(","))
    from effllm.kernels.cpu import gemm_tiles, int8_ir, packed_formats

    assert name == int8_ir.INSTRUCTION_SET
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = {f"{way} {bits}": loop_of(assembly(packed_formats.single_for(bits, way), 7, processor)) for way, bits in MOST}
    return {**found, "prompt": loop_of(assembly(gemm_tiles.block_product, 6, processor))}


@pytest.mark.parametrize("name", SETS)
def test_loops_are_of_arms_own_instructions(name: str) -> None:
    code = (f"import sys, json; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
            f"import test_arm as t; print(json.dumps(t.all_loops({name!r})))")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    _, _, multiplies, often = SETS[name]
    loops = json.loads(done.stdout)
    tile = loops.pop("prompt")
    assert sum(bool(re.match(rf"({multiplies})\b", each)) for each in tile) == (96 if name == "neondot" else 64)
    assert len(tile) <= (125 if name == "neondot" else 150) and not any("[sp" in each for each in tile)
    for text, loop in loops.items():
        way, bits = text.split()
        assert sum(bool(re.match(rf"({multiplies})\b", each)) for each in loop) == 2 * often, text  # two row blocks side by side
        assert len(loop) / 16 <= MOST[way, int(bits)][name == "neon"], text
        looked_up = sum(each.startswith("tbl\t") for each in loop)
        assert looked_up >= (64 if way in ("codebook", "exponents", "table") else 0), text


def test_the_features_of_arm_are_reported_where_llvm_is_silent(monkeypatch) -> None:
    assert add_arm_features("-aes,-rand,-sve", frozenset({"neon", "dotprod"})) == "-aes,+dotprod,+neon,-rand,-sve"
    assert add_arm_features("+neon,-dotprod", frozenset({"neon", "dotprod"})) == "+dotprod,+neon"
    assert add_arm_features("", frozenset({"neon"})) == "+neon" and add_arm_features("+avx2", frozenset()) == "+avx2"
    monkeypatch.setattr(of_target.os, "uname", lambda: os.uname_result(("Linux", "h", "r", "v", "x86_64")))
    assert arm_features() == frozenset()


@pytest.mark.parametrize(("bits", "found"), [(1 << 1, {"neon"}), (1 << 1 | 1 << 20, {"neon", "dotprod"}), (0, set())])
def test_linux_says_what_an_arm_processor_has(bits: int, found: set[str], monkeypatch) -> None:
    class Library:
        class getauxval:
            def __new__(cls, kind: int) -> int:
                return bits if kind == 16 else 0

    monkeypatch.setattr(of_target.os, "uname", lambda: os.uname_result(("Linux", "h", "r", "v", "aarch64")))
    monkeypatch.setattr(of_target.ctypes, "CDLL", lambda name: Library)
    assert arm_features() == found
