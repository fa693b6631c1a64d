"""Units of arrays, given as dense arrays, entries or rows, and their ownership."""
