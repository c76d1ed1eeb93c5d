"""A request's life through both workers (SGLang reference §3)."""

import pytest
from tests.core.sglang.pair import Pair

from windtunnel.core.outputs import FinishReason
from windtunnel.core.transfer.frames import KvChunk, KvStatus, Metadata

RELEASES = ("0.4.10", "0.5.5", "0.5.9", "0.5.11", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
WANTED = [1000 + index % 7 for index in range(6)]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (4, 2)])
def test_a_request_goes_through_on_every_release_and_tp_size(version: str, ranks: tuple[int, int]) -> None:
    pair = Pair(version, ranks=ranks)
    pair.submit("a", 150, 6)
    pair.submit("b", 30, 6)
    pair.run()
    for name in ("a", "b"):
        assert pair.status_of("prefill", name) == ("length", 200)
        assert pair.tokens("prefill", name) == WANTED[:1]
        assert pair.tokens("decode", name) == WANTED
        assert pair.ending("decode", name).finish_reason is FinishReason.LENGTH
    pair.assert_empty()


def test_chunks_are_sent_as_they_are_computed_whole_pages_only() -> None:
    pair = Pair(chunked_prefill_size=50)
    pair.submit("a", 150)
    pair.run()
    chunks = pair.frames_of(KvChunk)
    assert [(chunk.chunk, chunk.is_last, len(chunk.pages)) for chunk in chunks] == [
        (0, False, 12),
        (1, False, 12),
        (2, False, 12),
        (3, True, 2),
    ]
    (metadata,) = pair.frames_of(Metadata)
    assert sum((chunk.pages for chunk in chunks), ()) == metadata.pages
    assert chunks[-1].notification == f"{metadata.room}_kv_3_1_0"
    assert len(pair.frames_of(KvStatus)) == 1


def test_until_0_5_22_completion_travels_with_the_writes() -> None:
    pair = Pair("0.5.22")
    pair.submit("a")
    pair.run()
    assert pair.frames_of(KvStatus) == []
    assert pair.tokens("decode", "a") == WANTED[:4]
