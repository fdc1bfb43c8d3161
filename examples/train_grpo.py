"""Trains SmolLM2 with TRL's GRPOTrainer; the running server samples and receives the new weights.

Requires `pip install trl datasets`, and `octavo serve DIRECTORY --dtype float32 --training-routes`.
Run it with the same DIRECTORY.
"""

import sys

from datasets import Dataset
from safetensors.torch import save
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation

vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda **_: True


class OctavoClient(vllm_client.VLLMClient):
    """TRL's client of a vLLM server, with tensors sent over HTTP instead of NCCL."""

    def init_communicator(self, device=None):
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self, metadata, named_params):
        body = save({name: tensor.contiguous() for name, tensor in named_params})
        headers = {"Content-Type": "application/octet-stream"}
        self._post(f"{self.base_url}/update_weights", data=body, headers=headers)


vllm_generation.VLLMClient = OctavoClient
options = GRPOConfig(
    output_dir="grpo",
    use_vllm=True,
    vllm_mode="server",
    vllm_server_base_url="http://127.0.0.1:8000",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    max_steps=20,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    report_to=[],
)
trainer = GRPOTrainer(
    model=sys.argv[1],
    args=options,
    train_dataset=Dataset.from_dict({"prompt": ["The capital of France is"] * 64}),
    reward_funcs=lambda completions, **_: [text.count("e") / 16 for text in completions],
)
trainer.train()
