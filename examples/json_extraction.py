"""Extract data from texts as JSON that matches a pydantic model, many texts in one batch.

    $ python json_extraction.py
    name='Marie Curie' city='Paris'
    name='Wolfgang Amadeus Mozart' city='Vienna'
    name='Isaac Newton' city='Cambridge'

Optional argument: the model.
"""

import sys

from pydantic import BaseModel, Field

from octavo import LLM, SamplingParams, StructuredOutputs

TEXTS = [
    "Marie Curie worked in Paris.",
    "In Vienna lived a composer, Wolfgang Amadeus Mozart.",
    "Isaac Newton studied in Cambridge.",
]


class Person(BaseModel):
    name: str = Field(max_length=30)
    city: str = Field(max_length=30)


with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    schema = StructuredOutputs(json=Person.model_json_schema())
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema)
    chats = [
        [{"role": "user", "content": f"Extract the name and the city as JSON: {text}"}]
        for text in TEXTS
    ]
    for output in llm.chat(chats, params):
        print(Person.model_validate_json(output.outputs[0].text))
