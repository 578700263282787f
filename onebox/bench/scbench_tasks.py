"""SCBench's twelve tasks (arXiv 2412.10319): what is asked about a shared context, and how an answer is scored.

Scores are those of the paper's code: contained in the answer, share of names, first number equal, letter, F1 over
characters, ROUGE-Lsum, BLEU of a function against its neighbours. Two of its loops run over the characters of a string
where the paper says otherwise (Chinese answers, many-shot labels); here they do as the paper says.
"""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from onebox.errors import ConfigError

Answer = str | int | float | tuple[str, ...]
LETTERS = "ABCD"

# what stands before the context, in our words: the questions of published data are used as they are
INSTRUCTIONS = {
    "scbench_kv": "The JSON object below holds keys and values. Answer with the value of the key that is asked for.",
    "scbench_prefix_suffix": "Below is a list of strings. Answer with the string that begins and ends as asked.",
    "scbench_vt": "The text below assigns variables. Follow the assignments and answer with the names asked for.",
    "scbench_repoqa": "Read the code below. Repeat the function that is described, unchanged, in a block of ```.",
    "scbench_qa_eng": "Read the text below and answer the question in a few words.",
    "scbench_qa_chn": "请阅读下面的文字，用几个字回答问题。",
    "scbench_choice_eng": "Read the text below and answer the question with the letter of the right choice.",
    "scbench_mf": "Below is a list of numbers. Answer with one number.",
    "scbench_many_shot": "Learn from the examples below, then answer in the same way.",
    "scbench_summary": "Read the text below.",
    "scbench_summary_with_needles": "Read the text below and remember the numbers that it hides.",
    "scbench_repoqa_and_kv": "Read the code and the JSON object below.",
}
TASKS = tuple(INSTRUCTIONS)
# tasks that mix two kinds of questions: what a turn's `task` may be
MIXED = {
    "scbench_summary_with_needles": ("scbench_summary", "scbench_passkey"),
    "scbench_repoqa_and_kv": ("scbench_repoqa", "scbench_kv"),
}
# tokens an answer may have, as in the paper's code
MAX_NEW_TOKENS = {
    "scbench_kv": 150,
    "scbench_prefix_suffix": 150,
    "scbench_vt": 30,
    "scbench_repoqa": 1024,
    "scbench_qa_eng": 40,
    "scbench_qa_chn": 40,
    "scbench_choice_eng": 40,
    "scbench_mf": 5,
    "scbench_many_shot": 10,
    "scbench_summary": 200,
}
MIXED_MAX_NEW_TOKENS = {
    ("scbench_summary_with_needles", "scbench_summary"): 800,
    ("scbench_summary_with_needles", "scbench_passkey"): 15,
    ("scbench_repoqa_and_kv", "scbench_repoqa"): 1024,
    ("scbench_repoqa_and_kv", "scbench_kv"): 80,
}
PASS = 0.8  # BLEU from which a repeated function counts


@dataclass(frozen=True)
class Turn:
    """One question. `task` says how it is scored; `name` is the function asked for, where one is."""

    task: str
    input: str
    answer: Answer
    max_tokens: int
    options: tuple[str, ...] = ()
    name: str = ""

    @property
    def question(self) -> str:
        if not self.options:
            return self.input
        return "\n".join((self.input, *(f"{letter}. {o}" for letter, o in zip(LETTERS, self.options, strict=False))))

    @property
    def letter(self) -> str:
        return LETTERS[self.options.index(str(self.answer))]

    @property
    def gold(self) -> str:
        """The answer as a model would say it."""
        if self.options:
            return f"{self.letter}. {self.answer}"
        if self.task == "scbench_repoqa":
            return f"```\n{self.answer}\n```"
        return ", ".join(self.answer) if isinstance(self.answer, tuple) else str(self.answer)


@dataclass(frozen=True)
class Session:
    """A context and the questions about it. `lang` and `repo` are of code."""

    id: str
    task: str
    context: str
    turns: tuple[Turn, ...]
    lang: str = ""
    repo: str = ""

    def opening(self, question: str) -> str:
        """The first message: what to do, the context, a question."""
        return f"{INSTRUCTIONS[self.task]}\n\n{self.context}\n\n{question}"


def max_new_tokens(task: str, kind: str) -> int:
    """The paper's limit for a turn of `kind` in `task`."""
    return MIXED_MAX_NEW_TOKENS[task, kind] if task in MIXED else MAX_NEW_TOKENS[task]


Functions = Mapping[str, Mapping[str, str]]  # repo -> function name -> code


