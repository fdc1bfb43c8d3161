"""sentence-transformers' embeddings of texts, its linear layers in PyTorch's dynamic int8."""

import torch
from sentence_transformers import SentenceTransformer
from texts_work import arguments, measure

model, texts, out, threads = arguments()
torch.set_num_threads(threads)
encoder = SentenceTransformer(model, device="cpu")
torch.ao.quantization.quantize_dynamic(encoder, {torch.nn.Linear}, torch.qint8, inplace=True)
measure(lambda some: encoder.encode(some, batch_size=32), texts, out)
