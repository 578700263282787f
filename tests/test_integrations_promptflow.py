"""Prompt flow finds the tool by its entry point, and a flow runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from examples import EXAMPLES, example

pytest.importorskip("promptflow.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from promptflow._core.tools_manager import collect_package_tools
    from promptflow.executor._errors import ResolveToolError

from onebox.errors import PromptError
from onebox.integrations import promptflow as tools

ROOT = Path(__file__).parent.parent
QUESTION = "Who kept the lighthouse of Varrow?"
TOOL = "onebox.integrations.promptflow.compress"


def texts() -> list[str]:
    return [text for _, text, _ in example("passages").passages()]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The entry point that pyproject.toml declares, as an installed package shows it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["package_tools"]
    folder = tmp_path / "onebox_declared-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onebox-declared\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[package_tools]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    monkeypatch.syspath_prepend(str(tmp_path))
    return points


def test_the_entry_point_gives_the_tool(installed):
    (value,) = installed.values()
    listed = EntryPoint("onebox", value, "package_tools").load()()
    assert list(listed) == [TOOL]
    assert collect_package_tools()[TOOL]["function"] == "compress"


def test_the_yaml_declares_the_parameters_of_the_function():
    import inspect

    declared = tools.list_package_tools()[TOOL]["inputs"]
    real = inspect.signature(tools.compress).parameters
    assert list(declared) == list(real)
    for name, parameter in real.items():
        default = declared[name].get("default", inspect.Parameter.empty)
        assert default == parameter.default, name


def test_documents_stay_apart_and_the_question_decides():
    found = tools.compress(texts(), question=QUESTION, rate=0.06)
    assert [left == text for left, text in zip(found["documents"], texts(), strict=True)] == [True] + 19 * [False]
    assert found["tokens"] <= 0.06 * found["original_tokens"] and found["status"] == "compressed"


def test_one_prompt_and_a_target():
    found = tools.compress("\n\n".join(texts()), question=QUESTION, target_tokens=120)
    assert 114 <= found["tokens"] <= 120 and "Okafor" in found["text"]


def test_what_is_not_text_is_refused():
    with pytest.raises(PromptError, match="list of texts"):
        tools.compress([1, 2], question=QUESTION)
    with pytest.raises(PromptError, match="--model"):
        tools.compress("text", method="llmlingua2")


def test_the_example_flow_runs(installed, capsys):
    result = example("promptflow/run").main([QUESTION])
    assert result["prompt"].endswith("Answer from the text above. " + QUESTION)
    assert "Ines Okafor" in result["prompt"] and "Petrel" not in result["prompt"]
    assert result["tokens"]["tokens"] < 0.25 * result["tokens"]["original_tokens"]
    assert "tokens" in capsys.readouterr().out


def test_a_flow_without_the_package_says_which_tool_is_missing(monkeypatch):
    monkeypatch.setattr("promptflow._core.tools_manager._get_entry_points_by_group", lambda group: [])
    with pytest.raises(ResolveToolError, match="onebox"):
        example("promptflow/run").main([QUESTION])
    assert TOOL in (EXAMPLES / "promptflow" / "flow.dag.yaml").read_text("utf-8")


@pytest.mark.slow
def test_the_current_release_runs_the_flow_in_an_environment_of_its_own(installed, tmp_path):
    """promptflow 1.18.5 wants starlette < 0.50 and opentelemetry-sdk < 1.39, so the pinned environment has 1.18.1."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    needs = ["promptflow>=1.18.5", "tokenizers", "numpy", "rank-bm25", "regex", "pyyaml", "tree-sitter"]
    needs += ["tree-sitter-python", "tree-sitter-javascript"]  # what onebox.prompt reads; torch is none of it
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the package index has no answer: {done.stderr[-200:]}")
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [python, EXAMPLES / "promptflow" / "run.py", QUESTION]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ines Okafor" in done.stdout and "Petrel" not in done.stdout


def test_without_promptflow_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "promptflow", None)
    for name in [name for name in sys.modules if name.startswith("promptflow.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "onebox.integrations.promptflow")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'onebox\[promptflow\]'"):
        import onebox.integrations.promptflow  # noqa: F401
