"""Help pages against a golden file, and the flags behind them: names, environment variables, defaults, lean start-up.

After a wanted change: `python tests/test_cli_help.py` writes tests/golden/help.txt, docs/commands.md and cli/env_variables.py again; the
difference is then read in review.
"""

import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer
from command_line import Ran

from effllm.cli.app import build
from effllm.cli.env_variables import SECOND, VARIABLES
from effllm.cli.flags import flags_of
from effllm.cli.options import AnswerFlags, EngineFlags, SamplingFlags

GOLDEN = Path(__file__).parent / "golden" / "help.txt"
REFERENCE = Path(__file__).parent.parent / "docs" / "commands.md"
TABLE = Path(__file__).parent.parent / "cli" / "variables.py"
WIDTH = 100
MINUTE = 60
# What a flag feeds -> what its help calls the default, where that is not the value of the dataclass in words.
SAID_OTHERWISE = {"threads": "all physical cores", "ctx": "the model's, or what fits of it", "ram": "what is free", "vram": "what is free",
                  "gpu_layers": "as many as fit", "seed": "random, also -1; --stats tells it", "cache_k": "as --kv", "cache_v": "as --kv",
                  "dry_sequence_breakers": '\\n, :, " and *', "kv_ram": "what is left",
                  "disk": "what is free", "spill_dir": "the user's cache folder"}


