"""Analyses the program of an update: facts about its arrays, and about tables."""
