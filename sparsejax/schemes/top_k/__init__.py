"""Schemes that re-select while they reduce: Ok-Topk, SparDL and gTopk."""
