"""The computation of one rank in a step and in an evaluation, inside `shard_map`.

`program` is the whole of it. `losses` calls the user's function, `by_rows` handles
gradients by rows, `halves` is the first half of a step that has two, `shares` computes
means and sums over the ranks, `outputs` reduces auxiliary outputs, `asked` finds what an
optimizer asks for by keyword.
"""
