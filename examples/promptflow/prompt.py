"""The flow's second step: the prompt that a model would read."""

from promptflow.core import tool


@tool
def prompt(text: str, question: str) -> str:
    return f"{text}\n\nAnswer from the text above. {question}"
