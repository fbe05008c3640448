"""What people see: tables, plots, the progress line, and the data for them."""
