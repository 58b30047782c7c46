"""Machine code of kernels: Numba itself compiles and loads none of it in the process, and is left as it was."""

from __future__ import annotations

import ctypes
import threading

import pytest

from effllm.kernels.compile import KERNEL_SIGNATURE
from effllm.kernels.cpu.intrinsics import i64_at
from effllm.kernels.lazy_numba import compiler, inlined
from effllm.kernels.machine_code import _whole_kernel_optimization, compile_object, load_object


@inlined()
def twice(value):
    return 2 * value


def doubled(args, worker, counter):
    cell = i64_at(args)
    cell[0] = twice(cell[0]) + worker


def never_typed(args, worker, counter):
    return args.nothing_of_the_kind


def numbas_own():
    compiler()
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen()


def test_numba_makes_no_machine_code_of_what_a_kernel_calls(monkeypatch):
    codegen = numbas_own()

    def refuse(*_):
        raise AssertionError("Numba's engine was asked for machine code")

    monkeypatch.setattr(type(codegen._engine), "finalize_object", refuse)
    made = compile_object(doubled, KERNEL_SIGNATURE, False, "test.doubled")
    cell = ctypes.c_int64(20)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(load_object(made, "test.doubled"))(ctypes.addressof(cell), 2, 0)
    assert cell.value == 42


def test_what_kernels_call_still_runs_from_python_afterwards():
    compile_object(doubled, KERNEL_SIGNATURE, False, "test.doubled_again")
    assert twice(21) == 42


def test_numba_is_left_as_it_was_by_a_kernel_that_does_not_compile():
    before = dict(vars(numbas_own()))
    with pytest.raises(compiler().core.errors.TypingError):
        compile_object(never_typed, KERNEL_SIGNATURE, False, "test.never_typed")
    assert vars(numbas_own()) == before


def test_what_another_thread_compiles_meanwhile_waits_and_runs():
    """A program that has functions of Numba of its own, in the middle of a kernel's compilation."""
    ran = []
    own = compiler().njit(lambda value: value + 1)
    beside = threading.Thread(target=lambda: ran.append(own(41)))
    with _whole_kernel_optimization(numbas_own(), doubled):
        beside.start()
        beside.join(0.5)
        assert not own.signatures, "it was compiled as a part of a kernel, and has no machine code"
    beside.join(60)
    assert ran == [42]
