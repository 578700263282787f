"""Which replica a request goes to: the one that has seen how it begins, as long as it has room. Needs no Ray.

A prompt is known by marks: hashes of its first 256 characters, of its first 320, and so on, and of all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

FIRST_CHARS, GROWTH = 256, 1.25
REMEMBERED = 100_000  # marks: about 3,000 prompts of 100,000 tokens, 20 MB
Mark = tuple[int, str]  # how many characters, and their hash


def bounds(n: int) -> Iterator[int]:
    """Where marks of a text of `n` characters stand; the last one is its end."""
    at = FIRST_CHARS
    while at < n:
        yield at
        at = int(at * GROWTH)
    if n:
        yield n


def marks_of(text: str) -> list[Mark]:
    """A hash for each beginning of the text, in time proportional to its length."""
    running, made, begun = hashlib.blake2b(digest_size=8), list[Mark](), 0
    for at in bounds(len(text)):
        running.update(text[begun:at].encode("utf-8", "surrogatepass"))
        made.append((at, running.copy().hexdigest()))
        begun = at
    return made


def prompt_of(body: Mapping[str, Any]) -> str:
    """The prompt of a request of any of the APIs, as a text whose beginning is the prompt's; "" where there is none."""
    prompt = next((body[name] for name in ("messages", "prompt", "input", "documents") if body.get(name)), None)
    if prompt is None:
        return ""
    head = [body.get(name) for name in ("tools", "system", "instructions")]
    parts = prompt if isinstance(prompt, list) else [prompt]
    return "\n".join(json.dumps(part) for part in [*head, *parts] if part is not None)


def marks_of_request(body: bytes, session: str | None) -> list[Mark]:
    """The marks that decide: the session's where one is named, else the prompt's. Any bytes are taken."""
    if session:
        return [(1, "session " + hashlib.blake2b(session.encode("utf-8", "replace"), digest_size=8).hexdigest())]
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return marks_of(prompt_of(value)) if isinstance(value, dict) else []


class Memory:
    """Which replicas were sent what: the newest `limit` marks."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, marks: Iterable[Mark], replica: str) -> None:
        for _, hash in marks:
            self._seen.setdefault(hash, set()).add(replica)
            self._seen.move_to_end(hash)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def seen(self, marks: Sequence[Mark]) -> dict[str, int]:
        """How many characters of the prompt's beginning each replica knows; those that know none are left out."""
        found: dict[str, int] = {}
        for chars, hash in marks:
            found |= dict.fromkeys(self._seen.get(hash, ()), chars)
        return found

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        for hash, known in list(self._seen.items()):
            known.intersection_update(replicas)
            if not known:
                del self._seen[hash]


def weight(key: str, replica: str) -> bytes:
    """How much a key is drawn to a replica: a replica that comes or goes moves its own keys alone."""
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()


def order(
    marks: Sequence[Mark],
    seen: Mapping[str, int],
    loads: Mapping[str, int],
    *,
    room: int,
    avoid: Collection[str] = (),
) -> list[str]:
    """The replicas of `loads` (requests each has), the one to be asked first at the front.

    In front stand those with room (fewer than `room` requests), of them the one that knows most of the prompt, if that
    is half of it or more. What nobody knows goes where the hash of its first half says, unless that one has a quarter
    of `room` more to do than another; so several routers agree, and new prompts spread. Those without room follow, the
    least loaded first, and those to avoid at the end.
    """
    total = marks[-1][0] if marks else 0
    key = next((hash for chars, hash in marks if 2 * chars >= total), "")
    step = max(room // 4, 1)
    least = min(loads.values(), default=0)

    def place(replica: str) -> tuple[bool, int, int, int, int, bytes]:
        load, known = loads[replica], seen.get(replica, 0)
        full, behind = load >= room, (load - least) // step
        weighed = int.from_bytes(weight(key, replica), "big") if key else 0
        return (
            replica in avoid,
            load if full else 0,
            -known if 2 * known >= total else 0,
            behind if key else load,
            -weighed,
            replica.encode(),
        )

    return sorted(loads, key=place)
