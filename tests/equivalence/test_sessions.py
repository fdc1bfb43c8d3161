"""Named sessions: what follows a restored session is bitwise what an uninterrupted engine computes,
and a session that does not belong to the engine is rejected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, LoRARequest
from octavo.api.errors import InvalidRequest, SessionNotFound
from tests.support.llm_tools import GREEDY, fingerprint, make_llm, prompts_of
from tests.support.peft_adapters import save_adapter
from tests.support.tiny_images import picture, seeing_model
from tests.support.tiny_models import tiny_model

PROMPT = prompts_of(130)[0]


def make(folder: Path, family: str = "llama", **options) -> LLM:
    return make_llm(family, **{"backend": "native", "prefix_cache_dir": str(folder), **options})


def converse(llm: LLM, **request) -> tuple[list[int], list]:
    """Returns the tokens after a first question, and what follows them."""
    (first,) = llm.generate(PROMPT, GREEDY, **request)
    tokens = [*PROMPT, *first.outputs[0].token_ids]
    (second,) = llm.generate(tokens, GREEDY, **request)
    return tokens, fingerprint(second)


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        ("llama", "auto"),
        ("gemma3_text", "auto"),
        ("granitemoehybrid", "auto"),
        ("qwen3", "k8v4"),
        ("llama", "int4"),
    ],
)
def test_a_restored_session_continues_bitwise(tmp_path, family, kv_cache_dtype):
    options = {"kv_cache_dtype": kv_cache_dtype}
    with make_llm(family, backend="native", **options) as llm:
        tokens, expected = converse(llm)
    with make(tmp_path, family, **options) as llm:
        converse(llm)
        saved = llm.sessions.save("talk", llm.compute_prefix(tokens))
        assert saved.num_tokens == 128 and saved.num_bytes > 0
    with make(tmp_path, family, **options) as llm:
        restored = llm.sessions.restore("talk")
        assert restored.num_loaded == restored.session.num_tokens == 128
        (output,) = llm.generate(tokens, GREEDY)
        assert output.num_cached_tokens == 128 and fingerprint(output) == expected
        assert llm.get_metrics().connector.num_not_fetched == 0


def test_sessions_with_images(tmp_path):
    options = {"max_model_len": 512, "max_num_seqs": 4, "threads": 1, "dtype": "float32"}
    parts = [{"type": "image", "image": picture(0)}, {"type": "text", "text": "What is it?"}]
    question = [{"role": "user", "content": parts}]
    path = str(seeing_model("qwen2_vl").path)
    with LLM(path, prefix_cache_dir=str(tmp_path), **options) as llm:
        (expected,) = llm.chat(question, GREEDY, use_tqdm=False)
        saved = llm.sessions.save("picture", llm.compute_prefix(llm.chat_prompt(question)))
        assert saved.num_tokens > 16 and saved.prefix.media
    with LLM(path, prefix_cache_dir=str(tmp_path), **options) as llm:
        assert llm.sessions.restore("picture").num_loaded == saved.num_tokens
        (output,) = llm.chat(question, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == saved.num_tokens
        assert fingerprint(output)[0] == fingerprint(expected)[0]


def test_sessions_of_an_adapter(tmp_path):
    def adapter(seed: int) -> LoRARequest:
        path = save_adapter(tiny_model("llama"), tmp_path / f"a{seed}", seed=seed, r=2)
        return LoRARequest("style", seed + 1, str(path))

    own, other = adapter(0), adapter(1)
    with make(tmp_path / "cache", enable_lora=True) as llm:
        tokens, expected = converse(llm, lora_request=own)
        ref = llm.frontend.adapter(own)
        prefix = llm.compute_prefix(tokens, lora_request=own)
        llm.sessions.save("styled", prefix, adapter=ref)
    with make(tmp_path / "cache", enable_lora=True) as llm:
        with pytest.raises(InvalidRequest, match="got adapter none, expected adapter style"):
            llm.sessions.restore("styled")
        with pytest.raises(InvalidRequest, match="adapter style of other weights"):
            llm.sessions.restore("styled", llm.frontend.adapter(other))
        llm.sessions.restore("styled", llm.frontend.adapter(own))
        (output,) = llm.generate(tokens, GREEDY, lora_request=own)
        assert output.num_cached_tokens == 128 and fingerprint(output) == expected


@pytest.mark.parametrize(
    ("options", "different"),
    [
        ({"model_path": "seed"}, "different weights, expected"),
        ({"kv_cache_dtype": "int8"}, "different layouts, expected"),
    ],
)
def test_a_session_of_other_weights_or_layout_is_rejected(tmp_path, options, different):
    with make(tmp_path) as llm:
        llm.sessions.save("talk", llm.compute_prefix(PROMPT))
    if "model_path" in options:
        options = {"model_path": tiny_model("llama", seed=1).path}
    with make(tmp_path, **options) as llm:
        for reject in (llm.sessions.restore, llm.sessions.delete):
            with pytest.raises(InvalidRequest, match=different):
                reject("talk")
        assert [one.name for one in llm.sessions.list()] == ["talk"]


def test_missing_blocks_are_reported(tmp_path):
    with make(tmp_path) as llm:
        llm.sessions.save("talk", llm.compute_prefix(PROMPT))
    sorted(tmp_path.rglob("*.kv"))[3].unlink()
    with make(tmp_path) as llm:
        with pytest.raises(InvalidRequest, match="of its 128 tokens are stored; the other blocks"):
            llm.sessions.restore("talk")
        llm.sessions.save("talk", llm.compute_prefix(PROMPT))
        assert llm.sessions.restore("talk").num_loaded == 128


def test_deleted_sessions_leave_the_blocks_of_others_pinned(tmp_path):
    longer = PROMPT + PROMPT[:32]
    with make(tmp_path, prefix_cache_size="1MiB") as llm:
        for name, prompt in (("short", PROMPT), ("long", longer), ("short", PROMPT[:64])):
            llm.sessions.save(name, llm.compute_prefix(prompt))
        assert llm.sessions.find("short").num_tokens == 64
        llm.sessions.delete("short")
        with pytest.raises(SessionNotFound, match="no session 'short'"):
            llm.sessions.delete("short")
        assert [one.name for one in llm.sessions.list()] == ["long"]
        num_pinned = len(llm.frontend.client.core.scheduler.blocks.connector.pins)
        assert num_pinned == len(longer) // 16
        llm.sessions.delete("long")
        assert not llm.frontend.client.core.scheduler.blocks.connector.pins


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129, "a\n"])
def test_names_stay_in_the_directory(tmp_path, name):
    with make(tmp_path, model_path=None) as llm, pytest.raises(InvalidRequest, match="name: got"):
        llm.sessions.restore(name)


def test_without_a_directory_there_are_no_sessions():
    message = "sessions require prefix_cache_dir"
    with make_llm(backend="native") as llm, pytest.raises(InvalidRequest, match=message):
        llm.sessions.list()
