"""One host of a job of PyTorch's: how it joins. `host.join` is that of JAX's jobs."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.testbed import host


class _Store:
    """torch's store, as `host.Store` wants one."""

    def __init__(self, store):
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, name: str, ranks: int) -> None:
        if self._store.add(name, 1) == ranks:
            self._store.set(name + "/all", "")
        self._store.get(name + "/all")

    def values(self, folder: str, ranks: int) -> list[str]:
        keys = [f"{folder}/{rank}" for rank in range(ranks)]
        return [value.decode() for value in self._store.multi_get(keys)]


@contextlib.contextmanager
def join() -> Iterator[host.Here]:
    """Joins the job that the testbed started, with gloo and one thread."""
    torch.set_num_threads(1)
    here = host.Here.from_environment()
    address, port = here.coordinator.rsplit(":", 1)
    # gloo looks up the machine's name; an interface says the same without a look-up.
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if here.shaped else "lo"
    store = dist.TCPStore(address, int(port), here.ranks, is_master=here.rank == 0)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.ranks)
    here.store = _Store(store)

    def leave():
        here.barrier()
        dist.destroy_process_group()

    with host.ending(leave):
        yield here
