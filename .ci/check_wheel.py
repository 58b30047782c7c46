"""Checks an installed effllm against the sources it was built from. Run with the clean environment's Python, from outside the checkout:

    python -P check_wheel.py SOURCES

Every package file, the server's page, the model table and the packaged model must be there, nothing else may be, all bytes must be equal,
and every module must import with the declared dependencies alone (the CUDA backend excepted: torch is an extra).
"""

import importlib
import pkgutil
import sys
from importlib.metadata import files
from pathlib import Path

FOLDERS = ("cli", "kernels", "offload", "quant", "runtime")
NEEDS_AN_EXTRA = "effllm.kernels.cuda."


def expected_files(sources: Path) -> set[str]:
    paths = [path for folder in FOLDERS for path in (sources / folder).rglob("*.py")]
    paths += [sources / name for name in ("__init__.py", "__main__.py", "models.yaml", "models/SHA256SUMS", "runtime/calibration.txt")]
    paths += [path for folder in ("models/fable", "cli/server/browser") for path in (sources / folder).rglob("*") if path.is_file()]
    return {path.relative_to(sources).as_posix() for path in paths}


def main() -> None:
    sources = Path(sys.argv[1]).resolve()
    installed = {path.relative_to("effllm").as_posix(): Path(path.locate()) for path in files("effllm") or [] if path.parts[0] == "effllm"}
    installed = {name: path for name, path in installed.items() if path.suffix != ".pyc"}
    wanted = expected_files(sources)
    if missing := wanted - set(installed):
        sys.exit(f"the wheel lacks {sorted(missing)}")
    if surplus := set(installed) - wanted:
        sys.exit(f"the wheel holds what it should not: {sorted(surplus)}")
    if different := [name for name in wanted if installed[name].read_bytes() != (sources / name).read_bytes()]:
        sys.exit(f"the wheel differs from the sources in {sorted(different)}")

    package = importlib.import_module("effllm")
    if sources in Path(package.__file__).resolve().parents:
        sys.exit(f"effllm came from {package.__file__}, not from the wheel")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "effllm.")]
    modules = [name for name in names if not name.startswith(NEEDS_AN_EXTRA) and not name.endswith("__main__")]
    for name in modules:
        importlib.import_module(name)
    print(f"the wheel holds {len(installed)} files; {len(modules)} modules import")


if __name__ == "__main__":
    main()
