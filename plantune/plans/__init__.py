"""Plans: what they solve, what they are, and where they come from.

- `problem` is what a plan solves; `workload` names one for the command line.
- `plan` is the partition with a candidate for each step, and the evidence; `step_times` and
  `raced_routes` read parts of that evidence; `verdict` decides what a race showed, and `standing`
  says it.
- `checked_plan` is a plan that fits its graph, with the families of its steps, proved once.
- `precisions` are torch's settings for float32 that a problem or a trial depends on.
- `written_words` has what files and databases say for the words of the code.
- `planner` covers graphs with steps by what these cost; searches use it, too.
- `guess` makes plans from estimates, where nothing was measured.
- `database` keeps plans, trials and leases.
"""
