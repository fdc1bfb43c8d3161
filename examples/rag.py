"""RAG with one server: embeddings find passages, a reranker chooses one, a chat model answers.

    $ octavo serve smollm2 minilm reranker=cross-encoder/ms-marco-MiniLM-L6-v2
    $ python rag.py
    0.75 A ticket costs 12 euros, or 5 euros for students.
    ...
    best: A ticket costs 12 euros, or 5 euros for students.
    A ticket for a student costs 5 euros.

Optional argument: the URL of the server.
"""

import sys

import httpx
from openai import OpenAI

PASSAGES = [
    "The museum is open from 10:00 to 18:00, and closed on Mondays.",
    "A ticket costs 12 euros, or 5 euros for students.",
    "The cafe on the second floor serves lunch until 15:00.",
    "Dogs are not allowed in the museum.",
    "Bus 24 stops in front of the museum.",
]
QUESTION = "How much is a ticket for a student?"
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")

# An application stores the embeddings of its passages; here they are computed with the question's.
data = client.embeddings.create(model="minilm", input=[QUESTION, *PASSAGES]).data
target, *others = (item.embedding for item in data)
scores = [sum(a * b for a, b in zip(target, other, strict=True)) for other in others]
found = sorted(range(len(PASSAGES)), key=lambda index: -scores[index])[:3]
for index in found:
    print(f"{scores[index]:.2f} {PASSAGES[index]}")

body = {"model": "reranker", "query": QUESTION, "documents": [PASSAGES[i] for i in found]}
response = httpx.post(f"{url}/rerank", json=body | {"top_n": 1}).raise_for_status()
best = response.json()["results"][0]["document"]["text"]
print("best:", best)

prompt = f"{best}\n\nAnswer in one short sentence: {QUESTION}"
response = client.chat.completions.create(
    model="smollm2", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=40
)
print(response.choices[0].message.content)
