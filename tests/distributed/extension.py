"""Builds, in a rank of its own, what DeepSpeed compiles when it starts."""

from __future__ import annotations

import os


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()


if __name__ == "__main__":
    main()
