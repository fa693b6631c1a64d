"""Selections of elements by magnitude, on which sparsifiers are built."""
