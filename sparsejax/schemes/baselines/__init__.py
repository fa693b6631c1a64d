"""Schemes with which the papers compare theirs."""
