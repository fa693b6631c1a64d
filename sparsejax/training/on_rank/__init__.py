"""What one rank does in a step and in an evaluation; inside `shard_map`.

`program` is all of it. `losses` calls the user's function, `by_rows` takes and applies
rows, `halves` is the first half of a step that has two, `shares` puts together what ranks
have, `outputs` does so with auxiliary outputs.
"""
