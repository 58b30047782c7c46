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

OF_C = {"int64": "i64", "float64": "double", "float32": "float", "void": "void"}
NUMBA_OWN = ("NRT_", "numba_", "Py", "_Py")
CHECK = 4  # bytes of a CRC-32 before an object: LLVM does not survive every damage


def parse_signature(signature: str) -> tuple[str, tuple[str, ...]]:
    """`int64(int64, float32)` -> ("int64", ("int64", "float32"))."""
    result, _, arguments = signature.rstrip(")").partition("(")
    return result, tuple(each.strip() for each in arguments.split(",") if each.strip())


@contextmanager
def _as_one_module(codegen: object, body: Callable) -> Iterator[None]:
    """Numba optimizes each function a kernel calls on its own, again at every level of linking, and loads it as machine code that is never
    run here: half of a kernel's compile time. Inside this context such functions stay unoptimized (the loops of `cpu/inner_loops.py` and
    the like are vectorized from the start), and the kernel is optimized once, as a whole."""
    usual = codegen._library_class

    class Part(usual):
        def _optimize_final_module(self) -> None:
            if self.name == body.__name__:
                super()._optimize_final_module()

        def _finalize_specific(self) -> None:
            """Nothing was given to the engine."""

    from numba.core.compiler_lock import global_compiler_lock

    hidden = {"_library_class": Part, "_add_module": lambda module: None, "set_env": lambda name, env: None}
    with global_compiler_lock:  # another thread's functions of Numba, which are to run, are not compiled like that
        vars(codegen).update(hidden)
        try:
            yield
        finally:
            for each in hidden:
                delattr(codegen, each)


def _codegen() -> object:
    """Numba's code generator."""
    compiler()
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen()


def _compiled(body: Callable, signature: str, fastmath: set[str] | bool) -> object:
    with _as_one_module(_codegen(), body):
        return compiler().njit(signature, error_model="numpy", fastmath=fastmath, no_cpython_wrapper=True, no_cfunc_wrapper=True)(body)


def compile_object(body: Callable, signature: str, fastmath: set[str] | bool, name: str) -> bytes:
    """An object file behind its checksum, exporting one symbol, `name`: `body` for C scalars."""
    function = _compiled(body, signature, fastmath)
    made = function.overloads[function.signatures[0]]
    module = llvm.parse_assembly(made.library.get_llvm_str())
    entry = llvm.parse_assembly(_entry(made.fndesc.llvm_func_name, signature, name))
    entry.triple, entry.data_layout = module.triple, module.data_layout
    module.link_in(entry)
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != name:
            each.linkage = "internal"
    machine = _codegen()._tm  # with the very options that the body was optimised for
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    strange = [each.name for each in module.functions if each.is_declaration and each.name.startswith(NUMBA_OWN)]
    if strange:
        raise RuntimeError(f"{name} calls {', '.join(strange)}, which a run without Numba lacks: kernels neither allocate nor raise")
    found = machine.emit_object(module)
    return zlib.crc32(found).to_bytes(CHECK, "little") + found


def _entry(body: str, signature: str, name: str) -> str:
    """LLVM IR of a C function that calls a Numba function: pointers for the result and the exception come first, then the arguments."""
    result, arguments = (OF_C[parse_signature(signature)[0]], [OF_C[each] for each in parse_signature(signature)[1]])
    given = "".join(f", {kind} %a{index}" for index, kind in enumerate(arguments))
    held = "ptr" if result == "void" else result
    value = "ret void" if result == "void" else f"%value = load {held}, ptr %result\n  ret {result} %value"
    return f"""
declare i32 @"{body}"(ptr, ptr{"".join(f", {kind}" for kind in arguments)})
declare void @llvm.trap()
define {result} @"{name}"({given[2:]}) {{
  %result = alloca {held}
  %error = alloca ptr
  %status = call i32 @"{body}"(ptr %result, ptr %error{given})
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
    relocation = "static" if triple.name.startswith("x86") else "default"  # as Numba's own
    machine = triple.create_target_machine(cpu=name, features=features, reloc=relocation, codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def load_object(checked: bytes, name: str) -> int:
    """Load the output of `compile_object` into memory permanently; returns the function's address. Raises ValueError for damaged bytes."""
    found = checked[CHECK:]
    if zlib.crc32(found).to_bytes(CHECK, "little") != checked[:CHECK] or not found:
        raise ValueError(f"the machine code of {name} is damaged")
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(found))
    engine.finalize_object()
    return engine.get_function_address(name)
