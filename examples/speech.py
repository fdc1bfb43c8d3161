"""Transcribes a WAV file, given as an argument, with its timestamps. Needs the extra `audio`."""

import sys

from octavo import LLM

if len(sys.argv) < 2:
    print("usage: python examples/speech.py FILE.wav")
else:
    with LLM(model="whisper-tiny.en") as llm:
        (heard,) = llm.transcribe(sys.argv[1], timestamps=True)
        for segment in heard.segments:
            print(f"{segment.start:6.2f} s {segment.text}")
