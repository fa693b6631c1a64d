"""Advice before and during training: profiles, plans, forecasts, measured costs."""
