"""ONNX Runtime's embeddings of texts, in its dynamic int8; the model is converted once, beside its
directory. Needs torch, transformers, onnx and onnxruntime.
"""

from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from padded_texts import INPUTS, PaddedTexts
from texts_work import arguments, measure
from transformers import AutoModel

model, texts, out, threads = arguments()
folder = Path(f"{model.rstrip('/')}-onnx")
padded = PaddedTexts(model)


class Rows(torch.nn.Module):
    """The encoder's last rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(**dict(zip(INPUTS, inputs, strict=True))).last_hidden_state


def convert() -> Path:
    quantized = folder / "int8.onnx"
    if quantized.exists():
        return quantized
    folder.mkdir(exist_ok=True)
    example = padded.inputs(["a text", "and a longer text"])
    torch.onnx.export(
        Rows(),
        tuple(torch.tensor(example[name]) for name in INPUTS),
        str(folder / "float.onnx"),
        input_names=list(INPUTS),
        output_names=["rows"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*INPUTS, "rows")},
        dynamo=False,
    )
    quantize_dynamic(str(folder / "float.onnx"), str(quantized), weight_type=QuantType.QInt8)
    return quantized


options = onnxruntime.SessionOptions()
path = convert()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
measure(lambda some: padded.embed(some, lambda one: session.run(None, one)[0]), texts, out)
