"""Known attack phrases. Takes texts, gives a score by weights set by hand, and the names of the phrases found; also the
ways a model may read a text that a person does not see."""

# ruff: noqa: E501 - a pattern is one line

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

_BLOB = re.compile(r"(?<![A-Za-z0-9+/=_-])(?:[A-Za-z0-9+/_-]{4}){6,2000}(?:[A-Za-z0-9+/_-]{2,3}={0,2})?")
_SPELLED = re.compile(r"(?<!\w)(?:\w[ .\-_*]){5,200}\w(?!\w)")
_LEET = str.maketrans("013457@$", "oieastas")
_LEET_WORD = re.compile(r"(?<!\w)(?=\w*[A-Za-z])(?=\w*[013457@$])[A-Za-z013457@$]{4,40}(?!\w)")


def readings(text: str, *, guess: bool = True) -> list[str]:
    """The text, and the other ways a model may read it, for scoring alone: without invisible characters and look-alike
    forms, base64 runs decoded; with `guess` also letters spelled apart joined and digits for letters undone."""
    plain = unicodedata.normalize("NFKC", text)
    # Tag characters spell ASCII that no reader sees.
    plain = "".join(chr(ord(c) - 0xE0000) if 0xE0020 <= ord(c) <= 0xE007E else c for c in plain)
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    found = [text, plain]
    if guess:
        joined = _SPELLED.sub(lambda run: re.sub(r"[ .\-_*]", "", run.group()), plain)
        found.append(_LEET_WORD.sub(lambda word: word.group().translate(_LEET), joined))
    for blob in _BLOB.finditer(plain):
        body = blob.group().rstrip("=").replace("-", "+").replace("_", "/")
        try:
            decoded = base64.b64decode(body + "=" * (-len(body) % 4), validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            continue
        if decoded.isprintable() and " " in decoded:
            found.append(decoded)
    return list(dict.fromkeys(found))


_OVERRIDE = r"(?:ignore|disregard|forget|override|bypass|skip|overlook|drop|discard|dismiss|neglect|set aside|stop following|do not follow|don['’]t follow|cancel)"
_BEFORE = r"(?:previous|prior|preceding|above|earlier|existing|original|initial|system|your|the|all|any|every|everything|these|those|safety)"
_ORDERS = r"(?:instructions?|prompts?|rules?|guidelines?|directions?|commands?|orders?|polic(?:y|ies)|constraints?|restrictions?|programming|training|context|tasks?|assignments?|filters?|safeguards?)"
_SECRET = r"(?:system|hidden|initial|original|secret|internal|developer|confidential|full|exact|your)"
_SHOW = r"(?:reveal|show|print|repeat|output|display|disclose|leak|expose|dump|tell me|give me|send|share|recite|spell[- ]?check|translate|summari[sz]e|write (?:down|out)|what (?:is|are|was|were))"
#: (name, weight in log-odds, pattern over lower-cased text). Names are what a finding reports.
_PHRASES: tuple[tuple[str, float, re.Pattern[str]], ...] = tuple(
    (name, weight, re.compile(pattern))
    for name, weight, pattern in (
        (
            "override",
            4.5,
            rf"\b{_OVERRIDE}\b(?:\s+\S{{1,12}}){{0,3}}?\s+{_BEFORE}\b(?:\s+\S{{1,14}}){{0,3}}?\s*\b{_ORDERS}",
        ),
        (
            "override",
            4.0,
            rf"\b{_OVERRIDE}\s+(?:everything|anything|all|whatever)\b[^.!?\n]{{0,40}}\b(?:above|before|previously|said|told|told you|earlier|prior|so far|far)\b",
        ),
        (
            "new orders",
            2.5,
            rf"\b(?:new|updated?|real|actual|following|additional)\s+(?:system\s+)?(?:{_ORDERS}|objective|goal|role|persona)\s*(?:[:=]|are\b|is\b|follow)",
        ),
        (
            "new orders",
            2.0,
            r"\b(?:from now on|starting now|henceforth|for the rest of (?:this|the|our) (?:chat|conversation))\b",
        ),
        (
            "prompt theft",
            3.5,
            rf"\b{_SHOW}\b[^.!?\n]{{0,40}}?\b{_SECRET}\s+(?:\w+\s+)?(?:prompts?|instructions?|rules|messages?|configuration|directives?)\b",
        ),
        (
            "prompt theft",
            3.0,
            rf"\b{_SHOW}\b[^.!?\n]{{0,30}}?\b(?:prompts?|instructions?|text|words|everything|message|conversation|sentences?)\b[^.!?\n]{{0,20}}\b(?:above|before|verbatim|word for word|you were given|beginning of)\b",
        ),
        (
            "persona",
            3.0,
            r"\b(?:you are|you're|act as|acting as|become|pretend (?:to be|you are|you're)|play(?:ing)? the role of|roleplay as|simulate|enter|enable|activate|switch to)\b[^.!?\n]{0,50}?\b(?:dan\b|unrestricted|uncensored|unfiltered|jailbr\w+|developer mode|debug mode|admin mode|god mode|evil|no (?:rules|restrictions|limits|filters?|ethic\w*)|without (?:any )?(?:rules|restrictions|limits?|limitations|filters?|ethic\w*|censorship)|amoral)",
        ),
        (
            "persona",
            2.5,
            r"\b(?:do anything now|jailbr(?:eak|oken)|developer mode|sudo mode|opposite mode|no longer bound|free(?:d)? (?:from|of) (?:all|any|your|the) (?:\w+ )?(?:rules|restrictions|limits|constraints|guidelines|policies))\b",
        ),
        (
            "no refusal",
            2.5,
            r"\b(?:never|do not|don['’]t|cannot|must not|without|no)\s+(?:\w+\s+){0,3}?(?:refus\w+|declin\w+|disclaimers?|warnings?|moraliz\w+|apologi[sz]\w+|say(?:ing)? (?:no|you can['’]?t|that you (?:can['’]?t|cannot)))\b",
        ),
        (
            "delimiter",
            3.0,
            r"<\|(?:im_start|im_end|system|endoftext|assistant|user)\|>|\[/?inst\]|<</?sys>>|#{2,}\s*(?:system|instruction|new instruction|end of)\b|(?:^|\n)\s*(?:-{3,}|={3,})\s*(?:end|begin|system|new)\b|</?(?:system|instructions?|user_input|context)>",
        ),
        (
            "fake turn",
            2.0,
            r"(?:^|\n)\s*\[?(?:system|developer|assistant|admin(?:istrator)?)\]?\s*(?:message|prompt|note|override)?\s*:\s",
        ),
        (
            "addressed to a model",
            2.5,
            r"\b(?:attention|note|message|instructions?|reminder|important|hey|dear)\b[^.!?\n]{0,20}\b(?:ai|llm|assistant|language model|chatbot|bot|gpt|agent)s?\b|\b(?:if you are|as) an? (?:ai|llm|language model|assistant|agent)\b[^.!?\n]{0,60}\b(?:must|should|need|please|then|do|send|include|ignore)\b",
        ),
        (
            "exfiltration",
            2.5,
            r"\b(?:send|forward|post|email|e-mail|upload|transmit|exfiltrate|append|encode|leak|submit)\b[^.!?\n]{0,70}\b(?:to|at|into|via)\b[^.!?\n]{0,20}(?:https?://|\b[\w.+-]+@[\w-]+\.\w|\bwebhook|attacker|evil)",
        ),
        (
            "exfiltration",
            2.0,
            r"\b(?:api[ _-]?keys?|passwords?|credentials?|access tokens?|env(?:ironment)? variables?|secret keys?|private keys?|ssh keys?|session tokens?|chat history|conversation history)\b[^.!?\n]{0,60}\b(?:to|into|in|at|here|now|below)\b|!\[[^\]]*\]\(https?://[^)]*[?&]\w+=",
        ),
        (
            "concealment",
            2.0,
            r"\b(?:do not|don['’]t|never|without)\s+(?:mention|tell|inform|reveal|notify|alert|report|disclose|telling|mentioning|informing)\w*\b[^.!?\n]{0,40}\b(?:user|this|anyone|them|it|human|instruction)",
        ),
        (
            "übergehen",
            4.5,
            r"\b(?:vergiss|vergessen sie|ignoriere?n?|missachte\w*)\b[^.!?\n]{0,60}\b(?:anweisung\w*|aufgab\w*|instruktion\w*|regeln?|vorher\w*|bisher\w*|alles|obige\w*)",
        ),
        (
            "ignorer",
            4.5,
            r"\b(?:ignore[rz]?|oublie[zr]?|ignora|olvida|ignorar|olvidar|dimentica)\b[^.!?\n]{0,60}\b(?:instrucci\w+|instruzion\w+|instructions? (?:précéd|antér|ci-dessus)\w*|consignes?|règles?|reglas|regole|précédent\w*|anterior\w*|todo|tout)",
        ),
        ("无视", 4.5, r"(?:忽略|无视|忘记|不要理会)[^。！？\n]{0,20}(?:指令|指示|规则|提示|上文|之前|以上)"),
        (
            "игнорируй",
            4.5,
            r"(?:игнорируй\w*|забудь\w*)[^.!?\n]{0,50}(?:инструкц\w+|указани\w+|правил\w*|предыдущ\w+|все)",
        ),
    )
)
# A question about such words is not an attack.
_TALK_ABOUT = re.compile(
    r"^\s*(?:(?:could|can|would) you )?(?:please )?(?:explain|describe|discuss|define|what (?:is|are|does|do)|how (?:do|does|can|should) (?:i|we|one|you|people|someone|a|an|the)|why|when|should i|is it|are there|in what|tell me about)\b"
)


@dataclass(frozen=True)
class PhraseDetector:
    """Known attack phrases, weighted by hand. Needs no model; blind to wording it does not list."""

    name: str = "phrases"
    threshold: float = 0.5
    bias: float = -3.0

    def score(self, texts: Sequence[str]) -> list[float]:
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> float:
        best = -20.0
        for reading in readings(text):
            total = sum({name: weight for name, weight, _ in self.matches(reading)}.values())
            if total and _TALK_ABOUT.match(reading.lower()):
                total -= 1.5
            best = max(best, self.bias + total)
        return _sigmoid(best)

    @staticmethod
    def matches(text: str) -> list[tuple[str, float, tuple[int, int]]]:
        """(name, weight, characters) of every phrase in the text."""
        lowered = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)  # lengths must not change
        return [
            (name, weight, found.span()) for name, weight, pattern in _PHRASES for found in pattern.finditer(lowered)
        ]


def _sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value)) if value >= 0 else exp(value) / (1 + exp(value))


def phrase_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for reading in readings(text) for name, _, _ in PhraseDetector.matches(reading)))
