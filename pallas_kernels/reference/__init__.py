"""What each operation computes, in plain XLA: the definition, and the default everywhere.

`bitmap` has which elements there are, `indices` what is computed with lists of indices,
`slots` how a set is listed, `partitions` how indices are divided among parts, `messages`
how they travel, and `index_message` what is looked up in those. Arguments are checked by
the operations of the package, which call these.
"""
