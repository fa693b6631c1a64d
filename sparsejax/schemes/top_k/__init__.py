"""Schemes that select from partial sums while they reduce: Ok-Topk, SparDL and gTopk."""
