"""Plans, trials and leases in SQLite. The runtime reads with `rows`, `finding` and `stored` alone.

- The database: `plan_database`, `leases`, `transactions`, `migrations`.
- Opening a file, whatever it is: `opening`, `recognition`, `soundness`, `mounts`.
- Plans from and for others: `exports`, `validation`, `plan_file`, `team`, `merging`.
- `missing_families` says which stored plans are passed over.
- What was proved on this machine: `proofs`.
"""
