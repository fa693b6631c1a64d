"""Runnable examples; `README.md` in this folder describes each."""
