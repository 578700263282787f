"""SCBench's tasks made from a seed at any length: no download. Takes a task, a length and a counter; gives a session.

The published contexts of key-value, prefix-suffix, variable tracking, math find and the needles are made by programs
too. The others (books, repositories, papers) have stand-ins here: facts in made-up text, generated functions, a report
whose key findings are its summary. A score on a stand-in says whether a context was remembered, not how well a model
reads books.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from onebox.bench.scbench_tasks import TASKS, Session, Turn
from onebox.errors import ConfigError

Count = Callable[[str], int]  # tokens of a text
Make = Callable[[Random, "Room", int], Session]


def _words(text: str, by: str | None = None) -> list[str]:
    return text.split(by)


WORDS = _words(
    "amber birch cedar delta ember flint grove hazel ivory jade karst lotus maple north olive pearl quartz raven "
    "slate thorn umber violet willow yarrow zephyr anchor basalt copper dune fern"
)
PEOPLE = _words("Nora Elias Ruth Tomas Greta Ivan Clara Hugo Mina Oscar Lena Felix Vera Anton Ida Simon Petra Jonas")
FAMILIES = _words("Ashdown Brandt Castell Dorsey Eklund Farrow Grieve Holm Ibsen Jarvis Keller Lunde Marsh Norrby Orr")
TRADES = _words("keep bees,repair clocks,teach chess,build boats,bake bread,draw maps,tune pianos", ",")
TOWN_STARTS = _words("vel mor tar bren cos dun fal gar hol ist jan kel")
TOWN_ENDS = _words("mora stad wick hollow ford bury dale mere")
ADJECTIVES = _words("old quiet narrow bright distant empty careful sudden heavy gentle broken early")
NOUNS = _words("harbour garden letter window bridge ladder market river lantern orchard carriage stair")
VERBS = _words("crossed faced followed outlasted hid recalled warmed touched measured guarded")
PLACES = _words("before noon,after the rain,near the mill,without a word,in the spring,behind the wall", ",")
ENDINGS = {"ex": "(A)", "or": "(B)", "um": "(C)", "ia": "(D)"}
SYLLABLES = _words("ba de fi go lu mar nel pos rin sta tol ven wes zar")
HAN_PEOPLE = _words("林晓梅 陈立国 王海燕 赵子明 孙雅静 周文涛 吴佩兰 郑志强 冯秀英 何建平 高玉兰 罗家辉")
HAN_TOWN_STARTS = _words("青 白 红 金 银 石 竹 松 梅 云")
HAN_TOWN_ENDS = _words("石镇 水村 桥乡 山县 湖镇 林村")
HAN_FILLER = _words("天气很好 路上行人不多 河水流得很慢 远处传来钟声 院子里种着花 晚饭后大家聊天")
ORDINALS = ("", "second ", "third ", "fourth ", "fifth ", "sixth ", "seventh ", "eighth ")
MARGIN = 16  # tokens of an answer beyond its length


class Room:
    """How many tokens a context may have. Raises ConfigError when what must be in it does not fit."""

    def __init__(self, task: str, length: int, count: Count) -> None:
        self.task, self.length, self.count = task, length, count

    def fill(
        self, rng: Random, wanted: Sequence[str], filler: Callable[[], str], joiner: str, *, ordered: bool = False
    ) -> str:
        """`wanted` among as much filler as there is room for, in random order; `ordered` keeps theirs."""
        need = sum(self.count(joiner + text) for text in wanted)
        if need > self.length:
            raise ConfigError(
                f"{self.task}: {self.length} tokens are too few for {len(wanted)} things to remember, which take "
                f"{need}; ask for a greater length or fewer turns."
            )
        padding: list[str] = []
        while True:
            more = filler()
            need += self.count(joiner + more)
            if need > self.length:
                break
            padding.append(more)
        places = sorted(rng.sample(range(len(padding) + len(wanted)), len(wanted)))
        kept = list(wanted)
        if not ordered:
            rng.shuffle(kept)
        out, rest = [], iter(padding)
        for at in range(len(padding) + len(kept)):
            if places and at == places[0]:
                places.pop(0)
                out.append(kept.pop(0))
            else:
                out.append(next(rest))
        return joiner.join(out)

    def limit(self, answer: str) -> int:
        """Tokens an answer may have: those of the right one, and some more."""
        return self.count(answer) * 3 // 2 + MARGIN


class Fresh:
    """Draws that never repeat. Raises ConfigError when there are no more."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self.draw, self.seen = draw, set[str]()

    def __call__(self) -> str:
        for _ in range(1000):
            found = self.draw()
            if found not in self.seen:
                self.seen.add(found)
                return found
        raise ConfigError("a context of this length needs more different names than there are; ask for a shorter one.")


