"""Which replica a request goes to: prompts that begin alike together, new ones apart, nobody to one that is full."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from onebox.integrations.ray_routing import Memory, bounds, marks_of, marks_of_request, order

REPLICAS = ("a", "b", "c")
IDLE = dict.fromkeys(REPLICAS, 0)


def chat(*texts: str, **more: object) -> bytes:
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": turns, **more}).encode()


def first(marks, memory: Memory, loads=IDLE, **more) -> str:
    return order(marks, memory.seen(marks), loads, room=more.pop("room", 8), **more)[0]


def test_marks_stand_for_beginnings():
    text = "".join(random.Random(1).choices("abc ", k=5000))
    longer, other = marks_of(text + "and more"), marks_of("x" + text)
    assert marks_of(text)[:-1] == [mark for mark in longer if mark[0] < 5000][: len(marks_of(text)) - 1]
    assert not {hash for _, hash in other} & {hash for _, hash in longer}
    assert list(bounds(300)) == [256, 300] and list(bounds(0)) == [] and list(bounds(256)) == [256]
    assert marks_of("") == [] and len(marks_of("x" * 4_000_000)) < 50


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Say a."},
        {"prompt": ["Say a.", "Say b."]},
        {"prompt": [1, 2, 3]},
        {"input": "Say a."},
        {"input": [{"role": "user", "content": "Say a."}], "instructions": "Short."},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "system": "Short."},
        {"documents": ["a", "b"]},
    ],
)
def test_every_api_has_a_prompt(body):
    assert marks_of_request(json.dumps(body).encode(), None)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"messages": []}', b'{"model": "m"}', b"[" * 100_000])
def test_what_is_no_prompt_has_no_marks_and_goes_to_the_least_loaded(body):
    marks = marks_of_request(body, None)
    assert marks == [] and order(marks, {}, {"a": 2, "b": 0, "c": 1}, room=8) == ["b", "c", "a"]


def test_tools_and_system_prompt_count_as_the_beginning():
    plain, with_tools = chat("Hi"), chat("Hi", tools=[{"type": "function"}])
    assert marks_of_request(plain, None) != marks_of_request(with_tools, None)
    assert marks_of_request(chat("Hi", temperature=0), None) == marks_of_request(chat("Hi", temperature=1), None)


def test_a_session_goes_to_one_replica_whatever_it_says():
    memory = Memory()
    picked = {first(marks_of_request(chat(f"turn {n}"), "s1"), memory) for n in range(20)}
    assert len(picked) == 1
    spread = Counter(first(marks_of_request(b"", f"session {n}"), memory) for n in range(300))
    assert set(spread) == set(REPLICAS) and min(spread.values()) > 60


def test_a_conversation_stays_where_it_began():
    memory, turns = Memory(), ["x" * 400]
    home = first(marks := marks_of_request(chat(*turns), None), memory)
    memory.note(marks, home)
    for _ in range(8):
        turns += ["an answer " * 10, "a question " * 10]
        marks = marks_of_request(chat(*turns), None)
        assert first(marks, memory) == home
        memory.note(marks, home)


def test_a_short_system_prompt_that_all_share_binds_nobody():
    memory, spread = Memory(), Counter()
    for n in range(120):
        marks = marks_of_request(chat(f"{n} " * 400, system="You are a helpful assistant. " * 10), None)
        spread[home := first(marks, memory)] += 1
        memory.note(marks, home)
    assert min(spread.values()) > 20


def test_a_full_replica_is_passed_over_and_the_one_to_avoid_comes_last():
    memory = Memory()
    marks = marks_of_request(chat("x" * 1000), None)
    memory.note(marks, "b")
    assert first(marks, memory) == "b"
    assert first(marks, memory, {"a": 1, "b": 7, "c": 0}) == "b"
    assert first(marks, memory, {"a": 1, "b": 8, "c": 0}) != "b"
    assert order(marks, memory.seen(marks), {"a": 9, "b": 8, "c": 12}, room=8) == ["b", "a", "c"]
    assert order(marks, memory.seen(marks), IDLE, room=8, avoid=["b"])[-1] == "b"


def test_a_new_prompt_leaves_a_replica_that_is_behind():
    marks = marks_of_request(chat("x" * 1000), None)
    home = first(marks, Memory())
    others = [id for id in REPLICAS if id != home]
    assert first(marks, Memory(), {**IDLE, home: 1}) == home
    assert first(marks, Memory(), {**IDLE, home: 4}) in others


def test_a_replica_that_goes_moves_its_own_prompts_alone():
    prompts = [marks_of_request(chat(f"{n} " * 200), None) for n in range(200)]
    before = [first(marks, Memory()) for marks in prompts]
    after = [first(marks, Memory(), {"a": 0, "b": 0}) for marks in prompts]
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "c")


def test_memory_forgets_what_is_old_and_who_is_gone():
    memory = Memory(limit=4)
    for n in range(4):
        memory.note([(1, f"m{n}")], "a" if n % 2 else "b")
    memory.note([(1, "m0"), (2, "m9")], "a")
    assert memory.seen([(1, "m1")]) == {} and memory.seen([(1, "m0"), (2, "m9")]) == {"a": 2, "b": 1}
    memory.keep(["a"])
    assert memory.seen([(1, "m0")]) == {"a": 1} and memory.seen([(1, "m2")]) == {}


def shares(pick) -> float:
    """The share of requests whose replica had its prompt's beginning: 40 beginnings, 8 requests of each, shuffled."""
    requests = [(story, n) for story in range(40) for n in range(8)]
    random.Random(3).shuffle(requests)
    warm: set[tuple[str, int]] = set()
    hits = 0
    for story, n in requests:
        replica = pick(marks_of_request(chat(f"story {story} " * 100 + f"question {n}"), None))
        hits += (replica, story) in warm
        warm.add((replica, story))
    return hits / len(requests)


def test_shared_beginnings_hit_more_often_than_at_random():
    memory, chance = Memory(), random.Random(5)

    def by_prefix(marks):
        replica = first(marks, memory)
        memory.note(marks, replica)
        return replica

    assert shares(by_prefix) == (320 - 40) / 320  # each beginning is read once
    assert shares(lambda marks: chance.choice(REPLICAS)) < 0.75
