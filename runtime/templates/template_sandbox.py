"""Sandboxed Jinja for chat templates: ImmutableSandboxedEnvironment with a meter on every operation.

Jinja's sandbox stops attribute tricks but not `'a' * 10**10` or endless loops. Here the parsed template is rewritten before it is compiled:
loops, outputs, comparisons, slices, literals and `~` go through the meter of `template_limits`; operators, calls, filters and tests through
Jinja's hooks. Only listed callables run. No threads or signals are involved, so rendering works anywhere. This module imports jinja2 (50
ms), so it is loaded on the first render.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.environment import Environment, Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, pass_environment
from jinja2.visitor import NodeTransformer
from markupsafe import escape

from .template_limits import LONG_NUMBER, OPERATORS, LimitExceeded, Meter, binary, call_method, concat, percent, replace_size, tojson

READABLE = (str, list, tuple, dict, int, float, bool, Undefined)  # values whose attributes a template may name
# Jinja's own filters that need no check beforehand, and those of them that never grow a tree
COPIED = "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject rejectattr "
COPIED += "reverse select selectattr sort title truncate unique upper wordcount"
SHARING = frozenset("select reject selectattr rejectattr list reverse sort unique first last default d min max".split())
JINJA_EXTRA = ("_loop_vars", "_block_vars")  # compiled calls carry these for functions that take the context; others must not see them


class Refusal(Exception):
    """raise_exception: the template declines these messages."""


class TemplateNamespace(Namespace):
    """namespace(): rejects private names, and its repr does not walk its contents (a namespace may contain itself)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _refuse_private(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"the name {str(name)[:40]!r} is not allowed in a namespace")


