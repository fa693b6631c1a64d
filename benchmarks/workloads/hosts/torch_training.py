"""One host: the same training as a PyTorch script has it, by DistributedDataParallel.

Runs in an environment of its own, with torch and NumPy and without JAX. Of two sides one
has dense embeddings and Adam, the other `nn.Embedding(sparse=True)` and SparseAdam for
them, which leaves rows alone that a step does not read: its losses are a little different.
"""

import hashlib
import itertools
import pathlib
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import sides
from benchmarks.network import torch_side
from benchmarks.workloads.hosts.torch_models import IDS, MODELS, RATES
from benchmarks.workloads.options import Settings


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return dict(stored)


class Training:
    """A training, as a side of `sides.timed`.

    Attributes:
        loss: That of the last step, the mean of all ranks.
    """

    def __init__(self, settings: Settings, batches: list, sparse: bool):
        self.name = "PyTorch, sparse" if sparse else "PyTorch, dense"
        params = _read(pathlib.Path(settings.data) / "params.npz")
        model = MODELS[settings.task](params, sparse)
        self._model = DistributedDataParallel(model)
        self._batches = itertools.cycle(batches)
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        known = {id(x) for x in tables}
        rest = [x for x in model.parameters() if id(x) not in known and x.requires_grad]
        rate = RATES[settings.task]
        if sparse:
            self._optimizers = [torch.optim.SparseAdam(tables, lr=rate)]
        else:
            rest = tables + rest
            self._optimizers = []
        if rest:
            self._optimizers.append(torch.optim.Adam(rest, lr=rate))
        start = time.perf_counter()
        self.run()
        self.compiled = time.perf_counter() - start

    def run(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = self._model(next(self._batches))
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.loss = float(mean) / dist.get_world_size()

    def wire(self) -> None:
        return None

    def digest(self) -> str:
        """A hash of this rank's parameters."""
        digest = hashlib.sha256()
        for x in self._model.parameters():
            digest.update(x.detach().numpy())
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains on this host, and reports a row for each side."""
    with torch_side.join() as here:
        batches = []
        for number in range(settings.count):
            read = _read(pathlib.Path(settings.data) / f"batch-{here.rank}-{number}.npz")
            batch = {name: torch.tensor(x) for name, x in read.items()}
            batches.append({k: x.long() if k in IDS else x for k, x in batch.items()})
        of = _read(pathlib.Path(settings.data) / "params.npz")
        about = {"numbers": sum(x.size for x in of.values())}
        trainings = [Training(settings, batches, sparse) for sparse in (False, True)]
        rows = sides.timed(here, trainings, settings.rounds, settings.steps)
        rate = settings.rate if here.shaped else "unshaped"
        for side, row in zip(trainings, rows, strict=True):
            same = len(set(here.gather(side.digest()))) == 1
            row |= about | {"example": settings.task, "rate": rate, "loss": side.loss}
            here.report(**row, replicas_equal=same)
