"""Schemes that the papers compare with."""
