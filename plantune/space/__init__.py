"""Arch facts and the configs a search may try, read from `search_spaces/*.toml`."""
