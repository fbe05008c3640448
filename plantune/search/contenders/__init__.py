"""The whole plans of a search: which there are, which are compared, which one is raced and kept.

- `contender` is a plan with its labels, and all of them in order. `proposal` says which there are:
  `known` from before, made to fit by `fitting`, and those of covers by `of_covers`.
- What is not compared: `affordable` says for which there is time, `dearer` which are slower by the
  times of their steps.
- `warm_start` times known plans before anything is measured; `choice` ranks and races.
- Ranking: `timing` times plans in turns, `comparison` says what times mean, `ranking` orders plans,
  `improvement` makes the winner faster.
- The race: `racing`, `elsewhere` on other GPUs, then `judgement` of who runs the network; `finish`
  adds the evidence and `kept_times`, what was measured of its steps.
"""
