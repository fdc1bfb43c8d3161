"""Ask a question about an image, with a vision model.

    $ pip install 'octavo[media]'
    $ python image.py cat.png Qwen/Qwen2.5-VL-3B-Instruct

Optional arguments: the model and the question.
"""

import sys
from pathlib import Path

from octavo import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python image.py IMAGE [MODEL] [QUESTION]")
image = Path(sys.argv[1])
model = sys.argv[2] if len(sys.argv) > 2 else "Qwen/Qwen2.5-VL-3B-Instruct"
question = sys.argv[3] if len(sys.argv) > 3 else "What is in this picture?"

content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
with LLM(model=model) as llm:
    (output,) = llm.chat(
        [{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=80)
    )
    print(len(output.prompt_token_ids), "prompt tokens, with the image")
    print(output.outputs[0].text)
