"""The fields that `Stream*Config` add to TRL's configs."""

from __future__ import annotations

import dataclasses

from streambp.config import StreamConfig


@dataclasses.dataclass
class StreamArguments:
    """How the trainer's models stream.

    Args:
        stream_chunk_size: tokens of each row that are recomputed and differentiated at a time, or "auto".
        stream_saves: what backward keeps instead of recomputing it ("attn_out", "kv"); "auto": what fits; []: nothing.
        stream_offload: "cpu" moves what is kept to host memory; "auto" chooses what to keep as well.
        stream_host_memory: how much of it may be used, such as "96GiB".
        stream_gpu_memory: how much of the device's may be used for what lives longer than a chunk.
        stream_rows: "packed" computes a batch without its padding, and once what rows have in common at their beginning;
            "auto": without its padding where nothing shows it; "as_given": as its rows.
        stream_share_prefixes: the former name of "packed"; it will go.
    """

    stream_chunk_size: str = dataclasses.field(
        default="auto", metadata={"help": 'Tokens of each row recomputed and differentiated at a time, or "auto".'}
    )
    stream_saves: list[str] = dataclasses.field(
        default_factory=lambda: ["auto"],
        metadata={"help": 'What backward keeps instead of recomputing it ("attn_out", "kv"); "auto": what fits.'},
    )
    stream_offload: str = dataclasses.field(
        default="none", metadata={"help": '"cpu" moves what backward needs to host memory behind the compute.'}
    )
    stream_host_memory: str | None = dataclasses.field(
        default=None, metadata={"help": 'Host memory that may be used, such as "96GiB".'}
    )

    stream_gpu_memory: str | None = dataclasses.field(
        default=None,
        metadata={"help": 'With offloading, device memory for what lives longer than a chunk, such as "8GiB".'},
    )
    stream_rows: str = dataclasses.field(
        default="auto",
        metadata={"help": '"packed": without padding, and once what rows begin with in common; "auto"; "as_given".'},
    )
    stream_share_prefixes: bool | None = dataclasses.field(
        default=None, metadata={"help": 'The former name of stream_rows="packed"; it will go.'}
    )

    def stream_config(self) -> StreamConfig:
        """Raises ConfigError for a value that StreamConfig does not take."""
        size = self.stream_chunk_size
        chunk_size = int(size) if isinstance(size, str) and size.isdigit() else size
        return StreamConfig(
            chunk_size=chunk_size,  # type: ignore[arg-type]
            saves=self.stream_saves,  # type: ignore[arg-type]  # a list; text is refused
            offload=self.stream_offload,  # type: ignore[arg-type]
            host_memory=self.stream_host_memory,
            gpu_memory=self.stream_gpu_memory,
            rows=self.stream_rows,  # type: ignore[arg-type]
            share_prefixes=self.stream_share_prefixes,
        )
