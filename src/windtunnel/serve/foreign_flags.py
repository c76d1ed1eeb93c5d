"""Flags of the real servers that mean nothing to a simulator: accepted with one warning line each (vLLM 0.33, llm-d-inference-sim)."""

FOREIGN_FLAGS = frozenset(
    """
    additional-config all2all-backend allow-credentials allowed-headers allowed-local-media-path allowed-methods attention-backend
    calculate-kv-scales chat-template chat-template-content-format code-revision collect-detailed-traces compilation-config
    config config-format convert cpu-offload-gb cudagraph-capture-sizes data-parallel-address data-parallel-backend
    data-parallel-rpc-port data-parallel-start-rank default-mm-loras device disable-cascade-attn disable-custom-all-reduce
    disable-fastapi-docs disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-requests disable-log-stats
    disable-sliding-window distributed-executor-backend download-dir dtype enable-chunked-prefill enable-dbo enable-eplb
    enable-expert-parallel enable-lora-bias enable-multimodal-encoder-data-parallel enable-prompt-embeds
    enable-sleep-mode enable-ssl-refresh enforce-eager fully-sharded-loras generation-config
    gpu-memory-utilization guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size headless hf-config-path
    hf-overrides hf-token ignore-patterns interleave-mm-strings io-processor-plugin kv-cache-dtype kv-cache-memory-bytes
    kv-sharing-fast-prefill limit-mm-per-prompt load-format log-config-file logits-processors logprobs-mode lora-dtype
    lora-extra-vocab-size mamba-cache-dtype mamba-ssm-cache-dtype max-cpu-loras max-log-len max-long-partial-prefills
    max-lora-rank max-num-partial-prefills max-parallel-loading-workers max-seq-len-to-capture media-io-kwargs middleware
    mm-encoder-tp-mode mm-processor-cache-gb mm-processor-kwargs model-impl model-loader-extra-config multi-step-stream-outputs
    num-gpu-blocks numa-bind override-attention-dtype override-generation-config override-pooler-config pipeline-parallel-size
    pooler-config preemption-mode prefill-context-parallel-size quantization ray-workers-use-nsight renderer-num-workers
    response-role revision root-path rope-scaling rope-theta runner safetensors-load-strategy scheduler-cls
    scheduling-delay-factor show-hidden-metrics-for-version skip-mm-profiling skip-tokenizer-init speculative-config
    ssl-ca-certs ssl-cert-reqs ssl-ciphers structured-outputs-config swap-space task tokenizer-mode
    tokenizer-revision tool-parser-plugin tool-server trust-remote-code use-tqdm-on-load uvicorn-log-level
    video-pruning-rate worker-cls worker-extension-cls zero-copy
    """.split()
)