def commands(group: typer.core.TyperGroup | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """(words, command) of the application and everything below it, in order."""
    group = group or typer.main.get_command(build())
    yield path, group
    for name in group.commands:
        member = group.commands[name]
        if isinstance(member, typer.core.TyperGroup):
            yield from commands(member, (*path, name))
        else:
            yield (*path, name), member


def effllm(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": str(WIDTH), **variables}
    return subprocess.run([sys.executable, "-P", "-m", "effllm", *words], capture_output=True, text=True, env=environment, timeout=MINUTE,
                          stdin=subprocess.DEVNULL, check=False)


def page(*words: str) -> str:
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as out:
        patched.setenv("COLUMNS", str(WIDTH))
        ran = Ran(*words, "--help")
    assert ran.code == 0 and not ran.err, ran.err
    return out.getvalue() + ran.out


def all_pages() -> str:
    """Every help page under a line that names it."""
    return "\n".join(f"==== {' '.join(('effllm', *words))} --help\n{page(*words)}" for words, _ in commands())


def test_pages_are_the_golden_ones() -> None:
    assert all_pages() == GOLDEN.read_text(encoding="utf-8"), "if this change is wanted: python tests/test_cli_help.py"


@pytest.mark.parametrize("words", [(), ("run",), ("eval", "kld")])
def test_a_user_gets_these_pages(words: tuple[str, ...]) -> None:
    ran = effllm(*words, "--help")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, page(*words), "")


def reference(pages: str) -> str:
    """The pages as a document."""
    parts = ["# Commands\n\nThe help pages of every command, as `--help` prints them.\n"]
    for page in pages.split("==== ")[1:]:
        title, _, body = page.partition("\n")
        parts.append(f"## {title.removesuffix(' --help')}\n\n```text\n{body.strip()}\n```\n")
    return "\n".join(parts)


def test_the_reference_has_the_same_pages() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(GOLDEN.read_text(encoding="utf-8")), "python tests/test_cli_help.py"


def variables() -> list[str]:
    return sorted({parameter.envvar for _, command in commands() for parameter in command.params if parameter.envvar})


def second_names() -> list[tuple[str, str]]:
    """(name, variable) of every name of a flag that is not what its variable is called by, in the order of the commands."""
    taken, found = set(variables()), {}
    for _, command in commands():
        for parameter in command.params:
            for name in (*parameter.opts, *parameter.secondary_opts) if parameter.envvar else ():
                if (short := name.strip("-").upper().replace("-", "_")) and f"EFFLLM_{short}" not in taken:
                    found[short, parameter.envvar] = None
    return [*found]


def table(names: list[str], second: list[tuple[str, str]]) -> str:
    """The module that lists the variables of all flags, so that nobody who sets one waits for the flags of every command."""
    lines = textwrap.wrap(" ".join(names), 120)
    others = textwrap.wrap(" ".join(map("=".join, second)), 120)
    return '''"""The variables of all flags of all commands, as `python tests/test_cli_help.py` writes them.

A command knows its own alone, and to build the flags of the others would be a tenth of a second for everyone who has set one of theirs.
"""

VARIABLES = frozenset("""
''' + "\n".join(lines) + '''
""".split())

# A second name of a flag, as -c, and the variable of that flag; one name may stand for several, in the order of the commands.
SECOND = tuple(tuple(pair.split("=")) for pair in """
''' + "\n".join(others) + '''
""".split())
'''


def test_the_table_of_variables_is_that_of_the_flags() -> None:
    assert sorted(VARIABLES) == variables() and len(VARIABLES) > 60, "python tests/test_cli_help.py"
    assert [*SECOND] == second_names() and ("NGL", "EFFLLM_GPU_LAYERS") in SECOND, "python tests/test_cli_help.py"


def test_every_flag_has_its_variable_and_a_description() -> None:
    """Where commands mean different things by one flag, each has a variable of its own."""
    seen, own = 0, {"quantize --spec", "quantize --force", "export --force", "export --lora", "export --mmproj", "transcribe --format"}
    for words, command in commands():
        for parameter in command.params:
            if parameter.param_type_name != "option" or not words or parameter.name == "help":
                continue
            long = next(name for name in parameter.opts if name.startswith("--"))
            name = long[2:] if (both := f"{' '.join(words)} {long}") not in own else both.replace(" --", "-")
            assert parameter.envvar == "EFFLLM_" + name.upper().replace("-", "_"), (words, long)
            assert parameter.help, (words, long)
            assert (parameter.envvar in parameter.help) == (both in own), "what the rule does not tell is told"
            seen += 1
    assert seen > 60, "the walk over the commands found too little"


def test_flags_of_later_versions_are_absent() -> None:
    flags = {name for _, command in commands() for parameter in command.params for name in parameter.opts}
    assert {"--temp", "--top-k", "--repeat-penalty", "-c", "-n", "-t", "-ngl", "-f", "-s", "--kv"} <= flags


@pytest.mark.parametrize("name", [field.name for field in flags_of(EngineFlags)])
def test_engine_defaults_are_those_of_the_engine(name: str) -> None:
    from effllm.runtime.engine import EngineOptions
    from effllm.runtime.planning.plan_request import exact_ends

    sinks, window = exact_ends(EngineOptions())
    assert_default(EngineFlags, name, EngineOptions(kv_sink=sinks, kv_window=window))


@pytest.mark.parametrize("name", [field.name for field in flags_of(SamplingFlags)])
def test_sampling_defaults_are_those_of_the_sampler(name: str) -> None:
    from effllm.runtime.sampler import SamplerSettings

    assert_default(SamplingFlags, name, SamplerSettings())


def test_overflow_default_is_that_of_the_engine() -> None:
    from effllm.runtime.engine import EngineOptions

    assert said_default(AnswerFlags, "overflow") == EngineOptions().overflow


def assert_default(flags: type, name: str, feeds: object) -> None:
    """The flag's own value is "not given"; the default that its help names is the dataclass's."""
    value = getattr(feeds, name)
    assert getattr(flags(), name) in (None, False)
    said = said_default(flags, name).removesuffix(", or by the profile")
    assert said == (SAID_OTHERWISE.get(name) or ("" if value is False else str(value)))


def said_default(flags: type, name: str) -> str:
    """`(0.8)` at the end of a flag's description, without the brackets."""
    from typing import get_args, get_type_hints

    option = get_args(get_type_hints(flags, include_extras=True)[name])[1]
    found = re.search(r"\(([^()]*)\)$", option.help)
    return found.group(1) if found else ""


def test_precisions_of_the_cache_are_those_that_exist() -> None:
    import re
    from typing import get_args, get_type_hints

    from effllm import UsageError
    from effllm.quant.kv import CODECS, codec
    from effllm.runtime.engine import EngineOptions
    from effllm.runtime.policy import POLICIES

    named = re.findall(r"(?:\d+bit|k\dv\d)(?:\+\w+)?\b", get_args(get_type_hints(EngineFlags, include_extras=True)["kv"])[1].help)
    asks = "4bit+x"  # what answers with the policies that there are, so that the help need not change with them
    assert {*CODECS, "8bit", "2bit", "k8v4", "4bit+POLICY", asks} == set(named)
    for name in (*CODECS, "8bit", "2bit", "k8v4", "6bit", "5bit", "4bit", "3bit", *(f"4bit+{policy}" for policy in POLICIES)):
        codec(name)
    with pytest.raises(UsageError) as refused:
        EngineOptions(kv=asks)
    assert refused.value.hint == " or ".join(f"+{policy}" for policy in POLICIES)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(all_pages(), encoding="utf-8")
    REFERENCE.write_text(reference(GOLDEN.read_text(encoding="utf-8")), encoding="utf-8")
    TABLE.write_text(table(variables(), second_names()), encoding="utf-8")
