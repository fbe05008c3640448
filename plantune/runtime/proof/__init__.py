"""Proves that a plan computes the network, on random data.

- `recheck` proves a plan before its first use; `cases` and `draws` make the data, `distances` and
  `roundings` judge; `products` is torch's arithmetic as the references need it.
"""
