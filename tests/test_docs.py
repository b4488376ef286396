"""The documents keep up with the code: links lead somewhere, commands, options, keys and paths exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from distspec.config import Config, PolicyName, load, named

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CLUSTERS = sorted((ROOT / "clusters").glob("*.yaml"))

RECORDS = {"log.md", "performance.md", "CHANGELOG.md"}
"""Pages that say what was at their time."""

document = pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
living = pytest.mark.parametrize(
    "path", [path for path in DOCS if path.name not in RECORDS], ids=lambda path: path.name
)


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- links and paths ------------------------------------------------------------------------------


@document
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        aimed = (path.parent / name).resolve() if name else path
        assert aimed.exists(), target
        assert not anchor or anchor in _anchors(aimed), target


def _quoted(path: Path) -> list[str]:
    """What stands between single backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<!`)`([^`\n]+)`", text)


@living
def test_paths_that_are_named_exist(path: Path) -> None:
    """From the root of the repository, or within the package as `rounds/loop.py`; in what a reader is to run, too."""
    modules = {file.name for file in (ROOT / "distspec").rglob("*.py")}
    for name in _quoted(path):
        if re.fullmatch(r"\w+\.py", name):
            assert name in modules, name
        elif re.fullmatch(r"[\w.-]+(/[\w.-]+)*/|[\w.-]+(/[\w.-]+)+\.\w+", name):
            assert (ROOT / name).exists() or (ROOT / "distspec" / name).exists(), name
    for block in _blocks(path, "bash"):
        for name in re.findall(r"(?<![\w/-])(?:clusters|deploy|docs|tests|distspec)/[\w./-]+", block):
            assert (ROOT / name).exists(), name


@living
def test_names_that_are_quoted_are_names_of_ours(path: Path) -> None:
    """Options, fields, environment variables, functions: whatever is spelled with an underscore."""
    for quoted in _quoted(path):
        for name in re.findall(r"(?<![\w/])[A-Za-z]+(?:_[A-Za-z0-9]+)+(?![\w/])", quoted):
            assert name in _names() | NAMES_OF_OTHERS, f"{name} in `{quoted}`"


NAMES_OF_OTHERS = {"enable_thinking", "allowed_tools"}
"""What chat templates and OpenAI's API know and we do not."""


@cache
def _names() -> frozenset[str]:
    code = [*(ROOT / "distspec").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    files = [*code, *(ROOT / "deploy").glob("*.yaml"), ROOT / "Makefile"]
    return frozenset(name for file in files if file != Path(__file__) for name in re.findall(r"\w+", file.read_text()))


@living
def test_configuration_keys_that_are_quoted_exist(path: Path) -> None:
    sections = "|".join(get_type_hints(Config))
    for quoted in _quoted(path):
        for key in re.findall(rf"(?<![\w./])(?:{sections})(?:\.\w+)+(?![\w/])", quoted):
            assert key.endswith(".py") or _is_key(key), key


def _is_key(key: str) -> bool:
    struct: Any = Config
    for name in key.split("."):
        hints = get_type_hints(struct) if isinstance(struct, type) else {}
        if name not in hints:
            return False
        struct = hints[name]
    return True


@document
def test_configurations_that_are_shown_can_be_used(path: Path, tmp_path: Path) -> None:
    for number, block in enumerate(_blocks(path, "yaml")):
        shown = tmp_path / f"{number}.yaml"
        shown.write_text(block)
        load(str(shown))


def test_the_design_puts_every_module_on_a_floor() -> None:
    table = (ROOT / "docs" / "design.md").read_text().split("| floor |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    package = ROOT / "distspec"
    assert named == {
        path.stem for path in [*package.glob("[a-z]*.py"), *(file.parent for file in package.glob("*/__init__.py"))]
    }


def test_contributing_lists_every_folder_of_tests() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    rows = re.findall(r"^\| `tests/(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == folders


def test_every_path_of_the_server_is_documented_and_no_other() -> None:
    source = (ROOT / "distspec" / "serving" / "http.py").read_text()
    served = {re.sub(r"/\{.*", "", path) for path in re.findall(r'@app\.(?:get|post)\("([^"]+)"\)', source)}
    documented = (ROOT / "docs" / "api.md").read_text()
    assert {path for path in served if f"{path}`" not in documented} == set()
    assert set(re.findall(r"`(?:GET|POST) (/[\w/]+)`", documented)) == served


# -- commands -------------------------------------------------------------------------------------


def _commands() -> set[str]:
    """Every `distspec ...` and `make ...` line that a reader is told to run, without comments and quotes."""
    found = set()
    for path in DOCS:
        text = path.read_text()
        lines = [line for block in _blocks(path, "bash") for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"(?<!`)`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        found |= {_command(line) for line in lines}
    for path in CLUSTERS:
        comment = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
        found |= {_command(quoted) for quoted in re.findall(r"'(distspec [^']*)'", comment)}
    return found - {""}


def _command(line: str) -> str:
    """`X=1 .venv/bin/distspec check local  # why` -> `distspec check local`; "" for anything else."""
    match = re.match(r"(?:[A-Z_]+=(?:'[^']*'|\S*) )*(?:\.venv/bin/)?((?:distspec|make) .*)", line)
    return re.sub(r"\s#\s.*", "", match.group(1)).strip() if match else ""


@cache
def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from distspec.cli import main; main()", *command, "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "HOME": str(Path.home())},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = sorted(_commands())
OURS = [line for line in COMMANDS if line.startswith("distspec ")]


def test_documents_show_every_command() -> None:
    assert {"serve", "generate", "status", "trace", "check", "bench"} <= {line.split()[1] for line in OURS}


@pytest.mark.parametrize("line", OURS)
def test_distspec_commands_and_their_options_exist(line: str) -> None:
    command, *words = shlex.split(line)[1:]
    text = _help(command, *words[:1]) if command == "bench" else _help(command)
    for option in [word.split("=")[0] for word in words if word.startswith("--")]:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"distspec {command} has no {option}"


def test_make_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert {"serve", "test", "setup"} <= targets <= rules


@pytest.mark.parametrize("line", COMMANDS)
def test_configuration_keys_and_names_in_commands_exist(line: str) -> None:
    load("local", re.findall(r"(?<![\w.-])([a-z]\w*(?:\.\w+)+=[^\s']+)", line))
    shown = {re.findall(r"^name: (.*)$", block, re.MULTILINE)[0] for block in _blocks(ROOT / "README.md", "yaml")}
    known = {*named(), *(f"{name}.yaml" for name in shown)}
    assert set(re.findall(r"(?:--config|distspec check) ([a-z][a-z0-9.-]*)", line)) <= known


# -- contents -------------------------------------------------------------------------------------


@document
def test_python_in_documents_is_python(path: Path) -> None:
    for block in _blocks(path, "python"):
        ast.parse(block)


def test_the_readme_lists_exactly_the_policies_there_are() -> None:
    table = (ROOT / "README.md").read_text().split("| policy |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(get_args(PolicyName))


def test_pre_commit_hooks_are_local_and_run_what_setup_installs() -> None:
    tree = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in tree["repos"]] == ["local"]
    hooks = tree["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {
        ".venv/bin/ruff",
        ".venv/bin/mypy",
        ".venv/bin/lint-imports",
    }


def _imported() -> set[str]:
    """Top-level modules that the package imports, at the top of a file or inside a function."""
    found = set()
    for path in (ROOT / "distspec").rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                found.add(statement.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"distspec"}


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_distribution(re.split(r"[\[<>=]", line)[0]) for line in project["dependencies"]}
    owners = metadata.packages_distributions()
    for module in _imported():
        assert declared & {_distribution(owner) for owner in owners[module]}, f"{module} is imported, not declared"


def _distribution(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_lock_pins_every_dependency_once_and_leaves_the_build_of_torch_open() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["dev"]
    wanted = {re.split(r"[\[<>=]", line)[0].lower() for line in listed}
    assert wanted <= {_distribution(name) for name in pins}
