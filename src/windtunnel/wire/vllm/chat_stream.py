"""The frames of a chat stream (vLLM reference §3.2)."""

from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import Delta, Usage, WireError
from windtunnel.wire.output import HeldLogprobs
from windtunnel.wire.vllm import chunks, parsers
from windtunnel.wire.vllm.chat_spec import ChatSpec, ReasoningCount, chat_finish, prompt_text


class ChatEncoder:
    """Frames of one chat stream. Mutable: role chunks sent, counts, and one parser per choice.

    A plain delta (no parser, logprobs, token ids, usage or finish) is one join of prepared bytes around its text.
    """

    __slots__ = (
        "_called",
        "_counts",
        "_heads",
        "_held",
        "_parsers",
        "_plain",
        "_reasoned",
        "_roles_sent",
        "_spec",
        "_tail",
        "_top",
    )

    def __init__(self, spec: ChatSpec) -> None:
        self._spec = spec
        self._top = _chunk_head(spec)
        self._heads = [b'%b"choices":[{"index":%d,"delta":{"content":' % (self._top, index) for index in range(spec.n)]
        self._tail = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        parsed = spec.reasoning or spec.tools is not None
        self._parsers = [parsers.make_parser(reasoning=spec.reasoning, tools=spec.tools is not None) for _ in range(spec.n)]
        self._plain = not (parsed or spec.token_ids or spec.continuous_usage or spec.top_logprobs is not None)
        self._counts = [0] * spec.n
        self._held = HeldLogprobs(spec.n)
        self._called = [False] * spec.n
        self._reasoned = [ReasoningCount(spec) for _ in range(spec.n)] if spec.env.reasoning_parser else []
        self._roles_sent = False

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        if self._plain and delta.finish_reason is None and self._roles_sent:
            if not delta.text:
                return b""
            return b"".join((self._heads[delta[0]], http.json_text(delta.text), self._tail))
        before = b"" if self._roles_sent else self._role_chunks()
        return before + self._full(delta)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._heads[index], self._tail) if self._plain and self._roles_sent else None

    def close(self, usage: Usage) -> bytes:
        spec = self._spec
        if not spec.include_usage:
            return chunks.DONE
        details = spec.env.enable_prompt_tokens_details
        told: dict[str, Any] = {"usage": chunks.stream_usage(usage, details, created=True)}
        if self._reasoned:
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": sum(count.total for count in self._reasoned)}
        told["system_fingerprint"] = spec.env.system_fingerprint
        if usage.metrics is not None and spec.env.enable_per_request_metrics:
            told["metrics"] = {key: value for key, value in usage.metrics.items() if value is not None}
        return b'%b"choices":[],%b\n\n%b' % (self._top, http.dumps(told)[1:], chunks.DONE)

    def error(self, error: WireError) -> bytes:
        return http.error_frames(error, spaced=False)

    def _role_chunks(self) -> bytes:
        self._roles_sent = True
        spec = self._spec
        prompt = spec.prompts[0]
        after: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids) if spec.token_ids else None}
        after["prompt_text"] = prompt_text(prompt, spec)
        first = [self._bare_chunk(index, {"role": spec.role, "content": ""}, after) for index in range(spec.n)]
        if spec.echo_text:
            first += [self._bare_chunk(index, {"content": spec.echo_text}, {}) for index in range(spec.n)]
        return b"".join(first)

    def _bare_chunk(self, index: int, delta: dict[str, Any], after: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage_so_far(index)} if self._spec.continuous_usage else {}
        return self._frame({"choices": [choice]} | usage | after)

    def _full(self, delta: Delta) -> bytes:
        index = delta.index
        self._counts[index] += len(delta.token_ids)
        self._held.hold(delta)
        if self._reasoned:
            self._reasoned[index].add(delta.token_ids)
        shown = self._members(delta)
        if not shown:
            if delta.finish_reason is None and not self._spec.token_ids:
                return b""
            shown = [{}]
        frames = [self._chunk(delta, members, last=at == len(shown) - 1) for at, members in enumerate(shown)]
        return b"".join(frames)

    def _members(self, delta: Delta) -> list[dict[str, Any]]:
        """The `delta` objects that this text makes; none while a parser holds everything back."""
        parser = self._parsers[delta.index]
        if parser is None:
            return [{"content": delta.text}] if delta.text else []
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        made = [self._member(piece, delta.index) for piece in pieces]
        return [members for members in made if members is not None]

    def _member(self, piece: parsers.Piece, index: int) -> dict[str, Any] | None:
        spec = self._spec
        if piece.kind == "reasoning":
            return {"reasoning": piece.text} if spec.include_reasoning else None
        if piece.kind == "content":
            hidden = spec.reasoning and not spec.include_reasoning
            return {"content": piece.text} | ({"reasoning": None} if hidden else {})
        if piece.call > 0 and not spec.parallel_tool_calls:
            return None
        self._called[index] = True
        return {"content": None, "tool_calls": [call_piece(piece, spec)]}

    def _chunk(self, delta: Delta, members: dict[str, Any], *, last: bool) -> bytes:
        spec = self._spec
        finish = delta.finish_reason if last else None
        choice: dict[str, Any] = {"index": delta.index, "delta": members, "logprobs": None}
        if spec.top_logprobs is not None and last:
            choice["logprobs"] = chunks.chat_logprobs(self._held.release(delta.index), spec.top_logprobs, spec.as_ids)
        choice["finish_reason"] = chat_finish(finish, spec, self._called[delta.index])
        if finish is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = list(delta.token_ids) if spec.token_ids and last else None
        if finish is not None:
            choice |= chunks.weight_versions(spec.env)
        told: dict[str, Any] = {"choices": [choice]}
        if spec.continuous_usage:
            told["usage"] = self._usage_so_far(delta.index)
        if finish is not None and not spec.include_usage:
            told["system_fingerprint"] = spec.env.system_fingerprint
        return self._frame(told)

    def _usage_so_far(self, index: int) -> dict[str, Any]:
        counted = chunks.counts(len(self._spec.prompts[0].token_ids), self._counts[index])
        details = {"reasoning_tokens": self._reasoned[index].total} if self._reasoned else None
        return counted | {"completion_tokens_details": details}

    def _frame(self, told: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._top, http.dumps(told)[1:])


def _chunk_head(spec: ChatSpec) -> bytes:
    told = {"id": spec.response_id, "object": "chat.completion.chunk", "created": spec.created, "model": spec.model}
    return b"data: %b," % http.dumps(told)[:-1]


def call_piece(piece: parsers.Piece, spec: ChatSpec) -> dict[str, Any]:
    if piece.kind == "name":
        head = {"id": f"chatcmpl-tool-{spec.env.new_id()}", "type": "function", "index": piece.call}
        return head | {"function": {"name": piece.text}}
    return {"index": piece.call, "function": {"arguments": piece.text}}
