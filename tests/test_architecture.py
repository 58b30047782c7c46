"""The architecture, checked in the sources: which package imports which, and what a file may contain.

    cli  ->  runtime  ->  { quant -> kernels ,  offload }        (runtime may use kernels; the errors in the root belong to everyone)

Imports are read from the syntax tree, so that one inside a function counts as much as one at the top. What only shows while running is
in `test_starting.py`.
"""

import ast
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "kernels", "offload", "quant", "runtime")
# Layer -> the layers it may import, besides itself and the errors in the root.
MAY_IMPORT = {
    "cli": {"runtime"},
    "runtime": {"quant", "kernels", "offload"},
    "quant": {"kernels"},
    "kernels": set(),
    "offload": set(),
}
# Pure functions on words and numbers that any layer above may speak, whatever lies between.
VOCABULARY = {"effllm.offload.size"}
# External package -> the only places that may import it.
CONFINED = {
    "torch": ("kernels/cuda/",),
    "triton": ("kernels/cuda/",),
    "numba": ("kernels/lazy_numba.py", "kernels/machine_code.py"),
    "llvmlite": ("kernels/",),
    "rich": ("cli/screen.py",),
    "typer": ("cli/",),
    "prompt_toolkit": ("cli/",),
    "gguf": ("quant/imports/gguf_codebooks.py",),
    "tokenizers": ("runtime/",),
    "jinja2": ("runtime/",),
    "huggingface_hub": ("runtime/hub.py",),
    "lm_eval": ("runtime/harness.py",),
    "starlette": ("cli/server/",),
    "uvicorn": ("cli/server/",),
    "pydantic": ("cli/server/",),
}
# Programs of their own that report to effllm through a pipe.
CHILD_PROCESSES = {"kernels/warm.py", "kernels/autotune.py", "runtime/conversion/on_load.py", "runtime/planning/machine_probe.py"}
# Test tools that must never become a part of the product.
NEVER_IMPORTED = {"transformers", "pytest", "hypothesis", "pexpect", "safetensors.torch"}
LONGEST_FILE = 400
HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # expressions, most of a tree, hold no import
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def package_files() -> list[Path]:
    """Every Python file that is part of the import package, relative to the root."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.relative_to(ROOT) for path in [ROOT / "__init__.py", ROOT / "__main__.py", *files]]


def project_files() -> list[Path]:
    """The package, and the scripts and tests around it."""
    around = [path for folder in ("benchmarks", "tools", "tests", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))]
    return package_files() + [path.relative_to(ROOT) for path in around]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of its tree, which several tests look through."""
    return tuple(ast.walk(tree(file)))


@dataclass(frozen=True)
class Import:
    """One imported module, absolute; whether it is loaded with its file, on use, or by type checkers alone."""

    module: str
    line: int
    when: str


@cache
def imports(file: Path) -> tuple[Import, ...]:
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[Import]:
    package = ["effllm", *file.parent.parts]
    waiting: list[tuple[ast.AST, str]] = [(tree(file), "at once")]
    while waiting:
        node, when = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when = "types"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when != "types":
            when = "on use"
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            modules = [node.module] if node.module else [name.name for name in node.names]
            names = [f"{base}.{module}".lstrip(".") for module in modules]
        else:
            waiting.extend((child, when) for child in ast.iter_child_nodes(node) if isinstance(child, HOLDS_STATEMENTS))
            continue
        for name in names:
            yield Import(name, node.lineno, when)


def layer(module: str) -> str | None:
    """`effllm.quant.spec` -> `quant`; a name of the root itself, or a foreign module -> None."""
    parts = module.split(".")
    return parts[1] if parts[0] == "effllm" and len(parts) > 1 and parts[1] in FOLDERS else None


def calls(file: Path, *names: str) -> list[int]:
    """Lines that call one of these functions by its bare name."""
    return [node.lineno for node in nodes(file) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names]


