"""Octavo's texts of speech. Prefix caching is off, so that the warm-up helps no file."""

from speech_work import arguments, measure

from octavo import LLM

options, files = arguments()
llm = LLM("whisper-tiny.en", enable_prefix_caching=False, report=lambda text: None, **options)


def hear(some: list[str]) -> list[str]:
    return [made.text for made in llm.transcribe(some, use_tqdm=False)]


measure(hear, files)
