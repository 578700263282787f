"""What `make dist` makes: a wheel, made from the sdist, that installs into an empty environment and serves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

import onebox

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def command(*argv: str | Path, cwd: Path) -> str:
    """What a command says, away from the sources. Fails with its last lines."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([str(part) for part in argv], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_the_version_is_in_the_changelog() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest.group(1) == onebox.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", onebox.__version__)


def test_every_extra_and_entry_point_names_what_is_there() -> None:
    for target in (*PROJECT["scripts"].values(), *PROJECT["entry-points"]["package_tools"].values()):
        module, _, name = target.partition(":")
        text = (ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8")
        assert re.search(rf"^def {name}\b", text, re.M), target
    own = {re.sub(r"\[.*", "", line) for lines in PROJECT["optional-dependencies"].values() for line in lines}
    inner = re.findall(r"onebox\[(\w+)\]", str(PROJECT["optional-dependencies"]))
    assert "onebox" in own and set(inner) <= set(PROJECT["optional-dependencies"])


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a wheel, made from the sdist beside it."""
    out = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_the_sdist_all_that_tests_need(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"onebox-{onebox.__version__}-py3-none-any.whl"
    listed = command("git", "ls-files", "onebox", cwd=ROOT).split()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert set(listed) <= names and "onebox/py.typed" in names
    assert not [name for name in names if not name.startswith(("onebox/", f"onebox-{onebox.__version__}.dist-info/"))]
    tracked = command("git", "ls-files", "tests", "docs", "deploy", "install.sh", "Makefile", cwd=ROOT).split()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked) <= packed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_installs_in_an_empty_environment_and_serves(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    command(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pins = ROOT / "constraints.txt"
    command(python, "-m", "pip", "install", "-q", "-c", pins, f"{wheel}[prompt]", cwd=tmp_path)
    command(python, "-m", "pip", "check", cwd=tmp_path)
    where = command(python, "-c", "import onebox; print(onebox.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    script = tmp_path / "venv" / "bin" / "onebox"
    assert command(script, "--version", cwd=tmp_path) == f"onebox {onebox.__version__}\n"
    (tmp_path / "notes.txt").write_text("The bridge opens at nine. Tea is served, as always. The toll is 4 euros.")
    short = command(script, "compress", "notes.txt", "--rate", "0.5", "--question", "What is the toll?", cwd=tmp_path)
    assert "4 euros" in short
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([str(script), "serve", "--port", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert server.poll() is None
            try:
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=ask | {"temperature": 0}, timeout=60).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/ui/main.js").status_code == 200
    finally:
        server.terminate()
        assert server.wait(60) in (0, -signal.SIGTERM)
