"""The tree is the map: imports point down it, the prohibitions hold, and docs/architecture.md lists what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "onebox"
# top to bottom; testing.py holds the fakes of the interfaces below it
ORDER = [
    "cli",
    "doctor",
    "integrations",
    "batch",
    "bench",
    "testing",
    "llm",
    "server",
    "prompt",
    "engine",
    "model",
    "checkpoint",
    "kernels",
    "ledger",
    "request",
    "config",
    "spec",
    "errors",
]
FILES = sorted(PACKAGE.rglob("*.py"))
ENGINE_SIDE = ("engine", "model", "checkpoint", "kernels", "ledger", "request", "spec")
BARE_IMAGE = {"torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub", "rich"}


def imports(path: Path) -> Iterator[str]:
    """Dotted modules that a file imports, wherever in it the import stands; type-checking ones left out."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = place(path)
    if here == "__init__":
        return
    assert here in ORDER, f"{path}: give it a place in the map"
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "onebox" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) >= ORDER.index(here), f"{path}: imports {module}, which is above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_prohibitions(path: Path) -> None:
    here, found = place(path), list(imports(path))
    for module in found:
        top = module.split(".")[0]
        if here == "prompt":
            assert not module.startswith("onebox.engine"), f"{path}: prompt sees {module}"
        if here == "engine":
            assert top not in {"fastapi", "starlette", "uvicorn", "transformers", "tokenizers", "jinja2", "openai"}
            assert not module.startswith(("onebox.server", "onebox.prompt"))
        if here == "kernels":
            assert top in {"torch", "triton", "__future__"} or module.startswith("onebox.kernels") or _standard(top)
        if path.stem.endswith("_ref"):
            assert top != "triton", f"{path}: a reference imports triton"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_engine_side_runs_on_a_bare_cuda_image(path: Path) -> None:
    if place(path) not in ENGINE_SIDE:
        return
    allowed = BARE_IMAGE | ({"msgspec", "zmq"} if path.name == "process.py" else set())
    lazy = {("tuning.py", "auto_round"), ("grammar.py", "llguidance")}
    for module in imports(path):
        top = module.split(".")[0]
        assert top == "onebox" or top in allowed or _standard(top) or (path.name, top) in lazy, f"{path}: needs {top}"


def _standard(top: str) -> bool:
    import sys

    return top in sys.stdlib_module_names


def test_only_config_reads_the_environment() -> None:
    for path in FILES:
        if path.name in ("config.py", "configs.py"):  # the second: Triton's interpreter switch, which decides imports
            continue
        text = path.read_text("utf-8")
        assert not re.search(r"os\.environ|os\.getenv|getenv\(", text), f"{path}: reads the environment"


def test_the_map_in_the_docs_is_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    drawn = text[text.index("```\nonebox/") : text.index("```", text.index("onebox/"))]
    folder, listed, detailed = "", set(), set()
    for line in drawn.splitlines()[2:]:
        if match := re.match(r"  (\w+)/ ", line):
            folder = match[1]
            listed.add(folder)
        elif match := re.match(r"  (\w+\.py) ", line):
            listed.add(match[1])
        elif match := re.match(r"    (\w+\.py) ", line):
            listed.add(f"{folder}/{match[1]}")
            detailed.add(folder)
    real = {str(p.relative_to(PACKAGE)) for p in FILES if p.name != "__init__.py"}
    folders = {p.split("/")[0] for p in real if "/" in p}
    drawable = {p for p in real if "/" not in p or p.split("/")[0] in detailed} | folders
    assert listed == drawable, f"only drawn: {listed - drawable}; only real: {drawable - listed}"
