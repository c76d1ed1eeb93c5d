"""From recorded answers to a responses file (`windtunnel.wire.recorded`), so that the simulator says what the model said."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.conformance.cases import Case
from tests.conformance.compare import frames
from tests.conformance.exchange import split_answers
from tests.conformance.segment import Piece, Vocabulary
from tests.conformance.translate import as_chat, request_of
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.wire.recorded import body_hash

_LENGTH = re.compile(r"content-length: (\d+)", re.IGNORECASE)
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/invocations",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)


def lines(cases: Iterable[Case], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One line for each case whose answer holds generated text."""
    vocabulary = Vocabulary(tokenizer)
    made = [line(one, vocabulary) for case in cases for one in plain(case)]
    return [one for one in made if one is not None]


def plain(case: Case) -> list[Case]:
    """A verbatim case as the ordinary exchanges in it; any other case as it is."""
    if case.raw is None:
        return [case]
    requests = requests_in("".join(case.raw["request"]["sent_raw"]))
    answers = [answer for answer in split_answers(case.raw["response"]["raw"].encode()) if answer.status >= 200]
    pairs = zip(requests, answers, strict=False)
    return [replace(case, raw=None, path=path, body=body.encode(), expected=answer) for (path, body), answer in pairs]


def requests_in(text: str) -> list[tuple[str, str]]:
    """Path and body of each request in verbatim bytes."""
    out = []
    while "\r\n\r\n" in text:
        head, _blank, text = text.partition("\r\n\r\n")
        size = _LENGTH.search(head)
        length = int(size.group(1)) if size else 0
        words = head.split(" ", 2)
        out.append((words[1] if len(words) > 1 else "", text[:length]))
        text = text[length:]
    return out


def line(case: Case, vocabulary: Vocabulary) -> dict[str, Any] | None:
    if case.path.partition("?")[0] not in _PATHS or case.expected.status != 200 or case.raw is not None:
        return None
    digest = body_hash(case.json_body)
    if digest is None:
        return None
    request = request_of(json.loads(case.json_body))
    case = as_chat(case)
    choices, usage = _stream(case) if case.expected.is_stream else _body(case)
    if not choices:
        return None
    counts = _counts(choices, usage, request)
    told = [
        {"token_ids": _tokens(choice, request, count, vocabulary), "finish_reason": choice["finish_reason"]}
        for choice, count in zip(choices, counts, strict=True)
    ]
    details = (usage or {}).get("prompt_tokens_details") or {}
    return {"match": {"body": digest}, "choices": told, "cached_tokens": details.get("cached_tokens", 0), "case": case.title}


def _body(case: Case) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    value = json.loads(case.expected.body)
    return [_whole_choice(choice) for choice in value.get("choices", ())], value.get("usage")


def _whole_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    if "text" not in choice and "message" not in choice:
        return _choice(choice) | {"pieces": [], "token_ids": choice.get("token_ids")}
    message = choice.get("message")
    text = str(choice.get("text") or "") if message is None else _message_text(message)
    return _choice(choice) | {"pieces": [Piece(text, False)] if text else [], "token_ids": choice.get("token_ids")}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}


