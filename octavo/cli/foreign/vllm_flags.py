"""Flags of `vllm serve` and Ollama.

Sources: vLLM's argument parsers; `ollama run --help`.
"""

from __future__ import annotations

from octavo.cli.foreign.foreign_flags import (
    MODEL,
    OLLAMA,
    VLLM,
    ignore,
    one_origin,
    refuse,
    rename,
    switch,
)

VLLM_ROWS = (
    rename(VLLM, "--model", MODEL),
    rename(VLLM, "-q", "--quantization"),
    rename(VLLM, "--allowed-origins", "--allow-origin", one_origin),
    rename(VLLM, "--allowed-local-media-path", "--media-dir"),
    rename(VLLM, "--device-memory-utilization", "--gpu-memory-utilization"),
    rename(VLLM, "--shutdown-timeout", "--shutdown-timeout-s"),
    rename(VLLM, "--speculative-model", "--spec-model", extra=("--spec-method=draft_model",)),
    rename(VLLM, "--num-speculative-tokens", "--spec-tokens"),
    switch(VLLM, "--enable-sleep-mode", "--training-routes"),
    switch(VLLM, "--no-async-scheduling", "--async-scheduling=off"),
    switch(VLLM, "--disable-log-stats", "--log-stats-interval-s=0"),
    ignore(VLLM, "nothing", "--trust-remote-code", "no code of a checkpoint is ever run"),
    ignore(
        VLLM,
        "nothing",
        "--enable-auto-tool-choice",
        "tools are always on, in the format of the chat template or --tool-call-parser",
    ),
    ignore(
        VLLM,
        "nothing",
        "--enable-reasoning",
        "reasoning is always read, in the format of the chat template or --reasoning-parser",
    ),
    ignore(
        VLLM,
        "nothing",
        "--disable-log-requests --no-disable-log-requests --no-enable-log-requests"
        " --no-disable-log-stats --disable-uvicorn-access-log"
        " --no-enable-log-outputs --no-enable-log-deltas --log-error-stack --no-log-error-stack",
        "requests are not logged; see --access-log and --slow-request-s",
    ),
    ignore(
        VLLM,
        "value",
        "--uvicorn-log-level --max-log-len --disable-access-log-for-endpoints",
        "requests are not logged; see --access-log and --slow-request-s",
    ),
    refuse(
        VLLM,
        "nothing",
        "--enable-log-requests --enable-log-outputs --enable-log-deltas",
        "see --access-log, --slow-request-s, and --record, which keeps all requests",
    ),
    refuse(VLLM, "value", "--log-config-file", "see --log-format, --access-log, --slow-request-s"),
    ignore(
        VLLM,
        "nothing",
        "--enable-prompt-tokens-details --enable-request-id-headers --enable-offline-docs"
        " --enable-tokenizer-info-endpoint --enable-server-load-tracking"
        " --enable-mfu-metrics --cudagraph-metrics --kv-cache-metrics"
        " --enable-mm-processor-stats --enable-logging-iteration-details"
        " --aggregate-engine-logging --disable-frontend-multiprocessing"
        " --enable-flash-late-interaction --no-enable-flash-late-interaction"
        " --enable-per-request-metrics --enable-layerwise-nvtx-tracing",
        "what the server reports and serves is always on, or does not exist",
    ),
    ignore(
        VLLM,
        "nothing",
        "--disable-fastapi-docs --enable-ssl-refresh --allow-credentials --headless --grpc"
        " --enable-force-include-usage --exclude-tools-when-tool-choice-none"
        " --return-tokens-as-token-ids --tokens-only --cohere-is-reasoning-model"
        " --no-cohere-is-reasoning-model --interleave-mm-strings",
        "the server has no such setting",
    ),
    ignore(
        VLLM,
        "value",
        "--api-server-count -asc --allowed-methods --allowed-headers --response-role"
        " --chat-template-content-format --cohere-format --fingerprint-mode --fingerprint-value"
        " --h11-max-incomplete-event-size --h11-max-header-count --sse-keep-alive-interval"
        " --custom-histogram-buckets --show-hidden-metrics-for-version"
        " --kv-cache-metrics-sample --stream-interval --renderer-num-workers --ssl-ciphers"
        " --data-parallel-supervisor-port --dp-supervisor-probe-interval-s"
        " --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --grpc-port",
        "the server has no such setting",
    ),
    ignore(
        VLLM,
        "value",
        "--tokenizer-mode --config-format --hf-config-path --model-impl --runner --task"
        " --convert --code-revision --override-attention-dtype --safetensors-load-strategy"
        " --model-loader-extra-config --ignore-patterns --pt-load-map-location"
        " --max-parallel-loading-workers --io-processor-plugin --override-neuron-config",
        "Octavo reads this from the checkpoint",
    ),
    ignore(
        VLLM,
        "nothing",
        "--use-tqdm-on-load --no-use-tqdm-on-load --enable-prompt-embeds --disable-sliding-window"
        " --disable-async-output-proc --use-v2-block-manager --disable-cascade-attn",
        "Octavo decides this itself",
    ),
    ignore(
        VLLM,
        "value",
        "--block-size --num-gpu-blocks-override --prefix-caching-hash-algo --mamba-cache-dtype"
        " --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --num-lookahead-slots"
        " --kv-offloading-backend",
        "blocks have 16 tokens, and as many as --kv-cache-memory-bytes has room for",
    ),
    ignore(
        VLLM,
        "nothing",
        "--calculate-kv-scales --kv-sharing-fast-prefill --disable-hybrid-kv-cache-manager"
        " --no-disable-hybrid-kv-cache-manager",
        "Octavo decides this itself",
    ),
    refuse(
        VLLM,
        "value",
        "--cpu-offload-gb --cpu-offload-params --offload-group-size --offload-num-in-group"
        " --offload-prefetch-step --offload-params",
        "see --weights-memory-bytes, which reads weights from a disk",
    ),
    ignore(
        VLLM,
        "value",
        "--max-num-partial-prefills --max-long-partial-prefills --max-num-active-seqs"
        " --max-seq-len-to-capture",
        "see --max-num-seqs, --max-num-batched-tokens and --long-prefill-token-threshold",
    ),
    ignore(
        VLLM,
        "nothing",
        "--disable-chunked-mm-input --scheduler-reserve-full-isl --multi-step-stream-outputs"
        " --no-scheduler-reserve-full-isl",
        "Octavo decides this itself",
    ),
    ignore(
        VLLM,
        "value",
        "-O --compilation-config -cc --optimization-level --performance-mode --kernel-config"
        " --attention-config -ac --additional-config --profiler-config --quantization-config",
        "nothing is compiled; see --enforce-eager, --attention-backend and --torch-kernels",
    ),
    ignore(VLLM, "nothing", "-O0 -O1 -O2 -O3", "nothing is compiled; see --enforce-eager"),
    ignore(
        VLLM,
        "value",
        "--limit-mm-per-prompt --media-io-kwargs --mm-processor-kwargs --mm-processor-cache-gb"
        " --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode"
        " --mm-encoder-attn-backend --video-pruning-rate",
        "see --max-images, --max-image-tokens and --media-cache-tokens",
    ),
    ignore(
        VLLM,
        "nothing",
        "--enable-mm-embeds --skip-mm-profiling --language-model-only --mm-encoder-only"
        " --disable-mm-preprocessor-cache --enable-multimodal-encoder-data-parallel",
        "see --max-images, --max-image-tokens and --media-cache-tokens",
    ),
    refuse(VLLM, "value", "--allowed-media-domains", "see --allow-media-urls"),
    ignore(
        VLLM,
        "nothing",
        "--fully-sharded-loras --enable-lora-bias --enable-tower-connector-lora"
        " --specialize-active-lora",
        "see --max-loras and --max-lora-rank",
    ),
    ignore(
        VLLM,
        "value",
        "--lora-extra-vocab-size --long-lora-scaling-factors",
        "see --max-loras and --max-lora-rank",
    ),
    refuse(
        VLLM,
        "value",
        "--default-mm-loras --qlora-adapter-name-or-path --prompt-adapters --max-prompt-adapters"
        " --max-prompt-adapter-token",
        "adapters are LoRA, named by requests; see --lora-modules",
    ),
    refuse(VLLM, "nothing", "--enable-prompt-adapter", "adapters are LoRA; see --enable-lora"),
    ignore(
        VLLM,
        "value",
        "--collect-detailed-traces",
        "see --otlp-traces-endpoint, whose traces are always complete",
    ),
    ignore(
        VLLM,
        "value",
        "--distributed-executor-backend --master-port --node-rank --nnodes"
        " --data-parallel-rpc-port -dpp --data-parallel-backend -dpb --all2all-backend"
        " --data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local"
        " -dpl --data-parallel-address -dpa --eplb-config --expert-placement-strategy"
        " --dbo-decode-token-threshold --dbo-prefill-token-threshold --worker-cls"
        " --worker-extension-cls --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size"
        " --dcp-comm-backend",
        "ranks are processes of this machine; see --rank-address for others",
    ),
    ignore(
        VLLM,
        "nothing",
        "--disable-custom-all-reduce --ray-workers-use-nsight --enable-eplb --enable-dbo"
        " --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe"
        " --data-parallel-multi-port-external-lb --disable-nccl-for-dp-synchronization",
        "ranks are processes of this machine; see --rank-address for others",
    ),
    refuse(
        VLLM,
        "value",
        "--master-addr",
        "start `octavo rank HOST:PORT` on the other machines, and give --rank-address HOST:PORT",
    ),
    refuse(
        VLLM,
        "value",
        "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp",
        "contexts are not split over ranks; see --tensor-parallel-size",
    ),
    refuse(
        VLLM,
        "value",
        "--kv-transfer-config --ec-transfer-config",
        "see --kv-transfer, --role and docs/guides/prefill-and-decode.md",
    ),
    refuse(
        VLLM,
        "value",
        "--weight-transfer-config",
        "weights are loaded from files; POST /v1/models/load replaces a model",
    ),
    refuse(
        VLLM,
        "value",
        "--speculative-config -sc",
        "see --spec-method, --spec-model and --spec-tokens",
    ),
    ignore(
        VLLM,
        "value",
        "--speculative-model-quantization --speculative-draft-tensor-parallel-size"
        " -spec-draft-tp --speculative-max-model-len --speculative-disable-by-batch-size"
        " --ngram-prompt-lookup-max --ngram-prompt-lookup-min --spec-decoding-acceptance-method"
        " --typical-acceptance-sampler-posterior-threshold"
        " --typical-acceptance-sampler-posterior-alpha --disable-logprobs-during-spec-decoding",
        "drafting adapts to what is accepted; see --spec-method and --spec-tokens",
    ),
    ignore(
        VLLM,
        "nothing",
        "--speculative-disable-mqa-scorer",
        "drafting adapts to what is accepted; see --spec-method and --spec-tokens",
    ),
    ignore(
        VLLM,
        "value",
        "--guided-decoding-backend --structured-outputs-config --reasoning-config",
        "structured output has one implementation",
    ),
    ignore(
        VLLM,
        "nothing",
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace"
        " --guided-decoding-disable-additional-properties",
        "structured output has one implementation",
    ),
    refuse(
        VLLM,
        "value",
        "--tool-parser-plugin --reasoning-parser-plugin --middleware --logits-processor-pattern",
        "plugins are not loaded; see --tool-call-parser, --reasoning-parser, --logits-processors",
    ),
    refuse(
        VLLM,
        "value",
        "--scheduler-cls",
        "plugins are not loaded; see --scheduling-policy, --priority-function",
    ),
    refuse(VLLM, "value", "--tool-server", "clients run tools; the server only returns calls"),
    refuse(
        VLLM,
        "value",
        "--default-chat-template-kwargs",
        "requests set this, by the field chat_template_kwargs",
    ),
    refuse(
        VLLM,
        "value",
        "--hf-overrides --rope-scaling --rope-theta --pooler-config --override-pooler-config"
        " --logprobs-mode",
        "the checkpoint decides this; change its config.json",
    ),
    refuse(
        VLLM,
        "value",
        "--revision --tokenizer-revision",
        "download the revision with `hf download`, and give its directory",
    ),
    refuse(VLLM, "value", "--download-dir", "set the environment variable HF_HOME"),
    refuse(VLLM, "value", "-hft --hf-token", "set the environment variable HF_TOKEN"),
    refuse(
        VLLM,
        "value",
        "--ssl-ca-certs --ssl-cert-reqs",
        "clients' certificates are not read; put a proxy in front (docs/guides/access.md)",
    ),
    ignore(
        VLLM,
        "value",
        "--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
        "texts are tokenized in the server's process",
    ),
)

OLLAMA_ROWS = (
    ignore(OLLAMA, "nothing", "--nowordwrap --hidethinking", "text is printed as it comes"),
    refuse(OLLAMA, "nothing", "--insecure", "models come over HTTPS only"),
    ignore(OLLAMA, "value", "--keepalive", "the model is unloaded when the command ends"),
    refuse(
        OLLAMA,
        "value",
        "--format",
        "start `octavo serve`: requests set `format` or `response_format`",
    ),
    refuse(
        OLLAMA,
        "perhaps",
        "--think",
        'start `octavo serve`: requests set "chat_template_kwargs": {"enable_thinking": true}',
    ),
)
