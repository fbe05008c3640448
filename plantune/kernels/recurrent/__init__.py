"""What the families of recurrent layers share.

- A sequence in one launch: `scan_family`, `scan_division`, `scan_launches`; its gradient,
  `scan_gradient`.
- Translation: `translation`, `gru_encoder`.
"""
