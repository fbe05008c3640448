"""How a search spends its time: numbers that were chosen, each with its reason."""

from __future__ import annotations

from plantune.plans.guess import COMPILED

# The budget

# What is kept for ranking and for the race: a part of the budget, or seconds if that is less.
RANKING, RACING = (0.15, 10.0), (0.35, 15.0)
# A race has some ten routes and calls each at least ten times. On a GPU cuDNN tries its
# algorithms first: 22 s where a training pass takes 7.5 ms (five routes, H100, 2026-11-23).
CALLS_IN_A_RACE = {"cpu": 100, "cuda": 3000}
MOST_FOR_RACING = 0.6
# Without a race, everything that was measured would be wasted.
LEAST_RACING_S = 3.0
# When a race begins nothing more, this part of its time is left for its last rounds.
LAST_ROUNDS = 0.25
# Work still running when a stage ends may overrun into this part of the next stage; after the last
# stage, into this part of the budget.
GRACE, LAST_GRACE = {"measuring": 0.5, "ranking": 0.2}, 0.12
# Beside building: references, checks with two seeds, timing.
CHECKING_S = 0.5
# The next candidate may take as long as the longest of this many of its family.
REMEMBERED = 4
# What an earlier search built is read from a cache, in this part of the time.
CACHED = 0.2
# The part of the time for showing the best cover to who watches: 0.2 s for ResNet-50 in training.
BEST_COVER_PART = 0.05

# Known plans, before anything is measured

# How many plans of the problem itself, and of others of the same network.
MOST_OWN, MOST_OTHERS = 4, 4
# The time to compare them: a part of the budget, or these seconds if that is less.
COMPARING, COMPARING_S = 0.1, 8.0
# Before that, the part of the time to measure in which the nearest one should be built: others may
# need none of its kernels. Where nothing is measured meanwhile, these seconds if that is less.
BUILDING, BUILDING_S = 0.75, 20.0
# How long it waits for builds without a sign of life.
SIGN_OF_LIFE_S = 1.0

# Measuring

# Estimates are multiplied by these, one after the other: first what looks best is measured, then
# what would have to be better than it looks.
DISCOUNTS = (1.0, 0.75, 0.5)
# Before that without what takes long to build: beside inductor's builds checks took two to four
# times as long, and its first candidate 8 s, though none was part of a plan (se_resnet9_fixup, 2
# cores of a Xeon, 2026-11-28).
QUICK_DISCOUNTS = (1.0, 0.75)
# Of what is not measured in a cover, at least so many and one in so many are measured before the
# next cover.
LEAST_PER_COVER, PART_OF_COVER = 4, 4
# A candidate this much slower than the fastest for its step is never part of a plan, whatever
# conversions it saves.
SLOWER = 1.5
# How many configs of each step in the cover are built ahead, and how long to wait for one.
DEPTH = 6
WAIT_S = 0.5
# Where nothing can be started, how long to wait for an outcome before looking again.
POLL_S = 0.1
# More than any graph takes.
UNSURE_US = 1e9

# The queue of a cluster

# After so many configs without a better one the rest is left alone.
PATIENCE = 12
# A wrong result or a crash counts for several: it costs seconds, and is more often the fault of the
# kernel than of its config.
SERIOUS = 4
# A better one is better by more than two measurements of one candidate differ.
BETTER = 0.99
# Of more configs than this the first ones are tried in order, the others sampled, at least as many
# as patience says.
MOST_IN_ORDER = 300
TRIED_IN_ORDER = 16
SAMPLED_AT_ONCE = 8
# The best configs of a cluster are tried at each of its steps before new ones.
BEST_OF_CLUSTER = 2
# A family with this many wrong or crashing kernels before one works is given up.
MOST_FAULTS = 6
# For a chip that is not here: after so many failed builds of a family for a step and layout, the
# rest of them is left alone.
FAILURES_MAX = 3

# Ranking plans

