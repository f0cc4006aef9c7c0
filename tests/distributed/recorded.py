"""What each rank asks of the others, in order: a difference raises where it begins, on every rank,
instead of a hang.

Each collective is recorded where torch dispatches it, whoever calls it, with its shapes, and is
told to a store before it is issued. A rank waits there, and not in the collective, for what the
others are about to issue.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANK_TIMEOUT_SECONDS = 20  # that a rank waits for another
COLLECTIVES = ("c10d", "_c10d_functional")


class DifferentError(AssertionError):
    """Ranks ask different things of each other."""


class RecordedMode(TorchDispatchMode):
    """Within, every collective of this rank: `issued`. All ranks enter it with one name, which no
    other time had.

    Raises:
        DifferentError: another rank of the collective's group issues another one, or ends, or
            issues none for SECONDS.
    """

    def __init__(self, name):
        super().__init__()
        self.store = dist.PrefixStore(name, _get_default_store())
        self.rank, self.everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.issued, self.counts = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in COLLECTIVES and not func._schema.name.endswith("wait_tensor"):
            leaves = tree_leaves((args, kwargs or {}))
            shapes = [
                f"{x.dtype}{list(x.shape)}".removeprefix("torch.")
                for x in leaves
                if isinstance(x, torch.Tensor)
            ]
            self.tell(f"{func._schema.name.split('::')[1]} {' '.join(shapes)}", self._ranks(leaves))
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if kind is None:
            self.tell("the end", self.everyone)
        elif kind is not DifferentError:
            self._say(f"{kind.__name__}: {error}", self.everyone)

    def _ranks(self, leaves):
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                group = dist.ProcessGroup.unbox(leaf)
                if group.size() < len(self.everyone):
                    return tuple(
                        dist.get_process_group_ranks(_resolve_process_group(group.group_name))
                    )
        return self.everyone

    def _say(self, operation, ranks):
        number = self.counts[ranks] = self.counts.get(ranks, -1) + 1
        self.store.set(f"{ranks} {number} {self.rank}", operation)
        return number

    def tell(self, operation, ranks):
        """Say what comes next, and hear it of the others."""
        number = self._say(operation, ranks)
        self.issued.append(operation)
        keys = [f"{ranks} {number} {peer}" for peer in ranks]
        try:
            self.store.wait(keys, datetime.timedelta(seconds=RANK_TIMEOUT_SECONDS))
        except RuntimeError as error:
            raise DifferentError(
                f"collective {number}: rank {self.rank} is at {operation}, and one of {ranks} is "
                f"nowhere for {RANK_TIMEOUT_SECONDS} s"
            ) from error
        for peer, reply in zip(ranks, self.store.multi_get(keys), strict=True):
            if reply.decode() != operation:
                raise DifferentError(
                    f"collective {number}: rank {self.rank} is at {operation}, rank {peer} at "
                    f"{reply.decode()}"
                )
