"""How a tuned module answers a call.

- `plain_calls` answers those like the last one.
- `calls` takes others, `inputs` and `padding` read their arguments, `call_table` knows what runs a
  call of that kind; `planned` is one such entry.
- What is chosen where: `choose` takes a given, stored or guessed plan; `guess_race`, `route_race`
  and `shipped_race` race it in the first calls; `consistent` is about acting and learning by one
  plan.
- What runs without a plan: `framework`, and the framework's routes in `routes`.
"""
