"""Lazy access to Numba: it is imported only when something has to be compiled. Most runs find their machine code in the cache.

Importing the compiler takes longer than importing everything else, so kernel modules get its names from here. `types` and `cgutils` are
resolved when an intrinsic is typed; functions decorated with `inlined`, `intrinsic` or `llvm_intrinsic` are wrapped, and Numba unwraps them
when it meets one in the globals or closure of what it compiles. Scalars in compiled code are NumPy's (`np.float32(x)`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, wraps
from importlib import import_module
from inspect import get_annotations, signature
from types import ModuleType


class LazyModule:
    """A module that is imported on first attribute access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self._name), name)


types, cgutils = LazyModule("numba.core.types"), LazyModule("numba.core.cgutils")


class LazyFunction:
    """A function for compiled code to call, wrapped until Numba needs it. Called from Python, as tests do, it is compiled for its
    arguments."""

    def __init__(self, body: Callable, make: Callable[[Callable], object]) -> None:
        self.body, self._make = body, make
        self.__doc__ = body.__doc__

    @cached_property
    def real(self) -> object:
        """The Numba dispatcher or intrinsic itself."""
        return self._make(self.body)

    @cached_property
    def type(self) -> object:
        """Its Numba type."""
        from numba.core.registry import cpu_target

        real = self.real
        cpu_target.typing_context.refresh()  # registers an intrinsic
        return cpu_target.typing_context.resolve_value_type(real)

    @cached_property
    def _for_python(self) -> Callable:
        return compiler().njit(error_model="numpy")(lambda *arguments: self(*arguments))

    def __call__(self, *args: object) -> object:
        return self._for_python(*args)


def inlined(fastmath: set[str] | bool = False) -> Callable[[Callable], LazyFunction]:
    """Decorator for a function that is called by kernels only. It gets no Python or C wrappers, which cuts compilation by a quarter."""
    return lambda body: LazyFunction(body, lambda function: compiler().njit(error_model="numpy", fastmath=fastmath, no_cpython_wrapper=True,
                                                                  no_cfunc_wrapper=True)(function))


def intrinsic(body: Callable) -> LazyFunction:
    """Decorator for a function that emits LLVM IR, like `numba.extending.intrinsic`."""
    return LazyFunction(body, lambda function: compiler().extending.intrinsic(function))


def llvm_intrinsic(body: Callable) -> LazyFunction:
    """Decorator for an intrinsic that needs no typing code: `body(builder, *values)` emits LLVM IR for its arguments. Arguments are int64
    and there is no result, unless annotations name other Numba types."""

    @wraps(body)
    def typed(typingctx, *arguments):
        kinds = get_annotations(body, eval_str=True)
        result = kinds.get("return", types.void)

        def codegen(context, builder, _, args):
            value = body(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        return result(*(kinds.get(name, types.int64) for name in [*signature(body).parameters][1:])), codegen

    return intrinsic(typed)


carray = LazyFunction(LazyModule, lambda _: compiler().carray)  # an array over memory at a pointer


@cache
def compiler() -> ModuleType:
    """Numba, configured for the target processor and taught what a `LazyFunction` is."""
    import numba
    import numba.extending

    from .target import target

    numba.config.CPU_NAME, numba.config.CPU_FEATURES = target()

    @numba.extending.typeof_impl.register(LazyFunction)
    def type_of(value: LazyFunction, _: object) -> object:
        return value.type

    return numba
