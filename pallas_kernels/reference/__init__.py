"""The definition of each operation in plain XLA, which is also the default everywhere.

`bitmap` packs and lists the elements that are present, `slots` lists sets, `ordered` sums
in a fixed order, `partitions` divides indices among parts, `messages` packs and unpacks
messages, and `index_message` reads their headers and counts their bits; `specs` has their
static properties. The operations of the package check arguments and call these.
"""
