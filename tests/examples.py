"""The scripts of `examples/`, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    """`examples/NAME.py`, loaded as Python would run it: its folder is where it finds its neighbours."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module
