"""Benchmarks on hosts whose links have a limited rate, made by `benchmarks.testbed`."""
