"""Fill-in-the-middle prompts: the format is found in the vocabulary, and texts stay texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.api.errors import InvalidRequest
from octavo.checkpoint.ports import TokenizerSource
from octavo.text.infill import FORMATS
from octavo.text.tokenizer import TextTokenizer
from tests.support.tiers import examples


def tokenizer(*tokens: str, bos: bool = False) -> TextTokenizer:
    """Returns a tokenizer of bytes with these special tokens, the first of them bos."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate([*tokens, *letters])}, merges=[])
    )
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in tokens])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    source = TokenizerSource(None, special_tokens={"bos_token": tokens[0]} if bos else {})
    return TextTokenizer(made, source, None, adds_bos=bos)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form[1])
def test_each_format_puts_its_tokens_around_the_texts(form):
    name, before_prefix, before_suffix, end = form
    ours = tokenizer(*[one for one in form[1:] if one is not None])
    assert ours.infill_format == name
    text = ours.decode(ours.infill("a b", " c"), skip_special_tokens=False)
    if end is None:
        assert text == f"{before_suffix} c{before_prefix}a b"
    else:
        assert text == f"{before_prefix}a b{before_suffix} c{end}"


def test_the_first_token_comes_before_all():
    ours = tokenizer("<s>", *FORMATS[0][1:], bos=True)
    assert ours.infill("a", "b")[0] == 0


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.sampled_from([*FORMATS[0][1:], "a", " ", "<"]), max_size=4).map("".join))
def test_texts_bring_no_special_token(text):
    ours = tokenizer(*FORMATS[0][1:])
    ids = ours.infill(text, text)
    assert [i for i in ids if i in ours.special_token_ids] == [0, 1, 2]


def test_a_vocabulary_without_the_tokens_is_refused():
    ours = tokenizer("<|fim_prefix|>", "<|fim_suffix|>")
    assert ours.infill_format is None
    with pytest.raises(InvalidRequest, match="suffix: the model's vocabulary has no fill-in"):
        ours.infill("a", "b")
