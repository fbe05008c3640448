"""What the families for CPUs share.

- `cxx` loads C++; `direct` and `folded` prepare what it multiplies; `huge_pages` is its memory.
- `onednn` is torch's own library of convolutions.
"""
