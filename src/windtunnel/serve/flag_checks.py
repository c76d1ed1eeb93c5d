"""What no single flag can see: settings that contradict each other, or need one another."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from windtunnel.core.physics import MODELS
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.kv_config import check_kv_events
from windtunnel.serve.seams import pair_of, resolve


def check(config: ServeConfig) -> ServeConfig:
    """The configuration as it will be served. Raises UsageError that names the flags."""
    if config.engine == "sglang":
        from windtunnel.serve.sglang.flags import check_sglang

        check_sglang(config)
    else:
        _check_vllm(config)
    if config.pacing.other_jobs and not (config.pacing.profile and config.pacing.profile.machine.cores):
        raise UsageError("--other-jobs needs a --profile that knows its machine's cores: windtunnel calibrate --cores N")
    for name in config.faults:
        _check_fault(config, name)
    try:
        check_kv_events(config.kv_events, config.data_parallel_size)
    except ValueError as error:
        raise UsageError(f"--kv-events-config: {error}") from None
    if bool(config.ssl_certfile) != bool(config.ssl_keyfile):
        raise UsageError("--ssl-certfile and --ssl-keyfile go together")
    return _with_one_port(config)


def _with_one_port(config: ServeConfig) -> ServeConfig:
    """`--grpc-port` equal to `--port` says the same as `--grpc-on-http-port`."""
    same = config.grpc_port == config.port != 0
    if not (same or config.grpc_on_http_port):
        return config
    if config.grpc_port is not None and not same:
        raise UsageError(f"--grpc-on-http-port and --grpc-port {config.grpc_port} contradict each other: give one")
    if config.ssl_certfile:
        raise UsageError("--grpc-on-http-port serves no TLS: give gRPC a --grpc-port of its own")
    return replace(config, grpc_port=None, grpc_on_http_port=True)


def _check_vllm(config: ServeConfig) -> None:
    scheduler = config.scheduler
    if scheduler.kv_offloading_gib and scheduler.kv_offloading_blocks:
        raise UsageError("--kv-offloading-size and --kv-offloading-blocks say the same thing: give one")
    if (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks) and not scheduler.enable_prefix_caching:
        raise UsageError("--kv-offloading-size needs prefix caching: nothing is found in the host tier without it")
    if config.kv_transfer.on and (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks):
        raise UsageError("--kv-offloading-size and --kv-transfer-config exclude each other: there is no MultiConnector here")
    _check_kv_transfer(config)
    if scheduler.kv_offloading_disk_blocks and not (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks):
        raise UsageError(
            "--kv-offloading-disk-blocks needs --kv-offloading-size or --kv-offloading-blocks: it stands behind them"
        )
    needed = -(-scheduler.max_model_len // scheduler.block_size) + 1
    if scheduler.num_gpu_blocks < needed:
        raise UsageError(
            f"--num-gpu-blocks-override {scheduler.num_gpu_blocks} is too small: one request of --max-model-len "
            f"{scheduler.max_model_len} needs {needed} blocks of {scheduler.block_size} tokens"
        )
    pacing = config.pacing
    if pacing.gpu is not None and MODELS[pacing.gpu_model].heads % pacing.tensor_parallel:
        heads = MODELS[pacing.gpu_model].heads
        raise UsageError(
            f"--tensor-parallel-size {pacing.tensor_parallel} does not divide the {heads} heads of {pacing.gpu_model}"
        )


def _check_kv_transfer(config: ServeConfig) -> None:
    settings = config.kv_transfer
    if settings.side_channel_port + config.data_parallel_size > _PORTS:
        raise UsageError("--nixl-side-channel-port leaves no port for each data-parallel rank")
    if not settings.on:
        return
    try:
        settings.parsed("-")
    except ValueError as error:
        raise UsageError(f"--kv-transfer-config: {error}") from None


_PORTS = 65536


_PAIRS: Mapping[str, tuple[str, Callable[[ServeConfig], bool]]] = MappingProxyType(
    {
        "sglang-pd": ("--engine sglang --disaggregation-mode prefill|decode", lambda config: config.disagg.on),
        "vllm-pd": ("--kv-transfer-config", lambda config: config.engine == "vllm" and config.kv_transfer.on),
    }
)
"""Kind of P/D pair → the flags that make a server one of its sides, and whether this one is."""


def _check_fault(config: ServeConfig, text: str) -> None:
    try:
        resolve(text)
    except ValueError as error:
        raise UsageError(f"--fault {error}") from None
    if pair := pair_of(text):
        flags, belongs = _PAIRS[pair]
        if not belongs(config):
            raise UsageError(f"--fault {text}: only a server of a {pair} pair can have it: start it with {flags}")
