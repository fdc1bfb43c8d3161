"""Extracts data from texts as JSON that matches a pydantic model, many texts at once."""

import sys

from pydantic import BaseModel, Field

from octavo import LLM, SamplingParams, StructuredOutputs


class Person(BaseModel):
    name: str = Field(max_length=30)
    city: str = Field(max_length=30)


TEXTS = ["Marie Curie worked in Paris.", "Niels Bohr worked in Copenhagen."]
schema = StructuredOutputs(json=Person.model_json_schema())
params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema)
with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    questions = [
        [{"role": "user", "content": f"Who, and in which city? Answer in JSON. {text}"}]
        for text in TEXTS
    ]
    for output in llm.chat(questions, params):
        print(Person.model_validate_json(output.outputs[0].text))
