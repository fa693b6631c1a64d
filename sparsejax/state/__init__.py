"""The state of transformations: trees, arrays by rank, totals, delayed rows."""
