"""The memory that real bytes come from and go to. A block has a few bytes here, however large its KV is said to be.

*Source*: `SOURCE_SLOTS` slots of fixed content, the same in every process. What the block of an owner contains is one of them,
so that both ends know it without a word. *Sink*: a place for each block of the engine, where a peer's bytes land.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SOURCE_SLOTS = 4096
BLOCK_BYTES_LIMIT = 1 << 20
SINK_LIMIT_BYTES = 1 << 30


class BlockMemory:
    """Fixed in size. Owned by one agent."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Raises ValueError for more memory than a test bench should take."""
        if not 1 <= block_bytes <= BLOCK_BYTES_LIMIT:
            raise ValueError(f"nixl-block-bytes is {block_bytes}: must be between 1 and {BLOCK_BYTES_LIMIT}")
        if blocks * block_bytes > SINK_LIMIT_BYTES:
            most = max(1, SINK_LIMIT_BYTES // blocks)
            raise ValueError(
                f"nixl-block-bytes is {block_bytes}: {blocks} blocks would take {blocks * block_bytes} bytes, "
                f"at most {SINK_LIMIT_BYTES} are allowed (here: {most} bytes a block)"
            )
        self.blocks = blocks
        self.block_bytes = block_bytes
        slots = min(SOURCE_SLOTS, max(1, SINK_LIMIT_BYTES // block_bytes))
        content = b"".join(hashlib.shake_128(b"%d" % slot).digest(block_bytes) for slot in range(slots))
        self.source = np.frombuffer(bytearray(content), dtype=np.uint8).reshape(slots, block_bytes)
        self.sink = np.zeros((blocks, block_bytes), dtype=np.uint8)

    @property
    def source_address(self) -> int:
        return int(self.source.ctypes.data)

    @property
    def sink_address(self) -> int:
        return int(self.sink.ctypes.data)

    def slots_of(self, owner: str, blocks: Sequence[int]) -> Any:
        """The source slot with the content of each block. An owner is whoever the blocks are given to for a time."""
        return (np.asarray(blocks, dtype=np.int64) + zlib.crc32(owner.encode())) % len(self.source)

    def differing(self, owner: str, remote_blocks: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
        """Places at which our sink does not hold what `owner` has in its `remote_blocks`."""
        if not blocks:
            return ()
        want = self.source[self.slots_of(owner, remote_blocks)]
        have = self.sink[np.asarray(blocks, dtype=np.int64)]
        return tuple(int(place) for place in np.flatnonzero((want != have).any(axis=1)))

    def has(self, blocks: Sequence[int]) -> bool:
        return not blocks or (min(blocks) >= 0 and max(blocks) < self.blocks)