class Generation(Extension):
    """{% generation %}…{% endgeneration %} marks assistant text for training masks; here it only groups statements."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Guards(NodeTransformer):
    """Wraps in meter calls what Jinja compiles to plain Python and offers no hook for."""

    @staticmethod
    def _guarded(guard: str, *arguments: nodes.Expr, line: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(guard), list(arguments), [], None, None, lineno=line)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._guarded("guard_step", line=node.lineno), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        texts = [nodes.Const(c.data, lineno=c.lineno) if isinstance(c, nodes.TemplateData) else c for c in node.nodes]
        node.nodes = [self._guarded("guard_output", c, line=c.lineno) for c in texts]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._guarded("guard_operand", node.expr, line=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._guarded("guard_concat", *node.nodes, line=node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._literal(node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._literal(node)

    def _literal(self, node: nodes.Expr) -> nodes.Call:
        self.generic_visit(node)
        return self._guarded("guard_literal", node, line=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._guarded("guard_slice", node, line=node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("autoescape blocks are not supported in chat templates", node.lineno)


class MeteredFormatter(SandboxedFormatter):
    """str.format with field widths and total length metered."""

    def __init__(self, environment: "TemplateEnvironment") -> None:
        super().__init__(environment)
        self.meter, self.total = environment.meter, 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if LONG_NUMBER.search(format_spec):
            raise LimitExceeded("it formats with an absurd width")
        self.meter.step()
        text = super().format_field(value, format_spec)
        self.total += len(text)
        self.meter.require(self.total)
        return text


class StringFormat:
    """`text.format` as a value: what `wrap_str_format` gives a template in place of the bound method."""

    def __init__(self, environment: "TemplateEnvironment", text: str, mapping: bool) -> None:
        self.environment, self.text, self.mapping = environment, text, mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self.mapping:
            (kwargs,), args = args, ()
        return self.environment.meter.charge(MeteredFormatter(self.environment).vformat(self.text, args, kwargs))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One per template. `meter` is set before each render; the caller holds a lock meanwhile."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, "jinja2.ext.loopcontrols"])
        self.meter = Meter(0, seconds=0.0)
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "namespace": TemplateNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.callables = tuple(self.globals.values())
        metered_filters = {
            "center": self._center,
            "e": _escape,
            "escape": _escape,
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "safe": str,
            "string": str,
            "sum": self._sum,
            "tojson": self._tojson,
            "trim": self._trim,
        }
        jinja_filters = {name: DEFAULT_FILTERS[name] for name in COPIED.split()}
        self.filters = {name: self._metered_filter(name, function) for name, function in (jinja_filters | metered_filters).items()}
        self.tests = {name: self._metered_test(test) for name, test in DEFAULT_TESTS.items()}

    def load(self, source: str) -> Template:
        """Compile a template with the guards in place."""
        tree = Guards().visit(self.parse(source))
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    # ---- what the rewritten template calls ----

    def guard_step(self) -> None:
        self.meter.step()

    def guard_operand(self, value: Any) -> Any:
        self.meter.step()
        return value

    def guard_output(self, value: Any) -> str:
        self.meter.step()
        return self.meter.charge(str(value))

    def guard_concat(self, *parts: Any) -> str:
        self.meter.step()
        return concat(self.meter, parts)

    def guard_literal(self, value: Any) -> Any:
        self.meter.step()
        return self.meter.charge_tree(value)

    def guard_slice(self, value: Any) -> Any:
        self.meter.step()
        return self.meter.charge(value)

    # ---- the hooks of Jinja's sandbox ----

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        kind = type(obj)
        known = kind in READABLE or kind in (TemplateNamespace, LoopContext, Cycler) or isinstance(obj, (tuple, Undefined))
        return known and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_") or not (type(obj) in READABLE or isinstance(obj, Undefined)):
            raise SecurityError(f"it reads the attribute {attribute[:40]!r} of {type(obj).__name__}, which templates may not")
        return super().unsafe_undefined(obj, attribute)  # a mutating method may share its name with a key: an error only when it is called

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if isinstance(value, types.BuiltinMethodType) and type(value.__self__) is str and value.__name__ in ("format", "format_map"):
            return StringFormat(self, value.__self__, value.__name__ == "format_map")
        return None

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.step()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.meter.step()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.step()
        return binary(self.meter, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(obj)
        if kind is types.MethodType and obj.__self__ is self:
            return obj(*args)
        self.meter.step()
        if kind is types.BuiltinMethodType or kind is StringFormat:
            for name in JINJA_EXTRA:
                kwargs.pop(name, None)
            return obj(*args, **kwargs) if kind is StringFormat else call_method(self.meter, obj.__self__, obj.__name__, args, kwargs)
        loop_method = kind is types.MethodType and type(obj.__self__) in (LoopContext, Cycler)
        if not (kind in (Macro, LoopContext, Joiner) or loop_method or isinstance(obj, Undefined) or any(obj is f for f in self.callables)):
            raise SecurityError(f"it calls a {kind.__name__}, which templates may not")
        self.meter.weigh([args, {name: value for name, value in kwargs.items() if name not in JINJA_EXTRA}])
        result = super().call(context, obj, *args, **kwargs)
        return self.meter.charge_tree(result) if obj is dict else self.meter.charge(result)

    # ---- filters and tests ----

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, updated=("__dict__",) if isinstance(function, types.FunctionType | types.MethodType) else ())
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):  # Jinja's lazy filters: run them now, while the meter looks
                result = list(islice(result, self.meter.value_limit + 1))
                self.meter.require(len(result))
            return self.meter.charge(result) if name in SHARING else self.meter.charge_tree(result)

        return run

    def _metered_test(self, test: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> bool:
            self.meter.step()
            return test(*args, **kwargs)

        return run

    def _center(self, value: Any, width: int = 80) -> str:
        return call_method(self.meter, str(value), "center", (width,), {})

    def _trim(self, value: Any, chars: str | None = None) -> str:
        return call_method(self.meter, str(value), "strip", (chars,), {})

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        return percent(self.meter, str(value), kwargs or args)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text, step = str(s), len(width) if isinstance(width, str) else width
        self.meter.require(len(text) + step * (len(text.splitlines()) + 1))
        return DEFAULT_FILTERS["indent"](text, width, first, blank)

    @pass_environment
    def _join(self, environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
        return concat(self.meter, items, separator=str(d))

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        replace_size(self.meter, text, old, new, count)
        return text.replace(old, new, -1 if count is None else count)

    @pass_environment
    def _sum(self, environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for item in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
            self.meter.step()
            start = binary(self.meter, "+", start, item)
        return start

    def _tojson(
        self, value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return tojson(self.meter, value, ensure_ascii, indent, separators, sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200 or LONG_NUMBER.search(format):
        raise LimitExceeded("it formats the date with an absurd width")
    return datetime.now().strftime(format)


def _escape(value: Any) -> str:
    return str(escape(value))  # a plain str: Markup would bring methods of its own


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 300:
        raise LimitExceeded("it rounds to an absurd precision")
    return DEFAULT_FILTERS["round"](value, precision, method)
