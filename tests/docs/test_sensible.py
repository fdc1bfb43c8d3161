"""The judge of the examples' answers finds what a reader would call broken, and nothing else."""

import json

import pytest

from tests.support.sensible import faults_of, response_faults

PROSE = "The sea is deep and cold, and the ships that cross it are small. They carry what we need."
LOOP = "The sea is deep. " + "And the ships are small. " * 6
NONSENSE = (
    "zorble quix " * 3
    + "frand plonk vistor gramble ostin quell drabbit mantro silver kopt ister plom gadden frell"
)
ROWS = "\n".join(f"{number} times 7 is {number * 7}" for number in range(1, 12))


@pytest.mark.parametrize("answer", [PROSE, "Paris.", '{"a": 1}', "Ünïcode, 東京 and 🙂.", ROWS])
def test_sensible_answers(answer):
    assert faults_of("any prompt", answer) == []


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (" \n", "empty"),
        (LOOP, "five times in a row"),
        ("good bad " * 12, "4-grams"),
        (NONSENSE, "frequent words"),
        ("half a \ufffd", "cannot be printed"),
        ("a\x00b", "cannot be printed"),
    ],
)
def test_broken_answers(answer, fault):
    assert any(fault in each for each in faults_of("any prompt", answer))


@pytest.mark.parametrize(
    ("example", "right", "wrong"),
    [
        ("Name the capital of France.", "It is Paris.", "It is Lyon."),
        ("Name three colours.", "Red, green and blue.", "Red and green."),
        ("lived in London", '{"name": "Ada Lovelace", "city": "London"}', '{"name": "Ada"}'),
    ],
)
def test_facts(example, right, wrong):
    example = example.replace("lived in", "Ada Lovelace lived in")
    assert faults_of(example, right) == [] and faults_of(example, wrong) != []


def test_responses():
    def response(reason, text):
        return json.dumps({"choices": [{"finish_reason": reason, "message": {"content": text}}]})

    assert response_faults("curl", response("stop", PROSE)) == []
    assert response_faults("curl", response("length", PROSE)) == ["it did not end by itself"]
    assert response_faults('"max_tokens": 5', response("length", PROSE)) == []
    assert response_faults("curl", response("repetition", PROSE)) != []
    assert response_faults("curl", response("stop", "")) == ["the answer is empty"]
    assert response_faults("curl", '{"error": {"message": "no"}}') != []
    assert response_faults("curl", "<html>") == ["the response is no JSON"]
    assert response_faults("curl", '{"object": "list", "data": []}') == []
