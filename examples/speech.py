"""Transcribe an audio file (WAV, FLAC, OGG, MP3) with timestamps.

    $ pip install 'octavo[audio]'
    $ python speech.py speech.wav

Optional second argument: the model.
"""

import sys

from octavo import LLM

if len(sys.argv) < 2:
    sys.exit("usage: python speech.py FILE [MODEL]")
with LLM(model=sys.argv[2] if len(sys.argv) > 2 else "whisper-tiny.en") as llm:
    (transcript,) = llm.transcribe(sys.argv[1], timestamps=True)
    for segment in transcript.segments:
        print(f"{segment.start_s:6.2f} s {segment.text}")
