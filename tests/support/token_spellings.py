"""Tokens' bytes, and how a reader is shown them: each byte of a part of a character as `<0xE2>`.
The page's JavaScript and the API's Python have the same rule.
"""

SPELLINGS = [
    (b"hi", "hi"),
    ("€ 😀\ufffd".encode(), "€ 😀\ufffd"),
    (b"\xe2\x82", "<0xE2><0x82>"),
    (b"A\xf0\x9f", "A<0xF0><0x9F>"),
    (b"\x98\x80 b", "<0x98><0x80> b"),
    (b"\xef\xbb\xbf\xff\x00", "\ufeff<0xFF>\x00"),
    (b"", ""),
]