def _message_text(message: Mapping[str, Any]) -> str:
    reasoning = message.get("reasoning")
    content = message.get("content") or ""
    calls = [_call_text(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    thought = "" if reasoning is None else f"<think>{reasoning}</think>" if content or calls else _open_thought(reasoning)
    return thought + content + "\n".join(calls)


def _open_thought(reasoning: str) -> str:
    """Reasoning that was not ended; the tag in front shows in the line break behind it."""
    return f"<think>{reasoning}" if reasoning.startswith("\n") else reasoning


def _call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _stream(case: Case) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    values = [json.loads(part[6:]) for part in frames(case.expected.body) if part.startswith(b"data: {")]
    by_index: dict[int, list[dict[str, Any]]] = {}
    for value in values:
        for choice in value.get("choices", ()):
            by_index.setdefault(choice["index"], []).append(choice)
    usage = values[-1].get("usage") if values and not values[-1].get("choices") else None
    hold = _hold(request_of(json.loads(case.json_body)))
    return [_streamed_choice(by_index[index], hold) for index in sorted(by_index)], usage


def _hold(request: Mapping[str, Any]) -> int:
    stops = request.get("stop") or []
    longest = max((len(stop) for stop in ([stops] if isinstance(stops, str) else stops)), default=1)
    return 0 if request.get("include_stop_str_in_output") else longest - 1


def _streamed_choice(parts: Sequence[dict[str, Any]], hold: int) -> dict[str, Any]:
    told = [part for part in parts if "role" not in part.get("delta", {})]
    ids = [token for part in told for token in part.get("token_ids") or ()] or None
    pieces = _delta_pieces(told) if told and "delta" in told[0] else [Piece(part.get("text", ""), True) for part in told]
    if hold:
        pieces = _unheld([piece.text for piece in pieces], hold)
    return _choice(told[-1]) | {"pieces": [piece for piece in pieces if piece.text], "token_ids": ids, "frames": len(told)}


def _unheld(texts: Sequence[str], hold: int) -> list[Piece]:
    """Text between token boundaries: a frame that ended at character n was sent when n + hold had been generated."""
    whole = "".join(texts)
    ends = [sum(map(len, texts[: at + 1])) for at in range(len(texts) - 1)]
    bounds = sorted({end + hold for end in ends if end})
    return [Piece(whole[start:end], start > 0) for start, end in zip([0, *bounds], [*bounds, len(whole)], strict=True)]


def _delta_pieces(parts: Sequence[dict[str, Any]]) -> list[Piece]:
    """Content and reasoning frames one by one; tool calls put back into their tags."""
    pieces: list[Piece] = []
    state = "start"
    for part in parts:
        delta = part["delta"]
        for call in delta.get("tool_calls") or ():
            pieces += _call_pieces(call["function"], first=state != "call")
            state = "call"
        if delta.get("reasoning"):
            pieces += [Piece("<think>", True)] if state == "start" and delta["reasoning"].startswith("\n") else []
            pieces.append(Piece(delta["reasoning"], True))
            state = "reasoning"
        if delta.get("content"):
            opened = "reasoning" in delta and state == "start"
            pieces += [Piece("<think></think>" if opened else "</think>", False)] if opened or state == "reasoning" else []
            pieces.append(Piece(delta["content"], True))
            state = "content"
    return _closed(pieces) if state == "call" else pieces


def _call_pieces(function: Mapping[str, Any], *, first: bool) -> list[Piece]:
    if "name" not in function:
        return [Piece(function["arguments"], True)]
    between = "" if first else "}\n</tool_call>\n"
    return [Piece(f'{between}<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments":', False), Piece(" ", False)]


def _closed(pieces: list[Piece]) -> list[Piece]:
    """Join what one token spans: the blank before the arguments, the brace behind them."""
    out: list[Piece] = []
    for piece in [*pieces, Piece("}\n</tool_call>", False)]:
        if out and out[-1] == Piece(" ", False):
            out[-1] = Piece(f" {piece.text}", True)
        elif out and piece.text.startswith("}\n</tool_call>") and out[-1].single:
            out[-1] = Piece(out[-1].text + "}", True)
            out.append(Piece(piece.text[1:], False))
        else:
            out.append(piece)
    return out


def _counts(choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None, request: dict[str, Any]) -> list[int | None]:
    """Completion tokens of each choice, where they can be known."""
    total = (usage or {}).get("completion_tokens")
    if len(choices) == 1 and total is not None:
        return [total]
    request = request | request.get("sampling_params", {})
    limit = request.get("max_completion_tokens") or request.get("max_tokens") or (16 if "prompt" in request else None)
    return [limit if choice["finish_reason"] == "length" else None for choice in choices]


def _tokens(choice: Mapping[str, Any], request: Mapping[str, Any], count: int | None, vocabulary: Vocabulary) -> list[int]:
    if choice["token_ids"]:
        return _without_eos(list(choice["token_ids"]), choice)
    pieces = _without_echo(list(choice["pieces"]), request)
    stop = choice["stop_reason"]
    if isinstance(stop, str) and not request.get("include_stop_str_in_output"):
        pieces.append(Piece(stop, False))
    ended = choice["finish_reason"] in ("stop", "tool_calls") and not isinstance(stop, str)
    tail = [stop] if isinstance(stop, int) else []
    wanted = None if count is None else count - int(ended)
    ids = vocabulary.tokens(pieces, wanted)
    return ids + [_hidden(request)] * (0 if wanted is None else max(0, wanted - len(ids))) + tail


def _without_eos(ids: list[int], choice: Mapping[str, Any]) -> list[int]:
    natural = choice["finish_reason"] in ("stop", "tool_calls") and choice["stop_reason"] is None
    return ids[:-1] if natural else ids


def _without_echo(pieces: list[Piece], request: Mapping[str, Any]) -> list[Piece]:
    """The answer without the repeated prompt."""
    if not request.get("echo") or not pieces:
        return pieces
    messages = request.get("messages")
    prompt = request.get("prompt") if messages is None else messages[-1].get("content")
    if isinstance(prompt, str) and pieces[0].text.startswith(prompt):
        pieces[0] = pieces[0]._replace(text=pieces[0].text[len(prompt) :])
    return [piece for piece in pieces if piece.text]


def _hidden(request: Mapping[str, Any]) -> int:
    """A token without visible text: the one that a logit bias asks for, or the padding token."""
    return int(next(iter(request.get("logit_bias") or ("0",))))