def make(task: str, length: int, turns: int, count: Count, *, seed: int = 0, index: int = 0) -> Session:
    """Session `index` of a task whose context has at most `length` tokens by `count`, and nearly as many."""
    if turns < 1:
        raise ConfigError(f"turns must be at least 1, got {turns}.")
    if task not in MAKERS:
        raise ConfigError(f"task {task!r} is not known. Known: {', '.join(TASKS)}.")
    made = MAKERS[task](Random(f"{task} {seed} {index}"), Room(task, length, count), turns)
    return replace(made, id=str(index))


def sentence(rng: Random) -> str:
    a, b = rng.sample(NOUNS, 2)
    words = (rng.choice(ADJECTIVES), a, rng.choice(VERBS), rng.choice(ADJECTIVES), b, rng.choice(PLACES))
    return "The {} {} {} the {} {} {}.".format(*words)


def _turn(room: Room, task: str, question: str, answer: str | int | tuple[str, ...], **more: object) -> Turn:
    turn = Turn(task, question, answer, 1, **more)  # type: ignore[arg-type]
    return Turn(task, question, answer, room.limit(turn.gold), **more)  # type: ignore[arg-type]


def _key(rng: Random) -> str:
    return f"{rng.choice(WORDS)}-{rng.choice(WORDS)}-{rng.randrange(10_000):04}"


def _pairs(rng: Random, room: Room, asked: int) -> tuple[str, list[tuple[str, str]]]:
    """A JSON object of random keys and numbers, and the pairs that will be asked for."""
    key, value = Fresh(lambda: _key(rng)), Fresh(lambda: str(rng.randrange(10**6, 10**7)))

    def line() -> str:
        return f" {json.dumps(key())}: {json.dumps(value())}"

    wanted = [line() for _ in range(asked)]
    text = "{\n" + room.fill(rng, wanted, line, ",\n") + "\n}"
    pairs: list[tuple[str, str]] = [json.loads("{" + w + "}").popitem() for w in wanted]
    return text, pairs


def key_values(rng: Random, room: Room, turns: int) -> Session:
    text, pairs = _pairs(rng, room, turns)
    asked = tuple(_turn(room, "scbench_kv", f'What is the value of the key "{key}"?', value) for key, value in pairs)
    return Session("", "scbench_kv", text, asked)


def prefix_suffix(rng: Random, room: Room, turns: int) -> Session:
    """Every string asked for has neighbours that share its beginning, or its end, but not both."""

    def letters(n: int) -> str:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))

    ends = Fresh(lambda: letters(4))
    wanted = [(ends(), letters(6), ends()) for _ in range(turns)]
    strings = [first + middle + last for first, middle, last in wanted]
    strings += [first + letters(6) + ends() for first, _, _ in wanted]
    strings += [ends() + letters(6) + last for _, _, last in wanted]
    text = room.fill(rng, strings, lambda: ends() + letters(6) + ends(), "\n")
    asked = tuple(
        _turn(
            room,
            "scbench_prefix_suffix",
            f'Which string in the list begins with "{first}" and ends with "{last}"?',
            first + middle + last,
        )
        for first, middle, last in wanted
    )
    return Session("", "scbench_prefix_suffix", text, asked)


