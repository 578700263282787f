"""Set-up of all tests, before torch and triton are imported by any.

One thread each: the models are tiny, and waiting for a busy core costs more than it gives. Triton decides at import
whether kernels run in its interpreter: they do where there is no GPU.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ONEBOX_CACHE"] = tempfile.mkdtemp(prefix="onebox-tests-")
atexit.register(shutil.rmtree, os.environ["ONEBOX_CACHE"], ignore_errors=True)

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="DIR", help="where tests that measure something add a line of it")
    parser.addoption(
        "--pictures", metavar="DIR", help="where tests put pictures of pages; a folder of their own if not said"
    )


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for pictures of pages."""
    return Path(request.config.getoption("--pictures") or tmp_path)


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Adds a result to the file of that name, where --results says that they are kept."""

    def record(name: str, values: dict[str, Any]) -> None:
        from onebox.bench.record import append, environment

        if folder := request.config.getoption("--results"):
            append(Path(folder) / name, {**values, **environment(torch.device("cpu"))})

    return record
