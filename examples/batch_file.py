"""A batch file through OpenAI's API: upload it, wait, download the responses.

    $ octavo serve smollm2
    $ python batch_file.py
    completed 2 of 2
    question-0 The capital of France is Paris.
    question-1 The opposite of cold is heat. Heat is a form of energy that can be converted ...

Optional argument: the URL of the server.
"""

import json
import sys
import time

from openai import OpenAI

QUESTIONS = ["Name the capital of France.", "What is the opposite of cold?"]
ENDPOINT = "/v1/chat/completions"
client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)

lines = []
for number, question in enumerate(QUESTIONS):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}]}
    line = {"custom_id": f"question-{number}", "method": "POST", "url": ENDPOINT, "body": body}
    lines.append(json.dumps(line))
file = client.files.create(file=("batch.jsonl", "\n".join(lines).encode()), purpose="batch")

batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts.completed, "of", batch.request_counts.total)

for line in client.files.content(batch.output_file_id).text.splitlines():
    response = json.loads(line)
    message = response["response"]["body"]["choices"][0]["message"]
    print(response["custom_id"], message["content"])
