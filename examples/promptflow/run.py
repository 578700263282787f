"""Runs the flow of this folder, and shows the prompt that a model would read.

    pip install 'onebox[promptflow]'
    python examples/promptflow/run.py "Who kept the lighthouse of Varrow?"

The runtime alone (promptflow-core) is enough; with all of promptflow, `pf flow test --flow examples/promptflow`
does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from passages import passages
from promptflow.executor import FlowExecutor


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    question = " ".join(sys.argv[1:] if argv is None else argv) or "Who kept the lighthouse of Varrow?"
    executor = FlowExecutor.create(Path("flow.dag.yaml"), connections={}, working_dir=Path(__file__).parent)
    documents = [text for _, text, _ in passages()]
    result: dict[str, Any] = executor.exec_line({"question": question, "documents": documents}).output
    counts = result["tokens"]
    print(f"{counts['original_tokens']} -> {counts['tokens']} tokens")
    print(result["prompt"])
    return result


if __name__ == "__main__":
    main()
