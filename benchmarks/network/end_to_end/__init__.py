"""Steps a second of whole training scripts on a real network, by scheme.

    python -m benchmarks.network.end_to_end --hosts 4 16 --rate 250mbit
    python -m benchmarks.network.end_to_end --tasks clicks --hosts 4
    python -m benchmarks.network.end_to_end --peers PYTHON       with torch, for its sides

One process a host. All sides train from the same parameters on the same batches, of
`tasks`; losses must agree, and parameters must be the same bytes on all ranks. The
language model's sides take turns, a few steps each (Zen, figures 11 and 12; EmbRace,
figure 7). Tables of the click model are too large for several sides at once, which train
one after another.

Two sides of JAX have gradients by rows, and a lazy optimizer behind them: `rows` adds up
listed rows by `zen_sync`, `rows, gathered` sends all lists to all ranks as they are, which
is what Horovod does. PyTorch's side, right after them on the same network, is what its
users have: `nn.Embedding(sparse=True)`, gloo's sparse all-reduce, and `SparseAdam`, which
leaves rows alone that a step does not read, so that its losses are a little different.
"""
