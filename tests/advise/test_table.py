"""Tables and sizes as text."""

from sparsejax.advise.table import size, table


def test_columns_are_aligned():
    rows = [["leaf", "bytes"], ["kernel", "8"], ["b", "1,024"]]
    assert table(rows, left=(0,)) == [
        "leaf    bytes",
        "-------------",
        "kernel      8",
        "b       1,024",
    ]


def test_sizes_have_three_digits_and_a_unit():
    assert [size(n) for n in (0, 999, 1000, 1.5e6, 2e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 MB",
        "2 GB",
    ]
