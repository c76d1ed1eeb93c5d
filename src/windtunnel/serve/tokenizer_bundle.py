"""A tokenizer's files as `GetTokenizer` sends them: one zip, in pieces (smg-grpc-servicer 0.14.1)."""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as common

from windtunnel.wire.builtin_files import tokenizer_files

PIECE_BYTES = 64 * 1024
BUNDLE_BYTES_MAX = 1 << 30
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")


def bundle(path: str | None) -> bytes:
    """The zip of a tokenizer folder (or of the folder of a tokenizer.json); without one, of the built-in tokenizer."""
    if path is None:
        return zipped(tokenizer_files())
    given = Path(path)
    folder = given.parent if given.is_file() else given
    files = {folder / name for name in _NAMES} | {found for pattern in _PATTERNS for found in folder.glob(pattern)}
    kept = sorted(file for file in files if file.is_file())
    return zipped({file.name: file.read_bytes() for file in kept})


def zipped(files: Mapping[str, bytes]) -> bytes:
    if sum(len(data) for data in files.values()) > BUNDLE_BYTES_MAX:
        raise ValueError(f"the tokenizer's files are larger than {BUNDLE_BYTES_MAX} bytes together")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def pieces(data: bytes) -> Iterator[common.GetTokenizerChunk]:
    """The SHA-256 of the whole comes with the last piece only."""
    digest = hashlib.sha256(data).hexdigest()
    for at in range(0, len(data), PIECE_BYTES):
        last = at + PIECE_BYTES >= len(data)
        yield common.GetTokenizerChunk(data=data[at : at + PIECE_BYTES], sha256=digest if last else "")
