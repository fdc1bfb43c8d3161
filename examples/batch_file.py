"""A batch file through OpenAI's API: upload, wait, download.

Needs a server: `octavo serve smollm2`. A URL may be given.
"""

import json
import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
questions = ["What is the capital of France?", "What is the opposite of cold?"]
lines = [
    json.dumps(
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": question}]},
        }
    )
    for number, question in enumerate(questions)
]
file = client.files.create(file=("batch.jsonl", "\n".join(lines).encode()), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
for line in client.files.content(batch.output_file_id).text.splitlines():
    response = json.loads(line)
    message = response["response"]["body"]["choices"][0]["message"]["content"]
    print(response["custom_id"], message)
