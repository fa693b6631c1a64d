"""Forecasts the bytes and times of a synchronization, without any device."""
