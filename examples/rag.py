"""Retrieval with embeddings: finds the passage that answers a question, then asks a chat model.

Needs a server with both models: `octavo serve smollm2 minilm`. A URL may be given.
"""

import sys

from openai import OpenAI

PASSAGES = [
    "A prism refracts light, so that its colours separate.",
    "The Seine flows through Paris, the capital of France.",
    "An octavo is a book of sheets that are folded into eight leaves.",
]
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
question = "Which river flows through the capital of France?"
vectors = client.embeddings.create(model="minilm", input=[question, *PASSAGES]).data
target, *others = (vector.embedding for vector in vectors)
scores = [sum(a * b for a, b in zip(target, other, strict=True)) for other in others]
best = PASSAGES[scores.index(max(scores))]
print("found:", best)
prompt = f"Answer with the help of this text.\n{best}\n\n{question}"
answer = client.chat.completions.create(
    model="smollm2", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=30
)
print(answer.choices[0].message.content)
