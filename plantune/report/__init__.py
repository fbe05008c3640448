"""What people look at: tables, plots, the progress line, and the data behind them."""
