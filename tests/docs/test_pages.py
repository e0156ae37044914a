"""Every example that a reader can copy is run: README, the pages, and the docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnproof.cli._app import build

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("make", "attnproof", "pip")


def extras(arguments: list[str]) -> set[str]:
    """Extras of the package that a `pip install` asks for."""
    named = re.findall(r"(?:attnproof|\.)\[([\w,-]+)\]", " ".join(arguments))
    return {extra for group in named for extra in group.split(",")}


def fenced(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of every fenced block of one language."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start()].count("\n") + 2, m[2]) for m in FENCE.finditer(text) if m[1] == language]


def console_blocks() -> list[object]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{line}")
        for page in PAGES
        for line, block in fenced(page, "console")
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if fenced(page, "pycon")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_examples_of_a_page_give_what_it_says(page: Path) -> None:
    """One namespace per page: later examples may use earlier names."""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    names: dict[str, object] = {}
    said: list[str] = []
    for line, block in fenced(page, "pycon"):
        test = parser.get_doctest(block, names, page.name, str(page), line)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
    assert (0, "") == (runner.failures, "".join(said))
    assert runner.tries > 0


@pytest.mark.parametrize("block", console_blocks())
def test_a_shown_command_exists_and_a_shown_output_is_what_it_prints(block: str) -> None:
    """A block with output is run and compared, up to a line `...`; one without is looked up, as some take minutes."""
    lines = block.splitlines()
    commands = [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]
    assert commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, name, *arguments in commands:
        assert program in COMMANDS
        if program == "make":
            assert name in targets
            continue
        if program == "pip":
            project = (ROOT / "pyproject.toml").read_text()
            missing = [extra for extra in extras(arguments) if f"\n{extra} = [" not in project]
            assert ("install", []) == (name, missing)
            continue
        if len(commands) == len(lines):
            shown = CliRunner().invoke(build(), [name, "--help"])
            assert 0 == shown.exit_code
            flat = " ".join(shown.output.split())
            assert [] == [flag for flag in arguments if flag.startswith("--") and flag not in flat]
    if len(commands) < len(lines):
        (_, *arguments), expected = commands[0], lines[1:]
        printed = CliRunner().invoke(build(), arguments).output.rstrip("\n").splitlines()
        if expected[-1] == "...":
            expected, printed = expected[:-1], printed[: len(expected) - 1]
        assert expected == printed


def modules() -> list[str]:
    package = ROOT / "src" / "attnproof"
    return sorted(
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in package.rglob("*.py")
        if ">>>" in path.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_docstring_give_what_it_says(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert 0 == result.failed
    assert result.attempted > 0
