"""The pages name only what exists: links, files, modules, classes and flags."""

from __future__ import annotations

import argparse
import ast
import builtins
import fnmatch
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import Parser, build_parser
from penstock.config import vllm_routes
from penstock.config.engine import all_options
from penstock.config.options import options_of
from penstock.config.server import ServerConfig

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs", ROOT / "examples"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for each in FOLDERS for page in each.rglob("*.md"))])
SOURCE_FOLDERS = ("penstock", "tests", "benchmarks", "examples", ".ci")
# Projects whose names look like files.
FOREIGN_FILES = {"llama.cpp"}

ENTRY_POINT = "penstock.plugins"

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./*-]+\.(?:py|cpp|sh)\b")
CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(.*\))?")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?<!--no-)(?<!-)(?![\w-])")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def files() -> frozenset[str]:
    """Every source file under each path that a page may call it by: from any folder above it."""
    found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.*")]
    parts = [path.relative_to(ROOT).parts for path in found]
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))


@cache
def sources() -> str:
    found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in found)


@cache
def flags() -> frozenset[str]:
    def of(parser: Parser) -> set[str]:
        parser.load()
        known = set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(of(each) for each in action.choices.values()))
        return known

    return frozenset(of(build_parser()))


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = {name for code in CODE.findall(prose(page)) for name in FILE.findall(code)}
    missing = {name for name in named - files() if not fnmatch.filter(files(), name)}
    assert not missing - FOREIGN_FILES


@each_page
def test_modules_that_are_named_exist(page: Path) -> None:
    for module in re.findall(r"(?:`|python -m )(penstock(?:\.[a-z_]+)+)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists() or module == ENTRY_POINT, module


@each_page
def test_python_that_is_shown_parses_and_imports_what_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("penstock"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), block


@each_page
def test_flags_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = [code for code in CODE.findall(prose(page)) if code.startswith("--")]
    named += re.findall(r"^penstock (?:.*\\\n)*.*$", text, re.MULTILINE)
    assert set(FLAG.findall("\n".join(named))) <= flags() | script_flags()


@each_page
def test_flags_of_scripts_that_are_named_exist(page: Path) -> None:
    for script, arguments in re.findall(r"python ((?:\w+/)+\w+\.py)\b([^`\n]*)", page.read_text()):
        known = flags_in(ROOT / script)
        assert set(FLAG.findall(arguments)) <= known, script


@each_page
def test_defaults_that_are_given_are_those_of_the_options(page: Path) -> None:
    options = [option for section in all_options().values() for option in section]
    defaults = {option.flag: option.default for option in [*options, *options_of(ServerConfig)]}
    rows = re.findall(
        r"^\| `(--[a-z-]+)` \| (on|off|\d[^|]*) \| [^|]+ \|$", prose(page), re.MULTILINE
    )
    in_parentheses = re.findall(r"`(--[a-z-]+)` \((\d[^)]*)\)", prose(page))
    for flag, shown in rows + in_parentheses:
        assert shown == as_written(defaults[flag]), flag


def as_written(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and default % 2**20 == 0 and default:
        return f"{default // 2**20} MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


@each_page
def test_endpoints_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(?:[A-Z]+ )?(/(?:v1/)?[\w/{}]+)`", prose(page))
    routes = "\n".join(path.read_text() for path in (ROOT / "penstock" / "server").rglob("*.py"))
    known = {as_pattern(path) for path in re.findall(r'"(/[\w/{}:]*)"', routes)}
    missing = {path for path in named if as_pattern(path) not in known}
    missing -= vllm_routes.ROUTES.keys()  # which say what to do instead
    # Those of a tool server, and Ollama's.
    assert not {path for path in missing if not path.endswith("/sse") and path[:5] != "/api/"}


def as_pattern(path: str) -> str:
    return re.sub(r"\{[\w:]+\}", "{}", path)


def flags_in(script: Path) -> set[str]:
    found = set(re.findall(r'"(--[a-z][\w-]*)"', script.read_text()))
    return found | {flag.replace("--", "--no-") for flag in found}


@cache
def script_flags() -> frozenset[str]:
    """Flags of the scripts beside the package, which a page names after the script."""
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    scripts.append(ROOT / "tests" / "chaos.py")
    return frozenset(flag for script in scripts for flag in flags_in(script))


@each_page
def test_kernels_that_are_named_exist(page: Path) -> None:
    for kernel in re.findall(r"`(_\w+_kernel)`", page.read_text()):
        assert f"def {kernel}(" in sources(), kernel


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reliability.md"])
def test_classes_and_methods_that_are_named_exist(name: str) -> None:
    for code in CODE.findall(prose(ROOT / name)):
        if not (named := CLASS.fullmatch(code)):
            continue
        kind, member = named.groups()
        defined = re.search(rf"^\s*(class {kind}\b|{kind}\b.* = )", sources(), re.MULTILINE)
        assert defined or hasattr(builtins, kind), code
        if member:
            assert re.search(rf"(def {member}\b|\b{member}\b.*[:=])", sources()), code


def test_the_class_that_the_page_on_adding_a_model_shows_is_the_models_own() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    (shown,) = re.findall(r"```python\n(class .*?)```", page, re.DOTALL)
    assert shown in (ROOT / "penstock" / "models" / "olmo2.py").read_text()


def test_names_that_the_architecture_gives_with_a_file_are_in_that_file() -> None:
    named = re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert named
    for name, path in named:
        source = (ROOT / "penstock" / path).read_text()
        assert all(re.search(rf"\b{part}\b", source) for part in name.split(".")), (name, path)


def test_the_walk_of_a_request_names_at_most_20_files() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    walk = page.split("## The walk of a request\n")[1].split("\nOffline, ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", walk))
    assert 10 < len(named) <= 20
    assert all((ROOT / "penstock" / name).exists() for name in named)


def test_the_python_reference_has_every_name_of_the_package() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = {name for name in penstock.__all__ if not name.startswith("_")}
    assert names - set(re.findall(r"\w+", page)) == set()


def test_every_example_is_run_by_a_test() -> None:
    examples = [path for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"]
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_example_*.py"))
    assert examples
    assert [path.name for path in examples if f"examples/{path.name}" not in tests] == []
