"""Searches on several GPUs, and on several hosts that share one study of Optuna.

- `board` and `board_rows` say who measures what; `joint` joins and leaves; `status` shows it to
  whoever asks; `rdb` knows the databases.
- `slots` are the GPUs of one search.
"""
