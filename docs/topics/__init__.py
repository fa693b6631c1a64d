"""The texts of performance.md: one function a topic, beside the chart that it is about.

Each returns a title, what it says, its chart, the conditions, and the titles of the tables
that have all rows. A number in a text is one of its chart, or of the same record.
"""
