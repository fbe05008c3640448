"""Structs of constants in rendered sources."""

from __future__ import annotations

from plantune.kernels.rendering import Long, struct

EXPECTED = """struct Norm {
  using T = float;
  static constexpr int kSize = 3;
  static constexpr long long kRows = 7;
  static constexpr bool kBias = true;
  static constexpr float kEps = 1e-05f;
  static constexpr int kBegins[] = {0, 4};
  static constexpr bool kCut[] = {true, false};
  int more;
};
"""


def test_members_have_the_types_of_their_values() -> None:
    lists = {"kBegins": (0, 4), "kCut": [True, False]}
    made = struct(
        "Norm", "  int more;\n", T="float", kSize=3, kRows=Long(7), kBias=True, kEps=1e-5, **lists
    )
    assert made == EXPECTED
