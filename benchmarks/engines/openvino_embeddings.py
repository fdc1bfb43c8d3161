"""OpenVINO's embeddings of texts, in int8 as nncf makes it of the texts themselves; the model is
converted once, beside its directory. Needs torch, transformers, openvino and nncf.
"""

from pathlib import Path

import nncf
import openvino
import torch
from padded_texts import INPUTS, PaddedTexts
from texts_work import arguments, measure
from transformers import AutoModel

model, texts, out, threads = arguments()
folder = Path(f"{model.rstrip('/')}-openvino")
padded = PaddedTexts(model)


def convert() -> openvino.Model:
    path = folder / "int8.xml"
    core = openvino.Core()
    if path.exists():
        return core.read_model(path)
    folder.mkdir(exist_ok=True)
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    example = {
        name: torch.tensor(each) for name, each in padded.inputs(["a", "longer text"]).items()
    }
    whole = openvino.convert_model(encoder, example_input=example)
    samples = nncf.Dataset([padded.inputs([text]) for text in texts[:100]])
    quantized = nncf.quantize(whole, samples, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(quantized, path)
    return quantized


settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "THROUGHPUT"}
compiled = openvino.Core().compile_model(convert(), "CPU", settings)
names = {port.get_any_name() for port in compiled.inputs} & set(INPUTS)


def forward(inputs: dict) -> object:
    return compiled({name: inputs[name] for name in names})[0]


measure(lambda some: padded.embed(some, forward), texts, out)
