"""Machine code as bytes: compiled by Numba, stored as an object file, loaded by LLVM alone.

Reading Numba's own cache requires importing Numba with all its registries; loading an object file only needs a linker, which LLVM has. What
is stored is the function's body behind a C calling convention. A body reports an exception through its status, and no kernel raises one: a
nonzero status is a bug in a kernel and aborts the process on the spot instead of passing for a result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import llvmlite.binding as llvm

from .lazy_numba import compiler
from .target import target

LLVM_TYPES = {"int64": "i64", "float64": "double", "float32": "float", "void": "void"}
NUMBA_PREFIXES = ("NRT_", "numba_", "Py", "_Py")
CHECKSUM_NBYTES = 4  # CRC-32 before an object file: LLVM crashes on some damaged files


def parse_signature(signature: str) -> tuple[str, tuple[str, ...]]:
    """`int64(int64, float32)` -> ("int64", ("int64", "float32"))."""
    result, _, arguments = signature.rstrip(")").partition("(")
    return result, tuple(argument.strip() for argument in arguments.split(",") if argument.strip())


@contextmanager
def _whole_kernel_optimization(codegen: object, body: Callable) -> Iterator[None]:
    """Context in which the functions a kernel calls stay unoptimized and the kernel is optimized once, as a whole.

    Otherwise Numba optimizes each callee separately, again at every level of linking, and loads its machine code, which is never run here:
    half of a kernel's compile time. Loops such as those of `cpu/inner_loops.py` are emitted as vector code from the start."""
    library_class = codegen._library_class

    class UnoptimizedCallees(library_class):
        def _optimize_final_module(self) -> None:
            if self.name == body.__name__:
                super()._optimize_final_module()

        def _finalize_specific(self) -> None:
            """No module was added to the execution engine."""

    from numba.core.compiler_lock import global_compiler_lock

    overrides = {"_library_class": UnoptimizedCallees, "_add_module": lambda module: None, "set_env": lambda name, env: None}
    with global_compiler_lock:  # functions that another thread compiles with Numba must be optimized and loaded
        vars(codegen).update(overrides)
        try:
            yield
        finally:
            for name in overrides:
                delattr(codegen, name)


def _codegen() -> object:
    """Numba's code generator."""
    compiler()
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen()


def _compiled(body: Callable, signature: str, fastmath: set[str] | bool) -> object:
    with _whole_kernel_optimization(_codegen(), body):
        return compiler().njit(signature, error_model="numpy", fastmath=fastmath, no_cpython_wrapper=True, no_cfunc_wrapper=True)(body)


def compile_object(body: Callable, signature: str, fastmath: set[str] | bool, name: str) -> bytes:
    """An object file after its checksum. It exports one symbol, `name`: `body` with a C calling convention."""
    function = _compiled(body, signature, fastmath)
    compiled = function.overloads[function.signatures[0]]
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    entry = llvm.parse_assembly(_entry(compiled.fndesc.llvm_func_name, signature, name))
    entry.triple, entry.data_layout = module.triple, module.data_layout
    module.link_in(entry)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    machine = _codegen()._tm  # with the options that the body was optimized for
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    unresolved = [value.name for value in module.functions if value.is_declaration and value.name.startswith(NUMBA_PREFIXES)]
    if unresolved:
        raise RuntimeError(f"{name} calls {', '.join(unresolved)}, which a run without Numba lacks: kernels neither allocate nor raise")
    machine_code = machine.emit_object(module)
    return zlib.crc32(machine_code).to_bytes(CHECKSUM_NBYTES, "little") + machine_code


def _entry(body: str, signature: str, name: str) -> str:
    """LLVM IR of a C function that calls a Numba function: pointers for the result and the exception come first, then the arguments."""
    result, arguments = (LLVM_TYPES[parse_signature(signature)[0]], [LLVM_TYPES[argument] for argument in parse_signature(signature)[1]])
    parameters = "".join(f", {kind} %a{index}" for index, kind in enumerate(arguments))
    result_type = "ptr" if result == "void" else result
    value = "ret void" if result == "void" else f"%value = load {result_type}, ptr %result\n  ret {result} %value"
    return f"""
declare i32 @"{body}"(ptr, ptr{"".join(f", {kind}" for kind in arguments)})
declare void @llvm.trap()
define {result} @"{name}"({parameters[2:]}) {{
  %result = alloca {result_type}
  %error = alloca ptr
  %status = call i32 @"{body}"(ptr %result, ptr %error{parameters})
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %fault, label %done
fault:
  call void @llvm.trap()
  unreachable
done:
  {value}
}}
"""


def assembly(body: Callable, signature: str, fastmath: set[str] | bool) -> str:
    """The machine code as assembly text, to inspect what an inner loop became."""
    return "\n".join(_compiled(body, signature, fastmath).inspect_asm().values())


@cache
def _engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = target()
    triple = llvm.Target.from_default_triple()
    relocation = "static" if triple.name.startswith("x86") else "default"  # as in Numba
    machine = triple.create_target_machine(cpu=name, features=features, reloc=relocation, codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def load_object(checked: bytes, name: str) -> int:
    """Load the output of `compile_object` into memory permanently; returns the function's address. Raises ValueError for damaged bytes."""
    machine_code = checked[CHECKSUM_NBYTES:]
    if zlib.crc32(machine_code).to_bytes(CHECKSUM_NBYTES, "little") != checked[:CHECKSUM_NBYTES] or not machine_code:
        raise ValueError(f"the machine code of {name} is damaged")
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    return engine.get_function_address(name)
