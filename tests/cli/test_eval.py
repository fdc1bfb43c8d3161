"""`octavo eval` without lm-eval; tests/clients runs it with lm-eval."""

import sys


def test_without_lm_eval_it_names_the_extra(octavo, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ended = octavo("eval", "smollm2", "--tasks=arc_easy")
    assert ended.code == 2 and not ended.out
    assert "requires lm-eval" in ended.err and "hint: pip install 'octavo[eval]'" in ended.err
