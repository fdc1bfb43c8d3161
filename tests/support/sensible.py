"""Judges whether an example's answer is one that a reader would call sensible.

It is text in a natural language, it does not repeat itself, it ended by itself, and it has the
facts that the prompt asks for. Uses the engine's rule for repetition, on bytes, and a second
measure of its own: the share of different 4-grams of words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from octavo.api.repetition_detection import LOOP

FACTS = {
    r"capital of France|octavo chat$": r"\bParis\b",
    r"opposite of cold": r"\b(hot|warm|heat)",
    r"capital of (Italy|Japan)": r"\b(Rome|Tokyo)\b",
    r"haiku about memory": r"(?i)memor",
    r"Name three colours": r"(?is)(\b(red|blue|green|yellow|orange|purple)\b.*){3}",
    r"weather in Oslo": r'"city": ?"Oslo',
    r"Lovelace lived in London": r'^\{"name": ?"Ada Lovelace", ?"city": ?"London"\}$',
    r"Is water wet": r"^(yes|no)$",
}
"""Patterns of answers, by patterns of the examples that ask for them."""
COMMON_WORDS = (
    "a about all an and are as at be but by can for from has have he her his i in is it its "
    "like made me more my not of on one or our she so that the their there they this to up "
    "was we were what when who will with you your "
)
"""Frequent words, of which every English text has many."""
MIN_WORDS = 20
"""Number of words from which the shares below mean something."""
MIN_COMMON = 0.2
MIN_DIFFERENT = 0.6
"""Least share of different 4-grams; prose has over 0.9, a list with a repeated phrase 0.7."""
FINISHED = {"stop", "length", "tool_calls", "end_turn"}


def faults_of(example: str, answer: str) -> list[str]:
    """Returns what is wrong with an answer, in sentences; nothing if it is sensible."""
    found = [] if answer.strip() else ["the answer is empty"]
    strange = {char for char in answer if not (char.isprintable() or char in "\n\t")}
    if strange or "\ufffd" in answer:
        found.append(f"characters that cannot be printed: {sorted(strange)}")
    codes = list(answer.encode())
    if any(LOOP.matches(codes[:end], 0) for end in range(1, len(codes) + 1)):
        found.append("it repeats a text five times in a row")
    words = re.findall(r"[\w']+", answer.lower())
    if len(words) >= MIN_WORDS:
        grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        if len(set(grams)) < MIN_DIFFERENT * len(grams):
            found.append(f"{len(set(grams))} of {len(grams)} 4-grams are different")
        common = set(COMMON_WORDS.split())
        if sum(word in common for word in words) < MIN_COMMON * len(words):
            found.append("it has few of the frequent words of English")
    for asked, expected in FACTS.items():
        if re.search(asked, example) and not re.search(expected, answer.strip()):
            found.append(f"it does not match {expected}")
    return found


def texts_in(response: Any) -> Iterator[str]:
    """Yields the texts that a model wrote in the JSON of a server's response."""
    if isinstance(response, list):
        for part in response:
            yield from texts_in(part)
    elif isinstance(response, dict):
        for key, value in response.items():
            if key in ("content", "text", "response", "arguments") and isinstance(value, str):
                yield value
            else:
                yield from texts_in(value)


def response_faults(example: str, out: str) -> list[str]:
    """Returns what is wrong with a server's response to `curl`."""
    try:
        response = json.loads(out)
    except ValueError:
        return ["the response is no JSON"]
    if response.get("error"):
        return [f"an error: {response['error']}"]
    reasons = {choice.get("finish_reason") for choice in response.get("choices", ())}
    found = [f"finish_reason {reason!r}" for reason in reasons - FINISHED]
    if "length" in reasons and "max_tokens" not in example:
        found.append("it did not end by itself")
    texts = list(texts_in(response))
    if "choices" in response or texts:
        found += faults_of(example, "\n".join(texts))
    return found
