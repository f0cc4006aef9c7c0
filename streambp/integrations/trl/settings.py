"""Fields that `Stream*Config` classes add to TRL's configs."""

from __future__ import annotations

import dataclasses

from streambp.config import StreamConfig


@dataclasses.dataclass
class StreamArguments:
    """Settings of models that streambp patches and computes chunk by chunk.

    Args:
        stream_chunk_size: tokens of each row in one chunk, or "auto".
        stream_saves: tensors that layers save for backward in place of recomputing them
            ("attn_out", "kv"). "auto" saves what fits; [] saves none.
        stream_offload: "cpu" stores layer inputs and saved tensors in host memory. "auto" does the
            same, and chooses `stream_gpu_memory` if it is not given. "if_faster" stores tensors in
            host memory only in steps that are then faster, or would not fit otherwise. "none": all
            tensors stay on the device.
        stream_host_memory: maximum host memory for offloading, such as "96GiB".
        stream_gpu_memory: device memory for tensors that exist longer than a chunk, for example
            "8GiB". Used only with offloading.
        stream_rows: "packed" computes a batch without its padding, and common beginnings of rows
            once. "auto" packs if the caller gets no value at padding; "as_given" never packs.
        stream_weights: "cpu" stores the layers' frozen weights (LoRA bases) in host memory; "auto"
            only weights that do not fit on the device.
        stream_share_prefixes: deprecated. True means stream_rows="packed", False "as_given".
    """

    stream_chunk_size: str = dataclasses.field(
        default="auto", metadata={"help": 'Tokens of each row in one chunk, or "auto".'}
    )
    stream_saves: list[str] = dataclasses.field(
        default_factory=lambda: ["auto"],
        metadata={
            "help": 'Tensors that backward need not recompute ("attn_out", "kv"); "auto": those that fit.'
        },
    )
    stream_offload: str = dataclasses.field(
        default="if_faster",
        metadata={
            "help": '"cpu" keeps layer inputs and saved tensors in host memory; "auto" also '
            'chooses stream_gpu_memory; "if_faster" does so where steps are then faster, '
            '"none" never.'
        },
    )
    stream_host_memory: str | None = dataclasses.field(
        default=None, metadata={"help": 'Host memory that may be used, such as "96GiB".'}
    )

    stream_gpu_memory: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": 'With offloading, device memory for tensors that live longer than a chunk, such as "8GiB".'
        },
    )
    stream_rows: str = dataclasses.field(
        default="auto",
        metadata={
            "help": '"packed": without padding, and common beginnings of rows once; "auto"; "as_given".'
        },
    )
    stream_weights: str = dataclasses.field(
        default="device",
        metadata={
            "help": 'Where the layers\' frozen weights live: "device", "cpu" (host memory), or "auto".'
        },
    )
    stream_share_prefixes: bool | None = dataclasses.field(
        default=None, metadata={"help": 'The former name of stream_rows="packed"; it will go.'}
    )

    def stream_config(self) -> StreamConfig:
        """Return the `stream_*` settings as a `StreamConfig`.

        Raises:
            ConfigError: `StreamConfig` does not accept a value.
        """
        size = self.stream_chunk_size
        chunk_size: int | str = size
        if isinstance(size, str) and size.isdigit():
            chunk_size = int(size)
        return StreamConfig(
            chunk_size=chunk_size,  # type: ignore[arg-type]
            saves=self.stream_saves,  # type: ignore[arg-type]  # a list; text is refused
            offload=self.stream_offload,  # type: ignore[arg-type]
            host_memory=self.stream_host_memory,
            gpu_memory=self.stream_gpu_memory,
            rows=self.stream_rows,  # type: ignore[arg-type]
            weights=self.stream_weights,  # type: ignore[arg-type]
            share_prefixes=self.stream_share_prefixes,
        )
