"""The API families of a vLLM server."""

from collections.abc import Sequence

from windtunnel.wire.family import Family


def families(runner: str = "generate", convert: str | None = None, num_labels: int = 1) -> Sequence[Family]:
    """The families that run requests in the engine, one module each.

    Imported here: `wire.env` needs this package's table of versions first.
    """
    if runner == "pooling":
        return _pooling(convert, num_labels)
    from windtunnel.wire.vllm import chat, chat_batch, completions, generate, invocations, messages, responses, scoring

    return (completions, chat, chat_batch, responses, messages, generate, invocations, scoring)


def _pooling(convert: str | None, num_labels: int) -> Sequence[Family]:
    """Routes follow the model's tasks (§1.5): an embedding model has no `/classify`, a classifier no embeddings, and only one
    of one class scores (vLLM 0.33, `enable_scoring_api`)."""
    from windtunnel.wire.vllm import classify, embeddings, pooling, rerank, score

    if convert != "classify":
        return (embeddings, pooling, score, rerank)
    return (classify, pooling, score, rerank) if num_labels == 1 else (classify, pooling)