def variables(rng: Random, room: Room, turns: int, hops: int = 3) -> Session:
    """Chains of assignments in their order; each question is about the value of one chain."""
    name = Fresh(lambda: "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5)))
    value = Fresh(lambda: str(rng.randrange(10_000, 100_000)))
    chains = [(value(), tuple(name() for _ in range(hops))) for _ in range(turns)]
    lines = [[f"VAR {n[0]} = {v}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(n))] for v, n in chains]
    mixed, waiting = [], [list(chain) for chain in lines]
    while waiting:
        chain = rng.choice(waiting)
        mixed.append(chain.pop(0))
        waiting = [c for c in waiting if c]
    text = room.fill(rng, mixed, lambda: sentence(rng), "\n", ordered=True)
    question = "Find all variables that are assigned the value {}. Which are they?"
    asked = tuple(_turn(room, "scbench_vt", question.format(v), names) for v, names in chains)
    return Session("", "scbench_vt", text, asked)


def math_find(rng: Random, room: Room, turns: int) -> Session:
    """Order statistics of a list of different numbers."""
    number = Fresh(lambda: str(rng.randrange(1, 1_000_000)))
    numbers = [int(n) for n in room.fill(rng, [number() for _ in range(2 * turns + 1)], number, ", ").split(", ")]
    if len(numbers) % 2 == 0:
        numbers.pop()
    ranked = sorted(numbers)
    kinds = [("median", ranked[len(ranked) // 2])]
    for i, ordinal in enumerate(ORDINALS):
        kinds += [(f"{ordinal}largest number", ranked[-1 - i]), (f"{ordinal}smallest number", ranked[i])]
        if len(kinds) > turns:
            break
    if turns > len(kinds):
        raise ConfigError(f"scbench_mf: {turns} turns are too many; {len(kinds)} questions are known.")
    rng.shuffle(kinds)
    question = "What is the {0} of the list? The {0} of the list is"
    asked = tuple(_turn(room, "scbench_mf", question.format(kind), answer) for kind, answer in kinds[:turns])
    return Session("", "scbench_mf", str(numbers), asked)


def many_shot(rng: Random, room: Room, turns: int) -> Session:
    """Made-up words whose ending decides a label; the questions are words that are not among the examples."""

    def stem() -> str:
        return "".join(rng.choice(SYLLABLES) for _ in range(4))

    word = Fresh(lambda: stem() + rng.choice(list(ENDINGS)))
    ending = {end: Fresh(lambda end=end: stem() + end) for end in ENDINGS}  # type: ignore[misc]

    def example(w: str) -> str:
        return f"Word: {w}\nClass: {ENDINGS[w[-2:]]}"

    each = [example(ending[end]()) for end in ENDINGS]  # every class is seen
    text = room.fill(rng, each, lambda: example(word()), "\n\n")
    asked: list[Turn] = []
    while len(asked) < turns:
        w = word()
        if w not in text:
            asked.append(_turn(room, "scbench_many_shot", f"Word: {w}\nClass:", ENDINGS[w[-2:]]))
    return Session("", "scbench_many_shot", text, tuple(asked))


def _facts(rng: Random, turns: int) -> list[tuple[str, str, str]]:
    """(name, trade, town), all names and towns different."""
    name = Fresh(lambda: f"{rng.choice(PEOPLE)} {rng.choice(FAMILIES)}")
    town = Fresh(lambda: (rng.choice(TOWN_STARTS) + rng.choice(TOWN_ENDS)).capitalize())
    return [(name(), rng.choice(TRADES), town()) for _ in range(turns)]


def _stated(name: str, trade: str, town: str) -> str:
    verb, what = trade.split(" ", 1)
    return f"{name} {verb}{'es' if verb.endswith('ch') else 's'} {what} in {town}."


def _asked_where(name: str, trade: str) -> str:
    return f"Where does {name} {trade}?"


def questions(rng: Random, room: Room, turns: int) -> Session:
    facts = _facts(rng, turns)
    text = room.fill(rng, [_stated(*fact) for fact in facts], lambda: sentence(rng), " ")
    asked = tuple(_turn(room, "scbench_qa_eng", _asked_where(name, trade), town) for name, trade, town in facts)
    return Session("", "scbench_qa_eng", text, asked)


def choices(rng: Random, room: Room, turns: int) -> Session:
    """Options are towns of the text, so that having seen a word is not enough."""
    facts = _facts(rng, max(turns, 4))
    text = room.fill(rng, [_stated(*fact) for fact in facts], lambda: sentence(rng), " ")
    asked = []
    for name, trade, town in facts[:turns]:
        options = [town, *rng.sample([t for _, _, t in facts if t != town], 3)]
        rng.shuffle(options)
        question = _asked_where(name, trade)
        asked.append(_turn(room, "scbench_choice_eng", question, town, options=tuple(options)))
    return Session("", "scbench_choice_eng", text, tuple(asked))


def chinese_questions(rng: Random, room: Room, turns: int) -> Session:
    town = Fresh(lambda: rng.choice(HAN_TOWN_STARTS) + rng.choice(HAN_TOWN_ENDS))
    name = Fresh(lambda: rng.choice(HAN_PEOPLE))
    facts = [(name(), town()) for _ in range(turns)]
    text = room.fill(rng, [f"{n}住在{t}。" for n, t in facts], lambda: f"{rng.choice(HAN_FILLER)}。", "")
    asked = tuple(_turn(room, "scbench_qa_chn", f"问题：{n}住在哪里？", t) for n, t in facts)
    return Session("", "scbench_qa_chn", text, asked)


def _finding(rng: Random) -> str:
    words = (rng.choice(WORDS), rng.choice(NOUNS), rng.randrange(11, 99), rng.choice(WORDS), rng.choice(ADJECTIVES))
    return "Finding: {} {} rose by {} percent where {} stayed {}.".format(*words)


def _report(rng: Random, room: Room, parts: int, hidden: Sequence[str]) -> tuple[str, list[str]]:
    """A report in parts with two findings each, `hidden` sentences somewhere in it, and each part's findings."""
    finding = Fresh(lambda: _finding(rng))
    found = [(finding(), finding()) for _ in range(parts)]
    places = [rng.randrange(parts) for _ in hidden]
    text = []
    for i, pair in enumerate(found):
        head = f"Part {i + 1}"
        mine = [*pair, *(h for h, place in zip(hidden, places, strict=True) if place == i)]
        share = Room(room.task, room.length // parts - room.count(head + "\n\n\n"), room.count)
        text.append(f"{head}\n" + share.fill(rng, mine, lambda: sentence(rng), "\n", ordered=True))
    return "\n\n".join(text), ["\n".join(pair) for pair in found]


def _summary_turn(room: Room, part: int, findings: str) -> Turn:
    return _turn(
        room, "scbench_summary", f"List the findings of part {part}, one a line, as they are written.", findings
    )


def summary(rng: Random, room: Room, turns: int) -> Session:
    text, found = _report(rng, room, turns, ())
    asked = tuple(_summary_turn(room, i + 1, findings) for i, findings in enumerate(found))
    return Session("", "scbench_summary", text, tuple(rng.sample(asked, turns)))


def summary_with_needles(rng: Random, room: Room, turns: int) -> Session:
    """Summaries and numbers in turn."""
    name, number = Fresh(lambda: rng.choice(WORDS)), Fresh(lambda: str(rng.randrange(10**5, 10**6)))
    needles = [(name(), number()) for _ in range(turns // 2)]
    hidden = [f"The special magic number for {n} is {v}." for n, v in needles]
    text, found = _report(rng, room, turns - len(needles), hidden)
    asked = [_summary_turn(room, i + 1, findings) for i, findings in enumerate(found)]
    question = "What is the special magic number for {} in the text? Answer with the number alone."
    for i, (n, v) in enumerate(needles):
        asked.insert(2 * i + 1, _turn(room, "scbench_passkey", question.format(n), v))
    return Session("", "scbench_summary_with_needles", text, tuple(asked))


def _function(rng: Random, name: str) -> tuple[str, str]:
    """A function and what it does in words; the constants tell it from every other."""
    items, factor, least, added = rng.choice(NOUNS), rng.randrange(2, 99), rng.randrange(100, 999), rng.randrange(100)
    how, fold = rng.choice((("adds up", "total += scaled"), ("keeps the largest of", "total = max(total, scaled)")))
    code = f"""def {name}({items}s):
    total = {added}
    for {items} in {items}s:
        scaled = {items} * {factor}
        if scaled > {least}:
            {fold}
    return total"""
    what = f"starts from {added}, multiplies every {items} by {factor}, and {how} what is above {least}"
    return code, f"Which function {what}? Repeat it unchanged in a block of ```."


def _code(rng: Random, room: Room, asked: int) -> tuple[str, list[Turn]]:
    name = Fresh(lambda: f"{rng.choice(VERBS)}_{rng.choice(WORDS)}_{rng.randrange(100)}")
    wanted = [(n := name(), *_function(rng, n)) for _ in range(asked)]
    text = room.fill(rng, [code for _, code, _ in wanted], lambda: _function(rng, name())[0], "\n\n\n")
    turns = [_turn(room, "scbench_repoqa", what, code, name=n) for n, code, what in wanted]
    return f"```python\n{text}\n```", turns


def functions(rng: Random, room: Room, turns: int) -> Session:
    text, asked = _code(rng, room, turns)
    return Session("", "scbench_repoqa", text, tuple(asked), "python", f"synthetic {rng.randrange(10**9)}")


def functions_and_key_values(rng: Random, room: Room, turns: int) -> Session:
    """Code and then a JSON object, asked about in turn."""
    half = Room(room.task, room.length // 2, room.count)
    code, asked = _code(rng, half, turns - turns // 2)
    data, pairs = _pairs(rng, half, turns // 2)
    for i, (key, value) in enumerate(pairs):
        asked.insert(2 * i + 1, _turn(room, "scbench_kv", f'What is the value of the key "{key}"?', value))
    text, repo = f"{code}\n\n{data}", f"synthetic {rng.randrange(10**9)}"
    return Session("", "scbench_repoqa_and_kv", text, tuple(asked), "python", repo)


MAKERS: dict[str, Make] = {
    "scbench_kv": key_values,
    "scbench_prefix_suffix": prefix_suffix,
    "scbench_vt": variables,
    "scbench_repoqa": functions,
    "scbench_qa_eng": questions,
    "scbench_qa_chn": chinese_questions,
    "scbench_choice_eng": choices,
    "scbench_mf": math_find,
    "scbench_many_shot": many_shot,
    "scbench_summary": summary,
    "scbench_summary_with_needles": summary_with_needles,
    "scbench_repoqa_and_kv": functions_and_key_values,
}
