"""The pictures of the documentation: a function each, which returns a `card.Picture`."""
