"""The papers' formulas and measures."""
