"""One kernel family a file; each defines it as FAMILY."""
