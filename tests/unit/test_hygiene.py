"""Rules of the house that a reader should be able to rely on, held by tests instead of by memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "attnproof"

# lowest first; a module imports its own part and lower layers only
LAYERS = (
    ("errors",),
    ("dtypes", "arrays", "philox"),
    ("masks", "scores", "online_softmax", "products"),
    ("problem", "checks", "rows"),
    ("cache", "backends"),
    ("dispatch",),
    ("autograd",),
    ("api",),
    ("cases", "compat"),
    ("gcn", "ledger"),
    ("verify",),
    ("measure",),
    ("report",),
    ("cli",),
)

# path -> why it may be longer than FILE_LINES; path:function -> why it may be longer than FUNCTION_LINES
FILE_LINES, FUNCTION_LINES = 450, 60
KERNEL = "device code: most of its lines are the named arguments of one launch"
LONG_FILES: dict[str, str] = {
    "tests/gcn/test_checks.py": "one check of the interpreter after the other",
    "tests/gpu/test_cases.py": "one case after the other",
    "tests/unit/test_compat_transformers.py": "one kind of model after the other",
}
LONG_FUNCTIONS: dict[str, str] = {
    "src/attnproof/backends/triton/kernels/backward.py:dkdv_kernel": KERNEL,
    "src/attnproof/backends/triton/kernels/backward.py:dq_kernel": KERNEL,
    "src/attnproof/backends/triton/kernels/decode.py:decode_kernel": KERNEL,
    "src/attnproof/backends/triton/kernels/forward.py:forward_kernel": KERNEL,
    "src/attnproof/backends/triton/kernels/gradients.py:dbias_kernel": KERNEL,
    "src/attnproof/cases/named.py:_rows": "a list of cases",
    "src/attnproof/verify/adapters/flex.py:_flex": "one closure per option that FlexAttention takes as a function",
}

# backend -> the backend that it may import, and why
BORROWS = {"hopper": ("triton", "its fast path: the same calls, and what it cannot describe goes there")}

SOURCES = {".py", ".h", ".hpp", ".cc", ".cpp", ".hip", ".cu", ".js"}


def tracked() -> list[Path]:
    """Files under version control, or everything that looks like source where there is no git (an sdist)."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if git.returncode == 0 and git.stdout:
        return [ROOT / name for name in git.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    folders = ("src", "csrc", "tests", "tools", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """`attnproof.backends.native.loader` -> `backends`; the package itself -> ``."""
    return (module.split(".") + [""])[1]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module of the package that a file imports at run time, with its line; `if TYPE_CHECKING:` does not run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for body in node.body
        for inner in ast.walk(body)
    }
    module = dotted(path).split(".")
    folder = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` and `from attnproof import x` may name modules
            names = [f"{stem}.{alias.name}" for alias in node.names] if stem.count(".") == 0 else [stem]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "attnproof")


def test_importing_the_package_loads_neither_torch_nor_triton(
    record_property: Callable[[str, object], None],
) -> None:
    """Whoever only wants NumPy must not pay seconds for a GPU stack. The time is recorded, not judged."""
    code = (
        "import sys, time; t = time.perf_counter(); import attnproof; t = time.perf_counter() - t; "
        "heavy = {'torch', 'triton', 'jinja2', 'matplotlib', 'typer', 'rich', 'ml_dtypes'}; "
        "print(t, *sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *loaded = run.stdout.split()
    record_property("import_seconds", float(seconds))
    print(f"import attnproof: {float(seconds):.3f} s")
    assert [] == loaded


def test_all_lists_exactly_the_public_names_in_order() -> None:
    """A name that is public by accident becomes somebody's dependency."""
    import attnproof

    hidden = {"annotations"}  # `from __future__ import annotations`
    names = {name for name, value in vars(attnproof).items() if not isinstance(value, ModuleType)}
    public = {name for name in names if not name.startswith("_")} - hidden | {"__version__"}
    assert sorted(public) == attnproof.__all__


def test_every_part_of_the_package_has_a_layer() -> None:
    known = {part for layer in LAYERS for part in layer}
    parts = {part_of(dotted(path)) for path in modules()} - {"", "_version"}
    assert set() == parts - known, "give the new part a place in LAYERS"


def test_imports_go_down_only() -> None:
    """Upward imports are how a core ends up needing its own command line."""
    rank = {part: level for level, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for path in modules():
        mine = part_of(dotted(path))
        if not mine:
            continue
        for line, name in imports_of(path):
            other = part_of(name)
            if other and other != mine and rank.get(other, -1) > rank[mine]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert [] == wrong


def test_backends_do_not_import_each_other() -> None:
    """One backend must be deletable; what two of them share lives below both. BORROWS argues for the exception."""
    wrong = []
    for path in modules():
        module = dotted(path).split(".")
        if module[1:2] != ["backends"] or len(module) < 3:
            continue
        for line, name in imports_of(path):
            other = name.split(".")
            lender = BORROWS.get(module[2], (module[2],))[0]
            if other[1:2] == ["backends"] and len(other) > 2 and other[2] not in (module[2], lender):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert [] == wrong


def test_the_report_reads_records_and_computes_nothing() -> None:
    """A report that can compute can disagree with its record."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        if part_of(dotted(path)) == "report"
        for line, name in imports_of(path)
        if part_of(name) not in ("", "report", "errors") and not name.startswith("attnproof.verify.records")
    ]
    assert [] == wrong


def test_files_stay_short_enough_to_read_at_once() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked()
        if path.suffix in SOURCES
    }
    long = {name for name, lines in lengths.items() if lines > FILE_LINES}
    assert set() == long - set(LONG_FILES), "split it, or argue for it in LONG_FILES"
    assert set() == set(LONG_FILES) - long, "no longer an exception"


def test_functions_stay_short_enough_to_hold_in_mind() -> None:
    long = set()
    for path in tracked():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # the docstring is for the reader, and does not count against the code
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                code = (node.end_lineno or 0) - first.lineno + 1 + (node.body[0].lineno - node.lineno)
                if code > FUNCTION_LINES:
                    long.add(f"{path.relative_to(ROOT)}:{node.name}")
    assert set() == long - set(LONG_FUNCTIONS), "split it, or argue for it in LONG_FUNCTIONS"
    assert set() == set(LONG_FUNCTIONS) - long, "no longer an exception"


def test_the_package_raises_instead_of_asserting() -> None:
    """`python -O` removes asserts, and an assert has no sentence for the user."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert [] == found


def test_no_tracked_file_names_a_folder_of_somebodys_machine() -> None:
    """A home folder in a record or a script is noise to everyone else, and often wrong."""
    pattern = re.compile(r"(?<![\w.$}/])/(?:root|home|Users|work|tmp/[a-z]+[-_][a-z]+)/\w")
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".bin", ".hsaco", ".cubin"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [
            f"{path.relative_to(ROOT)}:{n}"
            for n, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert [] == found
