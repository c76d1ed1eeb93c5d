"""Flags of SGLang that a simulator has no use for: accepted, with a warning. Names from SGLang's page of its arguments."""

_SGLANG = """
    abort-on-priority-when-disabled allow-auto-truncate attention-backend attention-context-parallel-size attn-cp-size
    base-gpu-id bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token chat-template
    checkpoint-engine-wait-weights-before-ready collect-tokens-histogram completion-template
    constrained-json-disable-any-whitespace constrained-json-whitespace-pattern cpu-offload-gb crash-dump-folder crash-on-nan
    cuda-graph-bs cuda-graph-max-bs custom-sigquit-handler custom-weight-loader debug-tensor-dump-inject
    debug-tensor-dump-input-file debug-tensor-dump-layers debug-tensor-dump-output-folder decode-attention-backend
    decrypted-config-file decrypted-draft-config-file deepep-config deepep-dispatcher-output-dtype deepep-mode
    delete-ckpt-after-loading device disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding
    disable-custom-all-reduce disable-fast-image-processor disable-flashinfer-autotune
    disable-flashinfer-cutlass-moe-fp4-allgather disable-hybrid-swa-memory disable-outlines-disk-cache
    disable-piecewise-cuda-graph disable-shared-experts-fusion disable-tokenizer-batch-decode dist-init-addr dist-timeout
    dllm-algorithm dllm-algorithm-config download-dir dsa-decode-backend dsa-prefill-backend dsa-prefill-cp-mode dtype
    dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout elastic-ep-backend elastic-ep-rejoin
    enable-aiter-allreduce-fusion enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process
    enable-cudagraph-gc enable-custom-logit-processor enable-deepep-moe enable-deepep-waterfill
    enable-deterministic-inference enable-dp-attention enable-dp-lm-head enable-draft-weights-cpu-backup
    enable-dsa-prefill-context-parallel enable-dynamic-batch-tokenizer enable-dynamic-chunking
    enable-elastic-expert-backup enable-ep-moe enable-eplb enable-expert-distribution-metrics
    enable-flashinfer-allreduce-fusion enable-flashinfer-cutedsl-moe enable-flashinfer-cutlass-moe
    enable-flashinfer-mxfp4-moe enable-flashinfer-trtllm-moe enable-fp32-lm-head enable-fused-grouped-gemm-combine
    enable-fused-qk-norm-rope enable-hierarchical-cache enable-layerwise-nvtx-marker enable-lmcache
    enable-lora-overlap-loading enable-memory-saver enable-mfu-metrics enable-mixed-chunk enable-mm-global-cache
    enable-mscclpp enable-multi-layer-eagle enable-multimodal enable-nan-detection enable-nccl-nvls
    enable-nsa-prefill-context-parallel enable-p2p-check enable-pdmux enable-precise-embedding-interpolation
    enable-prefill-delayer enable-prefix-mm-cache enable-priority-scheduling enable-profile-cuda-graph
    enable-quant-communications enable-request-time-stats-logging enable-return-hidden-states enable-return-routed-experts
    enable-single-batch-overlap enable-symm-mem enable-tokenizer-batch-encode enable-torch-compile
    enable-torch-compile-debug-mode enable-torch-symm-mem enable-trace enable-triton-kernel-moe enable-two-batch-overlap
    enable-weights-cpu-backup encoder-only encoder-transfer-backend encoder-urls enforce-piecewise-cuda-graph ep
    ep-dispatch-algorithm ep-num-redundant-experts ep-size eplb-algorithm eplb-min-rebalancing-utilization-threshold
    eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-distribution-recorder-buffer-size
    expert-distribution-recorder-mode expert-parallel-size export-metrics-to-file export-metrics-to-file-dir
    fastapi-root-path file-storage-path flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision forward-hooks
    fp4-gemm-backend fp8-gemm-backend gc-warning-threshold-secs gpu-id-step grammar-backend grpc-mode
    hf-chat-template-name hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend
    hicache-storage-backend-extra-config hicache-storage-prefetch-policy hicache-write-policy
    hierarchical-sparse-attention-extra-config hybrid-kvcache-ratio init-expert-location is-embedding
    json-model-override-args keep-mm-feature-on-device kt-cpuinfer kt-max-deferred-experts-per-token kt-method
    kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype language-only
    limit-mm-data-per-request load-format load-watch-interval log-level log-level-http log-requests
    log-requests-format log-requests-level log-requests-target lora-backend lora-drain-wait-threshold lora-eviction-policy
    lora-target-modules mamba-full-memory-ratio mamba-scheduler-strategy mamba-ssm-dtype mamba-track-interval
    max-loaded-loras max-lora-chunk-size max-lora-rank max-loras-per-batch max-mamba-cache-size mem-fraction-static
    mm-attention-backend mm-enable-dp-encoder mm-max-concurrent-calls mm-per-request-timeout mm-process-config
    model-checksum model-impl model-loader-extra-config modelopt-checkpoint-restore-path modelopt-checkpoint-save-path
    modelopt-export-path modelopt-quant moe-a2a-backend moe-data-parallel-size moe-dense-tp-size moe-dp-size
    moe-runner-backend mooncake-ib-device msprobe-dump-config multi-item-scoring-delimiter nccl-init-addr nccl-port nnodes
    node-rank nsa-decode nsa-decode-backend nsa-prefill nsa-prefill-backend nsa-prefill-cp-mode num-continuous-decode-steps
    numa-node offload-group-size offload-mode offload-num-in-group offload-prefetch-step otlp-traces-endpoint
    pdmux-config-path piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens
    pipeline-parallel-size pp-async-batch-depth pp-max-micro-batch-size pp-size preferred-sampling-params
    prefill-attention-backend prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-ms
    prefill-delayer-max-delay-passes prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark
    prefill-delayer-wait-seconds-buckets prefill-max-requests prefill-round-robin-balance
    priority-scheduling-preemption-threshold prompt-tokens-buckets generation-tokens-buckets quantization
    quantization-param-path quantize-and-serve radix-eviction-policy remote-instance-weight-loader-backend
    remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
    remote-instance-weight-loader-send-weights-group-ports remote-instance-weight-loader-start-seed-via-transfer-engine
    revision rl-on-policy-target rl-quant-profile sampling-backend sampling-defaults scheduler-recv-interval
    show-time-cost skip-server-warmup skip-tokenizer-init sleep-on-idle sm-group-num smg-grpc-mode soft-watchdog-timeout
    speculative-accept-threshold-acc speculative-accept-threshold-single speculative-algorithm speculative-attention-mode
    speculative-draft-attention-backend speculative-draft-load-format speculative-draft-model
    speculative-draft-model-path speculative-draft-model-quantization speculative-draft-model-revision
    speculative-eagle-topk speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity
    speculative-ngram-match-type speculative-ngram-max-bfs-breadth speculative-ngram-max-trie-depth
    speculative-ngram-min-bfs-breadth speculative-num-draft-tokens speculative-num-steps speculative-token-map
    swa-full-tokens-ratio tbo-token-distribution-threshold tokenizer-metrics-allowed-custom-labels
    tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-worker-num tool-server torch-compile-max-bs
    torchao-config triton-attention-num-kv-splits triton-attention-reduce-in-fp32 triton-attention-split-tile-size
    trust-remote-code uvicorn-access-log-exclude-prefixes warmups watchdog-timeout weight-loader-disable-mmap
    weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
"""

SGLANG_FOREIGN_FLAGS = frozenset(_SGLANG.split())
