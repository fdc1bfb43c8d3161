"""lm-eval's local-completions over a task made here, with the server's own tokenizer: /tokenize,
/detokenize and /tokenizer_info as lm-eval's "remote" backend uses them.
"""

import json

import lm_eval
import pytest
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from octavo.cli.app import run_command
from tests.clients.conftest import MODEL

CHOICES = """task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{label}}}}"
doc_to_choice: [Paris, Rome, Berlin]
metric_list:
  - metric: acc
"""
ROWS = [
    {"country": "France", "label": 0},
    {"country": "Italy", "label": 1},
    {"country": "Germany", "label": 2},
]


@pytest.fixture
def model(base_url):
    return LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model=MODEL,
        tokenizer_backend="remote",
        num_concurrent=1,
        max_length=2048,
        batch_size=2,
    )


def test_a_task_of_choices(model, tmp_path):
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "capitals.yaml").write_text(CHOICES.format(data=tmp_path / "rows.json"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=["capitals"], task_manager=tasks, bootstrap_iters=0, use_cache=None
    )
    assert found["results"]["capitals"]["acc,none"] == 1.0


def test_octavo_eval_scores_a_running_server(server, tmp_path, capsys):
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "capitals.yaml").write_text(CHOICES.format(data=tmp_path / "rows.json"))
    arguments = ["eval", "--tasks=capitals", f"--include-path={tmp_path}", f"--url={server.url}"]
    assert run_command([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capitals"]["acc,none"] == 1.0
    assert run_command([*arguments, "no-such-model"]) == 2
    assert "the server has smollm2" in capsys.readouterr().err
    assert run_command([*arguments, "--threads=2"]) == 2
    assert "threads: got an engine option" in capsys.readouterr().err
    assert run_command(["eval", "--tasks=no-such-task"]) == 2
    assert "lm-eval has no task 'no-such-task'" in capsys.readouterr().err
