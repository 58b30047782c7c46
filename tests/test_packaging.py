"""Declarations against the tree: packages, data, dependencies, pins, the set-up files.

The root of the repository is the import package, so setuptools can find neither its subpackages nor its data by itself; each list
kept by hand in pyproject.toml is compared with the disk here. The built wheel is checked by `.ci/check_wheel.py`.
"""

import ast
import fnmatch
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import effllm

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("cli", "kernels", "offload", "quant", "runtime")
# Where the name to import differs from the name to install.
IMPORT_NAMES = {"pyyaml": "yaml", "prompt-toolkit": "prompt_toolkit", "huggingface-hub": "huggingface_hub", "lm-eval": "lm_eval",
                "pillow": "PIL"}
# Brought by another declared package that is made of it: (import name, declared package).
SAME_PROJECT = {"llvmlite": "numba"}
# Used by name (a command, a build backend), never imported.
USED_AS_COMMANDS = {"setuptools", "pytest-xdist"}
PEERS = {"llama_cpp", "accelerate", "timm"}  # what benchmarks compare with, and only those who run them install
OF_PEERS = {"accelerate": "accelerate", "anthropic": "anthropic", "bitsandbytes": "bitsandbytes",
            "compressed-tensors": "compressed_tensors", "google-genai": "google", "llama-cpp-python": "llama_cpp",
            "lm-eval": "lm_eval", "mcp": "mcp", "mlx": "mlx_lm", "mlx-lm": "mlx_lm", "ollama": "ollama", "openai": "openai",
            "playwright": "playwright", "rwkv": "rwkv", "sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}  # as imported


def declared(extra: str | None = None) -> dict[str, Requirement]:
    lines = PROJECT["project"]["optional-dependencies"][extra] if extra else PROJECT["project"]["dependencies"]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All within a tree. Its expressions, most of it, hold no import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


def imported(folders: tuple[str, ...], files: tuple[str, ...] = (), without: str = "") -> set[str]:
    """Top-level names that these sources import from outside, the standard library left out."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + [ROOT / file for file in files]
    own = {"effllm", *(path.stem for path in paths)}
    names = set()
    for path in paths:
        if without and path.relative_to(ROOT).as_posix().startswith(without):
            continue
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return {SAME_PROJECT.get(name, name) for name in names - own - set(sys.stdlib_module_names)}


def import_names(requirements: dict[str, Requirement]) -> set[str]:
    return {IMPORT_NAMES.get(name, name) for name in requirements}


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    pairs = [re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines if line]
    assert all(pairs), "constraints.txt holds a line that is not `name==version`"
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs}


# ---- packages and data


def test_every_folder_of_code_is_a_declared_package() -> None:
    folders = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    on_disk = {".".join(["effllm", *folder.parts]) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk | {"effllm"}
    homeless = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not (path.parent / "__init__.py").is_file()}
    assert not homeless, "Python files outside any package would be missing from the wheel"


def test_data_is_declared_by_pattern_and_complete() -> None:
    settings = PROJECT["tool"]["setuptools"]
    assert settings["package-dir"] == {"effllm": "."}
    assert settings["include-package-data"] is False
    patterns = settings["package-data"]["effllm"]
    wanted = ["models.yaml", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "models" / "fable").rglob("*") if path.is_file())]
    missing = [name for name in wanted if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert not missing, "these files would be missing from the wheel"
    stale = [pattern for pattern in patterns if not list(ROOT.glob(pattern))]
    assert not stale, "these patterns match nothing"
    other = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")
             if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
             and not any(fnmatch.fnmatch(path.relative_to(ROOT).as_posix(), pattern) for pattern in patterns)]
    assert not other, "files beside the code that no pattern ships"


def test_the_packaged_model_is_whole_and_small() -> None:
    folder = ROOT / "models" / "fable"
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 30_000_000
    card, config = (folder / "README.md").read_text(encoding="utf-8"), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert f"{config['num_hidden_layers']} layers" in card and f"width {config['hidden_size']}" in card
    assert f"context {config['max_position_embeddings']:,}" in card


def test_metadata() -> None:
    assert importlib.metadata.version("effllm") == effllm.__version__
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert (ROOT / PROJECT["project"]["readme"]).read_text(encoding="utf-8").startswith("# effllm")
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    module, function = PROJECT["project"]["scripts"]["effllm"].split(":")
    defined = ast.parse((ROOT / Path(*module.split(".")[1:])).with_suffix(".py").read_text(encoding="utf-8")).body
    assert function in {node.name for node in defined if isinstance(node, ast.FunctionDef)}


# ---- dependencies


def test_declared_dependencies_are_the_imported_ones() -> None:
    used = imported(FOLDERS, ("__init__.py", "__main__.py"), without="kernels/cuda/")
    beside = set().union(*(import_names(declared(extra)) for extra in ("eval", "pdf", "sound", "video")))
    assert import_names(declared()) - {"gguf"} == used - beside and beside <= used
    assert "gguf" in declared()  # a name that files of ours have too, so it is looked for where it is imported
    assert "from gguf import quants" in (ROOT / "quant/imports/gguf_codebooks.py").read_text(encoding="utf-8")


def test_the_harness_finds_its_model() -> None:
    module, name = PROJECT["project"]["entry-points"]["lm_eval.models"]["effllm"].split(":")
    source = (ROOT / Path(*module.split(".")[1:])).with_suffix(".py").read_text(encoding="utf-8")
    assert name == "EffllmLM" and f'if name == "{name}"' in source


def test_cuda_extra_is_what_the_cuda_backend_adds() -> None:
    extra = imported(("kernels/cuda",)) - import_names(declared())
    assert extra <= import_names(declared("cuda")) == {"torch", "triton"}


def test_test_extra_is_what_tests_and_scripts_add() -> None:
    used = imported(("tests", "tools", "benchmarks", ".ci")) - import_names(declared()) - PEERS
    assert used == import_names(declared("test")) - USED_AS_COMMANDS


def test_peers_extra_is_what_tests_look_for() -> None:
    """A test that runs only where another program is bears the mark that `make test-peers` selects by."""
    looked_for = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        found = set(re.findall(r"(?:importorskip|find_spec)\(\"(\w+)(?:\.\w+)*\"\)", text))
        assert not found or "pytest.mark.peer" in text, path.name
        looked_for |= found
    assert looked_for == {OF_PEERS[name] for name in declared("peers")}


@pytest.mark.parametrize("name", sorted(declared()))
def test_every_dependency_has_a_lower_bound_and_no_upper_one(name: str) -> None:
    operators = [part.operator for part in declared()[name].specifier]
    assert operators == [">="], "an application's users cannot resolve conflicts between upper bounds"


def test_torch_is_spelled_exactly_where_the_tests_install_it() -> None:
    assert str(declared("test")["torch"]) == "torch==2.13.0"
    assert pins()["torch"] == "2.13.0"


# ---- pins


def test_pins_satisfy_the_declared_bounds() -> None:
    for extra in (None, "test", "cuda", "eval", "lint", "peers"):
        for name, requirement in declared(extra).items():
            assert requirement.specifier.contains(pins()[name]), f"{requirement} is pinned at {pins()[name]}"
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_everything_that_an_install_brings_is_pinned() -> None:
    """Walks the requirements of the installed packages, from effllm with its test extra on."""
    open_requirements = [*declared().values(), *declared("test").values()]
    reached: set[tuple[str, str]] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in reached:
                continue
            reached.add((name, extra))
            environment = default_environment() | {"extra": extra}
            for line in importlib.metadata.requires(name) or []:
                child = Requirement(line)
                if child.marker is None or child.marker.evaluate(environment):
                    open_requirements.append(child)
    unpinned = {name for name, _ in reached} - set(pins())
    assert not unpinned


# ---- set-up files


def make(*arguments: str) -> str:
    ran = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_make_installs_once(tmp_path: Path) -> None:
    """A first run makes the environment and installs; a second, with the stamps in place, does neither."""
    environment = tmp_path / "venv"
    first = make("test", f"VENV={environment}")
    assert f"-m venv {environment}" in first and "--editable '.[test]'" in first and "pytest" in first
    stamps = re.findall(rf"touch (.*{re.escape(str(environment))}.*)", first)
    environment.mkdir()
    for stamp in " ".join(stamps).split():
        Path(stamp).touch()
    for goal, program in (("test", "pytest"), ("demo", "effllm run fable")):
        again = make(goal, f"VENV={environment}")
        assert program in again and "pip" not in again and "-m venv" not in again


@pytest.mark.parametrize(("goal", "extra", "program"), [("lint", "lint", "ruff check"), ("test-peers", "peers", "pytest -m peer")])
def test_make_installs_two_extras(tmp_path: Path, goal: str, extra: str, program: str) -> None:
    steps = make(goal, f"VENV={tmp_path / 'venv'}")
    assert f"--editable '.[test,{extra}]'\n" in steps and program in steps


def test_make_demo_installs_the_runtime_alone(tmp_path: Path) -> None:
    steps = make("demo", f"VENV={tmp_path / 'venv'}")
    assert re.search(r"pip install .*--editable \.$", steps, re.MULTILINE)
    assert f'{tmp_path}/venv/bin/effllm run fable "Tell me a story about the fox and the king."' in steps


def test_systems_are_promised_alike() -> None:
    """What the suite has not run on is named as such."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    systems = [line for line in project["classifiers"] if line.startswith("Operating System")]
    installing = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert re.search(r"needs Python \S+ or newer on Linux\. ", installing) and re.search(r"macOS .* not tested there", installing)


def test_a_check_of_the_wheel_takes_what_a_clone_would_hold(tmp_path: Path) -> None:
    """Also where a file was deleted and the index does not know yet, where one is new, and where one is a link."""
    source, target = tmp_path / "effllm checkout", tmp_path / "copy"
    for folder in (source / ".ci", source / "inner", target):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "sources", source / ".ci")
    for name in ("kept", "gone", "ignored", "inner/with a space", ".gitignore"):
        (source / name).write_text("ignored\n")
    (source / "link").symlink_to("nowhere")
    git = ("git", "-c", "init.defaultBranch=main", "-C", str(source))
    for words in (("init", "-q"), ("add", ".")):
        subprocess.run([*git, *words], check=True)
    (source / "gone").unlink()
    (source / "new").touch()
    subprocess.run([source / ".ci" / "sources", target], cwd=tmp_path, check=True)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or path.is_file()}
    assert found == {"kept", "inner/with a space", ".gitignore", "link", "new", ".ci/sources"}


def test_readme_names_every_folder_and_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme
    for folder in (*FOLDERS, "tests", "tools", "benchmarks", "models", "docs"):
        assert f"{folder}/" in readme, f"README.md does not say what {folder}/ is for"
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), f"README.md points to {link}, which is not there"
