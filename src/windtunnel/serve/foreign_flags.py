"""Flags of the real servers that mean nothing to a simulator: accepted with one warning line each.

Names were read off the public sources: vLLM's `arg_utils.py` and `cli_args.py` of late 2026, earlier releases, and the
reference of llm-d-inference-sim (2026-08-20). `docs/switching-from-llm-d-inference-sim.md` says what its flags are here.
"""

_VLLM = """
    additional-config aggregate-engine-logging all2all-backend allow-credentials allow-deprecated-quantization allowed-headers
    allowed-local-media-path allowed-media-domains allowed-methods api-server-count attention-backend attention-config
    chat-template chat-template-content-format code-revision cohere-format cohere-is-reasoning-model collect-detailed-traces
    compilation-config config-format cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb
    cpu-offload-params cudagraph-capture-sizes cudagraph-metrics data-parallel-address data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
    decode-context-parallel-size default-chat-template-kwargs default-mm-loras device-ids diffusion-config
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-hybrid-kv-cache-manager disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window
    distributed-executor-backend distributed-timeout-seconds download-dir dp-supervisor-probe-failure-threshold
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval dtype ec-manager-config ec-transfer-config
    enable-batch-sharded-sampling enable-bf16x3-router-gemm enable-chunked-prefill enable-cumem-allocator enable-dbo
    enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
    enable-flash-late-interaction enable-flashinfer-autotune enable-layerwise-nvtx-tracing enable-log-deltas
    enable-log-outputs enable-logging-iteration-details enable-mamba-cache-stochastic-rounding enable-mfu-metrics
    enable-mixed-moe-lora-format enable-mm-embeds enable-mm-processor-stats enable-moe-shared-loras enable-nccl-comm-suspend
    enable-offline-docs enable-prompt-embeds enable-return-routed-experts enable-sleep-mode enable-ssl-refresh
    enable-tower-connector-lora enable-trace-replay enforce-eager eplb-config exclude-tools-when-tool-choice-none
    expert-placement-strategy fail-on-environ-validation fault-tolerance-config fingerprint-mode fingerprint-value
    fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization h11-max-header-count
    h11-max-incomplete-event-size headless hf-config-path hf-overrides hf-token ignore-patterns interleave-mm-strings
    io-processor-plugin ir-op-priority jit-monitor-mode jit-monitor-verbose kda-prefill-backend kernel-config kv-cache-dtype
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
    kv-offloading-backend kv-sharing-fast-prefill  language-model-only
    limit-mm-per-prompt linear-backend load-format log-config-file log-error-stack logits-processors logprobs-mode lora-dtype
    lora-target-modules mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
    mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
    max-lora-rank max-num-scheduled-tokens max-parallel-loading-workers media-io-kwargs middleware mm-device-do-normalize
    mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
    mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
    mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs mm-shm-cache-max-object-size-mb
    mm-tensor-ipc model-class-overrides model-impl model-loader-extra-config moe-backend nnodes node-rank numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group offload-params
    offload-prefetch-step optimization-level otlp-traces-endpoint override-generation-config per-request-spec-decode-metrics
    performance-mode pipeline-parallel-size pooler-config prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-match-unit pt-load-map-location quantization quantization-config
    ray-workers-use-nsight reasoning-config reasoning-parser-plugin renderer-num-workers replayssm-buffer-len response-role
    return-sampling-mask revision root-path safetensors-load-strategy safetensors-prefetch-block-size
    safetensors-prefetch-num-threads scheduler-cls show-hidden-metrics-for-version skip-mm-profiling skip-tokenizer-init
    spec-method spec-model spec-tokens specialize-active-lora speculative-config ssl-ca-certs ssl-cert-reqs ssl-ciphers
    structured-outputs-config tokenizer-mode tokenizer-revision tokens-only tool-parser-plugin
    tool-server trust-remote-code trust-request-mm-kwargs ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load
    uvicorn-log-level video-pruning-method video-pruning-rate weight-transfer-config worker-cls worker-extension-cls
"""
_EARLIER_VLLM = """
    calculate-kv-scales device disable-frontend-multiprocessing disable-log-requests enable-lora-bias
    enable-multimodal-encoder-data-parallel guided-decoding-backend lora-extra-vocab-size max-long-partial-prefills
    max-num-partial-prefills max-seq-len-to-capture multi-step-stream-outputs num-gpu-blocks override-attention-dtype
    override-pooler-config preemption-mode rope-scaling rope-theta scheduling-delay-factor swap-space task zero-copy
"""
_LLM_D_INFERENCE_SIM = """
    add-dir-header alsologtostderr dataset-in-memory dataset-path dataset-table-name dataset-url default-embedding-dimensions
    fake-metrics fake-metrics-refresh-interval force-dummy-tokenizer
    global-cache-hit-threshold image-emission-rate kv-cache-transfer-latency kv-cache-transfer-latency-std-dev
    kv-cache-transfer-time-per-token kv-cache-transfer-time-std-dev
    latency-calculator log-backtrace-at log-dir log-file log-file-max-size log-http logtostderr
    max-tool-call-array-param-length max-tool-call-integer-param max-tool-call-number-param min-tool-call-array-param-length
    min-tool-call-integer-param min-tool-call-number-param mm-render-timeout object-tool-call-not-required-field-probability
    omni one-output prefill-time-std-dev render-timeout render-url self-signed-certs skip-headers skip-log-headers
    skip-tool-validation stderrthreshold time-factor-under-load time-to-generate-image time-to-generate-image-std-dev
    tool-call-extra-call-probability tool-call-not-required-param-probability v vmodule
"""

FOREIGN_FLAGS = frozenset((_VLLM + _EARLIER_VLLM + _LLM_D_INFERENCE_SIM).split())

SHORT_FLAGS = {
    "-q": "quantization",
    "-n": "nnodes",
    "-r": "node-rank",
    "-pp": "pipeline-parallel-size",
    "-tp": "tensor-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-v": "v",
}
"""vLLM's one-dash names, and klog's."""