COVERS_TO_RANK = 4
# The part of the time to rank plans in which known ones may be built that were not timed at first.
UNTIMED = 0.3
# Families that plans picked by hand do without: tiles do not pay for one image, direct sums perhaps
# not for many (the first convolution is a small one), and not everything that is compiled was built
# in time.
DIRECT = ("direct_conv", "direct_linear", "pooled_conv")
SKIPPED = ((), ("winograd",), DIRECT, COMPILED)
# Plans are not ranked if there is less time for it.
LEAST_RANKING_S = 0.3
# Of the time to rank plans, for timing all of them.
RANKED_AT_FIRST = {"cpu": 0.3, "cuda": 0.5}
# Of what is left then, for the plans that may be the fastest, timed alone. On a CPU the right plan
# gains more than other candidates for some of its steps, which are tried afterwards.
CLOSE_PART = {"cpu": 0.75, "cuda": 0.5}
# These are slower by at most this in few rounds of one make: on a CPU two makes of one plan were
# 7 % apart.
CLOSE = {"cpu": 0.1, "cuda": 0.06}
# The best of them, so that each has enough.
MOST_CLOSE = 4
# Plans are timed until the median of each beside the others' is known to this part. On a CPU where
# its memory lies moves a plan by 2.5 %: rounds that say more cost time and change no choice (20 of
# 33 s at 4 ms a call, by the simulation in tests/search/contenders/test_plans_by_makes.py).
RANKED_TO = {"cpu": 0.02, "cuda": 0.005}
# How often each of them is made, by kind of arch: two makes of one plan took 4.49 and 4.83 ms in
# turns with each other (se_resnet9_fixup, 4 images, 2 cores, 2026-11-23), because of where their
# memory happened to be. With one make each, luck chose plans that are 8 and 11 % slower.
MAKES = {"cpu": 3, "cuda": 1}
# On a busy machine only this many of the best plans are ranked, and the last one.
FEW_PLANS = 3
ALONE_S = 0.2
# A smaller difference is not worth a more complicated plan.
TIE = 0.01
TIE_RESAMPLES = 200
# Of few rounds on a busy machine everything ties: what looks slower than this is not preferred for
# being simple. So a search at batch 32 had kept a plan that took 1.27 of another's time, and with
# 0.02 here one that took 1.05: by simulation three searches end within 3 % in 182 of 200 instead of
# 161 (4 ms a call).
UNSURE = 0.005

# Improving the best plan by runners-up of single steps

RUNNERS_UP = 3
# Candidates that are slower by more than this alone are not compared again.
NEAR = 1.15
SWAPS_AT_ONCE = 7
REFINING_S = 1.0
# They change less than plans do: known to 2 %, those that gain tied with those that do not, and
# plans of 0.4 ms a call ended 0.7 % slower (simulated).
IMPROVED_TO = 0.005

# The race

RACE_S = 8.0
# No race begins with less time: it takes longer to make a plan's program and to prove it.
LEAST_RACE_S = 0.5
MOST_RACES = 3
# An undecided race is repeated for the routes concerned, if there is time.
MOST_REPEATS = 4
LEAST_REPEAT_S = 1.0
# The time that must be left for a route of torch.compile to join the race; others always join.
COMPILING_S = {"compile-default": 25.0, "compile-reduce-overhead": 25.0}
# For each node of the forward pass if that is more: 47 s for densenet121's 1,822, 18 to 22 s for
# the 777 to 939 of four others of torchvision (H200, 8 cores beside a search, 2026-11-23).
COMPILING_NODE_S = 0.03
# Where the kernels are in inductor's cache already.
COMPILED_AHEAD_S = 12.0
# Two passes are compiled in training: 31 to 37 s for se_resnet9_fixup (H200, 2026-11-23).
BOTH_PASSES = 2
# A few calls of what other GPUs run ahead: what counts is that they run, and that the plan's
# outputs are right.
RUN_AHEAD_S = 0.2
# What a race in training takes at least: of ResNet-50's plan making and proving both passes took 7
# s, eager's 3, and four more routes follow (32x32, 128 images, H200, 2026-11-23).
TRAINING_S = 28.0
# The time limit for proving a plan that another search found.
PROVING_S = 120.0
# The usual factor, either way, between a whole pass and the sum of its steps.
USUAL_FACTOR = 1.5
