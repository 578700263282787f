"""`<llmlingua rate=0.4 compress=True>...</llmlingua>` in a text. Takes tagged text, gives the text without the tags and
which characters have a rate of their own. Tags nest (the innermost counts); every other `<` is text."""

from __future__ import annotations

import regex

from onebox.errors import PromptError
from onebox.prompt.parts import Region

_TAG = regex.compile(r"<(?P<close>/)?llmlingua(?P<rest>(?=[\s,>])[^<>]{0,200})>", regex.IGNORECASE)
_ATTRIBUTE = regex.compile(r"[\s,]*(?P<name>\w+)\s*=\s*(?P<quote>[\"']?)(?P<value>[\w.+-]+)(?P=quote)(?=[\s,]|$)")


def parse_tags(text: str) -> tuple[str, tuple[Region, ...]]:
    """The text without tags, and its regions: `rate` as given, 1 for `compress=False`. Raises PromptError."""
    out: list[str] = []
    length = at = 0
    regions: list[Region] = []
    open_rates: list[tuple[float | None, int]] = []  # of each open tag: rate, and where it stands in the tagged text
    begin = 0  # where the current stretch of one rate starts in the output

    def close_stretch() -> None:
        rate = open_rates[-1][0] if open_rates else None
        if rate is not None and length > begin:
            regions.append(Region(begin, length, rate))

    for tag in _TAG.finditer(text):
        out.append(text[at : tag.start()])
        length += tag.start() - at
        at = tag.end()
        close_stretch()
        begin = length
        if tag["close"]:
            if tag["rest"].strip():
                raise PromptError(f"</llmlingua> at character {tag.start()}: a closing tag takes no {tag['rest']!r}")
            if not open_rates:
                raise PromptError(f"</llmlingua> at character {tag.start()}: no tag is open there")
            open_rates.pop()
        else:
            outer = open_rates[-1][0] if open_rates else None
            open_rates.append((_rate(tag["rest"], tag.start(), outer), tag.start()))
    if open_rates:
        raise PromptError(f"<llmlingua> at character {open_rates[-1][1]}: never closed; end it with </llmlingua>")
    return "".join([*out, text[at:]]), tuple(regions)


def _rate(attributes: str, place: int, outer: float | None) -> float | None:
    """The rate a tag asks for; None: the prompt's own. A tag that says nothing of it has that of the tag around it."""
    found: dict[str, str] = {}
    at = 0
    while attributes[at:].strip(" ,\t\n\r"):
        match = _ATTRIBUTE.match(attributes, at)
        if match is None or match["name"].lower() not in ("rate", "compress"):
            raise PromptError(
                f"<llmlingua> at character {place}: {attributes[at:].strip()!r} is not rate= or compress="
            )
        found[match["name"].lower()] = match["value"]
        at = match.end()
    compress = found.get("compress", "true").lower()
    if compress not in ("true", "false"):
        raise PromptError(f"<llmlingua> at character {place}: compress={found['compress']} is neither True nor False")
    if compress == "false":
        return 1.0
    if "rate" not in found:
        return None if "compress" in found else outer
    try:
        rate = float(found["rate"])
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise PromptError(f"<llmlingua> at character {place}: rate={found['rate']} is not a number from 0 to 1")
    return rate
