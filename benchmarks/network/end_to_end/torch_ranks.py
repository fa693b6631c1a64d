"""One host: the same training as a PyTorch script has it, with sparse embeddings.

Runs in an environment of its own, with torch and NumPy and without JAX. Tables are
`nn.Embedding(sparse=True)`; their gradients are coalesced and added up by gloo's sparse
all-reduce, all others by its dense one; `SparseAdam` and `Adam` take the step.
"""

import hashlib
import itertools
import math
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.network import torch_side
from benchmarks.network.end_to_end import reports, tasks
from benchmarks.network.end_to_end.options import LEARNING_RATE, Settings


def _table(numbers: np.ndarray) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.tensor(numbers), freeze=False, sparse=True)


class Language(nn.Module):
    """The language model of `examples.lm_model`, number for number."""

    def __init__(self, params):
        super().__init__()
        self.input = _table(params["input_embedding"])
        self.output = _table(params["output_embedding"])
        self.bias = _table(params["output_bias"][:, None])
        width = params["input_embedding"].shape[1]
        self.lstm = nn.LSTM(width, width, batch_first=True)
        # Gates of one are: enter, forget, leave, new; of the other: enter, forget, new,
        # leave. It forgets less at first, by a bias that is not trained.
        enter, forget, leave, new = np.split(params["lstm"], 4, axis=1)
        kernel = torch.tensor(np.concatenate([enter, forget, new, leave], axis=1).T)
        with torch.no_grad():
            self.lstm.weight_ih_l0.copy_(kernel[:, :width])
            self.lstm.weight_hh_l0.copy_(kernel[:, width:])
            self.lstm.bias_ih_l0.zero_()[width : 2 * width] = 1
            self.lstm.bias_hh_l0.zero_()
        self.lstm.bias_ih_l0.requires_grad = self.lstm.bias_hh_l0.requires_grad = False

    def forward(self, batch):
        hidden, _ = self.lstm(self.input(batch["tokens"]))
        targets, negatives = batch["targets"], batch["negatives"][0]
        right = (hidden * self.output(targets)).sum(-1) + self._bias(targets)
        wrong = hidden @ self.output(negatives).T + self._bias(negatives)
        # A negative that happens to be the right word is none.
        wrong = wrong.masked_fill(targets[..., None] == negatives, -math.inf)
        scores = torch.cat([right[..., None], wrong], dim=-1)
        return (torch.logsumexp(scores, dim=-1) - right).mean()

    def _bias(self, words):
        """The bias of a word's score, less the log of how often it is drawn."""
        share = torch.log1p(1 / (words + 1.0)) / math.log(self.bias.num_embeddings + 1)
        return self.bias(words)[..., 0] - torch.log(share)


class Clicks(nn.Module):
    """The click model of `benchmarks.training.rows`."""

    def __init__(self, params):
        super().__init__()
        self.table = _table(params["table"])

    def forward(self, batch):
        rows = self.table(batch["ids"]).sum(1)
        scores = rows[:, 0] + rows[:, 1:].square().sum(1)
        return functional.binary_cross_entropy_with_logits(scores, batch["clicked"])


MODELS = {"language": Language, "clicks": Clicks}


class Training:
    """A training run, as a side of `sides.timed`."""

    name = "PyTorch, sparse"
    compiled = 0.0

    def __init__(self, settings: Settings, task: tasks.Task):
        rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.model = MODELS[settings.task](task.params)
        own = [
            {name: torch.tensor(x) for name, x in batch.items()}
            for batch in task.of_host(rank, self._ranks)
        ]
        for batch in own:
            for name in batch.keys() & {"tokens", "targets", "negatives", "ids"}:
                batch[name] = batch[name].long()
        self._batches = itertools.cycle(own)
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        sparse = [table.weight for table in tables]
        known = {id(x) for x in sparse}
        dense = [x for x in self.model.parameters() if id(x) not in known]
        dense = [x for x in dense if x.requires_grad]
        self._optimizers = [torch.optim.SparseAdam(sparse, lr=LEARNING_RATE)]
        if dense:
            self._optimizers.append(torch.optim.Adam(dense, lr=LEARNING_RATE))
        self._trained = sparse + dense
        start = time.perf_counter()
        self.run()
        self.compiled = time.perf_counter() - start

    def run(self) -> None:
        loss = self.model(next(self._batches))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        for x in self._trained:
            if x.grad.is_sparse:
                x.grad = x.grad.coalesce()
            dist.all_reduce(x.grad)
            x.grad = x.grad / self._ranks
        for optimizer in self._optimizers:
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.loss = float(mean) / self._ranks

    def wire(self) -> None:
        return None

    def digest(self) -> str:
        """A hash of this rank's parameters."""
        digest = hashlib.sha256()
        for x in self._trained:
            digest.update(x.detach().numpy())
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains on this host, and reports a row."""
    with torch_side.join() as here:
        reports.timed(here, settings, [Training(settings, tasks.read(settings))])
