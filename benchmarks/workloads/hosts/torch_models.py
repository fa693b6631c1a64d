"""The examples' models in PyTorch, number for number, made from JAX's parameters.

Parameters are given by their paths, as `named` of the JAX side writes them. JAX is not
needed here.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


Params = dict[str, np.ndarray]
# Entries of batches that are whole numbers.
IDS = ("tokens", "targets", "negatives", "ids", "source", "target")
RATES = {"language_model": 5e-3, "click_model": 1e-3, "translation": 3e-3}
PAD = 0


def _table(numbers: np.ndarray, sparse: bool) -> nn.Embedding:
    given = torch.tensor(numbers)
    return nn.Embedding.from_pretrained(given, freeze=False, sparse=sparse)


def _linear(kernel: np.ndarray, bias: np.ndarray | None = None) -> nn.Linear:
    made = nn.Linear(*kernel.shape, bias=bias is not None)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(kernel.T))
        if bias is not None:
            made.bias.copy_(torch.tensor(bias))
    return made


def _sampled_softmax(hidden, table, bias, targets, negatives):
    """The loss of each target against the same negatives, as `examples.common.losses`."""

    def of(words):
        share = torch.log1p(1 / (words + 1.0)) / math.log(bias.num_embeddings + 1)
        return bias(words)[..., 0] - torch.log(share)

    right = (hidden * table(targets)).sum(-1) + of(targets)
    wrong = hidden @ table(negatives).T + of(negatives)
    # A negative that happens to be the right word is none.
    wrong = wrong.masked_fill(targets[..., None] == negatives, -math.inf)
    scores = torch.cat([right[..., None], wrong], dim=-1)
    return torch.logsumexp(scores, dim=-1) - right


class LanguageModel(nn.Module):
    """That of `examples.lm_model`."""

    def __init__(self, params: Params, sparse: bool):
        super().__init__()
        if "projection" in params:
            raise ValueError("PyTorch's language model is without a projection.")
        self.input = _table(params["input_embedding"], sparse)
        self.output = _table(params["output_embedding"], sparse)
        self.bias = _table(params["output_bias"][:, None], sparse)
        width = self.input.embedding_dim
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
        scored = batch["targets"], batch["negatives"][0]
        return _sampled_softmax(hidden, self.output, self.bias, *scored).mean()


class DeepFM(nn.Module):
    """That of `examples.click_model`."""

    def __init__(self, params: Params, sparse: bool):
        super().__init__()
        self.table = _table(params["table/embedding"], sparse)
        count = sum(name.endswith("kernel") for name in params)
        of = lambda i: (params[f"layers/{i}/kernel"], params[f"layers/{i}/bias"])
        self.layers = nn.ModuleList(_linear(*of(i)) for i in range(count))

    def forward(self, batch):
        found = self.table(batch["ids"])
        weights, vectors = found[..., 0], found[..., 1:]
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        x = vectors.flatten(1)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        scores = weights.sum(1) + pairs.sum(1) / 2 + self.layers[-1](x)[:, 0]
        return functional.binary_cross_entropy_with_logits(
            scores, batch["clicked"].to(scores.dtype)
        )


def _lstm(params: Params, name: str) -> nn.LSTM:
    """That of flax's `OptimizedLSTMCell`, whose gates are in PyTorch's order."""
    cell = f"{name}/cell"
    into, across = params[f"{cell}/dense_i/kernel"], params[f"{cell}/dense_h/kernel"]
    made = nn.LSTM(into.shape[0], across.shape[0], batch_first=True)
    with torch.no_grad():
        made.weight_ih_l0.copy_(torch.tensor(into.T))
        made.weight_hh_l0.copy_(torch.tensor(across.T))
        made.bias_hh_l0.copy_(torch.tensor(params[f"{cell}/dense_h/bias"]))
        made.bias_ih_l0.zero_()
    made.bias_ih_l0.requires_grad = False
    return made


class Translator(nn.Module):
    """That of `examples.translation`."""

    def __init__(self, params: Params, sparse: bool):
        super().__init__()
        of = lambda name: _table(params[f"{name}/embedding"], sparse)
        self.read, self.written, self.scored = map(of, ("read", "written", "scored"))
        self.bias = _table(params["bias"][:, None], sparse)
        self.reader, self.writer = _lstm(params, "reader"), _lstm(params, "writer")
        self.asked = _linear(params["asked/kernel"])
        self.out = _linear(params["out/kernel"], params["out/bias"])

    def forward(self, batch):
        source, target = batch["source"], batch["target"]
        before, after = target[:, :-1], target[:, 1:]
        there = source != PAD
        lengths = there.sum(1)
        packed = pack_padded_sequence(
            self.read(source), lengths, batch_first=True, enforce_sorted=False
        )
        meaning, state = self.reader(packed)
        length = source.shape[1]
        meaning, _ = pad_packed_sequence(meaning, batch_first=True, total_length=length)
        said, _ = self.writer(self.written(before), state)
        match = self.asked(said) @ meaning.transpose(1, 2)
        weights = torch.softmax(match.masked_fill(~there[:, None], -1e9), dim=-1)
        seen = weights @ meaning
        hidden = torch.tanh(self.out(torch.cat([said, seen], dim=-1)))
        negatives = batch["negatives"][0]
        losses = _sampled_softmax(hidden, self.scored, self.bias, after, negatives)
        counted = after != PAD
        return torch.where(counted, losses, 0).sum() / counted.sum()


MODELS = {
    "language_model": LanguageModel,
    "click_model": DeepFM,
    "translation": Translator,
}
