"""The README and docs/: links lead somewhere, commands name options that exist, Python blocks import what is there,
quoted messages are the program's own; slow: the site builds without a warning, the quickstart runs as it stands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from onebox import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
READ = [page for page in PAGES if page.name != "log.md"]  # its commands are those of their day


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    """Fenced blocks of a language, and of any if none is said, indented ones too."""
    text = page.read_text("utf-8")
    fenced = re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    bare = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return fenced + (re.findall(r"(?:^    \S.*\n)+", bare, re.M) if language == r"\w*" else [])


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each onebox command of a page."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(?:\S*/bin/)?onebox (.*)", line)
            if match and "[" not in line:  # brackets: a synopsis
                yield shlex.split(match.group(1), comments=True)


def named(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and what is left of them."""
    command: Any = typer.main.get_command(cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_commands_name_options_that_exist(page: Path) -> None:
    for words in commands(page):
        command, rest = named(words)
        assert not getattr(command, "commands", {}) or rest[:1] in ([], ["--version"], ["--help"]), words
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        if words[0] == "bench" and len(words) > 1:  # benchmarks read their own options
            own = ROOT / "onebox" / "bench" / f"{words[1].replace('-', '_')}.py"
            known |= set(re.findall(r'"(--[\w-]+)"', own.read_text("utf-8"))) if own.exists() else set()
        unknown = [word for word in rest if word.startswith("--") and word.split("=")[0] not in {*known, "--help"}]
        assert not unknown, f"{page.name}: onebox {' '.join(words)}"


def test_the_pages_have_commands_to_check() -> None:
    assert sum(len(list(commands(page))) for page in READ) >= 25


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_python_blocks_import_what_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("onebox"):
                continue
            path = ROOT / str(node.module).replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert all(re.search(rf"\b{name.name}\b", file.read_text("utf-8")) for name in node.names), node.module


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    asked = {word for page in READ for word in re.findall(r"(?:^|`|\s{4})make ([a-z][\w-]*)", page.read_text("utf-8"))}
    assert {"serve", "test", "docs"} <= asked <= targets


def anchors(page: Path) -> set[str]:
    """Ids of a page's headings, as the site and code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}"


def test_messages_in_troubleshooting_are_said_somewhere() -> None:
    source = "".join(
        path.read_text("utf-8") for path in (ROOT / "onebox").rglob("*.*") if path.suffix in (".py", ".js")
    )
    source += (ROOT / "Makefile").read_text("utf-8") + os.strerror(98)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that go on in the next line
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    start = text[text.index("## It does not start") : text.index("## It starts")]
    said = re.findall(r"^\| `([^`]+)`", start, re.M)
    assert len(said) >= 8
    assert not [message for message in said if message not in source]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and the page for what is not there
    for page in pages:
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(https?:[^" >]+)', page.read_text("utf-8"))
        assert not loaded, page.name


@pytest.mark.slow
def test_the_quickstart_runs_as_it_stands(tmp_path: Path) -> None:
    """In an empty folder that has what a clone has, with a server on another port than the page's."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("onebox", "python"):
        script = tmp_path / ".venv" / "bin" / name
        module = "-m onebox.cli " if name == "onebox" else ""
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        script.chmod(0o755)
    for name in ("onebox", "install.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    serve = [sys.executable, "-m", "onebox.cli", "serve", "--port", str(port)]
    server = subprocess.Popen(serve, env=env, stderr=subprocess.DEVNULL)
    said = []
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        for block in blocks(DOCS / "quickstart.md", "bash"):
            block = block.replace(":8000", f":{port}").replace(
                "onebox chat", f"onebox chat --url http://127.0.0.1:{port}"
            )
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, block + done.stdout + done.stderr
            said.append(done.stdout)
    finally:
        server.terminate()
        server.wait(60)
    assert '"The capital of France is Paris."' in said[0]
    assert "Rome" in said[1]
    assert "Paris" in said[2] and "accepted_prediction_tokens=" in said[2]
    assert "14 March" in said[3] and (tmp_path / "why.html").exists()
    assert "all as the manifest says" in said[5]
    assert "environment  would make" in said[7]
