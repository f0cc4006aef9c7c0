"""The fields that `Stream*Config` add to TRL's configs."""

from __future__ import annotations

import dataclasses

from streambp.config import StreamConfig


@dataclasses.dataclass
class StreamArguments:
    """How the trainer's models stream.

    Args:
        stream_chunk_size: tokens of each row that are recomputed and differentiated at a time, or "auto".
        stream_saves: what backward keeps instead of recomputing it ("attn_out", "kv").
    """

    stream_chunk_size: str = dataclasses.field(
        default="auto", metadata={"help": 'Tokens of each row recomputed and differentiated at a time, or "auto".'}
    )
    stream_saves: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": 'What backward keeps instead of recomputing it ("attn_out", "kv").'}
    )

    def stream_config(self) -> StreamConfig:
        """Raises ConfigError for a value that StreamConfig does not take."""
        size = self.stream_chunk_size
        chunk_size = int(size) if isinstance(size, str) and size.isdigit() else size
        return StreamConfig(chunk_size=chunk_size, saves=tuple(self.stream_saves))  # type: ignore[arg-type]
