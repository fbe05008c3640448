"""How a search spends its time: numbers that were chosen, each with its reason."""

from __future__ import annotations

from plantune.plans.guess import COMPILED

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
REASON_LENGTH = 4000
# More than any graph takes.
UNSURE_US = 1e9

COVERS_TO_RANK = 4
# The part of the time to rank plans in which known ones may be built that were not timed at first.
UNTIMED = 0.3
# Families that plans picked by hand do without: tiles do not pay for one image, direct sums perhaps
# not for many (the first convolution is a small one), and not everything that is compiled was built
# in time.
DIRECT = ("direct_conv", "direct_linear", "pooled_conv")
SKIPPED = ((), ("winograd",), DIRECT, COMPILED)
# What a race in training takes at least: of ResNet-50's plan making and proving both passes took 7
# s, eager's 3, and four more routes follow (32x32, 128 images, H200, 2026-11-23).
TRAINING_S = 28.0
# The time limit for proving a plan that another search found.
PROVING_S = 120.0