def for_every(files: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of all these files, which names every one that fails: a test for each takes longer to hand out than to run."""
    def of(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for file in files:
                try:
                    check(file)
                except AssertionError as error:
                    wrong.append(str(error))
            assert files
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test
    return of


# ---- who imports whom


@for_every([file for file in package_files() if len(file.parts) > 1])
def test_imports_point_downward(file: Path) -> None:
    own = file.parts[0]
    allowed = MAY_IMPORT[own] | {own, None}
    wrong = [f"line {found.line}: {found.module}" for found in imports(file)
             if layer(found.module) not in allowed and found.module not in VOCABULARY and found.when != "types"]
    assert not wrong, f"{file} ({own}) imports from a layer it must not know: {wrong}"


def test_layers_cover_every_folder_of_code() -> None:
    with_code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_code == set(FOLDERS) == set(MAY_IMPORT)


@for_every(package_files())
def test_own_modules_are_imported_relatively(file: Path) -> None:
    absolute = [node.lineno for node in nodes(file)
                if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "effllm"
                or isinstance(node, ast.Import) and any(name.name.split(".")[0] == "effllm" for name in node.names)]
    assert not absolute, f"{file}: absolute import of effllm at lines {absolute}"


@for_every(package_files())
def test_heavy_packages_stay_in_their_place(file: Path) -> None:
    for found in imports(file):
        top = found.module.split(".")[0]
        places = CONFINED.get(top)
        assert places is None or file.as_posix().startswith(places), f"{file}:{found.line} imports {top}, which belongs to {places}"
        assert not NEVER_IMPORTED & {top, found.module}, f"{file}:{found.line} imports {found.module}, a tool of the tests"


def test_hub_and_schema_libraries_load_on_use() -> None:
    """They cost tenths of a second, and most commands need neither, nor what serves."""
    early = [f"{file}:{found.line}" for file in package_files() for found in imports(file)
             if found.when == "at once" and file.parts[:2] != ("cli", "server")
             and (found.module.split(".")[0] in {"huggingface_hub", "pydantic"} or found.module.startswith("effllm.cli.server"))]
    assert not early


def test_the_import_reader_sees_what_it_should() -> None:
    """The checks above are worth what `imports` finds: known facts about known files."""
    found = {found.module: found for found in imports(Path("__init__.py"))}
    assert found["importlib"].when == "on use"
    assert "effllm.cli.app" in {found.module for found in imports(Path("__main__.py"))}
    assert {found.module for found in imports(Path("kernels/cpu/ops.py")) if found.when == "at once"} >= {"effllm.kernels.layout", "numpy"}
    assert layer("effllm.kernels.cpu.ops") == "kernels" and layer("effllm.EffllmError") is None and layer("numpy") is None


# ---- what a file may hold


@for_every(project_files())
def test_files_stay_small(file: Path) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_FILE, f"{file} has {len(lines)} lines: which two ideas live in it?"


@for_every(project_files())
def test_files_say_what_they_are(file: Path) -> None:
    assert not set(file.with_suffix("").parts) & VAGUE_NAMES, f"{file}: a name that says nothing"
    first, behind = first_tokens(file)
    said = first.type == tokenize.STRING and behind.type == tokenize.NEWLINE and isinstance(ast.literal_eval(first.string), str)
    assert said or (first.type == tokenize.ENDMARKER and file.name == "__init__.py"), f"{file} has no docstring"


def first_tokens(file: Path) -> tuple[tokenize.TokenInfo, tokenize.TokenInfo]:
    """Two, without comments and empty lines; the last one twice where there are no more. Trees of all tests would take five seconds."""
    with tokenize.open(ROOT / file) as text:
        telling = (token for token in tokenize.generate_tokens(text.readline) if token.type not in (tokenize.COMMENT, tokenize.NL))
        first = next(telling)
        return first, next(telling, first)


def test_kernels_init_is_empty() -> None:
    """Other libraries probe a top-level module named `kernels` when the repository root is on their path."""
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


def test_the_root_holds_two_python_files() -> None:
    """Every other file there would ship inside the package."""
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not (ROOT / "tests" / "__init__.py").exists()


@for_every(package_files())
def test_only_the_screen_prints(file: Path) -> None:
    if file.as_posix() != "cli/screen.py":
        assert not calls(file, "print"), f"{file} prints at lines {calls(file, 'print')}: `Screen` (cli/screen.py) does that"
    if file.parts[0] != "cli" and file.as_posix() not in CHILD_PROCESSES:
        streams = [node.lineno for node in nodes(file) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                   and node.value.id == "sys" and node.attr in {"stdin", "stdout", "stderr"}]
        assert not streams, f"{file}: only cli/ knows that a terminal exists (lines {streams})"


@for_every(package_files())
def test_no_shortcuts(file: Path) -> None:
    assert not calls(file, "hasattr"), f"{file} dispatches on hasattr at lines {calls(file, 'hasattr')}"
    assert not calls(file, "eval", "exec"), f"{file} evaluates text"
    for node in nodes(file):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{file}:{node.lineno}: bare except"
        assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: global"
        assert not (isinstance(node, ast.Name) and node.id == "NotImplementedError"), f"{file}:{node.lineno}: a stub"
        assert not (isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names)), f"{file}:{node.lineno}: import *"
        if isinstance(node, ast.FunctionDef):
            assert not is_stub(node) or is_protocol_method(node, file), f"{file}:{node.lineno}: {node.name} is a stub"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", (ROOT / file).read_text(encoding="utf-8")), f"{file} leaves something to do"


def is_stub(function: ast.FunctionDef) -> bool:
    """A body of `pass` or `...`, or nothing but a docstring where a value is owed (one that returns None may say that it does nothing)."""
    body = [part for part in function.body if not isinstance(part, ast.Pass)]
    body = [part for part in body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    says_so = ast.get_docstring(function) and isinstance(function.returns, ast.Constant) and function.returns.value is None
    return not body and not (says_so and len(function.body) == 1)


def is_protocol_method(function: ast.FunctionDef, file: Path) -> bool:
    """A method whose class states an interface and nothing else."""
    return any(function in node.body and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
               for node in nodes(file) if isinstance(node, ast.ClassDef))
