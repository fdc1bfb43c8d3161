"""Flags of llama.cpp's server and tools.

Source: llama-server's README.
"""

from __future__ import annotations

from octavo.cli.foreign.foreign_flags import (
    LLAMA,
    MODEL,
    PROMPT,
    device_name,
    ignore,
    one_origin,
    positive,
    refuse,
    rename,
    sampling,
    switch,
)


def _kv_dtype(text: str) -> str:
    kinds = {"f32": "fp32", "f16": "bf16", "bf16": "bf16", "q8_0": "int8", "q4_0": "int4"}
    if text not in kinds:
        raise ValueError(f"expected {', '.join(kinds)}")
    return kinds[text]


def _mebibytes(text: str) -> str | None:
    return None if positive(text) is None else f"{text}MiB"


def _reasoning_format(text: str) -> str | None:
    return "none" if text == "none" else None


LLAMA_ROWS = (
    rename(LLAMA, "-m --model -hf -hfr --hf-repo", MODEL),
    rename(LLAMA, "-p --prompt", PROMPT),
    rename(LLAMA, "-sys --system-prompt", "--system"),
    rename(LLAMA, "-t", "--threads", positive),
    rename(LLAMA, "-c --ctx-size", "--max-model-len", positive, text="the default is the model's"),
    rename(LLAMA, "-dev", "--device", device_name),
    rename(LLAMA, "-b --batch-size", "--max-num-batched-tokens"),
    rename(LLAMA, "-np --parallel", "--max-num-seqs", positive),
    rename(LLAMA, "-ctk --cache-type-k -ctv --cache-type-v", "--kv-cache-dtype", _kv_dtype),
    rename(LLAMA, "-cram --cache-ram", "--kv-offloading-size", _mebibytes),
    rename(LLAMA, "--slot-save-path", "--prefix-cache-dir"),
    rename(LLAMA, "-a --alias", "--served-model-name"),
    rename(LLAMA, "--chat-template-file", "--chat-template"),
    rename(LLAMA, "--reasoning-format", "--reasoning-parser", _reasoning_format),
    rename(LLAMA, "--ssl-key-file", "--ssl-keyfile"),
    rename(LLAMA, "--ssl-cert-file", "--ssl-certfile"),
    rename(LLAMA, "--cors-origins", "--allow-origin", one_origin),
    rename(LLAMA, "--api-prefix", "--root-path"),
    rename(LLAMA, "-to --timeout", "--max-request-s", positive),
    rename(LLAMA, "--media-path", "--media-dir"),
    rename(LLAMA, "--models-max", "--max-models", positive),
    rename(LLAMA, "--image-max-tokens", "--max-image-tokens", positive),
    rename(
        LLAMA,
        "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf",
        "--spec-model",
        extra=("--spec-method=draft_model",),
    ),
    rename(LLAMA, "--draft --draft-n --draft-max --spec-draft-n-max", "--spec-tokens", positive),
    sampling("--temp --temperature", "temperature"),
    sampling("--top-k", "top_k"),
    sampling("--top-p", "top_p"),
    sampling("--min-p", "min_p"),
    sampling("--repeat-penalty", "repetition_penalty"),
    sampling("--presence-penalty", "presence_penalty"),
    sampling("--frequency-penalty", "frequency_penalty"),
    sampling("-n --predict --n-predict --num-predict", "max_tokens", positive),
    rename(LLAMA, "-mm", "--mmproj"),
    switch(LLAMA, "--no-mmproj --no-mmproj-auto", "--mmproj=none"),
    switch(LLAMA, "--usage", "--help"),
    switch(LLAMA, "--log-jsonl", "--log-format=json"),
    switch(LLAMA, "--no-cache-prompt", "--no-enable-prefix-caching"),
    switch(LLAMA, "-nocb --no-cont-batching", "--batching=none"),
    rename(LLAMA, "-s", "--seed", positive, text="this is the default"),
    ignore(
        LLAMA,
        "value",
        "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu",
        "all layers are on one device; see --device and --tensor-parallel-size",
    ),
    ignore(
        LLAMA,
        "value",
        "-ot --override-tensor -ncmoe --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn",
        "all layers are on one device; --weights-memory-bytes reads weights from a disk",
    ),
    ignore(
        LLAMA,
        "nothing",
        "-cmoe --cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --no-host --op-offload"
        " --no-op-offload --mmproj-offload --no-mmproj-offload",
        "all layers and the KV cache are on one device",
    ),
    ignore(
        LLAMA,
        "value",
        "-tb --threads-batch --threads-http -C --cpu-mask -Cr --cpu-range --cpu-strict --prio"
        " --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch"
        " --poll-batch --numa",
        "--threads is the only setting of threads; taskset and numactl place them",
    ),
    ignore(
        LLAMA,
        "value",
        "-ub --ubatch-size",
        "a step computes up to --max-num-batched-tokens tokens",
    ),
    ignore(LLAMA, "value", "--sleep-idle-seconds", "a model stays loaded"),
    ignore(LLAMA, "perhaps", "-fa --flash-attn", "attention is always fused"),
    ignore(
        LLAMA,
        "value",
        "--keep -dt --defrag-thold --cache-reuse -sps --slot-prompt-similarity -ctxcp"
        " --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --kv-unified-per-slot",
        "KV blocks are paged, and shared by prefix automatically",
    ),
    ignore(
        LLAMA,
        "nothing",
        "--swa-full -kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots"
        " --no-cache-idle-slots --cache-prompt --context-shift --no-context-shift -cb"
        " --cont-batching",
        "KV blocks are paged, and shared by prefix automatically",
    ),
    ignore(
        LLAMA,
        "nothing",
        "--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io --repack -nr --no-repack"
        " --check-tensors --warmup --no-warmup",
        "weights are checked and packed into memory at load",
    ),
    ignore(
        LLAMA, "value", "-lm --load-mode -lzm --lazy-mode", "weights are packed into memory at load"
    ),
    ignore(
        LLAMA,
        "perhaps",
        "-fit --fit",
        "memory is divided at the start; `octavo plan` says how",
    ),
    ignore(
        LLAMA,
        "value",
        "-fitt --fit-target -fitc --fit-ctx",
        "memory is divided at the start; `octavo plan` says how",
    ),
    ignore(
        LLAMA,
        "nothing",
        "--perf --no-perf --metrics --props --slots --no-slots --embedding --embeddings --rerank"
        " --reranking --models-autoload --no-models-autoload --ui --webui --no-ui --no-webui"
        " --lora-init-without-apply",
        "the server always has all of its routes",
    ),
    ignore(LLAMA, "nothing", "--jinja --no-jinja", "chat templates are always rendered with Jinja"),
    ignore(
        LLAMA,
        "nothing",
        "--log-disable -v --verbose --log-verbose --log-prefix --no-log-prefix --log-timestamps"
        " --no-log-timestamps --no-log-jsonl",
        "see --log-format, --access-log and --slow-request-s",
    ),
    ignore(
        LLAMA,
        "value",
        "-lv --verbosity --log-verbosity",
        "see --log-format, --access-log and --slow-request-s",
    ),
    ignore(LLAMA, "perhaps", "--log-colors", "colours follow the terminal and NO_COLOR"),
    ignore(
        LLAMA,
        "value",
        "--samplers --sampler-seq --sampling-seq",
        "samplers have a fixed order; a value turns each on",
    ),
    ignore(
        LLAMA,
        "nothing",
        "-bs --backend-sampling -e --escape --no-escape --reuse-port --spm-infill --mmproj-auto"
        " --prefill-assistant --no-prefill-assistant --reasoning-preserve --no-reasoning-preserve"
        " --cors-credentials --no-cors-credentials --spec-default"
        " --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag"
        " --no-agent --spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-backend-sampling"
        " --no-spec-draft-backend-sampling",
        "Octavo has no such setting",
    ),
    ignore(
        LLAMA,
        "value",
        "--cors-methods --cors-headers --sse-ping-interval --tags --ui-config --webui-config"
        " --ui-config-file --webui-config-file -mmdev --mmproj-device --image-min-tokens"
        " --mtmd-batch-max-tokens --embd-normalize",
        "Octavo has no such setting",
    ),
    ignore(
        LLAMA,
        "value",
        "--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd"
        " --cache-type-v-draft --spec-draft-threads -td --threads-draft --spec-draft-threads-batch"
        " -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft"
        " --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict"
        " --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft"
        " --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch"
        " --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft"
        " --spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd"
        " --override-tensor-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed"
        " --n-cpu-moe-draft --spec-draft-n-min --draft-min --draft-n-min --spec-draft-p-split"
        " --draft-p-split --spec-draft-p-min --draft-p-min --spec-draft-sampling"
        " --spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft"
        " --n-gpu-layers-draft --spec-synth-len --spec-synth-rates",
        "drafting adapts to what is accepted; see --spec-tokens",
    ),
    ignore(
        LLAMA,
        "value",
        "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match"
        " --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits"
        " --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits"
        " --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits"
        " --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        "drafting adapts to what is accepted; see --spec-tokens",
    ),
    refuse(LLAMA, "nothing", "-cl --cache-list", "run `octavo list`"),
    refuse(LLAMA, "value", "-f --file", "pipe the file: octavo run < FILE"),
    refuse(
        LLAMA,
        "nothing",
        "-i --interactive -if --interactive-first -cnv --conversation",
        "run `octavo chat MODEL`",
    ),
    ignore(
        LLAMA,
        "nothing",
        "-no-cnv --no-conversation -st --single-turn",
        "`octavo run` answers once; --raw leaves out the chat template",
    ),
    ignore(LLAMA, "nothing", "-co --color", "colours follow the terminal and NO_COLOR"),
    refuse(LLAMA, "nothing", "--completion-bash", "run `octavo --install-completion`"),
    refuse(LLAMA, "nothing", "--version", "run `octavo --version`"),
    refuse(LLAMA, "nothing", "--list-devices", "run `octavo doctor`"),
    refuse(
        LLAMA,
        "value",
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx"
        " --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv"
        " --pooling",
        "the checkpoint decides this; change its config.json or the header of the GGUF file",
    ),
    refuse(LLAMA, "value", "--rpc", "see --rank-address for ranks on other machines"),
    refuse(
        LLAMA,
        "value",
        "--lora --lora-scaled",
        "give --enable-lora and, to octavo serve, --lora-modules NAME=DIRECTORY",
    ),
    refuse(
        LLAMA,
        "value",
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        "control vectors are not supported",
    ),
    refuse(
        LLAMA,
        "value",
        "-mu --model-url -mmu --mmproj-url",
        "download the file and give its path, or name a Hugging Face repository",
    ),
    refuse(
        LLAMA,
        "value",
        "-dr --docker-repo",
        "name a Hugging Face repository, a path or a short name (`octavo models` lists them)",
    ),
    refuse(LLAMA, "value", "-hff --hf-file", "name the file with the model: OWNER/REPO/FILE.gguf"),
    refuse(LLAMA, "nothing", "--offline", "set the environment variable HF_HUB_OFFLINE=1"),
    refuse(LLAMA, "value", "--log-file", "redirect the output: octavo serve ... 2> octavo.log"),
    refuse(LLAMA, "value", "--log-prompts-dir", "see --record, which keeps all requests"),
    refuse(
        LLAMA,
        "value",
        "--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p"
        " --repeat-last-n --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n"
        " --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range"
        " --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias -r"
        " --reverse-prompt",
        "requests set this, by fields of docs/reference/sampling.md",
    ),
    refuse(
        LLAMA,
        "nothing",
        "--ignore-eos -sp --special",
        "requests set this, by the fields ignore_eos and skip_special_tokens",
    ),
    refuse(
        LLAMA,
        "value",
        "--grammar --grammar-file -j --json-schema -jf --json-schema-file",
        "requests set this; see docs/guides/structured-output.md",
    ),
    refuse(
        LLAMA,
        "perhaps",
        "-rea --reasoning",
        'requests set this, e.g. by "chat_template_kwargs": {"enable_thinking": false}',
    ),
    refuse(
        LLAMA,
        "value",
        "--chat-template-kwargs --reasoning-effort --reasoning-budget --reasoning-budget-message",
        "requests set this, by chat_template_kwargs, reasoning_effort and thinking_token_budget",
    ),
    refuse(
        LLAMA,
        "nothing",
        "--skip-chat-parsing --no-skip-chat-parsing",
        "give --reasoning-parser none, and remove tools of the request",
    ),
    refuse(
        LLAMA,
        "value",
        "--video-fps --video-timestamp-interval --video-ffmpeg-dir",
        "frames are sampled as the checkpoint says; see --max-video-frames",
    ),
    refuse(
        LLAMA,
        "value",
        "--tools --tools-runtime --mcp-servers-config --mcp-servers-json",
        "clients run tools; the server only returns calls (docs/guides/tools.md)",
    ),
    refuse(LLAMA, "nothing", "-ag --agent", "clients run tools; the server only returns calls"),
    refuse(LLAMA, "value", "--path", "the server has one page of its own, and no other files"),
    refuse(
        LLAMA,
        "value",
        "--models-dir --models-preset",
        "name the models, or list them in a file for --config (docs/guides/several-models.md)",
    ),
    refuse(
        LLAMA,
        "value",
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
        "see --spec-method suffix and --spec-history",
    ),
    refuse(LLAMA, "value", "--spec-type", "see --spec-method: ngram, suffix, draft_model, eagle3"),
    refuse(
        LLAMA,
        "nothing",
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default"
        " --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default"
        " --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default"
        " --vision-gemma-12b-default",
        "name the model: a Hugging Face repository, a path or a short name",
    ),
)