def asked_functions(sessions: Iterable[Session]) -> Functions:
    """The functions that any session asks for, by repository: what an answer is told apart from."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for session in sessions:
        for turn in session.turns:
            if turn.task == "scbench_repoqa":
                found[session.repo][turn.name] = str(turn.answer)
    return found


def score(said: str, turn: Turn, session: Session, functions: Functions) -> float:
    """0 to 1. `functions` as `asked_functions` of all sessions gives them."""
    if turn.task == "scbench_repoqa":
        return float(same_function(said, turn.name, session.lang, functions[session.repo]))
    return SCORES[turn.task](said, turn)


def contained(said: str, turn: Turn) -> float:
    return float(str(turn.answer) in said)


def contained_in_any_case(said: str, turn: Turn) -> float:
    answers = turn.answer if isinstance(turn.answer, tuple) else (str(turn.answer),)
    return float(any(a.upper() in said.upper() for a in answers))


def share_of_names(said: str, turn: Turn) -> float:
    names = turn.answer if isinstance(turn.answer, tuple) else (str(turn.answer),)
    return round(sum(name.lower() in said.lower() for name in names) / len(names), 2)


def first_number(said: str, turn: Turn) -> float:
    found = re.search(r"\d+\.\d+|\d+", said)
    if found is None:
        return 0.0
    if isinstance(turn.answer, float):
        return float(float(found[0]) == turn.answer)
    return float(int(float(found[0])) == int(str(turn.answer)))


def first_integer(said: str, turn: Turn) -> float:
    """A needle: digits equal as text."""
    found = re.search(r"[0-9]+", said)
    return float(found is not None and found[0] == str(turn.answer))


def letter(said: str, turn: Turn) -> float:
    """The first letter if it is one of A to D, what follows "answer is", or the first A to D that stands alone."""
    said = said.strip()
    right = (str(turn.answer), turn.letter)
    if not said:
        return 0.0
    if said[0] in LETTERS:
        return float(said[0] in right)
    if said in right:
        return 1.0
    words = re.sub(r"[\n\"'.,?!{}]", " ", said)
    words = re.sub(" +", " ", words)
    for lead in ("answer is:", "answer:", "answer is", "option is"):
        at = words.find(lead)
        if at >= 0:
            rest = words[at + len(lead) + 1 :]
            return float(any(rest.startswith(r) for r in right)) if rest else 0.0
    alone = next((w for w in words.split() if w in LETTERS), "")
    return float(alone in right)


def _characters(text: str) -> list[str]:
    wide = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～《》「」『』【】〔〕、〃〈〉“”‘’…—"
    return [c for c in text.lower() if not c.isspace() and c not in string.punctuation and c not in wide]


def f1_of_characters(said: str, turn: Turn) -> float:
    """Best over the answers, if there are several."""
    answers = turn.answer if isinstance(turn.answer, tuple) else (str(turn.answer),)
    ours, best = _characters(said), 0.0
    for answer in answers:
        theirs = _characters(answer)
        same = sum((Counter(ours) & Counter(theirs)).values())
        if same:
            best = max(best, 2 * same / (len(ours) + len(theirs)))
    return best


def needed(module: str) -> Any:
    """A module of the extra `scbench`. Raises ConfigError saying how to get it."""
    try:
        return import_module(module)
    except ImportError as e:
        raise ConfigError(f"SCBench's scores need {e.name or module}; pip install 'onebox[scbench]'.") from e


@cache
def _rouge() -> Any:
    return needed("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])


def rouge_lsum(said: str, turn: Turn) -> float:
    return float(_rouge().score(str(turn.answer), said)["rougeLsum"].fmeasure)


SCORES: dict[str, Callable[[str, Turn], float]] = {
    "scbench_kv": contained,
    "scbench_prefix_suffix": contained,
    "scbench_vt": share_of_names,
    "scbench_qa_eng": contained_in_any_case,
    "scbench_qa_chn": f1_of_characters,
    "scbench_choice_eng": letter,
    "scbench_mf": first_number,
    "scbench_many_shot": contained_in_any_case,
    "scbench_summary": rouge_lsum,
    "scbench_passkey": first_integer,
}

# language -> module, its door, the node of a function
GRAMMARS = {
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}


@cache
def _parser(lang: str) -> Any:
    if lang not in GRAMMARS:
        raise ConfigError(f"code in {lang!r} cannot be scored; known languages: {', '.join(GRAMMARS)}.")
    tree_sitter = needed("tree_sitter")
    module, door, _ = GRAMMARS[lang]
    return tree_sitter.Parser(tree_sitter.Language(getattr(needed(module), door)()))


def function_in(said: str, lang: str) -> str:
    """The first function of the first code block that has one; the block; without a block, all of it."""
    blocks = re.findall(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", said.strip(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        code = block.encode()
        waiting = [_parser(lang).parse(code).root_node]
        while waiting:
            node = waiting.pop(0)
            if node.type == GRAMMARS[lang][2]:
                return code[node.start_byte : node.end_byte].decode()
            waiting[:0] = node.children
    return blocks[0] if blocks else said.strip()


def same_function(said: str, name: str, lang: str, candidates: Mapping[str, str]) -> bool:
    """Whether the most similar of `candidates` (name -> code) is the one asked for, by BLEU of PASS or more."""
    bleu = needed("nltk.translate.bleu_score")
    ours = re.split(r"\s+", function_in(said, lang).strip())
    smooth = bleu.SmoothingFunction().method4
    best, best_name = 0.0, ""
    for candidate, code in candidates.items():
        like = float(bleu.sentence_bleu([re.split(r"\s+", code.strip())], ours, smoothing_function=smooth))
        if like > best:
            best, best_name = like, candidate
    return best_name == name and best >= PASS


def mean_by_kind(scored: Sequence[tuple[str, float]]) -> dict[str, float]:
    """(kind of turn, score) -> mean by kind; a task's score is the mean of these."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for kind, value in scored:
        kinds[kind].append(value)
    return {kind: sum(values) / len(values) for kind, values in kinds.items()}
