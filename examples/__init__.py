"""Runnable examples; `README.md` beside this file says what each shows."""
