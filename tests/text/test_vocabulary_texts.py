"""A token is the only one where its bytes are forced and no other token could begin or continue
them.
"""

import pytest

from octavo.text.grammar.vocabulary import VocabularyTexts

TOKENS = [b"a", b"b", b"ab", b"c", b"cd", b"cde", b"xy", b"xyz", b"e", b"e", b"", b"</s>"]
END = 11


@pytest.mark.parametrize(
    ("forced", "legal", "only"),
    [
        (b"b", (), 1),
        (b"ba", (), 1),
        (b"a", (), 0),
        (b"a", (2,), None),  # "ab" may follow as well
        (b"ab", (), None),  # "a", or "ab" at once
        (b"c", (4, 5), None),
        (b"c", (), 3),
        (b"cde", (), None),
        (b"xy", (), 6),
        (b"x", (7,), 7),  # no token is "x" alone
        (b"x", (6, 7), None),
        (b"e", (), None),  # two tokens have this text
        (b"q", (), None),
        (b"\xff[11]", (), END),
        (b"\xff[11]ab", (), END),
        (b"b\xff[11]", (), 1),
    ],
)
def test_the_only_token(forced, legal, only):
    texts = VocabularyTexts(TOKENS, [END])
    assert texts.only_token(forced, lambda token_id: token_id in legal) == only
