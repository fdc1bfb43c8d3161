"""Quality of `octavo quantize` on SmolLM2 with its channels shuffled: the rise of perplexity of
each method over fp32's, and in the sample the error that two layers make of another text.

The text judged is the first five windows of Newton's Opticks, the calibration text what the book
has behind them: no token is in both. The plain formula of rounding to nearest costs 19.2%. A text
of another kind serves AWQ as well and GPTQ worse: with this project's documentation in the book's
place GPTQ leaves twice the error.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.cli.quantize import make_recipe
from octavo.models.registry import build_programs
from octavo.quant.making.recipe import Recipe
from octavo.text.tokenizer import load_tokenizer
from octavo.tools.quantize import CalibrationText, calibration_ids, quantize_checkpoint
from octavo.utils.progress import quiet
from octavo.worker.quantizing.calibration_run import CalibrationRun
from tests.quality.test_smollm2 import perplexity_script
from tests.support.shuffled_model import write_shuffled

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

BOOK = Path(__file__).parents[2] / "tests" / "data" / "opticks.txt"
JUDGED_TOKENS = 5 * 1024
OPTIONS: dict[str, Any] = {
    "output_format": "compressed-tensors",
    "bits": None,
    "group": 32,
    "scheme": None,
    "sym": False,
    "desc_act": False,
    "damp_percent": 5.0,
    "keep_sensitive": False,
}
ORDERED: dict[str, Any] = {"method": "gptq", "desc_act": True, "output_format": "gptq"}
PLAIN_RISE = 19.2
"""Percent by which rounding to nearest in groups of 32 raises the perplexity of five windows."""


def recipe(**options: Any) -> Recipe:
    return make_recipe(**(OPTIONS | options))


class Texts(NamedTuple):
    """Files of the two parts of the book."""

    judged: Path
    calibration: Path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    source = open_checkpoint(resolve("smollm2")).tokenizer_source()
    assert source is not None
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(BOOK.read_text(encoding="utf-8"), add_special_tokens=False)
    folder = tmp_path_factory.mktemp("texts")
    parts = Texts(folder / "judged.txt", folder / "calibration.txt")
    for path, part in zip(parts, (ids[:JUDGED_TOKENS], ids[JUDGED_TOKENS:]), strict=True):
        path.write_text(tokenizer.decode(part), encoding="utf-8")
    return parts


def quantized(model: Path, output: Path, chosen: Recipe, text: Path, length: int) -> Path:
    """Quantises a model over at most 16 pieces of a text."""
    checkpoint = open_checkpoint(model)
    texts = CalibrationText(text, 16, length, "smollm2")
    ids = calibration_ids(checkpoint, texts) if chosen.needs_calibration else None
    quantize_checkpoint(checkpoint, chosen, output, ids, quiet)
    return output


def hidden(model: Path, ids: np.ndarray) -> np.ndarray:
    """Computes what the last layer makes of a text."""
    checkpoint = open_checkpoint(model)
    program = build_programs(checkpoint.config)["decoder"]
    run = CalibrationRun(program, WeightReader(checkpoint).load, ids)
    while run.op is not None and run.op.outputs != (program.outputs["logits"],):
        run.advance()
    assert run.op is not None
    return run.rows(run.op.inputs[0])


@pytest.mark.slow
def test_methods_of_two_layers(tmp_path: Path, texts: Texts) -> None:
    """The error over another text is below that of rounding to nearest."""
    model = write_shuffled(tmp_path, num_layers=2)
    judged = CalibrationText(texts.judged, 2, 256, "smollm2")
    ids = calibration_ids(open_checkpoint(model), judged)
    wanted = hidden(model, ids)
    errors = {}
    for name, options in {
        "rtn": {"method": "rtn"},
        "awq": {"method": "awq"},
        "gptq": ORDERED,
    }.items():
        made = quantized(model, tmp_path / name, recipe(**options), texts.calibration, 64)
        errors[name] = float(np.square(hidden(made, ids) - wanted).sum())
    assert max(errors["gptq"], errors["awq"]) < 0.9 * errors["rtn"], errors


CASES = [
    pytest.param({"method": "smoothquant", "scheme": "w8a8"}, 1.0, id="w8a8"),
    pytest.param({"method": "rtn"}, PLAIN_RISE, id="rtn"),
    pytest.param({"method": "awq"}, 0.75 * PLAIN_RISE, id="awq"),
    pytest.param(ORDERED, 0.5 * PLAIN_RISE, id="gptq"),
    pytest.param(ORDERED | {"keep_sensitive": True}, 4.0, id="gptq, 8 bits too"),
    pytest.param(ORDERED | {"bits": 3, "gptaq": True}, 0.75 * PLAIN_RISE, id="gptaq of 3 bits"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "bound_percent"), CASES)
def test_perplexity_of_five_windows(
    tmp_path: Path, shuffled: Path, texts: Texts, options: dict[str, Any], bound_percent: float
) -> None:
    made = quantized(shuffled, tmp_path / "made", recipe(**options), texts.calibration, 1024)
    found = perplexity_script().measure(5, model=str(made), tokenizer=str(resolve("smollm2")))
    assert found["rise_percent"] <= bound_percent, found
