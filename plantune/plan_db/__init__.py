"""Plans, trials and leases in SQLite. The runtime reads with `rows` and `stored` alone."""
